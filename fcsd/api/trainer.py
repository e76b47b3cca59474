"""`FCSDTrainer`: distillation of a model on a data set, in the style of
`transformers.Trainer`.

`fcsd.training.ready_trainer` trains; this module does what a recipe's stages do before
and after training: models, rows, held-out loss, saving.

Not covered: other adapters than LoRA, `model_init` and hyperparameter search,
evaluation on tasks during the training (a recipe's `early_stopping` section).
"""

import contextlib
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from fcsd.api.trainer_inputs import (
    TrainerInputs,
    given_rules,
    training_rules,
)
from fcsd.base.artifact import ADAPTER
from fcsd.base.errors import UserError
from fcsd.base.strict import refuse
from fcsd.base.writing import new_folder
from fcsd.data.show import check_number, print_rows
from fcsd.model.saved_dtypes import saved_dtypes
from fcsd.parallel.engine import Engine
from fcsd.parallel.failure import stop_watching
from fcsd.parallel.launch import Launch, join_launch
from fcsd.training.card.trainer import TAGS, write_trainer_card
from fcsd.training.checkpoints import chosen_checkpoint, damage
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.heldout import HeldoutLosses
from fcsd.training.losses.head import head_logits
from fcsd.training.optimizer import refuse_factored_states
from fcsd.training.python_words import with_known_names
from fcsd.training.ready_trainer import ReadyTrainer, seed_and_record
from fcsd.training.save_model import replace_model
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.lora import merged_copy


