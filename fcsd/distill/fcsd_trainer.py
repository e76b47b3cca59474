"""`FCSDTrainer`: distillation for those who have a model, a data set and `transformers.Trainer` in mind.

The loss, what a checkpoint holds and how a step that goes wrong is skipped are `fcsd.distill.trainer`'s, as in the run
of a recipe. Here is what a recipe's stages do before and after it: models, rows, held-out loss, what is left.

Not covered: adapters (a recipe's `lora` section), `model_init` and hyperparameter search, evaluation on tasks during
the training (a recipe's `early_stopping` section).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from fcsd.data.bad_rows import BadRows
from fcsd.data.given import given_rows
from fcsd.data.workers import default_workers
from fcsd.distill.arguments import accumulation_steps, refuse_what_cannot_be_sharded
from fcsd.distill.checkpoints import damage, newest_usable
from fcsd.distill.export import write_model
from fcsd.distill.fcsd_config import FCSDConfig, is_loss
from fcsd.distill.heldout import HeldoutCE, HeldoutKL
from fcsd.distill.models import check_models, student_of, teacher_of
from fcsd.distill.out_of_memory import explain_oom
from fcsd.distill.prepare import check_vocabulary, collator, place_teacher, prepare_student, whole_steps
from fcsd.distill.python_words import python_words, with_known_names
from fcsd.distill.safety import Guard
from fcsd.distill.teachers.base import Teacher
from fcsd.distill.trainer import DistillTrainer
from fcsd.distributed.engine import check_precision, engine_environment
from fcsd.distributed.failure import stop_watching
from fcsd.distributed.launch import Launch, join_launch
from fcsd.distributed.state import read_state
from fcsd.errors import UserError
from fcsd.families.structure import head_scaling, output_head
from fcsd.files import writing
from fcsd.losses.head import attach_loss_head, detach_loss_head
from fcsd.models.load import dtype_of, find_model, load_tokenizer, to_dtype


@with_known_names
class FCSDTrainer(DistillTrainer):
    """A `transformers.Trainer` that distils a model with FarSkip connectivity back to its original.

    Args:
        model: a converted model (`fcsd.convert`), or the path or Hub id of a checkpoint; one that is not converted yet
            is converted as `args.layers` says. It is trained in place, in `args.dtype`.
        args: an `FCSDConfig`.
        train_dataset: a `datasets.Dataset`, a stream or a list of examples with the column messages, text, prompt and
            response, or input_ids (and labels); or rows that are packed already.
        eval_dataset: the same, or a dict of several.
        processing_class: the tokenizer; None: the one that lies beside the model's checkpoint.
        teacher: what the student is compared with: a model, the path of one, or a `fcsd` Teacher. None: a copy of the
            student with the original connectivity, made before anything is trained; it needs the memory of one more
            model, in the dtype that the model came in. Objectives sft and ce have none.
        compute_metrics: gets logits (rows, tokens, vocabulary) and labels of the packed rows of eval_dataset.
        launch: where this process stands among others; None: what accelerate or torchrun has started.

    With `args.on_bad_row` "skip", `bad_rows` has the examples that could not be tokenized and were left out.

    `evaluate` gives eval_kl, nats per kept token of KL(teacher || student) on eval_dataset, with eval_kl_stderr, and
    without a teacher eval_ce; eval_loss is the same number. `save_model` leaves a folder that
    `AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)` loads without fcsd.

    Raises:
        UserError: what a recipe would refuse, with the names that arguments have here.
    """

    _tag_names = ("farskip", "fcsd")

    def __init__(
        self,
        model: PreTrainedModel | str | Path,
        args: TrainingArguments | None = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        teacher: PreTrainedModel | Teacher | str | Path | None = None,
        compute_metrics: Callable[..., dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        launch: Launch | None = None,
    ):
        args = _fcsd_config(args)
        if launch is None:
            launch = join_launch()
            stop_watching()  # a launcher ends the others when one fails; a script may go on after the training
        self.launch = launch  # here already: rows are made before there is a Trainer
        self._settings = args
        sections = args.sections()
        train, objective = sections.train, sections.objective
        check_precision(train, launch.engine)
        if launch.engine.uses_deepspeed:  # its settings are made before there is a trainer
            raise UserError(
                "FCSDTrainer: DeepSpeed is not supported; launch configs/fsdp2_8.yaml, or use a recipe"
            )
        if launch.engine.shards:
            refuse_what_cannot_be_sharded(train, objective, launch.engine, by_heldout_kl=False)
        with engine_environment(launch.engine, launch.device):
            set_seed(args.seed)
            self._fit_to_engine(args, launch)
            check_models(model, teacher, args, launch)
            # Of a path the data are checked before it is loaded.
            student = None if isinstance(model, str | Path) else student_of(model, args, launch)
            path: Any = model if student is None else student.config._name_or_path
            self._tokenizer = processing_class or _tokenizer_beside(path, args)
            self.bad_rows = BadRows(args.on_bad_row, "on_bad_row")  # type: ignore[arg-type]
            rows = self._rows(train_dataset, "train_dataset", self.bad_rows, shuffle=True)
            heldout = self._heldout_rows(eval_dataset)
            if compute_metrics is None:
                _check_metric(args, heldout, teacher)
            student = student if student is not None else student_of(model, args, launch)
            compared = None
            if objective.has_teacher or teacher is not None:
                compared = place_teacher(teacher_of(teacher, student, args, launch), launch)
            check_vocabulary(student, compared, self._tokenizer, objective)
            self.save_dtype = student.dtype
            if not launch.engine.shards_when_placed:
                to_dtype(student, dtype_of(args.dtype))
            prepare_student(student, objective, train, launch)
            student.add_model_tags([*self._tag_names])
            whole = self._whole_steps(rows)
            collate = collator(args, compared)
            self._heldout: dict[int, list[HeldoutCE]] = {}
            self._compared = compared
            super().__init__(
                student,
                args,
                objective=objective,
                teacher=compared if objective.has_teacher else None,
                launch=launch,
                settings=train,
                guard=Guard(sections.safety),
                train_dataset=whole,
                eval_dataset=heldout,
                data_collator=collate,
                processing_class=self._tokenizer,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        if not launch.engine.shards:
            detach_loss_head(student)  # outside training and evaluation the model is the user's

    def _fit_to_engine(self, args: FCSDConfig, launch: Launch) -> None:
        """Set what the engine and the batch of a step decide, as the run of a recipe does."""
        if args.batch_size_tokens is not None:
            args.gradient_accumulation_steps = accumulation_steps(
                args.sections().train, args.max_length, launch.ranks.size
            )
        if launch.engine.shards:
            args.bf16, args.mixed_precision = False, "no"  # there it is in the parameters, not in autocast
        # Otherwise FSDP2 would hold whole gradients between the micro-batches of a step.
        each = {"sync_each_batch": launch.engine.has_dtensors}
        args.accelerator_config.gradient_accumulation_kwargs = each  # type: ignore[union-attr]
        if args.activation_checkpointing and args.activation_checkpointing_kwargs is None:
            args.activation_checkpointing_kwargs = {"use_reentrant": False}

    # ---- rows

    def _rows(self, data: Any, name: str, bad_rows: BadRows | None = None, *, shuffle: bool) -> Any:
        if data is None:
            return None
        args = self._settings
        num_rows = None
        if name == "train_dataset" and isinstance(data, IterableDataset):
            if args.max_steps <= 0:
                raise UserError("train_dataset: a stream does not say where it ends; set max_steps")
            num_rows = args.max_steps * self._rows_of_a_step
        return given_rows(
            data,
            self._tokenizer,
            name=name,
            max_length=args.max_length,
            packing=args.packing,
            loss_on=args.loss_on,
            columns=args.columns,  # type: ignore[arg-type]
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=shuffle,
            num_rows=num_rows,
            num_proc=args.dataset_num_proc or max(1, default_workers() // self.launch.ranks.size),
            bad_rows=bad_rows,
        )

    def _heldout_rows(self, data: Any, name: str = "eval_dataset") -> Any:
        """Return rows in order; of a dict of data sets a dict of them."""
        if isinstance(data, Mapping):
            return {key: self._heldout_rows(value, f"{name} {key!r}") for key, value in data.items()}
        return self._rows(data, name, BadRows(setting=None), shuffle=False)

    @property
    def _rows_of_a_step(self) -> int:
        args = self._settings
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.launch.ranks.size

    def _whole_steps(self, rows: Any) -> Any:
        if rows is None:
            return None
        return whole_steps(rows, self._rows_of_a_step, self._settings.max_length, "data set train_dataset")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Load rows of the data set given, packed first if need be, or of one of those of the constructor."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):
            eval_dataset = self._heldout_rows(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Load rows of the data set given, packed first if need be."""
        return super().get_test_dataloader(self._heldout_rows(test_dataset, "test_dataset"))

    # ---- training

    @contextlib.contextmanager
    def _with_loss_head(self) -> Iterator[None]:
        """Put the loss head on the model while it is trained or evaluated, and keep accelerate from sharding."""
        model: Any = self.model
        attached = self.launch.engine.shards or "_forward_before_loss_head" in model.__dict__
        with engine_environment(self.launch.engine, self.launch.device):
            if not attached:
                attach_loss_head(model, self.objective.vocab_size)
            try:
                yield
            finally:
                if not attached:
                    detach_loss_head(model)

    @python_words()
    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or go on from a checkpoint to the very weights of a training that was not interrupted.

        Args:
            resume_from_checkpoint: a folder, or True for the newest one in `args.output_dir` that is whole.

        Raises:
            UserError: there is no such checkpoint, or it is damaged; a loss that stays not finite; a disk that is full;
                too little memory.
        """
        if self.train_dataset is None:
            raise UserError("train_dataset: is needed for training")
        checkpoint = self._checkpoint(resume_from_checkpoint)
        settings, length = self.settings, self._settings.max_length
        with (
            self._with_loss_head(),
            explain_oom(self.plain_model, self.teacher, settings, length, self.launch.device),
        ):
            if checkpoint is not None and self.restore_if_complete(checkpoint):
                output = TrainOutput(self.state.global_step, 0.0, {})
            else:
                self._known_checkpoints.clear()
                resume = str(checkpoint) if checkpoint is not None else None
                output = super().train(resume, trial, ignore_keys_for_eval)
        if self.average is not None:
            self.average.apply()
        return output

    def _checkpoint(self, given: str | bool | None) -> Path | None:
        if given is None or given is False:
            return None
        folder = Path(str(self.args.output_dir))
        if given is True:
            newest = newest_usable(folder, self.launch.ranks)
            if newest is None:
                raise UserError(
                    f"{folder}: no checkpoint to go on from; leave resume_from_checkpoint out to begin"
                )
            return newest
        checkpoint = Path(str(given))
        if (what := damage(checkpoint, self.launch.ranks)) is not None:
            raise UserError(f"{checkpoint}: is no checkpoint that can be gone on from ({what})")
        return checkpoint

    @property
    def events_folder(self) -> Path:
        """Where `events.jsonl` is left: `output_dir` itself."""
        return Path(str(self.args.output_dir))

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        read_state(best, self.plain_model, self.optimizer, self.launch.ranks, weights_only=True)
        if self.average is not None:
            self.average.load(best)

    # ---- evaluation

    @python_words()
    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the held-out loss, and with `compute_metrics` those metrics."""
        with (
            self.meters.paused(),
            self._with_loss_head(),
        ):  # of a dict of data sets called for each, inside itself
            found: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        return found

    @python_words()
    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return logits (rows, tokens, vocabulary) and labels of a data set's packed rows, and its held-out loss."""
        with self._with_loss_head():
            return super().predict(test_dataset, *args, **kwargs)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run the Trainer's loop where logits are asked for; the loss is that of all ranks' rows, token by token."""
        rows, training = dataloader.dataset, self.plain_model.training
        only_loss = (
            prediction_loss_only if prediction_loss_only is not None else self.args.prediction_loss_only
        )
        with self.scored_weights(), self.accelerator.autocast():
            if only_loss:
                nothing: Any = None
                output = EvalLoopOutput(nothing, label_ids=None, metrics={}, num_samples=len(rows))
            else:
                output = super().evaluation_loop(
                    dataloader, description, False, ignore_keys, metric_key_prefix
                )
            output.metrics.update(self._heldout_metrics(rows, metric_key_prefix))  # type: ignore[union-attr]
        self.plain_model.train(training)
        return output

    def _heldout_metrics(self, rows: Sequence[Any], prefix: str) -> dict[str, float]:
        held: Any = self.eval_dataset
        kept = list(held.values()) if isinstance(held, Mapping) else [held]
        measures = self._heldout.get(id(rows)) or self._measures(rows)
        if any(rows is own for own in kept):
            self._heldout[id(rows)] = measures  # the teacher is asked once
        found: dict[str, float] = {}
        for measure in measures:
            score = measure(self.plain_model)
            name = f"{prefix}_{'kl' if isinstance(measure, HeldoutKL) else 'ce'}"
            found[name] = score.value
            if score.stderr is not None:
                found[f"{name}_stderr"] = score.stderr
        loss = "kl" if self.objective.has_teacher else "ce"
        return {f"{prefix}_loss": found[f"{prefix}_{loss}"], **found}

    def _measures(self, rows: Sequence[Any]) -> list[HeldoutCE]:
        measures = [] if self.objective.has_teacher else [HeldoutCE(rows, self.launch)]
        if self._compared is not None:
            against = HeldoutKL(rows, _no_original, self.launch)
            against.set_teacher(self._compared, sharded=self.launch.engine.shards)
            measures.append(against)
        return measures

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return logits and labels of a batch of packed rows, whose examples do not see each other."""
        given = self._prepare_inputs(inputs)
        ids, positions = given["input_ids"], given["position_ids"]
        with torch.no_grad():
            hidden = model(input_ids=ids, position_ids=positions, objective="hidden")["hidden"]
            logits = output_head(self.plain_model)(hidden)
            scale, softcap = head_scaling(self.plain_model.config)
            logits = logits if scale == 1 else logits * scale
            logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return None, logits.view(*ids.shape, -1), given["labels"]

    # ---- what is left

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Leave config, code, weights and tokenizer in a folder, in the dtype that the model came in.

        The folder loads with `AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)`, without fcsd.
        """
        if self.is_writing_checkpoint:
            return  # weights and optimiser are written together
        folder = Path(output_dir or str(self.args.output_dir))
        with self.scored_weights(), writing(folder):
            write_model(
                self.plain_model,
                folder,
                tokenizer=self.processing_class,
                dtype=self.save_dtype,
                launch=self.launch,
            )
        self.launch.wait()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the model as it is now; a checkpoint under its last name, once it has that."""
        if self.is_writing_checkpoint or self.args.hub_strategy == "end":
            return
        self.save_model(_internal_call=True)
        super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._refuse_factored_states()
        super()._save_checkpoint(model, trial)
        if self.args.push_to_hub:
            folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            self._push_from_checkpoint(str(folder))

    def _refuse_factored_states(self) -> None:
        """Refuse an optimiser whose states are not laid out like its parameters: a checkpoint would lose them."""
        if self.launch.engine.shards:
            return
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        for parameter, states in optimizer.state.items():
            for name, state in states.items():
                if isinstance(state, Tensor) and state.ndim > 0 and state.shape != parameter.shape:
                    raise UserError(
                        f"{type(optimizer).__name__}: its state {name!r} has not the shape of its parameter, and no"
                        " checkpoint can hold it; use another optimizer, or save_strategy='no' and save_model()"
                    )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the Trainer's card, and how the model is loaded."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            card = Path(str(self.args.output_dir)) / "README.md"
            loading = _LOADING.format(
                name=self.hub_model_id or self.args.hub_model_id or self.args.output_dir
            )
            card.write_text(card.read_text(encoding="utf-8") + loading, encoding="utf-8")


