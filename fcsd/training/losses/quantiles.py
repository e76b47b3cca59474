"""Quantiles of a stream of positive numbers that no rank has to keep: counts in logarithmic bins.

Bins are a factor of 10^(1/128) wide, so a quantile is known to within 1 %; counts of several batches and ranks
are added up. Everything stays on the device until a quantile is asked for.
"""

import math

import torch
from torch import Tensor

BINS_PER_DECADE = 128
SMALLEST, LARGEST = 1e-9, 1e3
NUM_BINS = BINS_PER_DECADE * round(math.log10(LARGEST / SMALLEST))


def bin_counts(values: Tensor) -> Tensor:
    """Count (N,) values in (NUM_BINS + 2,) int64 bins; the first is all below `SMALLEST`, the last all from `LARGEST`.

    No host synchronisation; NaN counts as larger than everything.
    """
    place = (values.double().clamp(min=SMALLEST / 2) / SMALLEST).log10().mul(BINS_PER_DECADE).floor() + 1
    place = place.nan_to_num(nan=NUM_BINS + 1.0).clamp(0, NUM_BINS + 1).long()
    counts = torch.zeros(NUM_BINS + 2, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, place, torch.ones_like(place))


def quantile(counts: Tensor, q: float) -> float | None:
    """Return the value of rank ceil(q * N) among the N counted ones, within 1 %; 0 below `SMALLEST`; None for N = 0."""
    cumulative = counts.cumsum(0)
    total = int(cumulative[-1])
    if total == 0:
        return None
    rank = max(1, math.ceil(q * total))
    place = int(torch.searchsorted(cumulative, rank))
    if place == 0:
        return 0.0
    if place == NUM_BINS + 1:
        return LARGEST
    return SMALLEST * 10 ** ((place - 0.5) / BINS_PER_DECADE)
