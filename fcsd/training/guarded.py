"""Let a `Guard` decide on the steps of all ranks, and end a run cleanly after a signal.

`fcsd.training.safety` takes the decisions and gives the reasons.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fcsd.base.errors import UserError
from fcsd.base.files import write_text
from fcsd.base.helper import obey_only_parent
from fcsd.base.memory import check_shared_memory
from fcsd.parallel.shard import own_part
from fcsd.training.safety import Guard, Verdict, events_text, not_finite

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ECHO_S = 3.0


def shield_workers(loader: Any) -> Any:
    """Let a data loader's workers ignore a signal that was sent to all processes: the
    trainer needs them until it ends itself.
    """
    # accelerate's wrapper starts no workers; the loader inside it does.
    if loader.num_workers > 0:
        check_shared_memory()
        begin = partial(_begin_shielded, os.getpid(), loader.worker_init_fn)
        getattr(loader, "base_dataloader", loader).worker_init_fn = begin
    return loader


# Not a closure: a worker that is spawned gets it as a pickle.
def _begin_shielded(
    trainer: int, worker_init: Callable[[int], None] | None, worker: int
) -> None:
    obey_only_parent(trainer)
    if worker_init is not None:
        worker_init(worker)


class Signals:
    """Catch, within the block, the signals that ask for the end; `received` is the
    number of the first one, 0 when there was none.

    SIGTERM: the scheduler wants the machine back. SIGUSR1: its early warning, if
    requested (`sbatch --signal=USR1@300`), which ends accelerate's launcher
    immediately. SIGINT: Ctrl-C. A second signal ends the process immediately. A
    launcher forwards a signal that the terminal or the scheduler has sent to its
    processes as well, so a signal within `_ECHO_S` of the first is taken for its echo.
    Outside the main thread, where Python handles no signals, all keep their usual
    effect.
    """

    def __init__(self) -> None:
        self.received = 0
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._handle) for number in _SIGNALS
            }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self.received:
            self.received, self._at = number, time.monotonic()
            if os.environ.get("RANK", "0") == "0":
                # `print` is not reentrant, and the signal may have interrupted one.
                name = signal.Signals(number).name
                os.write(
                    2,
                    f"\n{name}: finishing this step; a second signal stops now\n".encode(),
                )
        elif time.monotonic() - self._at > _ECHO_S:
            # The second signal has the effect that it would have had without us.
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            sys.stderr.flush()
            os.kill(os.getpid(), number)


class GuardedSteps:
    """Let a `Guard` decide on every step, from figures that all ranks share.

    signals: those that end the training. received: the number of the signal that came
    on whichever rank; 0 when there was none. interrupted_by: of the one that ended the
    training before its last step. events_folder: where `events.jsonl` is written.
    """

    def __init__(self, guard: Guard, accelerator: Any, events_folder: Path):
        self.guard, self.accelerator = guard, accelerator
        self.events_folder = events_folder
        self.signals = Signals()
        self.received = self.interrupted_by = 0
        self.is_written = True  # no rank is still writing its part of a checkpoint
        self._logged_step = 0
        self._skipped_since_log = 0
        # this rank's share of the loss of the present step
        self._step_loss: Tensor | None = None
        self._written: list[dict[str, Any]] = []  # the events of events.jsonl

    # ---- one step

    def watched(self, loss: Tensor) -> Tensor:
        """Add up a micro-batch's loss before its backward pass, and make sure that a
        loss that is not finite has such a gradient.

        A loss that is not finite may have a finite gradient. It is multiplied by NaN
        here, which spreads wherever gradients of ranks and micro-batches are added up,
        so that the norm of the gradient alone decides under every engine.
        """
        detached = loss.detach()
        self._step_loss = detached.float() + (
            0.0 if self._step_loss is None else self._step_loss
        )
        return loss * torch.where(torch.isfinite(detached), 1.0, math.nan)

    def decide(
        self, step: int, norm: float, model: nn.Module, *, is_writing: bool
    ) -> Verdict:
        """Decide on a step once its gradient is complete, before the optimiser uses it;
        all ranks call this. is_writing: a thread of this rank writes a checkpoint.
        """
        assert self._step_loss is not None
        # Everything that the ranks have to agree on goes through one gather a step:
        # loss, norm, signal, and whether a thread is still writing a checkpoint.
        step_figures = self._step_loss.new_tensor(
            [norm, self.signals.received, is_writing]
        )
        figures = torch.stack([self._step_loss, *step_figures])[None]
        if self.accelerator.num_processes > 1:
            figures = self.accelerator.gather(figures)
        losses, norms, received, writing = zip(*figures.tolist(), strict=True)
        self._step_loss = None
        self.received, self.is_written = int(max(received)), not any(writing)
        # The norm is over all ranks, so all have the same number. Should they differ, a
        # single one that is not finite makes the mean so.
        verdict = self.guard.decide(
            step,
            list(losses),
            math.fsum(norms) / len(norms),
            lambda: self._are_finite(model),
        )
        if verdict == "skip":
            self.say(self.guard.line())
        if self.guard.events != self._written:
            self._write_events()
        self._skipped_since_log += verdict == "skip"
        return verdict

    def _of_all_ranks(self, value: float) -> list[float]:
        """Gather a value of each rank, in rank order."""
        values = torch.tensor([value], device=self.accelerator.device)
        gathered: list[float] = self.accelerator.gather(values).tolist()
        return gathered

    def _are_finite(self, model: nn.Module) -> bool:
        """Tell whether all weights are finite; each rank looks at its own shards."""
        # No early exit: every rank does the same work and then takes part in the
        # gather.
        finite = True
        for weight in model.parameters():
            finite = finite and bool(torch.isfinite(own_part(weight).detach()).all())
        return all(value == 1 for value in self._of_all_ranks(float(finite)))

    def stopped(self, step: int, last_checkpoint: Path | None) -> UserError:
        """Return the error that ends a training before a step."""
        event = self.guard.events[-1]
        if self.guard.weights_are_finite:
            reason = f"{not_finite(event)} for {event['steps']} steps in a row"
        else:
            reason = f"{not_finite(event)}, nor are the weights"
        return UserError(
            f"training stopped before step {step}: {reason}; the last checkpoint is"
            f" {last_checkpoint or 'none'}; lower train.learning_rate or check the data"
        )

    # ---- between steps

    @property
    def ending(self) -> bool:
        """True when a signal has made this step the last one; the same on all ranks."""
        return bool(self.received)

    def listen(self) -> None:
        """Agree on a signal that arrived after the step on any rank; all ranks call
        this.

        A score may take hours, and `decide` has gathered the signals before it.
        """
        self.received = int(max(self._of_all_ranks(float(self.signals.received))))

    def reset(self, step: int) -> None:
        """Start the counts of the next log line after `step`."""
        self._logged_step, self._skipped_since_log = step, 0
        self._step_loss = None

    def leave_out_skipped(self, logs: dict[str, float], step: int) -> int:
        """Make the loss in `logs` the mean over the steps that were not skipped, or
        drop it where all were; return their number.
        """
        # The Trainer has divided by all steps since the last log.
        steps = step - self._logged_step
        trained = steps - self._skipped_since_log
        if trained:
            logs["loss"] *= steps / trained
        else:
            del logs["loss"]
        # The Trainer logs the norm of the last step, which may have been skipped.
        if not math.isfinite(logs.get("grad_norm", 0.0)):
            del logs["grad_norm"]
        return trained

    # ---- record

    def say(self, line: str) -> None:
        """Print a line above the bar, on the first rank."""
        if self.accelerator.is_main_process:
            tqdm.write(line, file=sys.stderr)

    def _write_events(self) -> None:
        if self.accelerator.is_main_process:
            text = events_text(self.guard.events)
            write_text(self.events_folder / "events.jsonl", text)
        self._written = [dict(event) for event in self.guard.events]