_LOADING = """
## How to load it

The model has FarSkip connectivity, whose code is in this repository:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```
"""


def _fcsd_config(args: TrainingArguments | None) -> FCSDConfig:
    if args is None:
        return FCSDConfig()
    if isinstance(args, FCSDConfig):
        return args
    given = {each.name: getattr(args, each.name) for each in dataclasses.fields(args) if each.init}
    if is_loss(args.metric_for_best_model or ""):
        given["greater_is_better"] = None  # what is there is transformers' guess
    return FCSDConfig(**given | {"remove_unused_columns": False, "logging_nan_inf_filter": False})


def _check_metric(args: FCSDConfig, heldout: Any, teacher: Any) -> None:
    """Raise UserError where the best model is to be chosen by a loss that the evaluation of `heldout` does not give."""
    metric = args.metric_for_best_model
    if metric is None or heldout is None or not is_loss(metric):
        return
    losses = ["loss", "kl" if args.sections().objective.has_teacher else "ce"]
    losses += ["kl"] if teacher is not None else []
    names = [f"{name}_" for name in heldout] if isinstance(heldout, Mapping) else [""]
    measured = [f"eval_{name}{loss}" for name in names for loss in dict.fromkeys(losses)]
    if f"eval_{metric.removeprefix('eval_')}" not in measured:
        raise UserError(
            f"FCSDConfig: metric_for_best_model: {metric!r} is not measured in this training;"
            f" allowed: {', '.join(measured)}"
        )


def _tokenizer_beside(path: str | Path, args: FCSDConfig) -> Any:
    if not path:
        raise UserError(
            "processing_class: is needed, the tokenizer of the model (it was not loaded from a checkpoint)"
        )
    found = find_model(args.model_config(str(path)))
    return load_tokenizer(found.folder, trust_remote_code=args.trust_remote_code)


def _no_original() -> PreTrainedModel:
    raise UserError(
        "eval_dataset: eval_kl needs a teacher that is run on other rows; one that reads a cache cannot"
    )
