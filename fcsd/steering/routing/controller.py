"""Choose the strength of a bias while a model runs, from the times of its exchanges.

The controller holds tables of rising strength, and the traffic of each, so that it can
say what each would take on the links as it knows them. Times that stay off its
prediction mean that the links have changed: it has the slowest edges measured again,
one by one until they explain the times, predicts anew, and takes the weakest tables
whose exchanges keep within the goal. A path that a bias keeps tokens off is not seen to
get well, so the one that is the slowest without a bias is measured again now and then.
What no edge explains (a busy host) slows all tables alike.

Not covered: traffic that drifts, which needs new tables.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.base.errors import UserError
from fcsd.steering.network.exchange import GroupExchange
from fcsd.steering.network.links import LinkModel, Phase
from fcsd.steering.network.profile import measure_edge
from fcsd.steering.routing.bias import BiasTables
from fcsd.steering.routing.bottleneck import Deployment

Probe = Callable[[Phase, int, int], tuple[float, float]]
"""Given a phase, a source and a destination, the latency and the seconds a byte that
its edge has now.
"""


PROBES, SEARCHES = 8, 3
"""Edges measured at once, and how often, before what they do not explain is put down to
something else than links.
"""


def probe_by(exchange: GroupExchange, links: LinkModel, largest_bytes: int) -> Probe:
    """Return a probe that measures an edge alone, between the endpoints of the links;
    all of them call it.

    fcsd sends all phases by one collective, with which the links must have been
    measured.
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
    """Hand every observed time to `observe`, the same one on all ranks; `tables` are
    those to use from then on.

    goal_s: seconds that an exchange may take, mean over layers. band: an observed time
    within this part of the predicted one says nothing new; a weaker bias has to keep
    this much below the goal. patience: observations, of which all have to say the same
    before anything changes. recheck: observations under a bias, after which what it is
    for is measured again.

    Raises:
        UserError: no rungs; rungs that are not of rising strength.
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
        """Those to use now."""
        return self._rungs[self._current].tables

    @property
    def links(self) -> LinkModel:
        """The links as the controller knows them now."""
        return self._deployment.links

    def predicted_s(self, rung: int | None = None) -> float:
        """Return the seconds of an exchange under the tables of a rung; None: those in use."""
        counts = self._rungs[self._current if rung is None else rung].counts
        return self._deployment.mean_time(counts) * self._unexplained

    def observe(self, seconds: float) -> BiasTables:
        """Take note of the time of an exchange, mean over layers; return the tables to use."""
        self._seen.append(seconds)
        off = [each / self.predicted_s() - 1 for each in self._seen]
        if len(off) < (self._seen.maxlen or 0) or not (
            min(off) > self.band or max(off) < -self.band
        ):
            self._since += 1
            if self._current and self._since >= self.recheck:
                self._measure_without_bias()
            return self.tables
        observed = float(np.median(self._seen))
        self._seen.clear()
        self._unexplained, self._since = 1.0, 0
        for _ in range(PROBES):
            if self._explains(observed) or not self._probe_slowest():
                break
        self._searches += 1
        if self._explains(observed) or self._searches == SEARCHES:
            self._unexplained = (
                1.0 if self._explains(observed) else observed / self.predicted_s()
            )
            self._searches = 0
            self._probed.clear()
        # At once with what was found: with it, the next times may be near enough to the
        # prediction to say nothing new.
        self._current = self._choice(self._current)
        return self.tables

    def _explains(self, observed: float) -> bool:
        return abs(observed / self.predicted_s() - 1) <= self.band

    def _choice(self, current: int | None = None) -> int:
        """Return the weakest rung within the goal, or the fastest; weaker than the one
        in use only with room left.
        """
        times = [self.predicted_s(rung) for rung in range(len(self._rungs))]
        for rung, time in enumerate(times):
            weaker = current is not None and rung < current
            if time <= self.goal_s * (1 - self.band if weaker else 1):
                return rung
        return int(np.argmin(times))

    def _probe_slowest(self) -> bool:
        """Measure again the slowest edge that was not since prediction and time agreed;
        False: none is left.
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
        """Measure the edges that would be the slowest under the weakest tables, until
        one is as slow as known.
        """
        for _ in range(PROBES):
            before = self.predicted_s(0)
            self._measure(self._slowest(0)[0])
            if self.predicted_s(0) > before * (1 - self.band):
                break
        self._since = 0
        if (choice := self._choice(self._current)) != self._current:
            self._current = choice
            self._seen.clear()

    def _slowest(self, rung: int) -> list[tuple[Phase, int, int]]:
        """Return all edges, those first that take the longest under the tables of a rung."""
        # [2, N, N]
        paths = self._deployment.paths(self._rungs[rung].counts).mean((0, 1))
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
