"""Tables of both kinds on simulated routers: CAMoE's by hand, ours against CAMoE's at
equal time.
"""

import numpy as np
import pytest
from simulated import (
    EQUAL,
    UNEQUAL,
    Routers,
    at_equal_time,
    deployment_of,
    links_of,
)

from fcsd.base.errors import UserError
from fcsd.planning.network.simulate import Payload
from fcsd_steering.routing.bottleneck import Deployment, bottleneck, fit_windows
from fcsd_steering.routing.camoe import camoe
from fcsd_steering.routing.exchanges import endpoint_counts
from tests.support import few


@pytest.mark.parametrize("seed", few(range(3), 1))
def test_at_camoes_time_ours_changes_loads_and_routes_far_less(seed: int) -> None:
    theirs, ours = at_equal_time(UNEQUAL, seed, 0.25)
    assert ours["time"] <= theirs["time"] < 0.9
    assert ours["layer_kl"] <= 0.4 * theirs["layer_kl"]
    assert (
        ours["moved"] <= 0.65 * theirs["moved"] and ours["lost"] <= 0.5 * theirs["lost"]
    )


@pytest.mark.parametrize("seed", few(range(3), 1))
def test_on_equal_links_ours_moves_no_more_routes(seed: int) -> None:
    theirs, ours = at_equal_time(EQUAL, seed, 0.25)
    assert ours["time"] <= theirs["time"] < 0.95
    assert ours["moved"] <= theirs["moved"]


def test_camoes_table_is_the_one_computed_by_hand() -> None:
    """Three endpoints, of which 0 reaches 2 slowly; one expert each, and one without an
    endpoint.
    """
    alpha, beta = np.full((3, 3), 1.0), np.full((3, 3), 0.1)
    beta[0, 2] = 0.5
    back_alpha, back_beta = np.full((3, 3), 2.0), np.full((3, 3), 0.2)
    back_alpha[1, 0], back_beta[0, 2] = 7.0, 0.6
    links = links_of(alpha, beta, combine=(back_alpha, back_beta))
    counts = np.array([[[2, 3, 4, 9], [1, 1, 1, 9], [6, 0, 2, 9]]])
    payload = Payload(row_width=1, num_experts=4, value_bytes=2, weight_bytes=1)
    tables = camoe(counts, links, payload, np.array([0, 1, 2, -1]), 0.3)
    # dispatch 3 bytes, combine 2. 0 -> 1: 1 + .1*3*3, and back, 1 -> 0, 7 + .2*3*2. 0
    # -> 2: 1 + .5*4*3, and 2 + .2*4*2. 1 -> 0 and 1 -> 2: 1 + .1*1*3, and 2 + .2*1*2. 2
    # -> 0: 1 + .1*6*3, back, 0 -> 2, 2 + .6*6*2. 2 -> 1: latencies
    costs = np.array(
        [
            [0, 1.9 + 8.2, 7.0 + 3.6],
            [1.3 + 2.4, 0, 1.3 + 2.4],
            [2.8 + 9.2, 1.0 + 2.0, 0],
        ]
    )
    expected = (
        -0.3 * (costs - costs.mean(1, keepdims=True)) / costs.std(1, keepdims=True)
    )
    np.testing.assert_allclose(tables[0, :, :3], expected, rtol=1e-6)
    assert (tables[0, :, 3] == 0).all()
    scaled = camoe(
        counts, links, payload, np.array([0, 1, 2, -1]), 0.3, logit_std=np.array([2.0])
    )
    np.testing.assert_allclose(scaled, 2 * tables, rtol=1e-6)
    with pytest.raises(UserError, match=r"strength \(lambda\) -0.1 is negative"):
        camoe(counts, links, payload, np.array([0, 1, 2, -1]), -0.1)
    with pytest.raises(UserError, match="between 4 endpoints, but 3 were requested"):
        camoe(counts, UNEQUAL, payload, np.array([0, 1, 2, -1]), 0.1)


