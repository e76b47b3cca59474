"""`transformers.Trainer` with a guard: the hooks by which a step is skipped, a run rewound, and ended well by a signal.

What is decided, and why, is in `fcsd.distill.safety`.

Not covered: what is logged and what is in a checkpoint; the subclass has both.
"""

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from fcsd.distill.checkpoints import GUARD_FILE, checkpoints, note_rewind, step_of
from fcsd.distill.interrupt import Signals, ignore_signals
from fcsd.distill.meters import Meters
from fcsd.distill.safety import Guard, Verdict, events_text, not_finite
from fcsd.distributed.failure import in_step
from fcsd.distributed.launch import Launch
from fcsd.errors import UserError
from fcsd.files import read_json, write_text


class GuardedTrainer(Trainer):
    """A Trainer whose every step a `Guard` decides on, by figures that all ranks share.

    interrupted_by: the number of the signal that ended the training before its last step, on whichever rank it came.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments,
        *,
        launch: Launch,
        guard: Guard,
        signals: Signals | None = None,
        **kwargs: Any,
    ):
        self.launch = launch
        super().__init__(model, args, **kwargs)
        self.guard = guard
        self.signals = signals or Signals()
        self.interrupted_by = 0
        self._received = 0  # the signal of any rank, as known to all
        self._logged_step = 0
        self._skipped_since_log = 0
        self._step_loss: Tensor | None = None  # this rank's share of the loss of the present step
        self._before_step: tuple[Tensor, Any] | None = None
        self._verdict: Verdict = "go"
        self._rewind_to: Path | None = None
        self._written = ""  # of events.jsonl

    # ---- what the subclass has

    meters: Meters  # a skipped step is taken out of them

    def restore(self, checkpoint: Path) -> None:
        """Restore weights, optimiser and schedule as they were at a checkpoint."""
        raise NotImplementedError

    def restore_progress(self, checkpoint: Path) -> None:
        """Restore what else the subclass continues with from a checkpoint."""

    # ---- one step

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Return the micro-batches of a step, which begins here."""
        self._before_step = (self._tr_loss.clone(), self.meters.kept())
        self._step_loss = None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def watched(self, loss: Tensor) -> Tensor:
        """Watch a micro-batch's loss on its way to the backward pass; where it is not finite, so will its gradient be.

        A loss that is not finite may have a gradient that is. It gets one that is not, which spreads wherever gradients
        of ranks and micro-batches are added up: the norm of the gradient alone decides, under every engine.
        """
        detached = loss.detach()
        self._step_loss = detached.float() + (0.0 if self._step_loss is None else self._step_loss)
        return loss * torch.where(torch.isfinite(detached), 1.0, math.nan)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        # Called once a step, when its gradient is whole and before the optimiser acts on it; under DeepSpeed, whose
        # engine skips a step with a norm that is not finite by itself, afterwards.
        norm = float(super()._get_grad_norm(model, grad_norm=grad_norm))
        assert self._step_loss is not None
        more = self._step_loss.new_tensor([norm, self.signals.received])
        losses, norms, received = zip(*self._of_all_ranks(torch.stack([self._step_loss, *more])), strict=True)
        self._received = int(max(received))
        known = len(self.guard.events)
        step = self.state.global_step + 1
        # The norm is that of all ranks, so all found the same; should they not, one that is not finite counts.
        self._verdict = self.guard.decide(
            step, list(losses), math.fsum(norms) / len(norms), self._weights_are_finite
        )
        if self._verdict == "rewind":
            self._rewind_to = self._checkpoint_before(self.guard.first_bad_step)
            if self._rewind_to is None:
                self._verdict = self.guard.instead_of_rewind()
        if self._verdict == "skip" or (len(self.guard.events) > known and self._verdict == "go"):
            self.say(self.guard.line(self.guard.events[-1]))
        self.write_events()
        if self._verdict == "stop":
            raise self._stopped(step)
        if self._verdict != "go":  # take the step out of the means that are logged next
            assert self._before_step is not None
            loss, meters = self._before_step
            self._tr_loss.copy_(loss)
            self.meters.go_back(meters)
            self._skipped_since_log += 1
        return norm

    def _of_all_ranks(self, figures: Tensor) -> list[list[float]]:
        """Gather (F,) figures of this rank as one list a rank, the same on all ranks."""
        rows = figures[None]
        return (self.accelerator.gather(rows) if self.args.world_size > 1 else rows).tolist()

    def _weights_are_finite(self) -> bool:
        """Tell whether all weights of all ranks are finite; each looks at its own shards."""
        finite = True
        for weight in self.model.parameters():  # type: ignore[union-attr]
            held = getattr(weight, "ds_tensor", weight)  # ZeRO-3's and FSDP's share of this rank
            held = held.to_local() if hasattr(held, "to_local") else held
            finite = finite and bool(torch.isfinite(held.detach()).all())
        return all(row[0] == 1 for row in self._of_all_ranks(self._tr_loss.new_tensor([float(finite)])))

    def _stopped(self, step: int) -> UserError:
        found = self.guard.events[-1]
        if self.guard.weights_are_finite:
            why = f"{not_finite(found)} for {found['steps']} steps in a row"
        else:
            why = f"{not_finite(found)}, nor are the weights"
        kept = checkpoints(Path(str(self.args.output_dir)))
        pass_over = (
            f"run again with safety.max_rewinds: {self.guard.rewinds + 1} to pass over these batches, "
        )
        return UserError(
            f"training stopped before step {step}: {why}; the last checkpoint is {kept[-1] if kept else 'none'};"
            f" {pass_over if kept else ''}lower train.learning_rate or check the data"
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if not self.is_deepspeed_enabled:
            self._let_steps_be_skipped()
        return prepared

    def _let_steps_be_skipped(self) -> None:
        """Make `step` of this optimiser do nothing, and say so to the schedule, when the guard does not let it pass."""
        optimizer: Any = self.optimizer
        act = optimizer.step

        def step(closure: Any = None) -> None:
            optimizer._is_overflow = self._verdict != "go"  # accelerate's word for a step that was skipped
            if self._verdict == "go":
                act(closure)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as what it wraps: else torch warns
        optimizer.step = step

    # ---- between steps

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self._rewind_to is not None:
            self._rewind(self._rewind_to)
            return
        self._heed_signals()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    @property
    def events_folder(self) -> Path:
        """The folder of `events.jsonl`: beside that of the checkpoints."""
        return Path(str(self.args.output_dir)).parent

    @property
    def ending(self) -> bool:
        """True when a signal has made this step the last one; the same on all ranks."""
        return bool(self._received)

    def listen(self) -> None:
        """Learn of a signal that has come since the step, on whichever rank; all ranks call this."""
        received = self._of_all_ranks(self._tr_loss.new_tensor([float(self.signals.received)]))
        self._received = int(max(row[0] for row in received))

    def _heed_signals(self) -> None:
        if self._received and not self.control.should_training_stop:
            self.interrupted_by = self._received
            self.control.should_training_stop = True
            self.control.should_save = self.args.save_strategy != SaveStrategy.NO

    def reset_meters(self) -> None:
        """Gather for the next log from here on."""
        self.meters.reset()
        self._logged_step, self._skipped_since_log = self.state.global_step, 0

    def leave_out_skipped(self, logs: dict[str, float]) -> int:
        """Make the loss in `logs` the mean over the steps that were not skipped, or drop it; returns their number."""
        steps = self.state.global_step - self._logged_step
        trained = steps - self._skipped_since_log
        if trained:
            logs["loss"] *= steps / trained
        else:
            del logs["loss"]
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            del logs["grad_norm"]
        return trained

    # ---- rewind

    def _checkpoint_before(self, step: int) -> Path | None:
        def newest() -> Path | None:
            before = [path for path in checkpoints(Path(str(self.args.output_dir))) if step_of(path) < step]
            return before[-1] if before else None

        return self.launch.ranks.from_first(newest)

    def _rewind(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, with the data that comes next: what the iterator has given stays behind."""
        done = self.state.global_step
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.guard.rewound(done, state.global_step, read_json(checkpoint / GUARD_FILE))
        self.say(self.guard.line(self.guard.events[-1]))
        self.write_events()
        if self.is_world_process_zero():
            note_rewind(checkpoint, self.guard.state())
        self.accelerator.wait_for_everyone()
        self.restore(checkpoint)
        self.restore_progress(checkpoint)
        self._load_rng_state(str(checkpoint))
        self.state.global_step, self.state.epoch = state.global_step, state.epoch
        self.state.log_history = state.log_history
        self._globalstep_last_logged = state.global_step
        self._tr_loss.zero_()
        self.reset_meters()
        self._rewind_to = None
        self._verdict = "go"
        for what in ("training_stop", "epoch_stop", "save", "evaluate", "log"):
            setattr(self.control, f"should_{what}", False)

    # ---- data

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; behind it no rank is in a step."""
        try:
            return super().train(*args, **kwargs)
        finally:
            in_step(False)

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's; its processes outlive a signal that the scheduler or Ctrl-C has sent to all."""
        loader = super().get_train_dataloader()
        begin = loader.worker_init_fn

        def begin_quietly(worker: int) -> None:
            ignore_signals()
            if begin is not None:
                begin(worker)

        if loader.num_workers > 0:
            loader.worker_init_fn = begin_quietly
        return loader

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple:
        """Plan as the Trainer does, with room for data that rewinds skip: `max_steps` ends the run, not an epoch."""
        _, steps_per_epoch, *numbers, steps_in_epoch, max_steps = super().set_initial_training_values(
            args, dataloader
        )
        return (sys.maxsize, steps_per_epoch, *numbers, steps_in_epoch, max_steps)

    @property
    def steps_of_data(self) -> int:
        """The number of steps whose rows were read: those trained, and those that rewinds passed over."""
        return self.state.global_step + self.guard.passed_steps

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self.args.ignore_data_skip:
            return self.state.global_step // num_update_steps_per_epoch, 0
        epoch, steps = divmod(self.steps_of_data, num_update_steps_per_epoch)
        return epoch, steps * self.args.gradient_accumulation_steps

    # ---- record

    def say(self, line: str) -> None:
        """Print a line above the bar, on the first rank."""
        if self.is_world_process_zero():
            tqdm.write(line, file=sys.stderr)

    def write_events(self) -> None:
        """Leave `events.jsonl` in its folder; nothing while nothing has happened."""
        text = events_text(self.guard.events)
        if text != self._written and self.is_world_process_zero():
            write_text(self.events_folder / "events.jsonl", text)
        self._written = text
