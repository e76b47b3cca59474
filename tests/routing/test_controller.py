"""The controller on links that change under it: exchanges are simulated on the true ones, with noise."""

from collections.abc import Callable

import numpy as np
import pytest

from fcsd.errors import UserError
from fcsd.routing.bias import BiasTables
from fcsd.routing.bottleneck import Deployment
from fcsd.routing.controller import Controller, Rung
from tests.routing.simulated import Routers, deployment_of, links_of


class Cluster:
    """Rungs 0, 1, 2 take ever more pairs off the edge 1 -> 2, and the controller believes in equal links."""

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
                    "bottleneck", 0.1 * k, False, (0,), each, self.deployment.placement, "qwen3_moe", 1
                ),
                routers.respond(each),
            )
            for k, each in enumerate(tables)
        ]

    def probe(self, phase: str, source: int, destination: int) -> tuple[float, float]:
        self.probes.append((phase, source, destination))
        return float(self.alpha[source, destination]), float(self.beta[source, destination])

    def seconds(self, tables: BiasTables) -> float:
        """What an exchange under these tables really takes."""
        true = Deployment(links_of(self.alpha, self.beta), self.deployment.payload, self.deployment.placement)
        return true.mean_time(next(rung.counts for rung in self.rungs if rung.tables is tables))

    def run(
        self, controller: Controller, times: int, noise: Callable[[], float] = lambda: 1.0
    ) -> list[float]:
        """The strengths after each of so many exchanges."""
        return [controller.observe(self.seconds(controller.tables) * noise()).strength for _ in range(times)]


def test_the_weakest_bias_within_the_goal_is_chosen_and_noise_changes_nothing() -> None:
    cluster = Cluster()
    rng = np.random.default_rng(0)
    goal = 1.05 * cluster.seconds(cluster.rungs[0].tables)
    controller = Controller(cluster.rungs, cluster.deployment, goal, cluster.probe)
    assert set(cluster.run(controller, 200, lambda: 1 + 0.08 * rng.uniform(-1, 1))) == {0.0}
    assert cluster.probes == []


def test_a_link_that_gets_slow_is_found_and_avoided_until_it_is_well_again() -> None:
    cluster = Cluster()
    goal = 1.6 * cluster.seconds(cluster.rungs[0].tables)
    controller = Controller(cluster.rungs, cluster.deployment, goal, cluster.probe, patience=3)
    cluster.run(controller, 10)
    cluster.beta[1, 2] = 2.5e-9
    strengths = cluster.run(controller, 120)
    assert strengths[-1] > 0 and cluster.seconds(controller.tables) <= goal
    assert controller.predicted_s() == pytest.approx(cluster.seconds(controller.tables), rel=0.1)
    assert {1, 2} in [{source, destination} for _, source, destination in cluster.probes]
    assert strengths == sorted(strengths)  # it rises and stays: no to and fro
    probes = len(cluster.probes)
    cluster.run(controller, 50)
    assert len(cluster.probes) == probes
    cluster.beta[1, 2] = 1e-9
    assert cluster.run(controller, 200)[-1] == 0.0


def test_one_slow_exchange_changes_nothing() -> None:
    cluster = Cluster()
    controller = Controller(cluster.rungs, cluster.deployment, 1.0, cluster.probe, patience=3)
    usual = cluster.seconds(controller.tables)
    for seconds in (usual, 5 * usual, 5 * usual, usual, 5 * usual, usual):
        controller.observe(seconds)
    assert cluster.probes == [] and controller.tables.strength == 0


def test_time_that_no_link_explains_counts_against_the_goal() -> None:
    """Everything takes 1.5 times as long, as under a loaded host: only the strongest bias is within the goal."""
    cluster = Cluster()
    times = [cluster.seconds(rung.tables) for rung in cluster.rungs]
    controller = Controller(cluster.rungs, cluster.deployment, 1.2 * times[0], cluster.probe, patience=3)
    for _ in range(60):
        controller.observe(1.5 * cluster.seconds(controller.tables))
    assert controller.predicted_s() == pytest.approx(1.5 * cluster.seconds(controller.tables), rel=0.1)


def test_rungs_have_to_rise() -> None:
    cluster = Cluster()
    with pytest.raises(UserError, match=r"rising strength, got \[0.2, 0.0\]"):
        Controller([cluster.rungs[2], cluster.rungs[0]], cluster.deployment, 1.0, cluster.probe)
