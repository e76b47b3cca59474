"""The controller on links that change under it: exchanges are simulated on the true
ones, with noise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from simulated import Routers, deployment_of, links_of
from testbed import Testbed

from fcsd.base.errors import UserError
from fcsd.model.families.choices import recording
from fcsd.planning.network.simulate import Payload
from fcsd_steering.routing.bias import BiasTables, router_bias
from fcsd_steering.routing.bottleneck import Deployment
from fcsd_steering.routing.controller import SEARCHES, Controller, Rung, probe_by
from fcsd_steering.routing.placement import contiguous
from fcsd_steering.routing.tables import Calibration, make_tables
from tests.reference.tiny import tiny_model


class Cluster:
    """Rungs 0, 1, 2 take ever more pairs off the edge 1 -> 2, and the controller
    believes in equal links.
    """

    def __init__(self) -> None:
        self.beta = np.full((4, 4), 1e-9)
        self.alpha = np.full((4, 4), 1e-4)
        self.probes: list[tuple[str, int, int]] = []
        routers = Routers(0, num_layers=1)
        self.deployment = deployment_of(links_of(self.alpha, self.beta), routers)
        tables = np.zeros((3, 1, 4, 128), dtype=np.float32)
        for rung in range(3):
            tables[rung, 0, 1, 64:96] = -1.0 * rung
            tables[rung, 0, 2, 32:64] = -1.0 * rung
        self.rungs = [
            Rung(
                BiasTables(
                    "bottleneck",
                    0.1 * k,
                    False,
                    (0,),
                    each,
                    self.deployment.placement,
                    "qwen3_moe",
                    1,
                ),
                routers.respond(each),
            )
            for k, each in enumerate(tables)
        ]

    def probe(self, phase: str, source: int, destination: int) -> tuple[float, float]:
        self.probes.append((phase, source, destination))
        return float(self.alpha[source, destination]), float(
            self.beta[source, destination]
        )

    def seconds(self, tables: BiasTables) -> float:
        """Return the actual seconds of an exchange under these tables."""
        true = Deployment(
            links_of(self.alpha, self.beta),
            self.deployment.payload,
            self.deployment.placement,
        )
        return true.mean_time(
            next(rung.counts for rung in self.rungs if rung.tables is tables)
        )

    def run(
        self,
        controller: Controller,
        times: int,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> list[float]:
        """Return the strengths after each of this many exchanges."""
        return [
            controller.observe(self.seconds(controller.tables) * noise()).strength
            for _ in range(times)
        ]


def test_the_weakest_bias_within_the_goal_is_chosen_and_noise_changes_nothing() -> None:
    cluster = Cluster()
    rng = np.random.default_rng(0)
    goal = 1.05 * cluster.seconds(cluster.rungs[0].tables)
    controller = Controller(cluster.rungs, cluster.deployment, goal, cluster.probe)
    assert set(cluster.run(controller, 200, lambda: 1 + 0.08 * rng.uniform(-1, 1))) == {
        0.0
    }
    assert cluster.probes == []


def test_a_link_that_gets_slow_is_avoided_until_it_is_well_again() -> None:
    cluster = Cluster()
    goal = 1.6 * cluster.seconds(cluster.rungs[0].tables)
    controller = Controller(
        cluster.rungs, cluster.deployment, goal, cluster.probe, patience=3
    )
    cluster.run(controller, 10)
    cluster.beta[1, 2] = 2.5e-9
    strengths = cluster.run(controller, 120)
    assert strengths[-1] > 0 and cluster.seconds(controller.tables) <= goal
    assert controller.predicted_s() == pytest.approx(
        cluster.seconds(controller.tables), rel=0.1
    )
    assert {1, 2} in [
        {source, destination} for _, source, destination in cluster.probes
    ]
    assert strengths == sorted(strengths)  # it rises and stays: no to and fro
    probes = len(cluster.probes)
    cluster.run(controller, 50)
    assert len(cluster.probes) == probes
    cluster.beta[1, 2] = 1e-9
    assert cluster.run(controller, 200)[-1] == 0.0


def test_a_path_that_a_bias_avoids_is_seen_to_get_well() -> None:
    """Under the strongest bias the times stay as predicted, whatever becomes of the
    edge that it keeps tokens off.
    """
    cluster = Cluster()
    slow = np.where(
        (np.arange(4)[:, None] == 1) & (np.arange(4) == 2), 1e-7, cluster.beta
    )
    healthy, cluster.beta = cluster.beta, slow
    believed = Deployment(
        links_of(cluster.alpha, slow),
        cluster.deployment.payload,
        cluster.deployment.placement,
    )
    rungs = [
        cluster.rungs[0],
        Rung(cluster.rungs[2].tables, avoiding(cluster.rungs[2].counts)),
    ]
    goal = 1.5 * cluster.deployment.mean_time(rungs[0].counts)
    controller = Controller(rungs, believed, goal, cluster.probe, recheck=20)
    usual = believed.mean_time(rungs[1].counts)
    for _ in range(30):
        assert controller.observe(usual).strength == 0.2
    # still slow: one probe, no more
    assert {probe[1:] for probe in cluster.probes} == {(1, 2)}
    cluster.beta = healthy
    strengths = [
        controller.observe(
            cluster.deployment.mean_time(rungs[controller.tables.strength > 0].counts)
        ).strength
        for _ in range(60)
    ]
    assert strengths[0] == 0.2 and strengths[-1] == 0.0
    assert len(cluster.probes) < 10


def avoiding(counts: np.ndarray) -> np.ndarray:
    """These pairs without any between endpoints 1 and 2, whose rows would go from 1 to
    2 in dispatch or combine.
    """
    fewer = counts.copy()
    fewer[:, :, 1, 64:96] = fewer[:, :, 2, 32:64] = 0
    return fewer


def test_one_slow_exchange_changes_nothing() -> None:
    cluster = Cluster()
    controller = Controller(
        cluster.rungs, cluster.deployment, 1.0, cluster.probe, patience=3
    )
    usual = cluster.seconds(controller.tables)
    for seconds in (usual, 5 * usual, 5 * usual, usual, 5 * usual, usual):
        controller.observe(seconds)
    assert cluster.probes == [] and controller.tables.strength == 0


def test_time_that_no_link_explains_counts_against_the_goal() -> None:
    """Everything takes 1.5 times as long, as under a loaded host: only the strongest
    bias is within the goal.
    """
    cluster = Cluster()
    times = [cluster.seconds(rung.tables) for rung in cluster.rungs]
    controller = Controller(
        cluster.rungs, cluster.deployment, 1.2 * times[0], cluster.probe, patience=3
    )
    for _ in range(60):
        controller.observe(1.5 * cluster.seconds(controller.tables))
    assert controller.predicted_s() == pytest.approx(
        1.5 * cluster.seconds(controller.tables), rel=0.1
    )


def test_a_running_model_is_steered_off_an_edge_that_gets_slow() -> None:
    """Its own routes, exchanged on links that are no simulation of fcsd's, which also
    measure what is probed.
    """
    random = torch.Generator().manual_seed(0)
    batches = [
        {"input_ids": torch.randint(3, 99, (2, 40), generator=random)}
        for _ in range(16)
    ]
    calibration = Calibration(tiny_model("qwen3_moe"), batches, 4)
    placement, payload = np.tile(contiguous(8, 4), (4, 1)), Payload(10_000, 8)
    alpha, beta = np.full((4, 4), 1e-4), np.full((4, 4), 1e-9)
    slow = beta.copy()
    slow[0, 3] = 5e-9
    deployments = [
        Deployment(links_of(alpha, each), payload, placement) for each in (beta, slow)
    ]
    tables = [
        make_tables(calibration, deployments[1], "camoe", strength)[0]
        for strength in (0.0, 0.4, 0.8)
    ]
    rungs = [Rung(each, calibration.respond(each)) for each in tables]
    goal = 1.3 * deployments[0].mean_time(rungs[0].counts)
    wires: Any = Testbed(alpha, beta)
    controller = Controller(
        rungs,
        deployments[0],
        goal,
        probe_by(wires, deployments[0].links, 1 << 22),
        patience=3,
    )
    seconds, strengths = [], []
    with (
        router_bias(calibration.model, controller.tables) as steering,
        recording(calibration.model) as recorded,
    ):
        for number in range(60):
            pairs = np.zeros((4, 4, 4))  # layer, source, endpoint
            for source in range(4):
                steering.endpoint = source
                with torch.no_grad():
                    calibration.model(**batches[4 * (number % 4) + source])
                for layer, routed in enumerate(recorded.take()):
                    np.add.at(
                        pairs[layer, source], routed.experts.flatten().numpy() // 2, 1
                    )
            wires.beta = beta if number < 12 else slow
            seconds.append(np.mean([exchanged(wires, each, payload) for each in pairs]))
            steering.use(controller.observe(float(seconds[-1])))
            strengths.append(controller.tables.strength)
    assert set(strengths[:12]) == {0.0} and strengths[-1] == 0.8
    assert np.mean(seconds[-8:]) < min(
        goal, 0.5 * np.mean(seconds[12:15])
    )  # 12 to 14 at least are seen without a bias
    assert controller.links.beta("dispatch")[0, 3] == pytest.approx(5e-9, rel=0.01)


def test_a_probe_by_another_collective_or_between_others_is_refused() -> None:
    links, wires = (
        links_of(np.ones((4, 4)), np.ones((4, 4))),
        Testbed(np.ones((4, 4)), np.ones((4, 4))),
    )
    wires.collective = "all_to_all_single"
    with pytest.raises(
        UserError, match="measured with p2p, the exchanges are all_to_all_single"
    ):
        probe_by(wires, links, 1024)  # type: ignore[arg-type]
    wires.size, wires.collective = 3, "p2p"
    with pytest.raises(UserError, match="between 4 endpoints, but 3 were requested"):
        probe_by(wires, links, 1024)  # type: ignore[arg-type]


def exchanged(wires: Testbed, pairs: np.ndarray, payload: Payload) -> float:
    """Counts, rows and returning rows of one layer, [source, endpoint]."""
    sent = (
        np.full((4, 4), payload.metadata_bytes),
        pairs * (2 * 10_000 + 4),
        pairs.T * 2 * 10_000,
    )
    return sum(wires(each) for each in sent)


def test_the_slowest_edge_is_measured_first_and_written_down_where_it_is() -> None:
    """Believed: dispatch is slowest from 1 to 2, then combine from 0 to 3, which brings
    back what 3 sent to 0.
    """
    cluster = Cluster()
    beta, back = (np.full((4, 4), 1e-9) for _ in range(2))
    beta[1, 2], back[0, 3] = 6e-9, 3e-9
    links = links_of(cluster.alpha, beta, combine=(cluster.alpha, back))
    believed = Deployment(
        links, cluster.deployment.payload, cluster.deployment.placement
    )
    probes: list[Any] = []

    def probe(*edge: Any) -> tuple[float, float]:
        probes.append(edge)
        return 2e-4, 7e-9

    controller = Controller(cluster.rungs[:1], believed, 1.0, probe, patience=3)
    seconds = 2 * controller.predicted_s()
    for _ in range(2):
        controller.observe(seconds)
    assert probes == []  # all of three have to say the same
    controller.observe(seconds)
    assert probes[:2] == [("dispatch", 1, 2), ("combine", 0, 3)]
    for phase, edge, was in (("dispatch", (1, 2), beta), ("combine", (0, 3), back)):
        others = {probe[1:] for probe in probes if probe[0] == phase} - {edge}
        for what, old, new in (("alpha", cluster.alpha, 2e-4), ("beta", was, 7e-9)):
            expected = np.where(np.eye(4, dtype=bool), 0, old)
            expected[edge] = new
            for other in others:
                expected[other] = new
            np.testing.assert_allclose(getattr(controller.links, what)(phase), expected)


@pytest.mark.parametrize(("share", "weakest"), [(0.95, False), (0.85, True)])
def test_a_weaker_bias_is_taken_only_with_a_tenth_of_the_goal_to_spare(
    share: float, weakest: bool
) -> None:
    """Everything takes half as long, so that without a bias exchanges would take this
    share of the goal.
    """
    cluster = Cluster()
    cluster.beta[1, 2] = 2.5e-9
    known = Deployment(
        links_of(cluster.alpha, cluster.beta),
        cluster.deployment.payload,
        cluster.deployment.placement,
    )
    goal = 0.5 * known.mean_time(cluster.rungs[0].counts) / share
    controller = Controller(cluster.rungs, known, goal, cluster.probe, patience=3)
    assert controller.tables.strength > 0
    for _ in range(3 * SEARCHES):
        controller.observe(0.5 * cluster.seconds(controller.tables))
    assert controller.predicted_s(0) == pytest.approx(share * goal)
    assert (controller.tables.strength == 0) == weakest


def test_what_links_do_not_explain_is_the_median_of_what_was_seen() -> None:
    cluster = Cluster()
    controller = Controller(
        cluster.rungs[:1], cluster.deployment, 1.0, cluster.probe, patience=3
    )
    usual = controller.predicted_s()
    for _ in range(SEARCHES):
        for factor in (1.5, 4.0, 1.5):
            controller.observe(factor * usual)
    assert controller.predicted_s() == pytest.approx(1.5 * usual)


def test_rungs_have_to_rise() -> None:
    cluster = Cluster()
    with pytest.raises(UserError, match=r"rising strength, got \[0.2, 0.0\]"):
        Controller(
            [cluster.rungs[2], cluster.rungs[0]], cluster.deployment, 1.0, cluster.probe
        )
