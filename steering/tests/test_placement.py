"""Placements against hand-made ones and against the best of all placements."""

import itertools

import numpy as np
import pytest

from fcsd.base.errors import UserError
from fcsd.planning.network.links import LinkModel
from fcsd.planning.network.simulate import Payload, simulate
from fcsd_steering.routing.exchanges import endpoint_counts
from fcsd_steering.routing.placement import balanced, contiguous, placed, topology_aware

PAYLOAD = Payload(row_width=64, num_experts=6)


def made_links(beta: list[list[float]], collective: str = "p2p") -> LinkModel:
    size = len(beta)
    phase = {
        "alpha_s": [[1e-3] * size for _ in range(size)],
        "beta_s_per_byte": beta,
        "r2": [[None] * size] * size,
        "refined": [[False] * size] * size,
        "repeats": 1,
    }
    none = [None] * size
    return LinkModel.model_validate(
        {
            "endpoints": [f"n{u}" for u in range(size)],
            "collective": collective,
            "backend": "gloo",
            "world_size": size,
            "libraries": {},
            **dict.fromkeys(("metadata", "dispatch", "combine"), phase),
            "ports": {"egress_s_per_byte": none, "ingress_s_per_byte": none},
        }
    )


def seconds(counts: np.ndarray, placement: np.ndarray, links: LinkModel) -> np.ndarray:
    return simulate(links, endpoint_counts(counts, placement), PAYLOAD).total


def test_experts_in_order_and_by_load_are_as_many_on_every_endpoint() -> None:
    assert contiguous(6, 3).tolist() == [0, 0, 1, 1, 2, 2]
    # 9 to endpoint 0, 8 to 1, 4 to 2, 3 to 2, then 2 and 1 to where there is room: 1
    # (8), then 0
    assert balanced(np.array([[1, 9, 8, 2, 3, 4], [6, 6, 6, 6, 6, 6]]), 3).tolist() == [
        [0, 0, 1, 1, 2, 2],
        [0, 1, 2, 0, 1, 2],
    ]
    assert np.bincount(balanced(np.array([100, 0, 0, 0, 0, 1]), 3)).tolist() == [
        2,
        2,
        2,
    ]


@pytest.mark.parametrize("collective", ["p2p", "all_to_all_single"])
def test_swaps_bring_each_sources_experts_home(collective: str) -> None:
    """Also where both directions of a pair take turns, as in fcsd's profiles of gloo."""
    # source 0 uses experts 1, 4 and 5 only, source 1 uses 0, 2 and 3: nothing has to
    # travel
    counts = np.zeros((1, 2, 6))
    for source, experts in enumerate(([1, 4, 5], [0, 2, 3])):
        counts[0, source, experts] = 100
    links = made_links([[0, 1e-6], [1e-6, 0]], collective)
    assert topology_aware(counts, links, PAYLOAD).tolist() == [[1, 0, 1, 1, 0, 0]]


def test_what_a_swap_takes_off_other_edges_counts_where_the_slowest_cannot_be_helped() -> (
    None
):
    """Endpoint 2 is used by nobody and is slow to reach: no swap changes the time, and
    0 and 1 still come home.
    """
    counts = np.zeros((1, 3, 6))
    for source, experts in enumerate(([1, 4], [0, 2])):
        counts[0, source, experts] = 100
    links = made_links([[0, 1e-6, 1e-6], [1e-6, 0, 1e-6], [1e-6, 1e-6, 0]])
    for phase in (links.metadata, links.dispatch, links.combine):
        phase.alpha_s[0] = [0, 1e-3, 0.1]
    placement = topology_aware(counts, links, PAYLOAD)[0]
    assert placement[[1, 4]].tolist() == [0, 0] and placement[[0, 2]].tolist() == [1, 1]


def test_a_placement_of_each_kind_is_made_for_every_layer() -> None:
    counts = np.random.default_rng(1).integers(0, 9, (2, 3, 6))
    links = made_links([[0, 8e-6, 8e-6], [8e-6, 0, 1e-6], [8e-6, 1e-6, 0]])
    assert (
        placed("contiguous", counts, links, PAYLOAD).tolist()
        == [[0, 0, 1, 1, 2, 2]] * 2
    )
    by_load, by_links = (
        placed(kind, counts, links, PAYLOAD) for kind in ("balanced", "topology_aware")
    )
    assert by_load.tolist() == balanced(counts.sum(1), 3).tolist()
    assert (
        by_links.tolist()
        == topology_aware(counts, links, PAYLOAD).tolist()
        != by_load.tolist()
    )


def test_swaps_come_close_to_the_best_placement_and_never_behind_their_start() -> None:
    rng = np.random.default_rng(0)
    links = made_links([[0, 8e-6, 8e-6], [8e-6, 0, 1e-6], [8e-6, 1e-6, 0]])
    counts = rng.integers(0, 200, (8, 3, 6)) * rng.gamma(1, 1, (8, 1, 6))
    placement = topology_aware(counts, links, PAYLOAD)
    times = seconds(counts, placement, links)
    starts = [contiguous(6, 3), balanced(counts.sum(1), 3)]
    assert (
        times
        <= np.minimum(*(seconds(counts, start, links) for start in starts)) + 1e-12
    ).all()
    every = [np.array(p) for p in set(itertools.permutations([0, 0, 1, 1, 2, 2]))]
    best = np.min([seconds(counts, placement, links) for placement in every], 0)
    assert (times >= best - 1e-12).all()
    assert (times / best).mean() < 1.05
    assert times.mean() < 0.9 * seconds(counts, starts[1], links).mean()
    assert all(np.bincount(layer).tolist() == [2, 2, 2] for layer in placement)


def test_endpoints_that_do_not_divide_the_experts_and_links_of_another_world_are_refused() -> (
    None
):
    with pytest.raises(
        UserError,
        match=r"^6 experts cannot be divided evenly among 4 .*; allowed: 1, 2, 3, 6$",
    ):
        contiguous(6, 4)
    with pytest.raises(
        UserError, match="6 experts cannot be divided evenly among 5 endpoints"
    ):
        balanced(np.ones((2, 6)), 5)
    with pytest.raises(
        UserError, match=r"^the links are between 2 endpoints, but 3 were requested; "
    ):
        topology_aware(np.ones((1, 3, 6)), made_links([[0, 1], [1, 0]]), PAYLOAD)


def test_counts_of_experts_are_summed_by_the_endpoint_that_holds_them() -> None:
    counts = np.array([[1, 2, 4, 8], [16, 32, 64, 128]])
    np.testing.assert_array_equal(
        endpoint_counts(counts, np.array([0, 1, 1, 0])), [[9, 6], [144, 96]]
    )
