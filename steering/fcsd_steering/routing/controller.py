"""Choose the strength of a bias while a model runs, from the times of its exchanges.

The controller has tables of rising strength and the traffic under each, so it can
predict the time of each on the known links. If times keep deviating from the
prediction, the links have changed: the controller measures the slowest edges again, one
by one until they explain the times, predicts again, and uses the weakest tables whose
exchanges stay within the goal. Traffic does not show that a path has recovered if a
bias avoids it, so the controller regularly measures the slowest unbiased path again.
Delays that no edge explains (a busy host) slow all tables alike.

Not covered: drifting traffic, which needs new tables.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.extension.base import UserError
from fcsd.extension.network import LinkModel, Phase
from fcsd_steering.network.exchange import GroupExchange
from fcsd_steering.network.profile import measure_edge
from fcsd_steering.routing.bias import BiasTables
from fcsd_steering.routing.bottleneck import Deployment

Probe = Callable[[Phase, int, int], tuple[float, float]]
"""Given a phase, a source and a destination, returns the edge's present latency and
seconds per byte.
"""


PROBES, SEARCHES = 8, 3
"""Edges measured at once, and the number of such searches, before an unexplained delay
is attributed to something other than links.
"""


def probe_by(exchange: GroupExchange, links: LinkModel, largest_bytes: int) -> Probe:
    """Return a probe that measures an edge alone, between the endpoints of the links;
    all endpoints call it.

    fcsd sends all phases by one collective; the links must have been measured with it.
    """
    size = len(links.endpoints)
    links.require(exchange.size, exchange.collective)

    def probe(phase: Phase, source: int, destination: int) -> tuple[float, float]:
        line = measure_edge(
            exchange, size, (source, destination), largest_bytes=largest_bytes
        )
        return line.alpha_s, line.beta_s_per_byte

    return probe


@dataclass(frozen=True)
class Rung:
    """Tables, and the pairs [X, L, N, E] of the calibration tokens under them."""

    tables: BiasTables
    counts: NDArray[Any]


class Controller:
    """Pass every observed time to `observe`, the same one on all ranks; then use
    `tables`.

    goal_s: seconds that an exchange may take, mean over layers. band: relative
    deviation from the prediction that is ignored; a weaker bias must stay below the
    goal by this much. patience: number of consecutive observations that must agree
    before anything changes. recheck: observations under a bias, after which the paths
    it avoids are measured again.

    Raises:
        UserError: no rungs, or rungs without rising strength.
    """

    def __init__(
        self,
        rungs: Sequence[Rung],
        deployment: Deployment,
        goal_s: float,
        probe: Probe,
        *,
        band: float = 0.1,
        patience: int = 5,
        recheck: int = 1000,
    ):
        strengths = [rung.tables.strength for rung in rungs]
        if not rungs or strengths != sorted(set(strengths)):
            raise UserError(
                f"controller: needs tables of rising strength, got {strengths}"
            )
        self.goal_s, self.band, self.recheck, self._probe = goal_s, band, recheck, probe
        self._rungs, self._deployment = list(rungs), deployment
        self._seen: deque[float] = deque(maxlen=patience)
        self._unexplained = 1.0  # observed / predicted that no probe explained
        self._probed: set[tuple[Phase, int, int]] = set()
        self._searches = self._since = 0
        self._current = self._choice()

    @property
    def tables(self) -> BiasTables:
        """The tables to use now."""
        return self._rungs[self._current].tables

    @property
    def links(self) -> LinkModel:
        """The links as the controller knows them now."""
        return self._deployment.links

    def predicted_s(self, rung: int | None = None) -> float:
        """Return the seconds of an exchange under a rung's tables; None: the tables in
        use.
        """
        counts = self._rungs[self._current if rung is None else rung].counts
        return self._deployment.mean_time(counts) * self._unexplained

    def observe(self, seconds: float) -> BiasTables:
        """Record the time of an exchange, mean over layers; return the tables to
        use.
        """
        self._seen.append(seconds)
        off = [seen_s / self.predicted_s() - 1 for seen_s in self._seen]
        if len(off) < (self._seen.maxlen or 0) or not (
            min(off) > self.band or max(off) < -self.band
        ):
            self._since += 1
            if self._current and self._since >= self.recheck:
                self._measure_without_bias()
            return self.tables
        # All recent times are off in the same direction: the links, or the host, have
        # changed.
        observed = float(np.median(self._seen))
        self._seen.clear()
        self._unexplained, self._since = 1.0, 0
        # Probing stops at the edge that explains the times, since every probe takes
        # time from the run.
        for _ in range(PROBES):
            if self._explains(observed) or not self._probe_slowest():
                break
        # After SEARCHES fruitless searches the rest is attributed to the host, as a
        # factor on all predictions.
        self._searches += 1
        if self._explains(observed) or self._searches == SEARCHES:
            self._unexplained = (
                1.0 if self._explains(observed) else observed / self.predicted_s()
            )
            self._searches = 0
            self._probed.clear()
        # Choose at once: with the links just measured, the next times may be too near
        # the prediction to trigger a choice.
        self._current = self._choice(self._current)
        return self.tables

    def _explains(self, observed: float) -> bool:
        return abs(observed / self.predicted_s() - 1) <= self.band

    def _choice(self, current: int | None = None) -> int:
        """Return the weakest rung within the goal, or else the fastest; a rung weaker
        than the present one needs a margin.
        """
        times = [self.predicted_s(rung) for rung in range(len(self._rungs))]
        for rung, time in enumerate(times):
            weaker = current is not None and rung < current
            if time <= self.goal_s * (1 - self.band if weaker else 1):
                return rung
        return int(np.argmin(times))

    def _probe_slowest(self) -> bool:
        """Measure the slowest edge that has not been measured since prediction and time
        last agreed; return False if none is left.
        """
        left = [
            edge for edge in self._slowest(self._current) if edge not in self._probed
        ]
        if not left:
            return False
        self._probed.add(left[0])
        self._measure(left[0])
        return True

    def _measure_without_bias(self) -> None:
        """Measure the edges that would be the slowest with the weakest tables, until
        one is confirmed to be as slow as assumed.
        """
        for _ in range(PROBES):
            predicted_s = self.predicted_s(0)
            self._measure(self._slowest(0)[0])
            if self.predicted_s(0) > predicted_s * (1 - self.band):
                break
        self._since = 0
        if (choice := self._choice(self._current)) != self._current:
            self._current = choice
            self._seen.clear()

    def _slowest(self, rung: int) -> list[tuple[Phase, int, int]]:
        """Return all edges, the slowest with the tables of a rung first."""
        # [2, N, N]
        paths = self._deployment.paths(self._rungs[rung].counts).mean((0, 1))
        # `paths` are by (source, endpoint of the expert); a combine travels the other
        # way.
        paths[1] = paths[1].T
        phases: tuple[Phase, Phase] = ("dispatch", "combine")
        order = [
            np.unravel_index(k, paths.shape) for k in np.argsort(-paths, axis=None)
        ]
        return [(phases[int(p)], int(u), int(v)) for p, u, v in order if u != v]

    def _measure(self, edge: tuple[Phase, int, int]) -> None:
        phase, source, destination = edge
        alpha, beta = self._probe(phase, source, destination)
        links = self.links.model_dump()
        links[phase]["alpha_s"][source][destination] = alpha
        links[phase]["beta_s_per_byte"][source][destination] = beta
        self._deployment = replace(
            self._deployment, links=LinkModel.model_validate(links)
        )
