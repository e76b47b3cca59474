"""Quantiles from bins against sorting."""

import math

import pytest
import torch

from fcsd.training.meters import LARGEST, SMALLEST, bin_counts, quantile


@pytest.mark.parametrize("q", [0.0, 0.01, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("count", [1, 2, 1000])
def test_a_quantile_is_the_value_of_its_rank_within_one_percent(
    q: float, count: int
) -> None:
    values = (
        torch.randn(count, generator=torch.Generator().manual_seed(count))
        .mul(1.5)
        .exp()
    )
    exact = values.sort().values[max(1, math.ceil(q * count)) - 1].item()
    assert quantile(bin_counts(values), q) == pytest.approx(exact, rel=0.01)


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    values = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    parts = sum(bin_counts(part) for part in values.split([1, 0, 299, 700]))
    assert torch.equal(parts, bin_counts(values))


def test_values_beyond_the_bins_are_0_and_the_largest() -> None:
    values = torch.tensor([-1e-8, 0.0, SMALLEST / 10, LARGEST, 1e9, math.inf, math.nan])
    counts = bin_counts(values)
    assert (counts[0], counts[-1], counts.sum()) == (3, 4, 7)
    assert (quantile(counts, 0.1), quantile(counts, 0.9)) == (0.0, LARGEST)


def test_no_values_have_no_quantile() -> None:
    assert quantile(bin_counts(torch.zeros(0)), 0.5) is None
