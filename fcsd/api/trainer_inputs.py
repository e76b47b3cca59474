"""Prepare models and data of `FCSDTrainer`: models in memory or paths of checkpoints,
converted or not; data sets, streams and lists.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import IterableDataset
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
)

from fcsd.base.errors import UserError, kind_of, one_line
from fcsd.base.strict import Rule, refuse, wrong_kind
from fcsd.base.writing import check_folder_place
from fcsd.data.batches import ROW_FEATURES
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import given_rows
from fcsd.data.rendering import BEGAN, TEMPLATE_DATE, noted_date, writes_date
from fcsd.data.rows import PackedRows, step_rows
from fcsd.data.write_rows import BadRows, default_workers
from fcsd.model.autocast import computing_dtype
from fcsd.model.connectivity import convert_model, unconvert_model
from fcsd.model.connectivity.checkpoint import (
    has_tokenizer,
    read_checkpoint,
    read_config,
)
from fcsd.model.connectivity.spec import changed_by, field_text
from fcsd.model.dtypes import dtype_of, is_in_dtype, without_storage
from fcsd.model.families import family_of, moe_mask
from fcsd.model.families.structure import output_head, refuse_adapters, refuse_offloaded
from fcsd.model.load import (
    ModelFolder,
    check_positions,
    find_model,
    load_checkpoint,
    load_tokenizer,
    refuse_not_finite,
    tokenizer_of,
)
from fcsd.model.quantised.methods import model_quantisation, why_not_trained
from fcsd.parallel.engine import engine_environment, precision_rules
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_launch
from fcsd.training.argument_rules import refuse_another_cut
from fcsd.training.arguments import check_reporters, refuse_what_cannot_be_sharded
from fcsd.training.card.trainer import TAGS, InputNames, input_names
from fcsd.training.checkpoints import checkpoints
from fcsd.training.config import Sections, micro_batches
from fcsd.training.fcsd_config import FCSDConfig, is_loss
from fcsd.training.prepare import TrainingInputs, check_student
from fcsd.training.python_words import python_words
from fcsd.training.record import RECORD_FILE
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.load import (
    check_teacher_folder,
    refuse_copy_of_student,
    refuse_other_tokenizer,
    tell_of_untrained,
    tokenizer_of_model,
)
from fcsd.training.teachers.lora import (
    AdapterOffTeacher,
    add_adapters,
    check_peft_config,
    try_adapters,
)

_SAMPLED = 1024  # values of a parameter in its fingerprint
_ROWS_AT_ONCE = 1000


def student_of(model: Any, args: FCSDConfig, launch: Launch) -> PreTrainedModel:
    """Return the model to train, with its connectivity; a model in memory is converted
    in place if `layers` is set.

    Raises:
        UserError: it is not converted and `layers` is not set; it is converted, but not
            as `layers` says.
    """
    if isinstance(model, str | Path):
        return _loaded_student(str(model), args, launch)
    name = type(model).__name__
    hint = ""
    if name.startswith("Peft"):
        hint = "; give the model without adapters, and peft_config"
    elif isinstance(model, tuple):
        hint = "; fcsd.load gives a model and its tokenizer"
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"model: {kind_of(model)}; a transformers model or the path of a checkpoint"
            f" is needed{hint}"
        )
    refuse_adapters(model, "model")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(
            f"model: no parameter of {name} requires a gradient, as after"
            " merge_and_unload(); call model.requires_grad_(True)"
        )
    # An already converted model must have the requested connectivity.
    connectivity = args.connectivity()
    current_field = getattr(model.config, "farskip", None)
    if current_field is None:
        if connectivity is None:
            raise _not_converted(name)
        convert_model(model, connectivity)
    elif connectivity is not None:
        requested_field = connectivity.field(
            moe_mask(model.config, family_of(model.config))
        )
        if requested_field != current_field:
            raise UserError(
                f"{name}: this model is already converted with"
                f" {field_text(current_field)}, but {field_text(requested_field)} was"
                " requested; leave layers out to train it as it is, or convert it first"
            )
    return model


def _loaded_student(path: str, args: FCSDConfig, launch: Launch) -> PreTrainedModel:
    checkpoint = find_model(args.model_config(path))
    return load_for_launch(checkpoint, launch, args.connectivity(), bf16=args.bf16)


def _unloaded_student(path: str, args: FCSDConfig) -> PreTrainedModel:
    """Return the model of a checkpoint without its weights."""
    checkpoint = find_model(args.model_config(path))
    connectivity = args.connectivity()
    if connectivity is None and read_config(checkpoint.folder).connectivity is None:
        raise _not_converted(path)
    return load_checkpoint(checkpoint, connectivity, weights=False)


def _not_converted(name: str) -> UserError:
    return UserError(
        f"{name}: is not converted; set layers in FCSDConfig (for example"
        " layers='last:90%'), or convert it with fcsd.convert (layers='none' trains"
        " the regular model)"
    )


def check_models(
    model: Any, teacher: Any, args: FCSDConfig, launch: Launch, *, has_teacher: bool
) -> None:
    """Check models and arguments before anything is loaded or tokenized; if no teacher
    is given and the objective needs one, also check that a copy of the student can be
    the teacher.

    Raises UserError: rows do not fit the positions of a model; the weights to train are
    quantised; weights are NaN, infinite or in float64; the teacher is the student, or a
    copy of the student would not be the original; loading arguments were given for a
    model that is not loaded.
    """
    refuse(
        (
            isinstance(teacher, PreTrainedModel) and teacher is model,
            "teacher: is the model in training; leave it out, and fcsd makes a copy with"
            " the original connectivity",
        ),
        _unused_loading(model, args.model_init_kwargs, "model"),
        _unused_loading(teacher, args.teacher_model_init_kwargs, "teacher"),
    )
    for candidate, is_teacher in ((model, False), (teacher, True)):
        if isinstance(candidate, str | Path):
            source = find_model(args.model_config(str(candidate), teacher=is_teacher))
            source.check_positions(args.max_length, tell=launch.first)
        elif isinstance(candidate, PreTrainedModel):
            if not launch.engine.shards:
                refuse_offloaded(candidate, "teacher" if is_teacher else "model")
            refuse_not_finite(candidate, type(candidate).__name__)
            shapes = [
                (name, tuple(parameter.shape))
                for name, parameter in candidate.named_parameters()
            ]
            check_positions(
                type(candidate).__name__,
                candidate.config,
                shapes,
                args.max_length,
                tell=launch.first,
            )
    refuse(*_original_rules(model, teacher, args, has_teacher=has_teacher))


def _original_rules(
    model: Any, teacher: Any, args: FCSDConfig, *, has_teacher: bool
) -> list[Rule]:
    """Return what a model to train, and the teacher or the copy of the model that
    becomes one, may not be.
    """
    is_own = teacher is None and has_teacher
    reason = _why_not_trained(model, args)
    change = changed_by(_config_of(model, args)) if is_own else None
    return [
        (reason, f"model: {_name_of(model)}: {reason}"),
        (
            change,
            f"teacher: {_name_of(model)} was {change} already, so a copy of it is not the"
            " original; pass the original as teacher=, a model or its path",
        ),
        (
            getattr(model if is_own else teacher, "dtype", None) == torch.float64,
            "teacher: has weights in float64, which the loss does not compute; give it"
            " (or the model, if it is a copy) as .float()",
        ),
    ]


def _name_of(model: Any) -> str:
    return str(model) if isinstance(model, str | Path) else type(model).__name__


def _config_of(model: Any, args: FCSDConfig) -> Any:
    if isinstance(model, str | Path):
        return read_config(find_model(args.model_config(str(model))).folder).config
    return getattr(model, "config", {})


def _why_not_trained(model: Any, args: FCSDConfig) -> str | None:
    """Return why the weights of a model are too quantised to be trained."""
    if isinstance(model, str | Path):
        folder = find_model(args.model_config(str(model))).folder
        quantisation = read_checkpoint(folder, any_family=True).quantisation
    elif isinstance(model, PreTrainedModel):
        quantisation = model_quantisation(model)
    else:  # `student_of` says what is needed
        return None
    return why_not_trained(quantisation)


def _unused_loading(model: Any, kwargs: Any, name: str) -> Rule:
    """Return the rule about arguments of loading for a model that is not loaded."""
    argument = "teacher_model_init_kwargs" if name == "teacher" else "model_init_kwargs"
    description = "was left out" if model is None else f"is a {type(model).__name__}"
    return (
        kwargs and not isinstance(model, str | Path),
        f"FCSDConfig: {argument}: applies only to a {name} given by its path, but"
        f" {name} {description}; leave it out, or give the path",
    )


def teacher_of(
    teacher: Any, student: PreTrainedModel, args: FCSDConfig, launch: Launch
) -> Any:
    """Return the model to compare with, or the caller's `Teacher`; for None, a regular
    copy of the student.
    """
    # The student is not trained yet, so its weights are the original's. `check_models`
    # has refused one that was trained or calibrated.
    if teacher is None:
        original = copy.deepcopy(student)
        unconvert_model(original)
        return original
    if not isinstance(teacher, str | Path):
        return teacher
    checkpoint = find_model(args.model_config(str(teacher), teacher=True))
    return load_for_launch(checkpoint, launch, any_family=True)


def _own_copy(
    teacher: PreTrainedModel, student_dtype: torch.dtype, bf16: bool
) -> PreTrainedModel:
    """Return a copy of the caller's model if the training would cast it."""
    dtype = computing_dtype(teacher.dtype, student_dtype, bf16=bf16, shards=False)
    return teacher if is_in_dtype(teacher, dtype) else copy.deepcopy(teacher)