def test_where_links_hardly_differ_the_deviation_is_at_least_a_twentieth_of_the_mean() -> (
    None
):
    """Among 1000 equal links the diagonal alone gives a deviation of 3 % of the mean."""
    counts = np.full((1, 1000, 1000), 5)
    links = links_of(np.full((1000, 1000), 1.0), np.zeros((1000, 1000)))
    payload = Payload(8, 1000)
    floored, printed = (
        camoe(counts, links, payload, np.arange(1000), 1.0, sigma_floor=floor)
        for floor in (0.05, 0.0)
    )
    assert printed[0, 0, 0] == pytest.approx(np.sqrt(999), rel=1e-4)
    assert floored[0, 0, 0] == pytest.approx(20, rel=1e-2)


def test_only_the_slowest_path_is_pushed_and_no_further_than_the_goal() -> None:
    beta = np.full((4, 4), 1e-9)
    beta[2, 1] = 8e-9
    links, routers = links_of(np.zeros((4, 4)), beta), Routers(0, num_layers=1)
    deployment = deployment_of(links, routers)
    before = deployment.mean_time(routers.respond(0.0))
    push = bottleneck(routers.respond, deployment, 0.8 * before)
    assert (push.tables[0, 2, 32:64] < -0.1).all()  # dispatch 2 -> 1
    assert (push.tables[0, 1, 64:96] < -0.1).all()  # combine of 1's tokens, 2 -> 1
    others = push.tables[0].copy()
    others[2, 32:64] = others[1, 64:96] = 0
    assert np.abs(others).max() < 1e-3
    assert (
        0.785 * before
        < deployment.mean_time(routers.respond(push.tables))
        <= 0.8 * before
    )
    nothing = bottleneck(routers.respond, deployment, before)
    assert nothing.steps == 0 and not nothing.tables.any()
    with pytest.raises(UserError, match="out of reach"):
        bottleneck(lambda tables: routers.respond(0.0), deployment, 0.8 * before)


def test_a_path_is_named_by_its_tokens_source_both_ways() -> None:
    """Two endpoints of one expert each: 0 sends 5 pairs to 1, and 1 sends 3 to 0; the
    way back has links of its own.
    """
    links = links_of(
        [[0, 1], [2, 0]],
        [[0, 0.1], [0.2, 0]],
        combine=([[0, 3], [4, 0]], [[0, 0.3], [0.4, 0]]),
    )
    payload = Payload(row_width=1, num_experts=2, value_bytes=2, weight_bytes=8)
    paths = Deployment(links, payload, np.array([[0, 1]])).paths(
        np.array([[[[7, 5], [3, 7]]]])
    )
    # out with 10 bytes per pair, back with 2: what 0 has sent comes back from 1 to 0
    np.testing.assert_allclose(paths[0, 0, 0], [[0, 1 + 0.1 * 50], [2 + 0.2 * 30, 0]])
    np.testing.assert_allclose(paths[0, 0, 1], [[0, 4 + 0.4 * 10], [3 + 0.3 * 6, 0]])


def test_where_a_port_is_shared_all_that_leaves_it_is_pushed() -> None:
    links = links_of(
        np.zeros((4, 4)), np.full((4, 4), 1e-9), egress=[None, None, None, 4e-9]
    )
    routers = Routers(0, num_layers=1)
    deployment = deployment_of(links, routers)
    push = bottleneck(
        routers.respond, deployment, 0.9 * deployment.mean_time(routers.respond(0.0))
    )
    away = push.tables[0].reshape(4, 4, 32)[..., 0]
    assert (away[3, :3] < -0.1).all() and away[3, 3] == 0  # what 3 sends
    assert (away[:3, 3] < -0.1).all()  # what it sends back


