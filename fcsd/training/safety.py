"""Guard a long run against steps that go wrong: skip, report, rewind, or stop.

A step whose loss or gradient is not finite is skipped, on all ranks: weights, optimiser
and schedule are as if it had never happened, the data moves on, and the step counts
towards `max_steps` (as in transformers, DeepSpeed and Megatron, whose iteration
counters include skipped steps). More than `max_skipped_steps` of them in a row end the
run: one bad batch in a week is no reason to stop, weights or data that give nothing
else are.

A spike is a loss far above the usual one. The usual loss is the median of the last
`spike_window` finite losses, and their spread is the median of their distances from it:
a mean and a standard deviation, as in OLMo-core's SkipStepOptimizer, are pulled up by
the spike itself, and one NaN among them makes every later comparison false.

With `max_rewinds`, a lasting spike or too many skipped steps in a row send the run back
to the newest checkpoint before them, and on with the batches after them (PaLM, arXiv
2204.02311, section 5.1).

Every decision is based on figures that all ranks share, so that all of them decide
alike.
"""

import json
import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any, Literal

from fcsd.training.config import SafetyConfig

Verdict = Literal["go", "skip", "rewind", "stop"]
# There is no spike before so many losses, or a full window if that is smaller.
_FEWEST_LOSSES = 16
# As a share of the usual loss: on an even curve a wiggle is no spike.
_LEAST_SPREAD = 0.02


class SpikeDetector:
    """Detect losses that are far above the usual one.

    A loss is an outlier when loss > m + threshold * max(1.4826 MAD, 0.02 |m|), where m is the median of the last
    `window` losses and MAD the median of their absolute distances from m; 1.4826 MAD is the standard deviation of
    normal noise. Outliers enter the window, too: a loss that stays high
    becomes the usual one.
    """

    def __init__(self, window: int, threshold: float | None):
        self.threshold = threshold
        self.losses: deque[float] = deque(maxlen=window)

    @property
    def usual(self) -> float:
        """The median of the window; NaN for an empty one."""
        return median(self.losses) if self.losses else math.nan

    @property
    def limit(self) -> float:
        """The loss above which a step is an outlier; infinite with too few losses."""
        if self.threshold is None or len(self.losses) < min(
            _FEWEST_LOSSES, self.losses.maxlen or 0
        ):
            return math.inf
        usual = self.usual
        spread = 1.4826 * median(abs(loss - usual) for loss in self.losses)
        return usual + self.threshold * max(spread, _LEAST_SPREAD * abs(usual))

    def add(self, loss: float) -> bool:
        """Add a finite loss; return whether it is an outlier among the previous ones."""
        outlier = loss > self.limit
        self.losses.append(loss)
        return outlier


