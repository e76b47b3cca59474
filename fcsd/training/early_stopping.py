"""Decide when to stop, because the score has not improved for a while (paper 5.1: every
1000 steps, patience 20, delta 2 %).

Pure bookkeeping; `fcsd.pipeline.scoring` defines and measures the score, and
`fcsd.training.best` calls both.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fcsd.base.stats import ratio
from fcsd.base.text import RELATIVE, duration, items_text, plus_minus


@dataclass(frozen=True)
class Score:
    """One evaluation: a figure for each item, with the same items in the same order
    every time.

    The score is sum(figures) / sum(weights). For a task the figures are the items'
    scores, and the weights are 1. For the held-out KL an item is a row, its figure the
    KL in nats summed over its tokens, and its weight their number.

    num_items_total: the items of the whole split, of which these are the first; None
    where that is not known.
    """

    figures: Sequence[float]
    weights: Sequence[int] | None = None
    num_items_total: int | None = None
    higher_is_better: bool = True

    @property
    def counts(self) -> list[int]:
        return [1] * len(self.figures) if self.weights is None else list(self.weights)

    @property
    def value(self) -> float:
        return math.fsum(self.figures) / sum(self.counts)

    @property
    def stderr(self) -> float | None:
        """Its standard error, items being independent; None for a single item."""
        return ratio(list(self.figures), self.counts).stderr

    def change(self, earlier_figures: Sequence[float]) -> tuple[float, float | None]:
        """Return the difference from an earlier evaluation and its standard error,
        paired item by item.
        """
        difference = ratio(
            [b - a for a, b in zip(earlier_figures, self.figures, strict=True)],
            self.counts,
        )
        assert difference.value is not None
        return difference.value, difference.stderr


class TimeSpent:
    """The seconds of a run, and those among them that scoring took, over all restarts.

    After a kill the time since the last checkpoint is not counted, because that work is
    done again. The preparation of scores (data, the canonical solutions) counts for
    both.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._run_s = self.scoring_s = self.last_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = self._clock()

    def stop(self) -> None:
        self._run_s, self._since = self.run_s, None

    @property
    def run_s(self) -> float:
        return self._run_s + (
            self._clock() - self._since if self._since is not None else 0.0
        )

    @property
    def share(self) -> float:
        return self.scoring_s / self.run_s if self.run_s else 0.0

    @contextlib.contextmanager
    def scoring(self) -> Iterator[None]:
        """Time a score, or its preparation."""
        begun = self._clock()
        try:
            yield
        finally:
            self.last_s = self._clock() - begun
            self.scoring_s += self.last_s
            # Outside the run's own clock, as when a score is prepared before the
            # training.
            if self._since is None:
                self._run_s += self.last_s

    def state(self) -> dict[str, float]:
        return {"run_s": self.run_s, "scoring_s": self.scoring_s}

    def resume(self, state: dict[str, float]) -> None:
        """Add the time spent before a restart."""
        self._run_s += state["run_s"]
        self.scoring_s += state["scoring_s"]


_CURVE = (
    "num_items",
    "num_items_total",
    "points",
    "best_step",
    "best_score",
    "best_stderr",
)
_STATE = (
    "highest",
    "highest_step",
    "reference",
    "stalled",
    "figures",
    "warned",
    "higher_is_better",
)


