"""`FCSDTrainer`: distillation for those who have a model, a data set and `transformers.Trainer` in mind.

The loss, what a checkpoint holds and how a step that goes wrong is skipped are `fcsd.training.trainer`'s, as in the run
of a recipe. Here is what a recipe's stages do before and after it: models, rows, held-out loss, what is left.

Not covered: adapters (a recipe's `lora` section), `model_init` and hyperparameter search, evaluation on tasks during
the training (a recipe's `early_stopping` section).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from fcsd.base.errors import UserError
from fcsd.base.files import writing
from fcsd.data.bad_rows import BadRows
from fcsd.data.given import given_rows
from fcsd.data.workers import default_workers
from fcsd.model.load import dtype_of, find_model, load_tokenizer, to_dtype
from fcsd.parallel.engine import check_precision, engine_environment, finish_zero_settings
from fcsd.parallel.failure import stop_watching
from fcsd.parallel.launch import Launch, join_launch
from fcsd.parallel.state import read_state
from fcsd.training.arguments import refuse_what_cannot_be_sharded
from fcsd.training.checkpoints import chosen_checkpoint
from fcsd.training.export import write_model
from fcsd.training.fcsd_config import FCSDConfig, is_loss
from fcsd.training.heldout import HeldoutLosses
from fcsd.training.losses.head import attach_loss_head, detach_loss_head, head_logits
from fcsd.training.models import check_models, student_of, teacher_of
from fcsd.training.optimizer import refuse_factored_states
from fcsd.training.out_of_memory import explain_oom
from fcsd.training.prepare import (
    Ready,
    check_vocabularies,
    collator,
    place_teacher,
    prepare_student,
    whole_steps,
)
from fcsd.training.python_words import python_words, with_known_names
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.lora import has_adapters
from fcsd.training.trainer import DistillTrainer


@with_known_names
class FCSDTrainer(DistillTrainer):
    """A `transformers.Trainer` that distils a model with FarSkip connectivity back to its original.

    Args:
        model: a converted model (`fcsd.convert`), or the path or Hub id of a checkpoint; one that is not converted yet
            is converted as `args.layers` says. It is trained in place, in `args.dtype`. A recipe's run gives what its
            stage has loaded and tokenized (`Ready`), within `engine_environment`.
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
    args: FCSDConfig

    def __init__(
        self,
        model: PreTrainedModel | str | Path | Ready,
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
        self.args = args = _fcsd_config(args)
        if launch is None:
            launch = join_launch()
            stop_watching()  # a launcher ends the others when one fails; a script may go on after the training
        self.launch = launch  # here already: rows are made before there is a Trainer
        self.of_a_recipe = isinstance(model, Ready)
        if not self.of_a_recipe:
            _check_launch(args, launch)
        with self._at_work():
            sections = args.sections()
            train, objective = sections.train, sections.objective
            set_seed(args.seed)
            args.fit_to_engine(train, launch)
            if isinstance(model, Ready):
                ready = model
            else:
                ready = self._made_ready(
                    model,
                    teacher,
                    train_dataset,
                    eval_dataset,
                    processing_class,
                    knows_metrics=compute_metrics is not None,
                )
                processing_class = ready.tokenizer
            student = ready.student
            compared = place_teacher(ready.teacher, launch)
            check_vocabularies(student, compared, ready.tokenizer, objective)
            self.save_dtype = student.dtype
            if not launch.engine.shards_when_placed and not has_adapters(student):
                to_dtype(student, dtype_of(args.dtype))
            prepare_student(student, objective, train, launch)
            rows = self._whole_steps(ready.rows)
            collate = collator(args, compared)
            if launch.engine.uses_deepspeed:
                finish_zero_settings(args, train)
            self._heldout = HeldoutLosses(compared, launch, of_teacher=objective.has_teacher)
            super().__init__(
                student,
                args,
                objective=objective,
                teacher=compared if objective.has_teacher else None,
                launch=launch,
                settings=train,
                safety=sections.safety,
                train_dataset=rows,
                eval_dataset=ready.heldout,
                data_collator=collate,
                processing_class=processing_class,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        if not launch.engine.shards:
            detach_loss_head(student)  # outside training and evaluation the model is the user's

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Keep accelerate from sharding, and name arguments in errors; a recipe's run does the one, and has keys."""
        if self.of_a_recipe:
            yield
        else:
            with python_words(), engine_environment(self.launch.engine, self.launch.device):
                yield

    def _made_ready(
        self,
        model: Any,
        teacher: Any,
        train_dataset: Any,
        eval_dataset: Any,
        processing_class: Any,
        *,
        knows_metrics: bool,
    ) -> Ready:
        """Load, convert and tokenize what the constructor was given; knows_metrics: more than losses are measured."""
        args, launch = self.args, self.launch
        has_teacher = args.sections().objective.has_teacher
        check_models(model, teacher, args, launch)
        # Of a path the data are checked before it is loaded.
        student = None if isinstance(model, str | Path) else student_of(model, args, launch)
        path: Any = model if student is None else student.config._name_or_path
        self._tokenizer = processing_class or _tokenizer_beside(path, args)
        self.bad_rows = BadRows(args.on_bad_row, "on_bad_row")  # type: ignore[arg-type]
        rows = self._rows(train_dataset, "train_dataset", self.bad_rows, shuffle=True)
        heldout = self._heldout_rows(eval_dataset)
        if not knows_metrics:
            _check_metric(args, heldout, teacher)
        student = student if student is not None else student_of(model, args, launch)
        student.add_model_tags([*self._tag_names])
        if has_teacher or teacher is not None:
            teacher = teacher_of(teacher, student, args, launch)
        return Ready(student, teacher, self._tokenizer, rows, heldout)

    # ---- rows

    def _rows(self, data: Any, name: str, bad_rows: BadRows | None = None, *, shuffle: bool) -> Any:
        if data is None:
            return None
        args = self.args
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
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps * self.launch.ranks.size

    def _whole_steps(self, rows: Any) -> Any:
        if rows is None:
            return None
        return whole_steps(rows, self._rows_of_a_step, self.args.max_length)

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
        """Put the loss head on the model while it is trained or evaluated."""
        model: Any = self.model
        attached = self.launch.engine.shards or "_forward_before_loss_head" in model.__dict__
        with self._at_work():
            if not attached:
                attach_loss_head(model, self.step_loss.objective.vocab_size)
            try:
                yield
            finally:
                if not attached:
                    detach_loss_head(model)

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
        folder = Path(str(self.args.output_dir))
        checkpoint = chosen_checkpoint(folder, resume_from_checkpoint, self.launch.ranks)
        return self.train_from(checkpoint, trial, ignore_keys_for_eval)

    def train_from(self, checkpoint: Path | None, *more: Any) -> TrainOutput:
        """Train from a checkpoint that is known to be whole; None: from the beginning."""
        length, device = self.args.max_length, self.launch.device
        with (
            self._with_loss_head(),
            explain_oom(self.plain_model, self.teacher, self.settings, length, device),
        ):
            if checkpoint is not None and self.restore_if_complete(checkpoint):
                output = TrainOutput(self.state.global_step, 0.0, {})
            else:
                self._known_checkpoints.clear()
                output = super().train(str(checkpoint) if checkpoint is not None else None, *more)
        if self.average is not None:
            self.average.apply()
        return output

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        read_state(best, self.plain_model, self.optimizer, self.launch.ranks, weights_only=True)
        if self.average is not None:
            self.average.load(best)

    # ---- evaluation

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
            held = self.eval_dataset
            known = held.values() if isinstance(held, Mapping) else [held]
            keep = any(rows is own for own in known)
            losses = self._heldout(self.plain_model, rows, metric_key_prefix, keep=keep)
            output.metrics.update(losses)  # type: ignore[union-attr]
        self.plain_model.train(training)
        return output

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
            logits = head_logits(self.plain_model, hidden)
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
        if not self.engine.shards:
            refuse_factored_states(getattr(self.optimizer, "optimizer", self.optimizer))
        super()._save_checkpoint(model, trial)
        if self.args.push_to_hub:
            folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            self._push_from_checkpoint(str(folder))

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


@python_words()
def _check_launch(args: FCSDConfig, launch: Launch) -> None:
    sections = args.sections()
    check_precision(sections.train, launch.engine)
    if launch.engine.uses_deepspeed:
        raise UserError(
            "FCSDTrainer: DeepSpeed is not supported; launch configs/fsdp2_8.yaml, or use a recipe"
        )
    refuse_what_cannot_be_sharded(sections.train, sections.objective, launch.engine)


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