class TrainerInputs:
    """The models and data that the constructor was given.

    bad_rows: the examples that were left out, with `args.on_bad_row` "skip". given: the
    names of models and data for a card. Raises UserError for an engine that training in
    a script cannot use.
    """

    def __init__(self, args: FCSDConfig, launch: Launch):
        with python_words():
            self.sections = _trainable_sections(args, launch)
        check_folder_place(Path(str(args.output_dir)))
        self.args, self.launch = args, launch
        self.names = InputNames()
        # set for a model that is given by its path
        self._checkpoint: ModelFolder | None = None
        self._teacher: str | None = None
        # set for a model in memory that gets adapters
        self._model: str | None = None
        self.date: datetime | None = None
        """The date that the chat template writes into training rows; None: it writes no
        date.
        """
        self._lora: Any = None
        self.adapters: Any = None
        """The `PeftModel` around the student, where it has adapters."""
        self.bad_rows = BadRows(args.on_bad_row, "on_bad_row")  # type: ignore[arg-type]
        self._tokenizer: Any = None
        self._vocab_size: int | None = None

    @contextlib.contextmanager
    def working_context(self) -> Iterator[None]:
        """Keep accelerate from sharding the model, and name arguments in errors.

        A recipe's run enters `engine_environment` itself, and its errors name keys.
        """
        with python_words(), engine_environment(self.launch.engine, self.launch.device):
            yield

    def ready(
        self,
        model: Any,
        teacher: Any,
        data: tuple[Any, Any],
        tokenizer: Any,
        *,
        knows_metrics: bool,
    ) -> TrainingInputs:
        """Load, convert and tokenize. data: the training data and the held-out data.
        knows_metrics: whether there are metrics besides the losses.
        """
        args, launch = self.args, self.launch
        has_teacher = self.sections.objective.has_teacher
        metric = _unmeasured(args, data[1], teacher, has_teacher=has_teacher)
        refuse(
            (
                data[1] is None and (args.eval_strategy != "no" or args.eval_on_start),
                "eval_dataset: is required, because eval_strategy or eval_on_start asks"
                " for an evaluation",
            ),
            *([] if knows_metrics else [metric]),
        )
        check_models(model, teacher, args, launch, has_teacher=has_teacher)
        self.names = input_names(model, teacher, data[0])
        if isinstance(model, str | Path):
            self._checkpoint = find_model(args.model_config(str(model)))
        # The data are checked before a model is loaded from a path, which may take a
        # long time.
        student = None
        if not isinstance(model, str | Path):
            student = student_of(model, args, launch)
        path: Any = model if student is None else student.config._name_or_path
        if student is None:
            self._vocab_size = find_model(args.model_config(str(model))).vocab_size
        else:
            self._vocab_size = student.config.get_text_config().vocab_size
        if tokenizer is None:
            self._tokenizer = _tokenizer_beside(path, args)
        else:
            trusts = args.trust_remote_code
            self._tokenizer = tokenizer_of(
                tokenizer, "processing_class", trust_remote_code=trusts
            )
        # Without an argument it is the model's own.
        self._check_tokenizers(model if tokenizer is not None else None, teacher)
        launch.ranks.from_first(lambda: self._check_teacher(model, teacher))
        unloaded = student if student is not None else _unloaded_student(path, args)
        check_student(
            unloaded,
            self._tokenizer,
            self.sections,
            teacher_rows=self._teacher_rows(teacher),
            checkpointing=args.activation_checkpointing,
        )
        if self._lora is not None:
            trial = without_storage(unloaded)
            try_adapters(trial, self._lora, args.seed, dtype_of(args.dtype))
        if writes_date(getattr(self._tokenizer, "chat_template", None)):
            folder = Path(str(args.output_dir))
            self.date = launch.ranks.from_first(lambda: _date_of_training(folder))
        rows = self._rows(data[0], "train_dataset", self.bad_rows, shuffle=True)
        heldout = self.heldout_rows(data[1])
        student = student if student is not None else student_of(model, args, launch)
        student.add_model_tags([*TAGS])
        if self._lora is not None:
            self._add_adapters(student)
            if teacher is None and has_teacher:
                teacher = AdapterOffTeacher(student)
        if has_teacher or teacher is not None:
            in_memory = isinstance(teacher, PreTrainedModel)
            teacher = teacher_of(teacher, student, args, launch)
            if in_memory and not launch.engine.shards:
                teacher = _own_copy(
                    teacher,
                    dtype_of(args.dtype) if self._lora is None else student.dtype,
                    args.bf16,
                )
            if isinstance(teacher, PreTrainedModel):
                launch.ranks.from_first(lambda: self._note_teacher(teacher, student))
        return TrainingInputs(student, teacher, self._tokenizer, rows, heldout)

    def take_adapters(self, config: Any) -> None:
        """Take the settings of adapters; UserError if they cannot be trained here."""
        if config is None:
            return
        check_peft_config(config)
        refuse(
            (
                self.launch.engine.shards,
                "peft_config: adapters on weights that are sharded over ranks are not"
                " supported; launch data parallel copies",
            ),
            *(
                (
                    getattr(self.args, name),
                    f"FCSDConfig: {name}: has no meaning with peft_config, which keeps"
                    " all weights of the model; leave it out",
                )
                for name in ("freeze_embeddings_and_head", "freeze_routers")
            ),
        )
        self._lora = config

    @property
    def adapter_settings(self) -> dict[str, Any] | None:
        """The settings of the adapters, for a record; sets in a fixed order."""
        if self._lora is None:
            return None
        return {
            name: sorted(value) if isinstance(value, set) else value
            for name, value in self._lora.to_dict().items()
            if value is not None
        }

    def _add_adapters(self, student: PreTrainedModel) -> None:
        # Checkpoints have the adapters alone.
        if self._checkpoint is None and self.launch.first:
            self._model = model_fingerprint(student)
        self.adapters = add_adapters(
            student, self._lora, self.args.seed, dtype_of(self.args.dtype)
        )

    def _check_tokenizers(self, model: Any, teacher: Any) -> None:
        """Raise UserError where student or teacher have another tokenizer than the one
        that makes the rows, as far as their tokenizers are known.
        """
        args = self.args
        for candidate, name in ((model, "model"), (teacher, "teacher")):
            theirs, is_path = None, isinstance(candidate, str | Path)
            if is_path:
                config = args.model_config(str(candidate), teacher=name == "teacher")
                folder = find_model(config).folder
                if has_tokenizer(folder):
                    theirs = load_tokenizer(
                        folder, trust_remote_code=args.trust_remote_code
                    )
            elif isinstance(candidate, PreTrainedModel):
                theirs = tokenizer_of_model(
                    candidate, trust_remote_code=args.trust_remote_code
                )
            if theirs is None:
                continue
            advice = "give the tokenizer of the model as processing_class"
            if name == "teacher":
                advice = "use a teacher with the same tokenizer"
            if not is_path:
                advice += (
                    "; if its embeddings were made for this tokenizer, set its"
                    " config._name_or_path to ''"
                )
            refuse_other_tokenizer(
                theirs,
                self._tokenizer,
                name,
                # Tokens may have been added to a student, and to a model in memory.
                may_lack=name == "model" or not is_path,
                advice=advice,
            )

    def _teacher_rows(self, teacher: Any) -> int | None:
        """Return the rows of the head of a teacher, as far as they are known."""
        if isinstance(teacher, str | Path):
            config = self.args.model_config(str(teacher), teacher=True)
            return find_model(config).vocab_size
        if isinstance(teacher, PreTrainedModel):
            return output_head(teacher).weight.shape[0]
        return None

    def _check_teacher(self, model: Any, teacher: Any) -> None:
        if isinstance(teacher, PreTrainedModel):
            tell_of_untrained(teacher.config, "teacher")
        if not (isinstance(teacher, str | Path) and isinstance(model, str | Path)):
            return
        args = self.args
        check_teacher_folder(
            find_model(args.model_config(str(teacher), teacher=True)),
            find_model(args.model_config(str(model))),
            args.connectivity(),
            "teacher",
        )

    def _note_teacher(self, teacher: Any, student: Any) -> None:
        self._teacher = model_fingerprint(teacher)
        field = getattr(teacher.config, "farskip", None)
        if field is not None and self._teacher == model_fingerprint(student):
            refuse_copy_of_student(
                field, getattr(student.config, "farskip", None), "teacher"
            )

    def fingerprints(self, rows: Any) -> dict[str, str]:
        """Return fingerprints of rows and models, as far as they are known, on the
        first rank.
        """
        fingerprints = {"train_dataset": rows_fingerprint(rows)}
        if self._checkpoint is not None:
            fingerprints["model"] = self._checkpoint.weights
        elif self._model is not None:
            fingerprints["model"] = self._model
        return fingerprints | (
            {"teacher": self._teacher} if self._teacher is not None else {}
        )

    def heldout_rows(self, data: Any, name: str = "eval_dataset") -> Any:
        """Return the rows of a data set in order; for a dict of data sets a dict."""
        if isinstance(data, Mapping):
            if not data:
                raise UserError(f"{name}: a dict without data sets; leave it out")
            return {
                key: self.heldout_rows(value, f"{name} {key!r}")
                for key, value in data.items()
            }
        return self._rows(data, name, BadRows(setting=None), shuffle=False)

    def rows_of_call(self, data: Any, name: str, held: Any = None) -> Any:
        """Return the rows of the data given to `evaluate` or `predict`; held: those of
        the constructor, which None or a name refers to.
        """
        if data is None and held is None:
            raise UserError(f"{name}: None; give the data to measure")
        is_name = isinstance(data, str) and isinstance(held, Mapping) and data in held
        if data is None or is_name:
            return data
        # For a dict of data sets `Trainer.evaluate` asks for each; `predict` takes one.
        return self._rows(data, name, BadRows(setting=None), shuffle=False)

    def _rows(self, data: Any, name: str, bad_rows: BadRows, *, shuffle: bool) -> Any:
        if data is None:
            return None
        args = self.args
        # A stream is read as far as the training goes, and no further.
        num_rows = None
        if name == "train_dataset" and isinstance(data, IterableDataset):
            if args.max_steps <= 0:
                raise UserError(
                    "train_dataset: a stream does not say where it ends; set max_steps"
                )
            num_rows = args.max_steps * step_rows(args, self.launch.ranks.size)
        rows = given_rows(
            data,
            self._tokenizer,
            name=name,
            max_length=args.max_length,
            packing=args.packing,
            loss_on=args.loss_on,
            columns=args.columns,  # type: ignore[arg-type]
            vocab_size=self._vocab_size,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=shuffle,
            num_rows=num_rows,
            num_proc=args.dataset_num_proc
            or max(1, default_workers() // self.launch.ranks.size),
            bad_rows=bad_rows,
            date=(self.date or BEGAN) if shuffle else TEMPLATE_DATE,
        )
        # For training rows `row_order.data_lines` reports this with the unused rows.
        if not shuffle and self.launch.first:
            tell_examples(rows, name, always=False)
        return rows


def _date_of_training(folder: Path) -> datetime:
    """Return the date of the training whose checkpoints lie in a folder."""
    for checkpoint in reversed(checkpoints(folder)):
        # A damaged checkpoint is set aside later, and training continues from an
        # earlier one.
        with contextlib.suppress(UserError):
            return noted_date(checkpoint / RECORD_FILE)
    return noted_date(None)


def _trainable_sections(args: FCSDConfig, launch: Launch) -> Sections:
    """Return the sections of arguments that a launch can train with."""
    sections = args.sections()
    refuse(*precision_rules(sections.train, launch.engine))
    try:
        with contextlib.suppress(ValueError):  # without the model some cannot be made
            Trainer.get_optimizer_cls_and_kwargs(args)
    except ImportError as error:
        raise UserError(f"FCSDConfig: optim: {one_line(error)}") from None
    if launch.engine.uses_deepspeed:
        raise UserError(
            "FCSDTrainer: DeepSpeed is not supported; launch configs/fsdp2_8.yaml, or"
            " use a recipe"
        )
    refuse_what_cannot_be_sharded(sections.objective, launch.engine)
    # transformers has made a list of one name.
    check_reporters(cast(list[str], args.report_to))
    if args.batch_size_tokens is not None:
        cut = micro_batches(sections.train, args.max_length, launch.ranks.size)
        refuse_another_cut(args, *cut, launch.ranks.size)
    return sections


def _unmeasured(
    args: FCSDConfig, heldout: Any, teacher: Any, *, has_teacher: bool
) -> Rule:
    """Return the rule about a `metric_for_best_model` that is a loss which the
    evaluation of `heldout` does not give.
    """
    metric = args.metric_for_best_model
    losses = ["loss", "kl" if has_teacher else "ce"]
    losses += ["kl"] if teacher is not None else []
    # The Trainer prefixes the losses of a dict of data sets with their names.
    names = [f"{name}_" for name in heldout] if isinstance(heldout, Mapping) else [""]
    measured = [
        f"eval_{name}{loss}" for name in names for loss in dict.fromkeys(losses)
    ]
    return (
        metric is not None
        and heldout is not None
        and is_loss(metric)
        and f"eval_{metric.removeprefix('eval_')}" not in measured,
        f"FCSDConfig: metric_for_best_model: {metric!r} is not measured in this"
        f" training; allowed: {', '.join(measured)}",
    )


def _tokenizer_beside(path: str | Path, args: FCSDConfig) -> Any:
    if not path:
        raise UserError(
            "processing_class: is required, because the model was not loaded from a"
            " checkpoint; give its tokenizer"
        )
    checkpoint = find_model(args.model_config(str(path)))
    return load_tokenizer(checkpoint.folder, trust_remote_code=args.trust_remote_code)


def given_rules(
    teacher: Any,
    callbacks: Any,
    optimizers: Any,
    compute_metrics: Any,
    launch: Any,
) -> Iterator[Rule]:
    """Yield what arguments of the constructor may not be, their types first."""
    # Common mix-ups get a hint; any other error names the actual and the expected type.
    hint = ""
    if isinstance(teacher, tuple):
        hint = " (fcsd.load gives a model and its tokenizer)"
    if type(teacher).__name__.startswith("Peft"):
        hint = " (its get_base_model(), which keeps the adapters)"
    models = f"a transformers model{hint}, the path of one, or a Teacher"
    kinds = str | Path | PreTrainedModel | Teacher | None
    yield wrong_kind("teacher", teacher, kinds, models)
    yield wrong_kind("callbacks", callbacks, list | tuple | None, "a list of callbacks")
    for callback in callbacks if isinstance(callbacks, list | tuple) else ():
        if not (isinstance(callback, type) and issubclass(callback, TrainerCallback)):
            one = "a TrainerCallback of transformers"
            yield wrong_kind("callbacks", callback, TrainerCallback, one)
    yield (
        not (isinstance(optimizers, list | tuple) and len(optimizers) == 2),
        f"optimizers: {kind_of(optimizers)}; give a pair (optimizer, scheduler), with"
        " None for one that fcsd should make",
    )
    yield (
        lambda: optimizers[0] is None and optimizers[1] is not None,
        "optimizers: a schedule alone steers another optimizer than the trainer's; give"
        " its optimizer, too, or set lr_scheduler_type",
    )
    functions = "a function of logits and labels"
    yield wrong_kind("compute_metrics", compute_metrics, Callable | None, functions)
    launches = "what fcsd.parallel.launch.join_launch gives"
    yield wrong_kind("launch", launch, Launch | None, launches)


def training_rules(
    model: Any,
    args: FCSDConfig,
    callbacks: Any,
    optimizer: Any,
    launch: Launch,
    *,
    adapts: bool,
) -> Iterator[Rule]:
    """Yield what may not be of the given callbacks, and of an optimiser, which may be
    None; adapts: only adapters are trained, which are made later.
    """
    for callback in callbacks or []:
        cls = callback if isinstance(callback, type) else type(callback)
        yield (
            issubclass(cls, EarlyStoppingCallback)
            and (args.metric_for_best_model is None or args.eval_strategy == "no"),
            "callbacks: EarlyStoppingCallback needs an evaluation and its metric; set"
            " eval_strategy and metric_for_best_model, for example 'kl'",
        )
    instead = "set optim in FCSDConfig, or give optimizer_cls_and_kwargs"
    yield (
        optimizer is not None and adapts,
        f"optimizers: peft_config makes the parameters to train; {instead}",
    )
    yield (
        optimizer is not None and launch.engine.shards,
        f"optimizers: sharding replaces the parameters of an optimizer; {instead}",
    )
    yield (
        optimizer is not None and not _trains(optimizer, model),
        "optimizers: the optimizer has no parameter of the model in training; make it of"
        " that model, given in memory, not of a copy or of a path",
    )


def _trains(optimizer: Any, model: Any) -> bool:
    """Tell whether an optimiser has a parameter of a model, which may be a path."""
    in_memory = isinstance(model, nn.Module)
    trained = {id(weight) for weight in model.parameters()} if in_memory else set()
    groups = optimizer.param_groups
    return any(id(weight) in trained for group in groups for weight in group["params"])


def model_fingerprint(model: nn.Module) -> str:
    """Return a hash of the name, the shape and some values of each parameter, which
    takes seconds for a model of any size.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:
            values = parameter.detach().flatten()[
                :: max(1, parameter.numel() // _SAMPLED)
            ]
            digest.update(values.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def rows_fingerprint(rows: Any) -> str:
    """Return a hash of the tokens, positions and labels of all rows in their order,
    whatever container they are in.
    """
    digest = hashlib.sha256()
    if isinstance(rows, PackedRows):
        rows.add_to(digest)
        return digest.hexdigest()
    for row in _in_order(rows):
        for name in sorted(ROW_FEATURES):
            digest.update(np.asarray(row[name], np.int64).tobytes())
    return digest.hexdigest()


def _in_order(rows: Any) -> Iterator[Any]:
    # A data set of `datasets` reads blocks much faster than single rows.
    if hasattr(rows, "with_format"):
        for block in rows.with_format("numpy").iter(_ROWS_AT_ONCE):
            for number in range(len(block["input_ids"])):
                yield {name: block[name][number] for name in ROW_FEATURES}
    else:
        yield from (rows[number] for number in range(len(rows)))
