"""The training loop: `transformers.Trainer` with the objectives of the paper, from
which a run goes on exactly.

What an objective is, what happens when a step goes wrong, and how a checkpoint is
written are parts of their own: `fcsd.training.step_loss`, `guarded` and `checkpoints`.
Here they are put into the Trainer's places.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from fcsd.base.files import read_json
from fcsd.model.autocast import autocast_experts
from fcsd.model.connectivity.spec import TRAINED
from fcsd.parallel.failure import in_step
from fcsd.parallel.launch import Launch
from fcsd.parallel.parts import begin_in_float32
from fcsd.parallel.state import load_schedule, read_state
from fcsd.training.averaging import WeightAverage
from fcsd.training.checkpoint_writer import SCHEDULE, CheckpointWriter, restore_beside
from fcsd.training.checkpoints import PARTIAL, STOPPER_FILE
from fcsd.training.early_stopping import EarlyStopper
from fcsd.training.fcsd_config import Sections
from fcsd.training.guarded import GuardedSteps, shield_workers
from fcsd.training.losses.balance import Balance
from fcsd.training.optimizer import learning_rate_schedule, note_parts
from fcsd.training.record import TrainingRecord
from fcsd.training.safety import Guard
from fcsd.training.step_loss import StepLoss
from fcsd.training.teachers.base import Teacher


class _Steps(TrainerCallback):
    """Notes when this rank is in a step, so that one that hangs is noticed, and does
    what is done once a step, behind the optimiser and before anything is logged, scored
    or saved of it; comes before callbacks that take hours.
    """

    def __init__(self, trainer: "DistillTrainer"):
        self.trainer = trainer

    def on_step_begin(self, *args: Any, **more: Any) -> None:
        in_step()

    on_substep_end = on_step_begin

    def on_step_end(self, *args: Any, **more: Any) -> None:
        in_step(False)  # weights are updated
        guarded = self.trainer.guarded
        if guarded.verdict == "go":
            self.trainer.step_loss.end_step()
        if guarded.is_written:
            self.trainer.checkpoint_writer.finish()


class DistillTrainer(Trainer):
    """Minimises an `Objective` over packed rows, while a `Guard` decides on every step:
    what `FCSDTrainer` stands on.

    The model must carry a loss head (`fcsd.training.losses.head.attach_loss_head`).
    `teacher` is needed for the objectives that compare with one. `sections` say beyond
    what `args` can say what is minimised, what moves the weights, and what becomes of a
    step that goes wrong; `record` what a checkpoint says that it was made from. What is
    logged is in `fcsd.training.meters`.
    """

    # `compute_loss` divides by the number of kept tokens of the whole step, see the
    # module's docstring.
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
        if args.bf16:
            autocast_experts()
        # Else the Trainer refuses to write checkpoints; ours are not its.
        args.save_only_model = self.engine.spreads_experts
        kwargs["callbacks"] = [_Steps(self), *(kwargs.get("callbacks") or [])]
        super().__init__(model, args, **kwargs)
        args.save_only_model = False
        # The name is `Trainer`'s for a model that came sharded: accelerate wraps the
        # optimiser only.
        self.is_distributed_loading_by_transformers = self.engine.has_dtensors
        balance = (
            Balance(sections.train, model, self.accelerator)
            if sections.train.balances
            else None
        )
        self.step_loss = StepLoss(
            sections.objective, teacher, model, self.accelerator, balance
        )
        self.meters, self.teacher = self.step_loss.meters, teacher
        self.guard = Guard(sections.safety)
        self.guarded = GuardedSteps(self, self.guard, Path(str(args.output_dir)))
        self.stopper: EarlyStopper | None = None
        self.settings = sections.train
        self.average: WeightAverage | None = None
        if (decay := self.settings.ema_decay) is not None:
            self.average = WeightAverage(
                self, decay, skipped=lambda: self.guarded.verdict != "go"
            )
            # before the one that scores, which is added later
            self.add_callback(self.average)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not self.engine.shards:  # whose parts are where they belong
            super()._move_model_to_device(model, device)

    # ---- one step

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Return a step's micro-batches, with the teacher's hidden states, and its
        number of kept tokens.
        """
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
        return self.step_loss.num_kept(batch_samples, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute this micro-batch's share of the step's mean loss, in nats per kept token."""
        assert num_items_in_batch is not None
        loss, outputs = self.step_loss(model, inputs, num_items_in_batch)
        loss = self.guarded.watched(loss)
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        # Called once a step, when its gradient is whole and before the optimiser acts
        # on it; under DeepSpeed, whose engine skips a step with a norm that is not
        # finite by itself, afterwards.
        norm = float(super()._get_grad_norm(model, grad_norm=grad_norm))
        self.guarded.decide(norm)
        return norm

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # Called behind a step, and once more behind the last one of an epoch: what is
        # done once is in `_Steps`.
        if self.control.should_training_stop:
            # the last step is on record whatever logging_steps is
            self.control.should_log = True
        if self.guarded.rewind():
            return
        self.guarded.heed_signals()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the parts of the loss, the throughput and what was guarded against to
        what the Trainer logs.
        """
        if "loss" in logs:
            logs.update(self.meters.means(self.guarded.leave_out_skipped(logs)))
            self.meters.refuse_all_clipped(logs, self.state.global_step)
            logs["tokens_per_second"] = self.meters.tokens_per_second()
            logs.update(self.guard.report())
            self.guarded.reset_meters()
        super().log(logs, start_time)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # the score that began this run may have ended it
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        self.note_training()
        # What `Trainer` would load, and when, depends on the engine; `restore` is the
        # same for all.
        prepared: tuple[nn.Module, Any] = super()._prepare_for_training(
            max_steps, train_dataloader, None
        )
        if self.is_deepspeed_enabled:
            begin_in_float32(self.plain_model, self.optimizer, self.launch.ranks)
        else:
            self.guarded.let_steps_be_skipped(self.optimizer)
        if self.step_loss.terms is not None:
            self.step_loss.terms.steps = max_steps
        if resume_from_checkpoint is not None:
            self.restore(Path(resume_from_checkpoint))
            self.checkpoint_writer.known.add(Path(resume_from_checkpoint).name)
        self.guarded.reset_meters()
        return prepared

    def note_training(self) -> None:
        """Let the config say that these are no longer an original's weights; those of a
        regular model are one's.
        """
        config = self.plain_model.config
        if (getattr(config, "farskip", None) or {}).get("layers"):
            setattr(config, TRAINED, True)

    # ---- data

    def train(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.step_loss.capped(self.plain_model, self.settings):
                return super().train(*args, **kwargs)
        except BaseException as error:
            self.checkpoint_writer.leave(error)
            raise
        finally:
            in_step(False)

    def _finalize_training(self, *args: Any) -> Any:
        self.checkpoint_writer.close()
        return super()._finalize_training(*args)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's; its processes outlive a signal that the scheduler or
        Ctrl-C has sent to all.
        """
        return shield_workers(super().get_train_dataloader())

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple:
        """Plan as the Trainer does, with room for data that rewinds skip: `max_steps`
        ends the run, not an epoch.
        """
        _, steps_per_epoch, *numbers, steps_in_epoch, max_steps = (
            super().set_initial_training_values(args, dataloader)
        )
        return (sys.maxsize, steps_per_epoch, *numbers, steps_in_epoch, max_steps)

    @property
    def steps_of_data(self) -> int:
        """The number of steps whose rows were read: those trained, and those that
        rewinds passed over.
        """
        return self.state.global_step + self.guard.passed_steps

    def _init_training_state(
        self, max_steps: int, steps_per_epoch: int, *more: Any
    ) -> tuple[int, int]:
        super()._init_training_state(max_steps, steps_per_epoch, *more)
        if self.args.ignore_data_skip:
            return self.state.global_step // steps_per_epoch, 0
        epoch, steps = divmod(self.steps_of_data, steps_per_epoch)
        return epoch, steps * self.args.gradient_accumulation_steps

    # ---- optimiser

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Make the Trainer's optimiser, and note which parameters of it decay."""
        optimizer = super().create_optimizer(model)
        # The Trainer has one group a mesh of those that decay, and of the others.
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
        """Give the model within the block the weights that are scored and kept: with
        ema_decay their average.
        """
        return (
            self.average.applied()
            if self.average and self.average.average
            else nullcontext()
        )

    @property
    def plain_model(self) -> Any:
        """The model without DDP's or DeepSpeed's wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def restore(self, checkpoint: Path) -> None:
        """Load weights, optimiser and schedule, whatever engine and number of ranks
        wrote the checkpoint.
        """
        read_state(checkpoint, self.plain_model, self.optimizer, self.launch.ranks)
        schedule = torch.load(
            checkpoint / SCHEDULE, map_location="cpu", weights_only=True
        )
        load_schedule(self.lr_scheduler, self.optimizer, schedule)
        restore_beside(self, checkpoint)

    def restore_weights(self, checkpoint: Path, optimizer: Any) -> None:
        """Load the weights, and their average; optimizer: None where none is at work yet."""
        read_state(
            checkpoint,
            self.plain_model,
            optimizer,
            self.launch.ranks,
            weights_only=True,
        )
        restore_beside(self, checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return (
            str(Path(folder) / PARTIAL) if self.checkpoint_writer.is_saving else folder
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint beside, then rename it, then drop the oldest: a
        checkpoint that can be seen is whole.
        """
        save = super()._save_checkpoint
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
        """Do nothing: `restore` does it, once there is an optimiser."""

    def restore_progress(self, checkpoint: Path) -> None:
        """Load the stopper as it was; the time that was spent stays spent."""
        if self.stopper is not None:
            self.stopper.load(read_json(checkpoint / STOPPER_FILE))


def _use_one_device(args: TrainingArguments) -> None:
    """Train on one device, which is what a process has; transformers would copy the
    model to all that it sees.
    """
    if args.n_gpu > 1:
        print(
            f"this process trains on one of the {args.n_gpu} devices that it sees;"
            f" `accelerate launch --num_processes {args.n_gpu}` starts a process for"
            " each (docs/scale.md)",
            file=sys.stderr,
        )
        args._n_gpu = 1
