"""The training loop: `transformers.Trainer` with the objectives of the paper, and with
checkpoints from which a run continues exactly.

The objective, the reaction to a step that goes wrong and the writing of a checkpoint
live in `fcsd.training.step_loss`, `guarded` and `checkpoint_writer`. This module hooks
them into the Trainer's methods.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.model.autocast import autocast_experts
from fcsd.model.connectivity.marks import TRAINED
from fcsd.model.families.structure import checkpoints_reentrantly
from fcsd.parallel.failure import in_step
from fcsd.parallel.launch import Launch
from fcsd.parallel.parts import begin_in_float32
from fcsd.parallel.state import load_schedule, read_state
from fcsd.training.argument_rules import REENTRANT
from fcsd.training.averaging import WeightAverage
from fcsd.training.checkpoint_writer import SCHEDULE, CheckpointWriter, restore_beside
from fcsd.training.checkpoints import PARTIAL, STOPPER_FILE
from fcsd.training.config import Sections
from fcsd.training.guarded import GuardedSteps, shield_workers
from fcsd.training.losses.balance import Balance
from fcsd.training.optimizer import (
    learning_rate_schedule,
    note_parts,
    take_rate_of_schedule,
)
from fcsd.training.own_text import OwnText
from fcsd.training.record import RECORD_FILE, TrainingRecord
from fcsd.training.safety import Guard
from fcsd.training.step_loss import StepLoss
from fcsd.training.teachers.base import Teacher


class _Steps(TrainerCallback):
    """Mark the time that this rank spends in a step, so that a hang is noticed, and do
    the work that is due once per step: after the optimiser, and before the step is
    logged, scored or saved.

    It is the first callback, because later ones may take hours.
    """

    def __init__(self, trainer: "DistillTrainer"):
        self.trainer = trainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        in_step()

    on_substep_end = on_step_begin

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        in_step(False)  # weights are updated
        guarded = self.trainer.guarded
        # Loads of a skipped step must not move the routers' biases, since its weights
        # did not move either.
        if guarded.verdict == "go":
            self.trainer.step_loss.end_step()
        # All ranks learnt in `decide` that no thread is writing any more, so all of
        # them give the checkpoint its name in the same step.
        if guarded.is_written:
            self.trainer.checkpoint_writer.finish()


class DistillTrainer(Trainer):
    """Minimise an `Objective` over packed rows, while a `Guard` decides on every step;
    the base class of `FCSDTrainer`.

    The model must carry a loss head (`fcsd.training.losses.head.attach_loss_head`).
    `teacher` is needed for the objectives that compare with one. `sections` hold the
    settings that `args` have no field for: the objective, the training and the reaction
    to a step that goes wrong. `record` is written into each checkpoint and states its
    settings and data. `fcsd.training.meters` lists the logged figures.
    """

    # `compute_loss` divides by the number of kept tokens of the whole step, so the
    # Trainer must not divide by the number of micro-batches again.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        sections: Sections,
        teacher: Teacher | None,
        launch: Launch,
        record: TrainingRecord,
        **kwargs: Any,
    ):
        self.launch, self.engine, self.record = launch, launch.engine, record
        self.checkpoint_writer = CheckpointWriter(self)
        _use_one_device(args)
        # torch's autocast has no rule for the grouped matmuls of the experts.
        if args.bf16:
            autocast_experts()
        # The Trainer would refuse to write checkpoints of such a model; fcsd writes its
        # own, so the flag is set for the constructor alone.
        args.save_only_model = self.engine.spreads_experts
        kwargs["callbacks"] = [_Steps(self), *(kwargs.get("callbacks") or [])]
        super().__init__(model, args, **kwargs)
        args.save_only_model = False
        # With this flag, which the Trainer sets for a model that was loaded in shards,
        # accelerate wraps the optimiser only.
        self.is_distributed_loading_by_transformers = self.engine.has_dtensors
        balance = None
        if sections.train.balances:
            balance = Balance(sections.train, model, self.accelerator)
        self.step_loss = StepLoss(
            sections.objective, teacher, self.accelerator, balance
        )
        self.meters, self.teacher = self.step_loss.meters, teacher
        self.guard = Guard(sections.safety)
        self.guarded = GuardedSteps(self, self.guard, Path(str(args.output_dir)))
        # `fcsd.training.early_stopping.EarlyStopper`, where a run stops by its scores
        self.stopper: Any = None
        self.settings = sections.train
        self.own_text: OwnText | None = None  # where the student writes, too
        self.average: WeightAverage | None = None
        if (decay := self.settings.ema_decay) is not None:
            self.average = WeightAverage(
                self, decay, skipped=lambda: self.guarded.verdict != "go"
            )
            # The callback that scores is added later, and thus sees the new average.
            self.add_callback(self.average)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.engine.shards:  # shards are on their devices already
            super()._move_model_to_device(model, device)

    # ---- one step

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Return a step's micro-batches, with the teacher's hidden states, and its
        number of kept tokens.
        """
        # The batches of the last step are still referenced by the Trainer's loop: free
        # the teacher's hidden states before those of this step are computed.
        self.step_loss.forget()
        self.guarded.begin()
        batches, num_kept = super().get_batch_samples(
            epoch_iterator, num_batches, device
        )
        model: Any = self.model
        self.step_loss.prepare(model, batches, self.state.global_step)
        return batches, num_kept

    def _get_num_items_in_batch(
        self, batch_samples: list, device: torch.device
    ) -> Tensor | None:
        # Before the kept tokens are counted, and before the teacher sees the rows.
        if self.own_text is not None:
            step = self.state.global_step
            self.own_text.write(self.plain_model, batch_samples, step)
        return self.step_loss.num_kept(batch_samples, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute this micro-batch's share of the step's mean loss, in nats per kept
        token.
        """
        assert num_items_in_batch is not None
        loss, outputs = self.step_loss(model, inputs, num_items_in_batch)
        loss = self.guarded.watched(loss)
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        # The Trainer calls this once per step, when the gradient is complete and before
        # the optimiser uses it. Under DeepSpeed it comes after the optimiser, but that
        # engine itself skips a step whose norm is not finite.
        norm = float(super()._get_grad_norm(model, grad_norm=grad_norm))
        self.guarded.decide(norm)
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # The Trainer calls this after a step, and once more after the last step of an
        # epoch; `_Steps` does the work that must happen only once.
        if self.control.should_training_stop:
            # the last step is logged whatever logging_steps is
            self.control.should_log = True
        self.guarded.heed_signals()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the throughput and the guard's counts to the
        Trainer's figures.
        """
        if "loss" in logs:
            logs.update(self.meters.means(self.guarded.leave_out_skipped(logs)))
            logs.update(self.meters.written())
            logs["tokens_per_second"] = self.meters.tokens_per_second()
            logs.update(self.guard.report())
            self.guarded.reset_meters()
        super().log(logs, start_time)
        if "loss" in logs and self.own_text is not None:
            self._show_sample(self.own_text.due_sample(self.state.global_step))

    def _show_sample(self, sample: str | None) -> None:
        """Print a sample of own text, and put it into the history alone: reporters take
        numbers.
        """
        if sample is not None:
            shown = " ".join(sample.split())
            self.guarded.say(f"own text, step {self.state.global_step}: {shown}")
            entry: dict[str, Any] = self.state.log_history[-1]
            entry["own_text"] = sample

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # The score before the first step may have ended the run.
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        self.note_training()
        _refuse_reentrant_checkpointing(self.plain_model)
        # A continued training has the checkpoint's, which transformers would keep.
        self.state.compute_steps(self.args, max_steps)
        # None: the Trainer would load a checkpoint at a time that depends on the
        # engine, in that engine's format. `restore` below is the same for all engines.
        prepared: tuple[nn.Module, Any] = super()._prepare_for_training(
            max_steps, train_dataloader, None
        )
        # DeepSpeed's engine steps the optimiser itself, and also skips by itself.
        if self.is_deepspeed_enabled:
            begin_in_float32(self.plain_model, self.optimizer, self.launch.ranks)
        else:
            self.guarded.let_steps_be_skipped(self.optimizer)
        if self.step_loss.distance is not None:
            self.step_loss.distance.steps = max_steps
        # Only now is there an optimiser to load the state into.
        if resume_from_checkpoint is not None:
            self.restore(Path(resume_from_checkpoint))
            self.checkpoint_writer.known.add(Path(resume_from_checkpoint).name)
        self.guarded.reset_meters()
        return prepared

    def note_training(self) -> None:
        """Mark the config of a rewired model: its weights are no longer the original's.

        A regular model needs no mark, for it is an original itself.
        """
        config = self.plain_model.config
        if (getattr(config, "farskip", None) or {}).get("layers"):
            setattr(config, TRAINED, True)

    # ---- data

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.step_loss.capped(self.plain_model, self.settings):
                return super().train(*args, **kwargs)
        # Also for signals: a thread may still be writing a checkpoint.
        except BaseException as error:
            self.checkpoint_writer.leave(error)
            raise
        finally:
            in_step(False)

    def _finalize_training(self, *args: Any) -> Any:
        self.checkpoint_writer.close()
        return super()._finalize_training(*args)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader, with workers that outlive a signal which the
        scheduler or Ctrl-C sends to all processes.
        """
        return shield_workers(super().get_train_dataloader())

    # ---- optimiser

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the Trainer's optimiser; with expert parallelism, note which of its
        groups decay.
        """
        optimizer = super().create_optimizer(model)
        # Parameters on different meshes are in different groups. A checkpoint stores
        # the two groups of one process, so each group notes which of them it belongs
        # to.
        if self.engine.spreads_experts:
            trained: Any = self.model if model is None else model
            note_parts(optimizer, trained, self.get_decay_parameter_names(trained))
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            steered: Any = optimizer or self.optimizer
            self.lr_scheduler = learning_rate_schedule(
                self.args, steered, num_training_steps
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    # ---- checkpoints

    def scored_weights(self) -> AbstractContextManager[None]:
        """Give the model, within the block, the weights that are scored and saved: with
        ema_decay their average.
        """
        if self.average is None or not self.average.average:
            return nullcontext()
        return self.average.applied()

    @property
    def plain_model(self) -> Any:
        """The model without DDP's or DeepSpeed's wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def restore(self, checkpoint: Path) -> None:
        """Load weights, optimiser and schedule of a checkpoint from any engine and
        number of ranks.
        """
        read_state(checkpoint, self.plain_model, self.optimizer, self.launch.ranks)
        schedule = torch.load(
            checkpoint / SCHEDULE, map_location="cpu", weights_only=True
        )
        load_schedule(self.lr_scheduler, self.optimizer, schedule)
        if self.record.longer_than(read_json(checkpoint / RECORD_FILE)):
            take_rate_of_schedule(self.lr_scheduler, self.optimizer)
        restore_beside(self, checkpoint)

    def restore_weights(self, checkpoint: Path, optimizer: Any) -> None:
        """Load the weights and their average; optimizer: None before there is one."""
        read_state(
            checkpoint,
            self.plain_model,
            optimizer,
            self.launch.ranks,
            weights_only=True,
        )
        restore_beside(self, checkpoint)

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Do nothing within a checkpoint: its writer writes weights and optimiser
        together.
        """
        if not self.checkpoint_writer.is_saving:
            super().save_model(output_dir, _internal_call)

    def _get_output_dir(self, trial: Any) -> str:
        # Only files of a checkpoint go to the temporary folder.
        folder = super()._get_output_dir(trial)
        if self.checkpoint_writer.is_saving:
            return str(Path(folder) / PARTIAL)
        return folder

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint under a temporary name, rename it, then drop the oldest:
        a checkpoint that has its name is complete.
        """
        save = super()._save_checkpoint
        # transformers would append to the states of namesakes at every save, and knows
        # no callback that the training was not begun with.
        names = [
            type(callback).__name__
            for callback in (*self.callback_handler.callbacks, self.control)
            if isinstance(callback, ExportableState)
        ]
        state: Any = self.state
        state.stateful_callbacks = {
            name: [] if names.count(name) > 1 else {} for name in names
        }
        self.checkpoint_writer.write(
            f"checkpoint-{self.state.global_step}", lambda: save(model, trial)
        )

    # The Trainer saves with `save_pretrained`, which writes per-expert tensor names,
    # and loads a checkpoint with a non-strict `load_state_dict`, which expects the
    # fused names: the experts would silently stay as they are. Under FSDP and DeepSpeed
    # it writes formats that only the same engine reads.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.checkpoint_writer.save_state(Path(output_dir))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Do nothing: `restore` loads the checkpoint once there is an optimiser."""

    def _load_callback_state(self) -> None:
        self.restore_callbacks(self.state)

    def restore_callbacks(self, state: TrainerState) -> None:
        """Give the callbacks the attributes that they had when `state` was saved.

        transformers does this only on request, and with new objects at the end of the
        list, of which the caller knows nothing. The arguments of their constructors are
        those given now, unless `restore_callback_states_from_checkpoint` is set.
        """
        callbacks = self.callback_handler.callbacks
        all_saved: Any = state.stateful_callbacks
        for name, saved in all_saved.items():
            namesakes = [
                callback for callback in callbacks if type(callback).__name__ == name
            ]
            for callback, values in zip(
                namesakes, saved if isinstance(saved, list) else [saved], strict=False
            ):
                restored = dict(values.get("attributes", {}))
                if self.args.restore_callback_states_from_checkpoint:
                    restored |= values.get("args", {})
                for attribute, value in restored.items():
                    setattr(callback, attribute, value)

    @property
    def has_stopped_early(self) -> bool:
        """Whether a callback of transformers has ended the training by its metric."""
        return any(
            isinstance(callback, EarlyStoppingCallback)
            and callback.early_stopping_patience_counter
            >= callback.early_stopping_patience
            for callback in self.callback_handler.callbacks
        )

    def restore_progress(self, checkpoint: Path) -> None:
        """Load the stopper's state; the time that it has counted is kept."""
        if self.stopper is not None:
            self.stopper.load(read_json(checkpoint / STOPPER_FILE))


def _refuse_reentrant_checkpointing(model: nn.Module) -> None:
    # It may have been enabled on the model itself, of which the arguments know nothing.
    if any(checkpoints_reentrantly(module) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__}: {REENTRANT}; call"
            " model.activation_checkpointing_enable({'use_reentrant': False})"
        )


def _use_one_device(args: TrainingArguments) -> None:
    """Train on one device per process; transformers would replicate the model on every
    visible device.
    """
    if args.n_gpu > 1:
        print(
            f"this process trains on only one of the {args.n_gpu} visible devices;"
            " start one process per device with `accelerate launch --num_processes"
            f" {args.n_gpu}` (docs/scale.md)",
            file=sys.stderr,
        )
        args._n_gpu = 1
