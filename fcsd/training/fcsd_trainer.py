"""`FCSDTrainer`: distillation of a model on a data set, in the style of
`transformers.Trainer`.

`fcsd.training.trainer` has the loss, the content of a checkpoint and the handling of
failing steps, as for a recipe. This module does what a recipe's stages do before and
after training: models, rows, held-out loss, saving.

Not covered: adapters (a recipe's `lora` section), `model_init` and hyperparameter
search, evaluation on tasks during the training (a recipe's `early_stopping` section).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from fcsd.base.errors import UserError
from fcsd.model.autocast import float32_routers
from fcsd.model.dtypes import saved_dtypes
from fcsd.parallel.engine import finish_zero_settings
from fcsd.parallel.failure import stop_watching
from fcsd.parallel.launch import Launch, join_launch
from fcsd.training.card.trainer import TAGS, write_trainer_card
from fcsd.training.checkpoints import chosen_checkpoint, restore_if_complete
from fcsd.training.export import replace_model
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.heldout import HeldoutLosses
from fcsd.training.losses.head import detach_loss_head, head_logits, loss_head
from fcsd.training.optimizer import refuse_factored_states
from fcsd.training.out_of_memory import explain_oom
from fcsd.training.prepare import (
    Ready,
    check_vocabularies,
    collator,
    compute_alike,
    place_teacher,
    prepare_student,
)
from fcsd.training.python_words import with_known_names
from fcsd.training.record import TrainingRecord
from fcsd.training.row_order import EpochRows, ReadsWholeSteps
from fcsd.training.teachers.base import Teacher
from fcsd.training.trainer import DistillTrainer
from fcsd.training.trainer_inputs import TrainerInputs, check_kinds


@with_known_names
class FCSDTrainer(ReadsWholeSteps, DistillTrainer):
    """A `transformers.Trainer` that distils a model with FarSkip connectivity back to
    its original.

    Args:
        model: a converted model (`fcsd.convert`), or the path or Hub id of a
            checkpoint; fcsd converts an unconverted one according to `args.layers`. It
            is trained in place, in `args.dtype`. A recipe's run passes what its stage
            has loaded and tokenized (`Ready`), within `engine_environment`.
        args: an `FCSDConfig`.
        train_dataset: a `datasets.Dataset`, a stream or a list of examples with the
            column messages, text, prompt and response, or input_ids (and labels); or
            rows that are packed already.
        eval_dataset: the same, or a dict of several.
        processing_class: the tokenizer, or its path; None: the one in the model's
            checkpoint.
        teacher: a model, its path, or a `fcsd` Teacher. None: a copy of the student
            with the original connectivity, made before training; it needs the memory of
            one more model, in the model's original dtype. Objectives sft and ce have no
            teacher.
        compute_metrics: receives logits (rows, tokens, vocabulary) and labels of the
            packed rows of eval_dataset.
        launch: the position of this process among others; None: as accelerate or
            torchrun started it.

    With `args.on_bad_row` "skip", `bad_rows` lists the examples that were left out
    because they cannot be tokenized.

    `evaluate` gives eval_kl, nats per kept token of KL(teacher || student) on eval_dataset, with eval_kl_stderr, and
    without a teacher eval_ce; eval_loss is the same number. `save_model` leaves a folder that
    `AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True)` loads without fcsd.

    Raises:
        UserError: what a recipe would refuse, with the names of these arguments.
    """

    _tag_names = TAGS
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
        self.args = args = FCSDConfig.of(args)
        check_kinds(teacher, callbacks, optimizers, compute_metrics, launch)
        # Everything that can be refused is checked before a model is loaded, and rows
        # are packed before the Trainer exists: its constructor needs them.
        self.launch = launch = launch or _own_launch()
        self.inputs = None if isinstance(model, Ready) else TrainerInputs(args, launch)
        with self._at_work():
            sections = args.sections()
            objective, train = sections.objective, sections.train
            set_seed(args.seed)
            # The record takes the arguments as they were given, `fit_to_engine` then
            # changes those that depend on the launch.
            record = TrainingRecord(args, train, launch, of_recipe=self.inputs is None)
            args.fit_to_engine(train, launch)
            if self.inputs is not None:
                data = (train_dataset, eval_dataset)
                measures = compute_metrics is not None
                model = self.inputs.ready(
                    model, teacher, data, processing_class, knows_metrics=measures
                )
                self.bad_rows, processing_class = self.inputs.bad_rows, model.tokenizer
                record.complete(
                    model.student,
                    partial(self.inputs.fingerprints, model.rows),
                    self.inputs.date,
                )
            assert isinstance(model, Ready)
            # From here on a recipe's run and a script take the same steps. The dtypes
            # to save in are read before the student is cast to that of the training.
            student, compared = model.student, place_teacher(model.teacher, launch)
            check_vocabularies(student, compared, model.tokenizer, objective)
            self.saved_dtypes = launch.ranks.from_first(partial(saved_dtypes, student))
            prepare_student(student, objective, train, launch)
            compute_alike(
                compared, student, under_autocast=args.bf16 and not launch.engine.shards
            )
            self.row_order = EpochRows.of(
                model.rows, args.rows_of_a_step(launch), args.max_length
            )
            finish_zero_settings(args, train, launch.engine)
            self._heldout = HeldoutLosses(
                compared, launch, of_teacher=objective.has_teacher
            )
            super().__init__(
                student,
                args,
                sections=sections,
                teacher=compared if objective.has_teacher else None,
                launch=launch,
                record=record,
                train_dataset=model.rows,
                eval_dataset=model.heldout,
                data_collator=collator(args, compared),
                processing_class=processing_class,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        if not launch.engine.shards:
            # outside training and evaluation the model is the user's
            detach_loss_head(student)

    def _at_work(self) -> contextlib.AbstractContextManager[None]:
        if self.inputs is None:
            return contextlib.nullcontext()
        return self.inputs.at_work()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of a data set's rows, which are packed first if necessary;
        None or a name selects from those of the constructor.
        """
        if self.inputs is not None:
            eval_dataset = self.inputs.rows_of_call(
                eval_dataset, "eval_dataset", self.eval_dataset
            )
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        if self.inputs is not None:
            test_dataset = self.inputs.rows_of_call(test_dataset, "test_dataset")
        return super().get_test_dataloader(test_dataset)

    # ---- training

    @contextlib.contextmanager
    def _with_loss_head(self) -> Iterator[None]:
        model = self.plain_model
        routers = float32_routers(model) if self.args.bf16 else contextlib.nullcontext()
        with (
            self._at_work(),
            loss_head(model, self.step_loss.objective.vocab_size),
            routers,
        ):
            yield

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or continue from a checkpoint to exactly the weights of an
        uninterrupted training.

        Args:
            resume_from_checkpoint: a folder, or True for the newest intact one in
                `args.output_dir`.

        Raises:
            UserError: there is no such checkpoint, it is damaged, or it has other
                settings or data; the loss stays not finite; the disk is full; memory
                runs out.
        """
        if self.train_dataset is None:
            raise UserError("train_dataset: is required for training")
        folder = Path(str(self.args.output_dir))
        checkpoint = chosen_checkpoint(
            folder, resume_from_checkpoint, self.launch.ranks
        )
        return self.train_from(checkpoint, trial, ignore_keys_for_eval)

    def train_from(self, checkpoint: Path | None, *args: Any) -> TrainOutput:
        """Train from a checkpoint that is known to be intact; None: from the beginning."""
        if checkpoint is not None:
            self.record.refuse_another(checkpoint)
        length, device = self.args.max_length, self.launch.device
        explained = explain_oom(
            self.plain_model, self.teacher, self.settings, length, device
        )
        with self._with_loss_head(), explained:
            # A run that was killed after its last step has nothing left to train.
            if checkpoint is not None and restore_if_complete(self, checkpoint):
                output = TrainOutput(self.state.global_step, 0.0, {})
            else:
                self.checkpoint_writer.known.clear()
                output = super().train(
                    str(checkpoint) if checkpoint is not None else None, *args
                )
        # The model that the user holds afterwards has the weights that are saved.
        if self.average is not None:
            self.average.apply()
        return output

    def _load_best_model(self) -> None:
        self.restore_weights(
            Path(str(self.state.best_model_checkpoint)), self.optimizer
        )

    # ---- evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the held-out loss, and with `compute_metrics` those metrics."""
        # For a dict of data sets the Trainer calls this method again for each.
        with self.meters.paused(), self._with_loss_head():
            metrics: dict[str, float] = super().evaluate(
                eval_dataset, ignore_keys, metric_key_prefix
            )
        return metrics

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return logits (rows, tokens, vocabulary) and labels of a data set's packed
        rows, and its held-out loss.
        """
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
        """Run the Trainer's loop only if logits are requested; measure the loss token
        by token over the rows of all ranks.
        """
        rows, training = dataloader.dataset, self.plain_model.training
        if prediction_loss_only is None:
            only_loss = self.args.prediction_loss_only
        else:
            only_loss = prediction_loss_only
        with self.scored_weights(), self.accelerator.autocast():
            # The held-out loss needs no logits, which would take vocabulary-sized
            # memory.
            if only_loss:
                no_predictions: Any = None
                output = EvalLoopOutput(
                    no_predictions, label_ids=None, metrics={}, num_samples=len(rows)
                )
            else:
                output = super().evaluation_loop(
                    dataloader, description, False, ignore_keys, metric_key_prefix
                )
            losses = self._heldout(
                self.plain_model,
                rows,
                metric_key_prefix,
                eval_dataset=self.eval_dataset,
            )
            output.metrics.update(losses)  # type: ignore[union-attr]
        # The Trainer's loop leaves the model in evaluation mode.
        self.plain_model.train(training)
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return logits and labels of a batch of packed rows, whose examples do not
        attend to each other.
        """
        batch = self._prepare_inputs(inputs)
        ids, positions = batch["input_ids"], batch["position_ids"]
        with torch.no_grad():
            hidden = model(input_ids=ids, position_ids=positions, objective="hidden")[
                "hidden"
            ]
            logits = head_logits(self.plain_model, hidden)
        return None, logits.view(*ids.shape, -1), batch["labels"]

    # ---- what is saved

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write config, code, weights and tokenizer to a folder, each tensor in its
        original dtype.

        The folder loads with `AutoModelForCausalLM.from_pretrained(…,
        trust_remote_code=True)`, without fcsd.
        """
        if self.checkpoint_writer.is_saving:
            return  # the checkpoint writer writes weights and optimiser together
        folder = Path(str(output_dir or self.args.output_dir))
        with self.scored_weights():
            replace_model(
                self.plain_model,
                folder,
                tokenizer=self.processing_class,
                dtypes=self.saved_dtypes,
                launch=self.launch,
            )
        self.launch.wait()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(
                commit_message="Model save", revision=self.args.hub_revision
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push the present model, and the checkpoint once it has its final name."""
        if self.checkpoint_writer.is_saving or self.args.hub_strategy == "end":
            return
        self.save_model(_internal_call=True)
        super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not self.engine.shards:
            refuse_factored_states(getattr(self.optimizer, "optimizer", self.optimizer))
        super()._save_checkpoint(model, trial)
        if self.args.push_to_hub:
            folder = (
                Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            )
            self._push_from_checkpoint(str(folder))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card of `fcsd push` to `args.output_dir`; the arguments are
        the Trainer's.
        """
        if self.is_world_process_zero():
            bound = inspect.signature(super().create_model_card).bind(*args, **kwargs)
            write_trainer_card(self, bound.arguments)


def _own_launch() -> Launch:
    """Join the processes that a launcher has started.

    The launcher ends the others when one fails, so fcsd's own watch over them is
    stopped: a script may have more to do after the training.
    """
    launch = join_launch()
    stop_watching()
    return launch
