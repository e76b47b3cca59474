"""The floor of a task: what a model of random answers gets. A score that does not stand
above it shows neither a loss nor that nothing was lost. Pure functions.

Not covered: metrics of shares of a likelihood (the second choice set of TruthfulQA),
whose floor only their suite can say.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def floor_of(
    row: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> float | None:
    """Return a task's floor: that of its suite or of its result, else one in the number
    of choices of each item, or 0 for what is written; None if unknown, and for own text.

    row: an entry of `tasks` in a result.
    """
    if row.get("floor") is not None:
        return float(row["floor"])
    if row["kind"] == "own_text":
        return None
    if row["kind"] != "likelihood":
        return 0.0
    metric = row["metric"].partition(",")[0]
    counts = [len(sample.get("loglikelihoods", ())) for sample in samples]
    if metric == "acc_mutual_info":  # every choice also has a likelihood without prompt
        counts = [count // 2 for count in counts]
    right_or_wrong = all(sample["score"] in (0, 1) for sample in samples)
    if not (metric.startswith("acc") and right_or_wrong and counts and min(counts)):
        return None
    # A single answer is right if it is the likeliest of all texts.
    return fmean(1 / count if count > 1 else 0.0 for count in counts)


def at_floor(value: float, stderr: float | None, floor: float | None) -> bool:
    """Tell whether a score is within two standard errors of its floor, or below it."""
    return floor is not None and value <= floor + 2 * (stderr or 0.0)
