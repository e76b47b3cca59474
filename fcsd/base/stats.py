"""Compute standard errors, intervals, ratios and Holm's correction from plain numbers.

Not covered: where the scores come from, and which of them are compared
(`fcsd.evaluation.scores`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Ratio(NamedTuple):
    """A ratio estimate and its standard error; None where it is not known."""

    value: float | None
    stderr: float | None


def ratio(sums: list[float], counts: list[int]) -> Ratio:
    """Compute the ratio estimate and its standard error (Cochran, Sampling Techniques,
    6.4): residuals s_i - r c_i over rows. The error is None unless two rows have
    tokens; the ratio, too, where none has.
    """
    num_tokens = sum(counts)
    if num_tokens == 0:
        return Ratio(None, None)
    ratio = math.fsum(sums) / num_tokens
    n = len(sums)
    if sum(count > 0 for count in counts) < 2:
        return Ratio(ratio, None)
    # Rows are the independent units, not tokens: the tokens of a row depend on each
    # other.
    residuals = math.fsum(
        (total - ratio * count) ** 2 for total, count in zip(sums, counts, strict=True)
    )
    return Ratio(ratio, math.sqrt(n / (n - 1) * residuals) / num_tokens)


ALPHA = 0.05


def standard_error(scores: Sequence[float]) -> float | None:
    """Compute the standard error of the mean, sqrt(sum (x - mean)^2 / (n - 1) / n), as
    lm-eval's; None for one item.
    """
    count = len(scores)
    if count < 2:
        return None
    mean = math.fsum(scores) / count
    return math.sqrt(
        math.fsum((score - mean) ** 2 for score in scores) / (count - 1) / count
    )


def pooled_standard_error(groups: Sequence[Sequence[float]]) -> float | None:
    """Compute the standard error of the mean over all items of a group of tasks, from
    the variance within its tasks alone: sqrt(sum_g sum (x - mean_g)^2 / (N - G) / N),
    as lm-eval's; None where a task has a single item."""
    sizes = [len(group) for group in groups]
    errors = [standard_error(group) for group in groups]
    task_errors = [error for error in errors if error is not None]
    if len(task_errors) < len(errors):
        return None
    # n (n - 1) se^2 is the sum of squares within a task, from which its error was made.
    within = math.fsum(
        size * (size - 1) * error**2
        for size, error in zip(sizes, task_errors, strict=True)
    )
    return math.sqrt(within / (sum(sizes) - len(sizes)) / sum(sizes))


def plain_mean(
    values: Sequence[tuple[float, float | None]],
) -> tuple[float, float | None]:
    """Compute the unweighted mean of (value, standard error) and its own standard error
    sqrt(sum se^2) / n, for independent tasks; None where a task has no error.
    """
    if not values:
        raise ValueError("mean of no values")
    count = len(values)
    mean = math.fsum(value for value, _ in values) / count
    errors = [error for _, error in values if error is not None]
    return mean, math.hypot(*errors) / count if len(errors) == count else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979): the i-th smallest of m is
    multiplied by m - i + 1, and results never decrease nor exceed 1.

    Calling every task different whose adjusted p is below alpha is wrong about any of
    them with probability alpha.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    by_size = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(by_size):
        # The running maximum keeps the adjusted p-values in the order of the p-values.
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = least
    return adjusted


Interval = tuple[float, float]


def interval(differences: Sequence[float]) -> Interval | None:
    """Compute the 95 % interval of a mean paired difference; None where a single item
    gives none.

    Where all n are -1, 0 or 1, one gained and one lost item are added to the n + 2
    (Bonett and Price 2012): the plain interval would have no width where no item
    changed, as if nothing could. Elsewhere it is centred on the mean. Both use
    Student's t. The interval may extend beyond -1 and 1, which `mean_interval` needs;
    `clipped` is for people.
    """
    from scipy.stats import t

    count = len(differences)
    if all(difference in (-1, 0, 1) for difference in differences):
        # Under the root: the sum of squares of the n + 2 values about their mean.
        gained, lost = (sum(d == sign for d in differences) + 1 for sign in (1, -1))
        centre = (gained - lost) / (count + 2)
        error: float | None = math.sqrt(gained + lost - (gained - lost) * centre) / (
            count + 2
        )
        freedom = count + 2
    else:
        centre = math.fsum(differences) / count
        error = standard_error(differences)
        freedom = count - 1
    if error is None:
        return None
    half = float(t.ppf(1 - ALPHA / 2, freedom)) * error
    return centre - half, centre + half


def mean_interval(deltas: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """Compute the 95 % interval of the unweighted mean of independent deltas, each with
    an interval of its own: mean -+ sqrt(sum (delta - limit)^2) / n, the variance of
    each taken at its own limit (MOVER, Zou and Donner 2008).

    It is centred on the measured deltas: the centres of intervals of few items are
    shrunk towards 0, a bias that a mean over many tasks would keep.
    """
    count = len(deltas)
    mean = math.fsum(deltas) / count
    below: list[float] = []
    above: list[float] = []
    for delta, (low, high) in zip(deltas, intervals, strict=True):
        below.append(delta - low)
        above.append(high - delta)
    return mean - math.hypot(*below) / count, mean + math.hypot(*above) / count


def clipped(interval: Interval | None, *, shares: bool) -> list[float] | None:
    """Return an interval as results hold it; shares: the differences are of shares of
    right answers, which lie within -1 and 1.
    """
    if interval is None:
        return None
    return [max(-1.0, interval[0]), min(1.0, interval[1])] if shares else list(interval)
