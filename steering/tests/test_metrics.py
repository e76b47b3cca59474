"""Metrics of routing against values computed by hand, and losses against the loops that
they are printed as.
"""

from math import log, sqrt

import numpy as np
import pytest
import torch

from fcsd.model.families.capacity import capacity, kept_pairs
from fcsd_steering.routing.metrics import (
    avg_layer_cv,
    avg_layer_kl,
    cv,
    kl,
    layer_kl,
    routes_moved,
    switch_balance_loss,
)

# both means are 2; summed over layers 6, 4, 2, 4
LOADS = np.array([[1, 3, 0, 4], [5, 1, 2, 0]])
OTHER = np.array([[2, 2, 2, 2], [1, 5, 2, 0]])


def test_variation_is_that_of_the_summed_loads_or_the_mean_over_layers() -> None:
    assert cv(LOADS) == pytest.approx(sqrt((4 + 0 + 4 + 0) / 4) / 4)
    assert avg_layer_cv(LOADS) == pytest.approx(
        (sqrt(10 / 4) / 2 + sqrt(14 / 4) / 2) / 2
    )
    assert cv(np.zeros((2, 4))) == 0


def test_kl_smooths_every_expert_and_sums_over_layers_first_or_last() -> None:
    # with epsilon 1: layer 0 is (2, 4, 1, 5)/12 against (3, 3, 3, 3)/12, layer 1 is (6,
    # 2, 3, 1)/12, (2, 6, 3, 1)/12
    first = (2 * log(2 / 3) + 4 * log(4 / 3) + 1 * log(1 / 3) + 5 * log(5 / 3)) / 12
    second = (6 * log(3) + 2 * log(1 / 3)) / 12
    assert layer_kl(LOADS, OTHER, 1) == pytest.approx([first, second])
    assert avg_layer_kl(LOADS, OTHER, 1) == pytest.approx((first + second) / 2)
    # summed over layers: (6, 4, 2, 4) against (3, 7, 4, 2), each + 1 of 20
    whole = (7 * log(7 / 4) + 5 * log(5 / 8) + 3 * log(3 / 5) + 5 * log(5 / 3)) / 20
    assert kl(LOADS, OTHER, 1) == pytest.approx(whole)
    assert kl(LOADS, LOADS) == 0
    # an expert that nobody uses any more: finite, and larger the smaller epsilon is
    gone = np.array([[4, 0, 2, 2]])
    assert 0 < kl(LOADS[:1], gone, 1e-3) < kl(LOADS[:1], gone) < 10


def test_moved_routes_are_pairs_that_the_other_run_does_not_have_in_any_order() -> None:
    base = np.array([[[0, 1], [2, 3], [4, 5], [6, 7]]])
    other = np.array([[[1, 0], [2, 4], [6, 7], [6, 7]]])
    assert routes_moved(base, other) == pytest.approx([3 / 8])


def test_switch_loss_is_one_when_even_and_more_when_uneven() -> None:
    assert switch_balance_loss(
        np.array([2, 2, 2, 2]), np.array([0.7, 0.1, 0.1, 0.1])
    ) == pytest.approx(1)
    # f = (1, 3, 0, 4)/8
    loss = switch_balance_loss(LOADS[0], np.array([0.1, 0.2, 0.3, 0.4]))
    assert loss == pytest.approx(4 * (1 * 0.1 + 3 * 0.2 + 0 * 0.3 + 4 * 0.4) / 8)

    switch = []
    for skew in (0.0, 2.0, 8.0):
        logits = (
            torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
            + skew * torch.arange(8) / 8
        )
        loads = np.bincount(logits.topk(2).indices.flatten().numpy(), minlength=8)
        switch.append(
            float(switch_balance_loss(loads, logits.softmax(-1).mean(0).numpy()))
        )
    assert 0.99 < switch[0] < 1.05 < switch[1] < 2 < switch[2]


def test_top_k_is_part_of_the_capacity_and_the_first_tokens_keep_their_place() -> None:
    assert capacity(1.0, num_tokens=512, top_k=8, num_experts=128) == 32
    assert capacity(1.25, 10, 2, 8) == 4  # 3.125
    assert capacity(1.1, 10, 1, 11) == 1  # exactly 1, up to rounding
    experts = torch.stack(
        [
            torch.randperm(6, generator=torch.Generator().manual_seed(s))[:2]
            for s in range(20)
        ]
    )
    taken = [0] * 6
    wanted = np.zeros((20, 2), dtype=bool)
    for token in range(20):
        for choice in range(2):
            expert = int(experts[token, choice])
            wanted[token, choice] = taken[expert] < 5
            taken[expert] += 1
    assert not wanted.all()
    assert np.array_equal(kept_pairs(experts, 5).numpy(), wanted)


def test_an_even_routing_loses_nothing_at_factor_one() -> None:
    experts = torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]])
    assert kept_pairs(experts, capacity(1.0, 4, 2, 4)).all()
