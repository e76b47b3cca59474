"""Guard a long run against steps that go wrong: skip them, or stop.

A step whose loss or gradient is not finite is skipped, on all ranks: weights, optimiser
and schedule are as if it had never happened, the data moves on, and the step counts
towards `max_steps` (as in transformers, DeepSpeed and Megatron, whose iteration
counters include skipped steps). More than `max_skipped_steps` of them in a row end the
run: one bad batch in a week is no reason to stop, weights or data that give nothing
else are.

Every decision is based on figures that all ranks share, so that all of them decide
alike.

Not covered: losses that are finite and far above the usual one.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fcsd.base.errors import UserError
from fcsd.base.writing import write_text
from fcsd.parallel.shard import own_part
from fcsd.training.config import SafetyConfig
from fcsd.training.signals import Signals

Verdict = Literal["go", "skip", "stop"]


class Guard:
    """Decide on every step before the optimiser uses its gradient, and keep the record.

    skipped_steps: count of the whole run. events: one dict for each run of skipped
    steps.
    """

    def __init__(self, settings: SafetyConfig):
        self.settings = settings
        self.events: list[dict[str, Any]] = []
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    # ---- one step

    def decide(
        self,
        step: int,
        losses: list[float],
        grad_norm: float,
        weights_are_finite: Callable[[], bool] = lambda: True,
    ) -> Verdict:
        """Decide on a step before the optimiser uses its gradient.

        step: its number, from 1. losses: the loss of each rank. grad_norm: over all
        ranks. weights_are_finite: called where a run of skipped steps begins; its
        answer is the same on all ranks.
        """
        if math.isfinite(grad_norm) and all(map(math.isfinite, losses)):
            self.skipped_in_a_row = 0
            return "go"
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        # A run of skipped steps is one event, which its later steps update. Whether the
        # weights are finite is asked once, since skipped steps do not change them.
        if self.skipped_in_a_row == 1:
            finite = weights_are_finite()
            self.events.append(
                {"event": "skipped", "step": step, "weights_are_finite": finite}
            )
        self.events[-1] |= {
            "steps": self.skipped_in_a_row,
            "loss": _plain(sum(losses) / len(losses)),
            "grad_norm": _plain(grad_norm),
            "ranks": [
                rank for rank, loss in enumerate(losses) if not math.isfinite(loss)
            ],
        }
        # Weights that are not finite make every later step fail: skipping cannot help.
        goes_on = self.skipped_in_a_row <= self.settings.max_skipped_steps
        return "skip" if goes_on and self.weights_are_finite else "stop"

    @property
    def weights_are_finite(self) -> bool:
        """Whether the weights were finite when the current run of skipped steps began;
        true when there is no such run.
        """
        return self.skipped_in_a_row == 0 or self.events[-1]["weights_are_finite"]

    # ---- the record

    def report(self) -> dict[str, int]:
        """Return the count of skipped steps, by name, unless it is 0."""
        return {"skipped_steps": self.skipped_steps} if self.skipped_steps else {}

    def line(self) -> str:
        """Describe the newest run of skipped steps in a line."""
        event = self.events[-1]
        return (
            f"step {event['step'] + event['steps'] - 1}: skipped,"
            f" {not_finite(event)}; {event['steps']} in a row of at most"
            f" {self.settings.max_skipped_steps}"
        )

    def state(self) -> dict[str, Any]:
        """Return the state for an exact continuation, as plain data."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "events": self.events,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.events = [dict(event) for event in state["events"]]


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
        figures = self.accelerator.gather(
            torch.stack([self._step_loss, *step_figures])[None]
        )
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


def events_text(events: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(event, allow_nan=False) + "\n" for event in events)


def not_finite(event: dict[str, Any]) -> str:
    """Say whether loss or gradient of a skipped step was not finite, and on which
    ranks.
    """
    if event["ranks"]:
        ranks = ", ".join(map(str, event["ranks"][:8])) + (
            ", …" if len(event["ranks"]) > 8 else ""
        )
        return (
            f"the loss is not finite (on rank {ranks}; gradient norm"
            f" {event['grad_norm']})"
        )
    return f"the gradient is not finite (gradient norm {event['grad_norm']})"


def _plain(value: float) -> float | str:
    """Replace values that JSON lacks, NaN and the infinities, by text."""
    return value if math.isfinite(value) else str(value)
