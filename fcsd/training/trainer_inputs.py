"""Models and data of `FCSDTrainer`, made ready: models in memory, or paths of
checkpoints; converted already, or not; data sets, streams and lists.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from datasets import IterableDataset
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from fcsd.base.errors import UserError, check_kind, kind_of
from fcsd.base.files import check_folder_place
from fcsd.data.bad_rows import BadRows
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import given_rows
from fcsd.data.dates import BEGAN, TEMPLATE_DATE, noted_date, writes_date
from fcsd.data.workers import default_workers
from fcsd.model.connectivity import convert_model, unconvert_model
from fcsd.model.connectivity.checkpoint import read_config
from fcsd.model.connectivity.spec import changed_by, field_text
from fcsd.model.families import family_of, moe_mask
from fcsd.model.load import ModelFolder, find_model, load_tokenizer, tokenizer_of
from fcsd.model.positions import check_positions
from fcsd.parallel.engine import check_precision, engine_environment
from fcsd.parallel.launch import Launch
from fcsd.parallel.place import load_for_launch
from fcsd.training.argument_rules import refuse_another_cut
from fcsd.training.arguments import micro_batches, refuse_what_cannot_be_sharded
from fcsd.training.card.trainer import TAGS, Given, given
from fcsd.training.checkpoints import checkpoints
from fcsd.training.fcsd_config import FCSDConfig, is_loss
from fcsd.training.prepare import Ready
from fcsd.training.python_words import python_words
from fcsd.training.record import RECORD_FILE, model_fingerprint, rows_fingerprint
from fcsd.training.teachers.base import Teacher


def student_of(model: Any, args: FCSDConfig, launch: Launch) -> PreTrainedModel:
    """Return the model to train, with its connectivity; one in memory is converted in
    place where that is asked for.

    Raises:
        UserError: it is not converted, and `layers` does not say how; it is converted
            otherwise than `layers` says.
    """
    if isinstance(model, str | Path):
        return _loaded_student(str(model), args, launch)
    if not isinstance(model, PreTrainedModel):
        hint = (
            "; adapters are a recipe's `lora` section"
            if type(model).__name__.startswith("Peft")
            else ""
        )
        if isinstance(model, tuple):
            hint = "; fcsd.load gives a model and its tokenizer"
        raise UserError(
            f"model: {kind_of(model)}; a transformers model or the path of a checkpoint"
            f" is needed{hint}"
        )
    connectivity = args.connectivity()
    own = getattr(model.config, "farskip", None)
    if own is None:
        if connectivity is None:
            raise _not_converted(type(model).__name__)
        convert_model(model, connectivity)
    elif connectivity is not None:
        wanted = connectivity.field(moe_mask(model.config, family_of(model.config)))
        if wanted != own:
            raise UserError(
                f"{type(model).__name__}: this model is already converted with"
                f" {field_text(own)}, but {field_text(wanted)} is asked for; leave"
                " layers out to train it as it is, or convert it first"
            )
    return model


def _loaded_student(path: str, args: FCSDConfig, launch: Launch) -> PreTrainedModel:
    checkpoint = find_model(args.model_config(path))
    connectivity = args.connectivity()
    if connectivity is None and read_config(checkpoint.folder)[2] is None:
        raise _not_converted(path)
    return load_for_launch(checkpoint, launch, connectivity, bf16=args.bf16)


def _not_converted(what: str) -> UserError:
    return UserError(
        f"{what}: is not converted; set layers in FCSDConfig (for example"
        " layers='last:90%'), or convert it with fcsd.convert (layers='none' trains"
        " the regular model)"
    )


def check_models(model: Any, teacher: Any, args: FCSDConfig, launch: Launch) -> None:
    """Check, before anything is loaded or tokenized, what models and arguments say; the
    student may be its own teacher.

    Raises UserError: rows do not fit the positions of a model; a copy of the student
    would not be the original; it is said how to load a model that is not loaded.
    """
    for each, is_teacher in ((model, False), (teacher, True)):
        _check_loading(each, args, "teacher" if is_teacher else "model")
        if isinstance(each, str | Path):
            source = find_model(args.model_config(str(each), teacher=is_teacher))
            check_positions(source, args.max_length, tell=launch.first)
        elif isinstance(each, PreTrainedModel):
            check_positions(each, args.max_length, tell=launch.first)
    if teacher is None and args.sections().objective.has_teacher:
        _check_own_teacher(model, args)


def _check_loading(model: Any, args: FCSDConfig, name: str) -> None:
    argument = "teacher_model_init_kwargs" if name == "teacher" else "model_init_kwargs"
    if getattr(args, argument) and not isinstance(model, str | Path):
        given = "was left out" if model is None else f"is a {type(model).__name__}"
        raise UserError(
            f"FCSDConfig: {argument}: is for a {name} that is given by its path, and"
            f" {name} {given}; leave it out, or give the path"
        )


def _check_own_teacher(model: Any, args: FCSDConfig) -> None:
    name, config = type(model).__name__, getattr(model, "config", {})
    if isinstance(model, str | Path):
        name, config = (
            str(model),
            read_config(find_model(args.model_config(str(model))).folder)[0],
        )
    if (how := changed_by(config)) is not None:
        raise UserError(
            f"teacher: {name} was {how} already, so that a copy of it is not the"
            " original; give the original as teacher=, a model or its path"
        )


def teacher_of(
    teacher: Any, student: PreTrainedModel, args: FCSDConfig, launch: Launch
) -> Any:
    """Return the model to compare with, or the `Teacher` of the caller; for None a
    regular copy of the student. UserError where it is the student itself.
    """
    if teacher is None:
        original = copy.deepcopy(student)
        unconvert_model(original)
        return original
    if teacher is student:
        raise UserError(
            "teacher: is the model that is trained; leave it out, and a copy with the"
            " original connectivity is made"
        )
    if not isinstance(teacher, str | Path):
        return teacher
    checkpoint = find_model(args.model_config(str(teacher), teacher=True))
    return load_for_launch(checkpoint, launch, any_family=True)


class TrainerInputs:
    """Models and data of the constructor. bad_rows: with `args.on_bad_row` "skip" the
    examples that were left out. given: what a card says of them. UserError for an
    engine that a training in a script cannot have.
    """

    def __init__(self, args: FCSDConfig, launch: Launch):
        _check_launch(args, launch)
        check_folder_place(Path(str(args.output_dir)))
        self.args, self.launch = args, launch
        self.given = Given()
        # of a model that is given by its path
        self._checkpoint: ModelFolder | None = None
        self._teacher: str | None = None
        self.date: datetime | None = None
        """What the chat template writes in rows to train on; None: it writes no date."""
        self.bad_rows = BadRows(args.on_bad_row, "on_bad_row")  # type: ignore[arg-type]
        self._tokenizer: Any = None
        self._vocab_size: int | None = None

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Keep accelerate from sharding, and name arguments in errors; a recipe's run
        does the one, and has keys.
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
    ) -> Ready:
        """Load, convert and tokenize; data: to train on, held out. knows_metrics: more
        than losses are measured.
        """
        args, launch = self.args, self.launch
        has_teacher = args.sections().objective.has_teacher
        check_models(model, teacher, args, launch)
        self.given = given(model, teacher, data[0])
        if isinstance(model, str | Path):
            self._checkpoint = find_model(args.model_config(str(model)))
        # The data are checked before a model is loaded from a path.
        student = (
            None if isinstance(model, str | Path) else student_of(model, args, launch)
        )
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
        if writes_date(getattr(self._tokenizer, "chat_template", None)):
            folder = Path(str(args.output_dir))
            self.date = launch.ranks.from_first(lambda: _date_of_training(folder))
        rows = self._rows(data[0], "train_dataset", self.bad_rows, shuffle=True)
        heldout = self.heldout_rows(data[1])
        if not knows_metrics:
            _check_metric(args, heldout, teacher)
        student = student if student is not None else student_of(model, args, launch)
        student.add_model_tags([*TAGS])
        if has_teacher or teacher is not None:
            teacher = teacher_of(teacher, student, args, launch)
            if launch.first and isinstance(teacher, PreTrainedModel):
                self._teacher = model_fingerprint(teacher)
        return Ready(student, teacher, self._tokenizer, rows, heldout)

    def fingerprints(self, rows: Any) -> dict[str, str]:
        """Identify rows and models, as far as they are known, on the first rank."""
        known = {"train_dataset": rows_fingerprint(rows)}
        if self._checkpoint is not None:
            known["model"] = self._checkpoint.weights
        return known | ({"teacher": self._teacher} if self._teacher is not None else {})

    def heldout_rows(self, data: Any, name: str = "eval_dataset") -> Any:
        """Return rows in order; of a dict of data sets a dict of them."""
        if isinstance(data, Mapping):
            return {
                key: self.heldout_rows(value, f"{name} {key!r}")
                for key, value in data.items()
            }
        return self._rows(data, name, BadRows(setting=None), shuffle=False)

    def rows_of_call(self, data: Any, name: str, held: Any = None) -> Any:
        """Return rows of what `evaluate` or `predict` is given; held: the constructor's
        data, for None or a name.
        """
        if data is None and held is None:
            raise UserError(f"{name}: None; the data to measure are needed")
        is_name = isinstance(data, str) and isinstance(held, Mapping) and data in held
        return data if data is None or is_name else self.heldout_rows(data, name)

    def _rows(self, data: Any, name: str, bad_rows: BadRows, *, shuffle: bool) -> Any:
        if data is None:
            return None
        args = self.args
        num_rows = None
        if name == "train_dataset" and isinstance(data, IterableDataset):
            if args.max_steps <= 0:
                raise UserError(
                    "train_dataset: a stream does not say where it ends; set max_steps"
                )
            num_rows = args.max_steps * args.rows_of_a_step(self.launch)
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
        # of those to train on it is told which are never used, too
        if not shuffle and self.launch.first:
            tell_examples(rows, name, always=False)
        return rows


def _date_of_training(folder: Path) -> datetime:
    """Return the date of the training whose checkpoints lie in a folder."""
    begun = checkpoints(folder)
    return noted_date(begun[-1] / RECORD_FILE if begun else None)


@python_words()
def _check_launch(args: FCSDConfig, launch: Launch) -> None:
    sections = args.sections()
    check_precision(sections.train, launch.engine)
    if launch.engine.uses_deepspeed:
        raise UserError(
            "FCSDTrainer: DeepSpeed is not supported; launch configs/fsdp2_8.yaml, or"
            " use a recipe"
        )
    refuse_what_cannot_be_sharded(sections.train, sections.objective, launch.engine)
    if args.batch_size_tokens is not None:
        cut = micro_batches(sections.train, args.max_length, launch.ranks.size)
        refuse_another_cut(args, *cut, launch.ranks.size)


def _check_metric(args: FCSDConfig, heldout: Any, teacher: Any) -> None:
    """Raise UserError where the best model is to be chosen by a loss that the
    evaluation of `heldout` does not give.
    """
    metric = args.metric_for_best_model
    if metric is None or heldout is None or not is_loss(metric):
        return
    losses = ["loss", "kl" if args.sections().objective.has_teacher else "ce"]
    losses += ["kl"] if teacher is not None else []
    names = [f"{name}_" for name in heldout] if isinstance(heldout, Mapping) else [""]
    measured = [
        f"eval_{name}{loss}" for name in names for loss in dict.fromkeys(losses)
    ]
    if f"eval_{metric.removeprefix('eval_')}" not in measured:
        raise UserError(
            f"FCSDConfig: metric_for_best_model: {metric!r} is not measured in this"
            f" training; allowed: {', '.join(measured)}"
        )


def _tokenizer_beside(path: str | Path, args: FCSDConfig) -> Any:
    if not path:
        raise UserError(
            "processing_class: is needed, the tokenizer of the model (it was not loaded"
            " from a checkpoint)"
        )
    checkpoint = find_model(args.model_config(str(path)))
    return load_tokenizer(checkpoint.folder, trust_remote_code=args.trust_remote_code)


def check_kinds(
    teacher: Any, callbacks: Any, optimizers: Any, compute_metrics: Any, launch: Any
) -> None:
    """Raise UserError where an argument of the constructor is something else than it takes."""
    hint = (
        " (fcsd.load gives a model and its tokenizer)"
        if isinstance(teacher, tuple)
        else ""
    )
    models = f"a transformers model{hint}, the path of one, or a Teacher"
    check_kind("teacher", teacher, str | Path | nn.Module | Teacher | None, models)
    check_kind("callbacks", callbacks, list | tuple | None, "a list of callbacks")
    for callback in callbacks or []:
        if not (isinstance(callback, type) and issubclass(callback, TrainerCallback)):
            check_kind(
                "callbacks",
                callback,
                TrainerCallback,
                "a TrainerCallback of transformers",
            )
    if not (isinstance(optimizers, list | tuple) and len(optimizers) == 2):
        raise UserError(
            f"optimizers: {kind_of(optimizers)}; a pair (optimizer, scheduler) is"
            " needed, None for one that is to be made"
        )
    check_kind(
        "compute_metrics",
        compute_metrics,
        Callable | None,
        "a function of logits and labels",
    )
    check_kind(
        "launch", launch, Launch | None, "what fcsd.parallel.launch.join_launch gives"
    )
