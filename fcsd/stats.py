"""Compute standard errors, intervals, ratios and Holm's correction from plain numbers.

Not covered: where the scores come from, and which of them are compared (`fcsd.evaluate.scores`).
"""

import math
from collections.abc import Sequence


def ratio(sums: list[float], counts: list[int]) -> dict[str, float | None]:
    """Compute the ratio estimate and its standard error (Cochran, Sampling Techniques, 6.4): residuals s_i - r c_i over
    rows."""
    num_tokens = sum(counts)
    if num_tokens == 0:
        return {"kl": None, "stderr": None, "num_tokens": 0}
    ratio = math.fsum(sums) / num_tokens
    n = len(sums)
    if n < 2:
        return {"kl": ratio, "stderr": None, "num_tokens": num_tokens}
    residuals = math.fsum((total - ratio * count) ** 2 for total, count in zip(sums, counts, strict=True))
    return {"kl": ratio, "stderr": math.sqrt(n / (n - 1) * residuals) / num_tokens, "num_tokens": num_tokens}


ALPHA = 0.05


_Z = 1.959963984540054  # 97.5 % point of the normal distribution


def standard_error(scores: Sequence[float]) -> float:
    """Compute the standard error of the mean, sqrt(sum (x - mean)^2 / (n - 1) / n), as lm-eval's; 0 for one item."""
    count = len(scores)
    if count < 2:
        return 0.0
    mean = math.fsum(scores) / count
    return math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (count - 1) / count)


def pooled_standard_error(groups: Sequence[Sequence[float]]) -> float | None:
    """Compute the standard error of the mean over all items of a group of tasks, from the variance within its tasks
    alone: sqrt(sum_g sum (x - mean_g)^2 / (N - G) / N), as lm-eval's; None where a task has a single item."""
    sizes = [len(group) for group in groups]
    if min(sizes) < 2:
        return None
    within = math.fsum(
        size * (size - 1) * standard_error(group) ** 2 for size, group in zip(sizes, groups, strict=True)
    )
    return math.sqrt(within / (sum(sizes) - len(sizes)) / sum(sizes))


def plain_mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Compute the unweighted mean of (value, standard error) and its own standard error sqrt(sum se^2) / n, tasks
    independent."""
    if not values:
        raise ValueError("mean of no values")
    count = len(values)
    mean = math.fsum(value for value, _ in values) / count
    return mean, math.sqrt(math.fsum(error**2 for _, error in values)) / count


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979): the i-th smallest of m times m - i + 1, never falling, at
    most 1.

    Calling every task different whose adjusted p is below alpha is wrong about any of them with probability alpha.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = least
    return adjusted


def centre_and_error(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return centre and standard error of the 95 % interval of a mean paired difference; None where one item cannot
    tell.

    Where all are -1, 0 or 1, half an item is added to each cell of the 2 x 2 table (Agresti and Min 2005): the plain
    interval would have no width where no item changed, as if nothing could. Elsewhere the mean, and its standard error
    widened from Student's t to the normal distribution.
    """
    count = len(differences)
    if all(difference in (-1, 0, 1) for difference in differences):
        gained, lost = (sum(d == sign for d in differences) + 0.5 for sign in (1, -1))
        centre = (gained - lost) / (count + 2)
        return centre, math.sqrt(gained + lost - (gained - lost) * centre) / (count + 2)
    if count < 2:
        return None
    from scipy.stats import t

    wider = float(t.ppf(1 - ALPHA / 2, count - 1)) / _Z
    return math.fsum(differences) / count, standard_error(differences) * wider


def interval(centre: tuple[float, float] | None, *, clip: bool = False) -> list[float] | None:
    """clip: differences are shares of right answers."""
    if centre is None:
        return None
    low, high = (centre[0] + sign * _Z * centre[1] for sign in (-1, 1))
    return [max(-1.0, low), min(1.0, high)] if clip else [low, high]