def test_each_layer_is_pushed_into_its_windows_and_a_hidden_one_is_not() -> None:
    routers = Routers(1)
    deployment = deployment_of(UNEQUAL, routers)
    before = deployment.paths(routers.respond(0.0)).max((-2, -1)).mean(0)
    windows = before * [[2, 2], [0.85, 2], [2, 2]]
    push = fit_windows(routers.respond, deployment, windows)
    assert not push.tables[[0, 2]].any() and push.tables[1].any() and push.left == ()
    after = deployment.paths(routers.respond(push.tables)).max((-2, -1)).mean(0)
    assert after[1, 0] <= windows[1, 0] and after[1, 0] > 0.95 * windows[1, 0]
    hopeless = fit_windows(
        routers.respond, deployment, np.array([[1e-5, 1], [1, 1], [1, 1]])
    )  # below the latency
    assert hopeless.left == (0,) and not hopeless.tables.any()
    for wrong, message in (
        (np.ones((2, 2)), "2 layers, but the model has 3"),
        (-windows, "negative or missing"),
    ):
        with pytest.raises(UserError, match=message):
            fit_windows(routers.respond, deployment, wrong)


@pytest.mark.parametrize("phase", [0, 1])
def test_only_the_phase_that_is_late_is_pushed(phase: int) -> None:
    """Dispatch is slow from 2 to 1; combine from 0 to 3, which brings back what 3 has sent to 0."""
    beta, back, none = np.full((4, 4), 1e-9), np.full((4, 4), 1e-9), np.zeros((4, 4))
    beta[2, 1] = back[0, 3] = 8e-9
    routers = Routers(0, num_layers=1)
    deployment = deployment_of(links_of(none, beta, combine=(none, back)), routers)
    before = deployment.paths(routers.respond(0.0)).max((-2, -1)).mean(0)
    windows = np.where(np.arange(2) == phase, 0.8, 2.0) * before
    push = fit_windows(routers.respond, deployment, windows)
    pushed = push.tables[0].reshape(4, 4, 32)[..., 0]
    assert np.argwhere(pushed < -1e-3).tolist() == [[[2, 1]], [[3, 0]]][phase]
    after = deployment.paths(routers.respond(push.tables)).max((-2, -1)).mean(0)
    assert 0.95 * windows[0, phase] < after[0, phase] <= windows[0, phase]


def test_a_step_is_a_part_of_the_logits_deviation_and_the_last_one_is_halved_to_the_goal() -> (
    None
):
    routers = Routers(0, num_layers=2, num_tokens=64)
    deployment, counts = deployment_of(UNEQUAL, routers), routers.respond(0.0)

    def respond(tables: np.ndarray) -> np.ndarray:
        return np.zeros_like(counts) if tables.any() else counts

    goal = 0.9 * deployment.mean_time(counts)
    usual, scaled = (
        bottleneck(respond, deployment, goal, logit_std=std)
        for std in (None, np.array([2.4, 7.2]))
    )
    assert usual.steps == scaled.steps == 1
    assert np.abs(usual.tables).max() == pytest.approx(0.025 * 2.4 / 16)
    np.testing.assert_allclose(scaled.tables, usual.tables * [[[1]], [[3]]], rtol=1e-6)
    windows = 0.9 * deployment.paths(counts).max((-2, -1)).mean(0)
    hidden = fit_windows(respond, deployment, windows, logit_std=np.array([2.4, 7.2]))
    np.testing.assert_allclose(hidden.tables, 16 * scaled.tables, rtol=1e-6)


def test_experts_without_an_endpoint_are_not_pushed_and_cost_nothing() -> None:
    routers = Routers(2, num_layers=1)
    deployment = deployment_of(UNEQUAL, routers)
    placement = deployment.placement.copy()
    placement[0, ::5] = -1
    deployment = Deployment(UNEQUAL, deployment.payload, placement)
    counts = routers.respond(0.0)
    assert (
        endpoint_counts(counts, placement).sum() == counts[..., placement[0] >= 0].sum()
    )
    push = bottleneck(routers.respond, deployment, 0.9 * deployment.mean_time(counts))
    assert push.tables.any() and not push.tables[..., ::5].any()