@dataclass(eq=False, kw_only=True)
class EarlyStopper:
    """Follow a score, which should grow or, where lower is better, fall.

    An evaluation counts as an improvement when its score is more than `min_delta`
    better than the score of the last improvement; after `patience` evaluations in a row
    without one, `should_stop` is true. The best checkpoint is the last one whose score
    is no more than `min_delta` worse than the best: by the choice of `min_delta`
    smaller differences are noise, and among equals the later checkpoint has seen more
    data. The score before training counts like any other: a training that only makes
    the model worse leaves the weights that it began with.

    `min_delta` is a difference of scores. KLs span orders of magnitude, so for
    heldout_kl and own text it is a share: -ln(KL) takes the place of the score, and a
    fall by 2 % is a gain of -ln(1 - 0.02).

    points: one dict per evaluation: step, score, stderr, and change and change_stderr
    since the previous evaluation.
    """

    every_steps: int
    patience: int
    min_delta: float
    metric: str = "pass@1"
    time: TimeSpent = field(default_factory=TimeSpent)
    points: list[dict[str, Any]] = field(default_factory=list)
    num_items: int | None = None
    num_items_total: int | None = None
    best_step: int | None = None
    best_score: float | None = None
    best_stderr: float | None = None
    highest: float | None = None
    highest_step: int | None = None
    reference: float | None = None
    stalled: int = 0
    figures: list[float] = field(default_factory=list)  # of the last evaluation
    warned: bool = False
    higher_is_better: bool = True  # as the last evaluation says

    def update(self, step: int, score: Score) -> bool:
        """Record the score at `step` (0: before training); return whether these weights
        are the best checkpoint so far.
        """
        self.higher_is_better = score.higher_is_better
        gain, margin = self._gain(score.value), self.min_delta
        # For KLs, min_delta is relative: a fall by 2 % is this margin on a log scale.
        if self.metric in RELATIVE:
            margin = -math.log1p(-self.min_delta)
        self._note(step, score)
        # The reference moves only by more than the margin: many small gains in a row
        # add up to an improvement, a drift within the noise does not.
        if self.reference is None or gain > self.reference + margin:
            self.reference, self.stalled = gain, 0
        else:
            self.stalled += 1
        # The highest score may be higher than the reference by less than the margin.
        if self.highest is None or gain > self.highest:
            self.highest, self.highest_step = gain, step
        if gain >= self.highest - margin:
            self._take(self.points[-1])
            return True
        return False

    def _gain(self, score: float) -> float:
        """Return what grows with quality for every metric, so that one comparison
        serves all.
        """
        if self.metric in RELATIVE:
            # Rounding may make a KL 0, or slightly negative.
            return -math.log(max(score, 1e-30))
        return score if self.higher_is_better else -score

    def _take(self, point: dict[str, Any] | None) -> None:
        """Make the weights of a point the best checkpoint so far; None: there is none."""
        self.best_step, self.best_score, self.best_stderr = (
            None if point is None else point[name]
            for name in ("step", "score", "stderr")
        )

    def lose_all_but(self, steps: Collection[int]) -> None:
        """Make the best of these steps the best checkpoint so far: all other weights
        are lost.

        Among equal scores the later one is taken; there is none where none of the steps
        was scored.
        """
        best = max(
            (point for point in self.points if point["step"] in steps),
            key=lambda point: (self._gain(point["score"]), point["step"]),
            default=None,
        )
        self._take(best)
        self.highest = None if best is None else self._gain(best["score"])
        self.highest_step = self.best_step

    def _note(self, step: int, score: Score) -> None:
        if not math.isfinite(score.value):
            raise ValueError(f"a score is a finite number, got {score.value}")
        if self.points:
            change, change_stderr = score.change(self.figures)
        else:
            change, change_stderr = None, None
        self.num_items, self.num_items_total = len(score.figures), score.num_items_total
        self.figures = list(score.figures)
        self.points.append({
            "step": step, "score": score.value, "stderr": score.stderr,
            "change": change, "change_stderr": change_stderr,
        })  # fmt: skip

    @property
    def should_stop(self) -> bool:
        return self.stalled >= self.patience

    def is_due(self, step: int, max_steps: int) -> bool:
        """Tell whether the weights of `step` must still be scored."""
        scored = self.points[-1]["step"] if self.points else -1
        return step > scored and (step % self.every_steps == 0 or step == max_steps)

    # ---- in words

    def line(self) -> str:
        """Describe the last evaluation: `step 2000: pass@1 0.4120 ± 0.0250 (378 of 378
        items), +0.0210 ± 0.0140 since step 1000, best so far; 93 s`."""
        point, previous_points = self.points[-1], self.points[-2:-1]
        text = (
            f"step {point['step']}: {self.name}"
            f" {plus_minus(point['score'], point['stderr'])} ({self.items})"
        )
        for previous in previous_points:
            change = plus_minus(point["change"], point["change_stderr"], sign="+")
            text += f", {change} since step {previous['step']}"
        if point["step"] == self.best_step and previous_points:
            text += f", {self._how_good()}"
        if self.stalled:
            text += f", {self.stalled} of {self.patience} without an improvement"
        return f"{text}; {self.time.last_s:.0f} s"

    def _how_good(self) -> str:
        highest = next(
            (point for point in self.points if point["step"] == self.highest_step),
            self.points[-1],
        )
        if highest is self.points[-1]:
            return "best so far"
        best = plus_minus(highest["score"], None)
        return (
            f"within min_delta of the best ({best} at step {highest['step']}), and"
            " later"
        )

    @property
    def name(self) -> str:
        """The metric without lm-eval's filter."""
        return self.metric.partition(",")[0]

    @property
    def items(self) -> str:
        """The number of items of each evaluation: `40 of 378 items`."""
        return items_text(self.metric, self.num_items, self.num_items_total)

    def noise(self) -> str | None:
        """Return a warning, once, where the last evaluation shows that `min_delta` is
        within the noise.

        That is the case when the score moved by no more than two standard errors of the
        change, and one of these is more than `min_delta`: chance alone can then make an
        evaluation count as an improvement.
        """
        change, error = self.points[-1]["change"], self.points[-1]["change_stderr"]
        if self.warned or error is None or abs(change) > 2 * error:
            return None
        previous_point, relative = self.points[-2], self.metric in RELATIVE
        scale = previous_point["score"] if relative else 1.0
        if error <= self.min_delta * scale:
            return None
        self.warned = True
        share = f" ({error / scale:.3g} of the score)" if relative else ""
        text = (
            f"early stopping: {self.name} changed by"
            f" {plus_minus(change, error, sign='+')}{share} from step"
            f" {previous_point['step']} to {self.points[-1]['step']}, with the paired"
            f" standard error on {self.items}. early_stopping.min_delta,"
            f" {self.min_delta:g}, is less than that error, so chance decides what"
            " counts as an improvement: raise it, or "
        )
        if self.metric == "heldout_kl":
            return text + "data.heldout_examples"
        assert self.num_items is not None
        if self.num_items_total is None or self.num_items_total <= self.num_items:
            return text + "score on a task with more items"
        # The standard error falls with the root of the number of items.
        full_error = error * math.sqrt(self.num_items / self.num_items_total)
        return (
            text + f"early_stopping.limit (all {self.num_items_total} items: about ±"
            f" {full_error:.2g})"
        )

    def summary(self) -> str:
        """Summarise the best score, the reason why training ended, and the share of the
        run's time that scoring took.
        """
        text = f"early stopping: {len(self.points)} scores on {self.items}"
        if self.best_step is not None and self.best_score is not None:
            best = plus_minus(self.best_score, self.best_stderr)
            text += f"; best {self.name} {best} at step {self.best_step}"
            if self.best_step == 0:
                text += ", before training"
            if self.should_stop:
                text += f", stopped at step {self.points[-1]['step']}"
        spent = self.time
        took = f"{duration(spent.scoring_s)} of {duration(spent.run_s)}"
        return (
            f"{text}; scoring took {took}, {100 * spent.share:.1f} % of the run's time"
        )

    def no_gain(self) -> str | None:
        """Return a warning that training has gained nothing, where the initial weights
        score best.
        """
        if self.best_step != 0 or len(self.points) < 2:
            return None
        return (
            f"early stopping: no score was as good as the {self.name} before training,"
            f" {plus_minus(self.points[0]['score'], self.points[0]['stderr'])}:"
            " training made the model worse, so this run keeps the weights of step 0."
            " Try a smaller learning rate, or more warm-up (`fcsd sweep`)"
        )

    # ---- as plain data

    def results(self) -> dict[str, Any]:
        """Return the facts that a manifest has in addition to best step and score."""
        return {
            "num_scores": len(self.points),
            "num_items": self.num_items,
            "num_items_total": self.num_items_total,
            "best_stderr": self.best_stderr,
            "scoring_s": round(self.time.scoring_s, 3),
            "run_s": round(self.time.run_s, 3),
            "share_of_time": round(self.time.share, 6),
        }

    def record(self) -> dict[str, Any]:
        """Return the curve in the form of `scores.json`."""
        curve = {name: getattr(self, name) for name in _CURVE}
        return {"schema_version": 1, "metric": self.metric, **curve}

    def state(self) -> dict[str, Any]:
        """Return the state for an exact continuation, as plain data."""
        progress = {name: getattr(self, name) for name in _STATE}
        return self.record() | progress | {"time": self.time.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state()`, except for the time spent: `TimeSpent.resume` adds
        it.
        """
        for name in (*_CURVE, *_STATE):
            setattr(self, name, state[name])
        self.points = [*self.points]
