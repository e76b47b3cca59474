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
from collections.abc import Callable
from typing import Any, Literal

from fcsd.training.config import SafetyConfig

Verdict = Literal["go", "skip", "stop"]


class Guard:
    """Decide on every step before the optimiser uses its gradient, and keep the record.

    skipped_steps: count of the whole run. events: one dict for each row of skipped
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
        ranks. weights_are_finite: called where a row of skipped steps begins; its
        answer is the same on all ranks.
        """
        if math.isfinite(grad_norm) and all(map(math.isfinite, losses)):
            self.skipped_in_a_row = 0
            return "go"
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        # A row of skipped steps is one event, which its later steps update. Whether the
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
        """Describe the newest row of skipped steps in a line."""
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