@with_known_names
class FCSDTrainer(ReadyTrainer):
    """A `transformers.Trainer` that distils a model with FarSkip connectivity back to
    its original.

    Args:
        model: a converted model (`fcsd.convert`), or the path or Hub id of a
            checkpoint; fcsd converts an unconverted one according to `args.layers`. It
            is trained in place, in `args.dtype`.
        args: an `FCSDConfig`.
        train_dataset: a `datasets.Dataset`, a stream or a list of examples with the
            column messages, text, prompt and response, or input_ids (and labels); or
            rows that are packed already.
        eval_dataset: the same, or a dict of several.
        processing_class: the tokenizer, or its path; None: the one in the model's
            checkpoint.
        teacher: a model, its path, or a `fcsd` Teacher. None: a copy of the student
            with the original connectivity, made before training; it needs the memory of
            one more model. It computes in the student's precision: where its weights
            have to be cast, those of a copy. Objectives sft and ce have no teacher.
        compute_metrics: receives logits (rows, tokens, vocabulary) and labels of the
            packed rows of eval_dataset.
        peft_config: a `peft.LoraConfig`: train its adapters, of `args.dtype`, and keep
            the model's weights, in the dtype in which they are. The teacher is the same
            model without adapters and connectivity, so that there is no copy.
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
        peft_config: Any = None,
        launch: Launch | None = None,
    ):
        args = FCSDConfig.of(args)
        refuse(*given_rules(teacher, callbacks, optimizers, compute_metrics, launch))
        # Everything that can be refused is checked before a model is loaded, and rows
        # are packed before the Trainer exists: its constructor needs them.
        launch = launch or _own_launch()
        self.inputs = TrainerInputs(args, launch)
        with self.working_context():
            sections = self.inputs.sections
            self.inputs.take_adapters(peft_config)
            adapts = peft_config is not None
            refuse(
                *training_rules(
                    model, args, callbacks, optimizers[0], launch, adapts=adapts
                )
            )
            record = seed_and_record(args, sections, launch)
            data = (train_dataset, eval_dataset)
            measures = compute_metrics is not None
            ready = self.inputs.ready(
                model, teacher, data, processing_class, knows_metrics=measures
            )
            self.bad_rows, self._rows = self.inputs.bad_rows, ready.rows
            record.complete(
                ready.student,
                partial(self.inputs.fingerprints, ready.rows),
                self.inputs.date,
                self.inputs.adapter_settings,
            )
            # Read before the student is cast to the dtype of the training.
            self.saved_dtypes = launch.ranks.from_first(
                partial(saved_dtypes, ready.student)
            )
            super().__init__(
                ready,
                args,
                sections=sections,
                record=record,
                launch=launch,
                processing_class=ready.tokenizer,
                compute_metrics=compute_metrics,
                callbacks=[*(callbacks or []), _OptimizerCheck(launch.engine)],
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        self.heldout = HeldoutLosses(
            self.placed_teacher, launch, of_teacher=sections.objective.has_teacher
        )

    def working_context(self) -> contextlib.AbstractContextManager[None]:
        return self.inputs.working_context()

    # ---- data

    def show_rows(self, number: int = 3) -> None:
        """Print the text of the first `number` rows to train on. Tokens with loss are
        in [[double brackets]], or in reverse video on a terminal; special tokens are
        written out, and padding is left out.

        Raises UserError: nothing to train on; a number below 1.
        """
        check_number(number, "show_rows")
        if self.train_dataset is None:
            raise UserError("train_dataset: is required for show_rows")
        if self.is_world_process_zero():
            print_rows(self.train_dataset, self.processing_class, number)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of a data set's rows, which are packed first if necessary;
        None or a name selects from those of the constructor.
        """
        rows = self.inputs.rows_of_call(eval_dataset, "eval_dataset", self.eval_dataset)
        return super().get_eval_dataloader(rows)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        rows = self.inputs.rows_of_call(test_dataset, "test_dataset")
        return super().get_test_dataloader(rows)

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, or continue from a checkpoint to exactly the weights of an
        uninterrupted training; with a larger max_steps or num_train_epochs, along the
        schedule of the longer one from there on.

        Args:
            resume_from_checkpoint: a folder, or True for the newest intact one in
                `args.output_dir`.

        Raises:
            UserError: there is no such checkpoint, it is damaged, or it has other
                settings or data; the loss stays non-finite; the disk is full; memory
                runs out.
        """
        if self.train_dataset is None:
            raise UserError("train_dataset: is required for training")
        if self.train_dataset is not self._rows:
            raise UserError(
                "train_dataset: was replaced after the trainer had packed and recorded"
                " its rows; make another FCSDTrainer"
            )
        folder = Path(str(self.args.output_dir))
        checkpoint = chosen_checkpoint(
            folder, resume_from_checkpoint, self.launch.ranks
        )
        return self.train_from(checkpoint, trial, ignore_keys_for_eval)

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        # The training may have begun in a folder that has been moved since.
        if not best.is_dir():
            best = Path(str(self.args.output_dir)) / best.name
        if (reason := damage(best, self.launch.ranks)) is not None:
            raise UserError(
                f"{best}: the best weights cannot be loaded ({reason}); load_best_model_at"
                "_end: False keeps the last ones"
            )
        self.record.refuse_another(best)
        self.restore_weights(best, self.optimizer)

    # ---- evaluation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measure the held-out loss, and with `compute_metrics` those metrics."""
        # For a dict of data sets the Trainer calls this method again for each.
        with self.meters.paused(), self.with_loss_head():
            metrics: dict[str, float] = super().evaluate(
                eval_dataset, ignore_keys, metric_key_prefix
            )
        return metrics

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return logits (rows, tokens, vocabulary) and labels of a data set's packed
        rows, and its held-out loss.
        """
        with self.with_loss_head():
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
            losses = self.heldout(
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
        trust_remote_code=True)`, without fcsd. With adapters these are its weights with
        the adapters merged; the adapters alone are in `adapter`, in peft's format.
        """
        folder = Path(str(output_dir or self.args.output_dir))
        with self.scored_weights():
            model, adapters = self.plain_model, self.inputs.adapters
            if adapters is not None and self.launch.first:
                model = merged_copy(adapters)
            replace_model(
                model,
                folder,
                tokenizer=self.processing_class,
                dtypes=self.saved_dtypes,
                launch=self.launch,
            )
            if adapters is not None and self.launch.first:
                with new_folder(folder / ADAPTER) as written:
                    adapters.save_pretrained(written)
        self.launch.wait()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(
                commit_message="Model save", revision=self.args.hub_revision
            )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        _refuse_unsaved(self.engine, self.optimizer)
        super()._save_checkpoint(model, trial)
        # Push the current model, and the checkpoint, which has its final name.
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            folder = (
                Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
            )
            self.save_model(_internal_call=True)
            self._push_from_checkpoint(str(folder))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model card of `fcsd push` to `args.output_dir`; the arguments are
        the Trainer's.
        """
        if self.is_world_process_zero():
            bound = inspect.signature(super().create_model_card).bind(*args, **kwargs)
            write_trainer_card(self, bound.arguments)


class _OptimizerCheck(TrainerCallback):
    """Refuse an optimiser that fcsd cannot checkpoint before work is lost: in the first
    steps, when it has states, and not only when the first checkpoint is written.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        *rest: Any,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        # A skipped step leaves no states, so the first ten are looked at.
        if state.global_step <= 10 and args.save_strategy != "no":
            _refuse_unsaved(self.engine, optimizer)


def _refuse_unsaved(engine: Engine, optimizer: Any) -> None:
    """Refuse an optimiser whose states a checkpoint of one process would lose."""
    if not engine.shards:
        refuse_factored_states(getattr(optimizer, "optimizer", optimizer))


def _own_launch() -> Launch:
    """Join the processes that a launcher has started.

    The launcher ends the others when one fails, so fcsd's own watch over them is
    stopped: a script may have more to do after the training.
    """
    launch = join_launch()
    stop_watching()
    return launch