class Guard:
    """Decide on every step before the optimiser uses its gradient, and keep the record.

    skipped_steps, rewinds: counts of the whole run. passed_steps: batches that rewinds
    have passed over, counted in steps; the data is so many steps ahead of the step's
    number. events: one dict for each row of skipped steps, spike and rewind.
    """

    def __init__(self, settings: SafetyConfig):
        self.settings = settings
        self.detector = SpikeDetector(settings.spike_window, settings.spike_threshold)
        self.events: list[dict[str, Any]] = []
        self.skipped_steps = 0
        self.skipped_in_a_row = 0
        self.rewinds = 0
        self.passed_steps = 0
        self._spike: dict[str, Any] | None = None  # the event of the present spike

    # ---- one step

    def decide(
        self,
        step: int,
        losses: list[float],
        grad_norm: float,
        weights_are_finite: Callable[[], bool] = lambda: True,
    ) -> Verdict:
        """Decide on a step before the optimiser uses its gradient.

        step: its number, from 1. losses: the loss of each rank; that of the step is
        their mean. grad_norm: over all ranks. weights_are_finite: called where a row of
        skipped steps begins; its answer is the same on all ranks.

        Returns: "go"; "skip"; "rewind", after which the caller calls `rewound` or
        `instead_of_rewind`; "stop".
        """
        if not (math.isfinite(grad_norm) and all(map(math.isfinite, losses))):
            return self._skip(step, losses, grad_norm, weights_are_finite)
        self.skipped_in_a_row = 0
        loss = math.fsum(losses) / len(losses)
        # Read before this loss enters the window.
        usual, limit = self.detector.usual, self.detector.limit
        # One usual loss ends a spike.
        if not self.detector.add(loss):
            self._spike = None
            return "go"
        if self._spike is None:
            self._spike = {
                "event": "spike", "step": step, "steps": 0, "loss": loss, "usual": usual, "limit": limit, "peak": loss,
            }  # fmt: skip
            self.events.append(self._spike)
        self._spike["steps"] += 1
        self._spike["peak"] = max(self._spike["peak"], loss)
        # Asked at one step of the spike only: where a rewind is not possible then, the
        # spike is left to run its course.
        if self._spike["steps"] == self.settings.spike_steps and self._may_rewind:
            return "rewind"
        return "go"

    def _skip(
        self,
        step: int,
        losses: list[float],
        grad_norm: float,
        weights_are_finite: Callable[[], bool],
    ) -> Verdict:
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        facts = {
            "steps": self.skipped_in_a_row,
            "loss": _plain(
                math.fsum(losses) / len(losses)
                if all(map(math.isfinite, losses))
                else math.nan
            ),
            "grad_norm": _plain(grad_norm),
            "ranks": [
                rank for rank, loss in enumerate(losses) if not math.isfinite(loss)
            ],
        }
        # A row of skipped steps is one event, which its later steps update. Whether the
        # weights are finite is asked once, since skipped steps do not change them.
        if self.skipped_in_a_row == 1:
            self.events.append(
                {
                    "event": "skipped",
                    "step": step,
                    "weights_are_finite": weights_are_finite(),
                }
            )
        self._row.update(facts)
        # Weights that are not finite make every later step fail: skipping cannot help.
        if (
            self.weights_are_finite
            and self.skipped_in_a_row <= self.settings.max_skipped_steps
        ):
            return "skip"
        return "rewind" if self._may_rewind else "stop"

    @property
    def _row(self) -> dict[str, Any]:
        """The event of the newest row of skipped steps."""
        return next(
            event for event in reversed(self.events) if event["event"] == "skipped"
        )

    @property
    def weights_are_finite(self) -> bool:
        """Whether the weights were finite when the present row of skipped steps began;
        true when there is no such row.
        """
        return self.skipped_in_a_row == 0 or self._row["weights_are_finite"]

    @property
    def _may_rewind(self) -> bool:
        return self.rewinds < self.settings.max_rewinds

    @property
    def first_bad_step(self) -> int:
        """The step with which the trouble began that a rewind has to undo."""
        if self.skipped_in_a_row:
            return self._row["step"]
        return (self._spike or {})["step"]

    def instead_of_rewind(self) -> Verdict:
        """Decide on the step where there is no checkpoint from before the trouble."""
        return "stop" if self.skipped_in_a_row else "go"

    def rewound(self, done: int, checkpoint_step: int, saved: dict[str, Any]) -> None:
        """Record a rewind from the end of step `done` to a checkpoint whose guard had
        the state `saved`.
        """
        cause = "skipped" if self.skipped_in_a_row else "spike"
        passed = done - checkpoint_step
        self.events.append({
            "event": "rewind", "step": done, "to_step": checkpoint_step, "passed_steps": passed, "cause": cause,
        })  # fmt: skip
        self.rewinds += 1
        self.passed_steps += passed
        self.skipped_in_a_row, self._spike = 0, None
        # The usual loss is again that of the checkpoint; counts and events stay.
        self.detector.losses.clear()
        self.detector.losses.extend(saved["losses"])

    # ---- the record

    def report(self) -> dict[str, int]:
        """Return the counts that are not 0, by name."""
        spikes = sum(event["event"] == "spike" for event in self.events)
        counts = {
            "skipped_steps": self.skipped_steps,
            "spikes": spikes,
            "rewinds": self.rewinds,
        }
        return {name: count for name, count in counts.items() if count}

    def line(self, event: dict[str, Any]) -> str:
        """Describe an event in a line."""
        if event["event"] == "skipped":
            return (
                f"step {event['step'] + event['steps'] - 1}: skipped,"
                f" {not_finite(event)}; {event['steps']} in a row of at most"
                f" {self.settings.max_skipped_steps}"
            )
        if event["event"] == "spike":
            return (
                f"step {event['step']}: the loss is {event['loss']:.4g}, usually"
                f" {event['usual']:.4g}; a loss above {event['limit']:.4g} is a spike"
            )
        return (
            f"step {event['step']}: returning to the checkpoint of step"
            f" {event['to_step']} and continuing with the data after the"
            f" {event['passed_steps']} steps in between (rewind {self.rewinds} of at"
            f" most {self.settings.max_rewinds})"
        )

    def state(self) -> dict[str, Any]:
        """Return the state for an exact continuation, as plain data."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "rewinds": self.rewinds,
            "passed_steps": self.passed_steps,
            "spike_goes_on": self._spike is not None,
            "losses": list(self.detector.losses),
            "events": self.events,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.skipped_steps = state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.rewinds, self.passed_steps = state["rewinds"], state["passed_steps"]
        self.events = [dict(event) for event in state["events"]]
        self.detector.losses.clear()
        self.detector.losses.extend(state["losses"])
        spikes = [event for event in self.events if event["event"] == "spike"]
        self._spike = spikes[-1] if state["spike_goes_on"] else None


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
