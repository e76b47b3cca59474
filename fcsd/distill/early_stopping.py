"""When to stop: the score has not improved for a while (paper 5.1: every 1000 steps, patience 20, delta 2 %).

Pure bookkeeping; what the score is and how it is measured is elsewhere.
"""

from typing import Any


class EarlyStopper:
    """Follows a score that should grow.

    An evaluation counts as an improvement when its score is more than `min_delta` above the score of the last
    improvement; after `patience` evaluations in a row without one, `should_stop` is true. The best checkpoint is the
    last one whose score is no more than `min_delta` below the highest: differences that small are noise by the choice
    of `min_delta`, and of equals the later checkpoint has seen more data.
    """

    def __init__(self, *, every_steps: int, patience: int, min_delta: float):
        self.every_steps, self.patience, self.min_delta = every_steps, patience, min_delta
        self.history: list[tuple[int, float]] = []
        self.best_step: int | None = None
        self.best_score = float("-inf")
        self.highest = float("-inf")
        self.reference = float("-inf")
        self.stalled = 0

    def first(self, score: float) -> None:
        """Note the score before training: part of the curve, neither an improvement nor a checkpoint."""
        self.history.append((0, score))

    def update(self, step: int, score: float) -> bool:
        """Note the score at `step`; true when these weights are the best so far."""
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"a score is a share between 0 and 1, got {score}")
        self.history.append((step, score))
        if score > self.reference + self.min_delta:
            self.reference, self.stalled = score, 0
        else:
            self.stalled += 1
        self.highest = max(self.highest, score)
        if score >= self.highest - self.min_delta:
            self.best_step, self.best_score = step, score
            return True
        return False

    @property
    def should_stop(self) -> bool:
        """Whether `patience` evaluations have passed without an improvement."""
        return self.stalled >= self.patience

    def state(self) -> dict[str, Any]:
        """What an exact continuation needs, as plain data."""
        return {
            "history": [list(point) for point in self.history],
            "best_step": self.best_step,
            "best_score": self.best_score if self.best_step is not None else None,
            "highest": self.highest if self.best_step is not None else None,
            "reference": self.reference if self.best_step is not None else None,
            "stalled": self.stalled,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.history = [(int(step), float(score)) for step, score in state["history"]]
        self.best_step = state["best_step"]
        self.best_score = float("-inf") if state["best_score"] is None else state["best_score"]
        self.highest = float("-inf") if state["highest"] is None else state["highest"]
        self.reference = float("-inf") if state["reference"] is None else state["reference"]
        self.stalled = state["stalled"]
