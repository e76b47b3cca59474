"""Exchange times against equation 9 computed by hand on three endpoints."""

import numpy as np
import pytest

from fcsd.planning.network.links import LinkModel
from fcsd.planning.network.simulate import (
    Payload,
    exchange_time,
    path_times,
    simulate,
)

# the diagonal is never read
ALPHA = [[9.0, 0.1, 0.2], [0.3, 9.0, 0.4], [0.5, 0.6, 9.0]]
BETA = [[9.0, 0.01, 0.02], [0.03, 9.0, 0.04], [0.05, 0.06, 9.0]]


def links(
    egress: list[float | None] = [None] * 3,
    ingress: list[float | None] = [None] * 3,
    collective: str = "p2p",
) -> LinkModel:
    phase = {
        "alpha_s": ALPHA, "beta_s_per_byte": BETA, "r2": [[None] * 3] * 3, "refined": [[False] * 3] * 3, "repeats": 1,
    }  # fmt: skip
    return LinkModel.model_validate(
        {
            "endpoints": ["a", "b", "c"], "collective": collective, "backend": "gloo", "world_size": 3,
            "libraries": {}, "metadata": phase, "dispatch": phase, "combine": phase,
            "ports": {"egress_s_per_byte": egress, "ingress_s_per_byte": ingress},
        }
    )  # fmt: skip


BYTES = np.array([[500.0, 10, 20], [30, 500, 0], [0, 5, 500]])
# alpha + beta * bytes by hand: 0->1 0.2, 0->2 0.6, 1->0 1.2, 1->2 0.4, 2->0 0.5, 2->1
# 0.9


def test_the_slowest_edge_decides() -> None:
    # no port is shared
    assert exchange_time(links(), "dispatch", BYTES) == pytest.approx(1.2)


def test_both_directions_of_a_pair_run_one_after_another_at_half_duplex() -> None:
    # 0-1: max(.1, .3) + .1 + .9 = 1.3; 0-2: .5 + .4 + 0 = .9; 1-2: .6 + 0 + .3 = .9
    assert exchange_time(
        links(collective="all_to_all_single"), "dispatch", BYTES
    ) == pytest.approx(1.3)


def test_a_shared_port_carries_what_all_its_edges_carry() -> None:
    # endpoint 0 sends 30 bytes at 0.1 s each after a latency of at most 0.2
    assert exchange_time(
        links(egress=[0.1, None, None]), "dispatch", BYTES
    ) == pytest.approx(3.2)
    # endpoint 1 receives 15 bytes at 0.2 s each after a latency of at most 0.6
    assert exchange_time(
        links(ingress=[None, 0.2, None]), "dispatch", BYTES
    ) == pytest.approx(3.6)


def test_a_shared_port_holds_up_the_paths_that_lead_through_it_and_no_other() -> None:
    alone = [[0, 0.2, 0.6], [1.2, 0, 0.4], [0.5, 0.9, 0]]
    leaving = path_times(links(egress=[0.1, None, None]), "dispatch", BYTES)
    np.testing.assert_allclose(leaving, [[0, 3.2, 3.2], *alone[1:]])
    reaching = path_times(links(ingress=[None, 0.2, None]), "dispatch", BYTES)
    np.testing.assert_allclose(reaching, [[0, 3.6, 0.6], alone[1], [0.5, 3.6, 0]])


def test_each_phase_has_links_of_its_own() -> None:
    payload = Payload(
        row_width=3, num_experts=2, value_bytes=1, weight_bytes=2, count_bytes=5
    )
    counts = np.array([[7.0, 2, 4], [6, 7, 0], [0, 1, 7]])
    usual = links()
    slower = {
        name: [[10 * each for each in row] for row in rows]
        for name, rows in (("alpha_s", ALPHA), ("beta_s_per_byte", BETA))
    }
    for phase in ("metadata", "dispatch", "combine"):
        changed = usual.model_copy(
            update={phase: usual.dispatch.model_copy(update=slower)}
        )
        before, after = (simulate(each, counts, payload) for each in (usual, changed))
        factors = [
            float(getattr(after, each) / getattr(before, each))
            for each in ("metadata", "dispatch", "combine")
        ]
        assert factors == pytest.approx(
            [
                10.0 if each == phase else 1.0
                for each in ("metadata", "dispatch", "combine")
            ]
        )


def test_a_layer_takes_its_counts_its_dispatch_and_its_combine() -> None:
    payload = Payload(
        row_width=3, num_experts=2, value_bytes=1, weight_bytes=2, count_bytes=5
    )
    counts = np.array([[7.0, 2, 4], [6, 7, 0], [0, 1, 7]])
    times = simulate(links(), counts, payload)
    assert times.metadata == pytest.approx(0.6 + 0.06 * 10)
    assert times.dispatch == pytest.approx(0.3 + 0.03 * 6 * 5)
    assert times.combine == pytest.approx(
        max(0.1 + 0.01 * 18, 0.5 + 0.05 * 12, 0.6 + 0.06 * 0)
    )  # 1 -> 0's way back
    assert times.total == pytest.approx(1.2 + 1.2 + 1.1)
