"""Links that are not there: exchanges that sleep, or only say, what flows over edges
and shared ports would take.

Independent of `fcsd.planning.network.simulate`: bytes flow, flows of a shared port get
equal shares of its rate as far as their edges let them (max-min fair), and what is left
is divided again whenever a flow begins or ends.
"""

import time
from collections.abc import Callable

import numpy as np

from fcsd.planning.network.links import Array, LinkModel
from fcsd.planning.network.simulate import ExchangeTimes, Payload, edge_times
from fcsd_steering.network.measure import REPEATS


class Testbed:
    """N endpoints: latencies and seconds per byte [N, N], seconds per byte of egress and
    ingress ports [N] (0: not shared).

    delay: seconds that an exchange takes on top of it.
    """

    __test__ = False

    def __init__(
        self,
        alpha: Array,
        beta: Array,
        egress: Array | None = None,
        ingress: Array | None = None,
        delay: Callable[[], float] = lambda: 0.0,
    ):
        self.alpha, self.beta, self.delay = alpha, beta, delay
        self.size, self.collective = len(alpha), "p2p"
        none = np.zeros(len(alpha))
        self.ports = [
            none if egress is None else egress,
            none if ingress is None else ingress,
        ]
        self.calls = 0

    def __call__(self, num_bytes: Array) -> float:
        self.calls += 1
        return self.seconds(num_bytes) + self.delay()

    def seconds(self, num_bytes: Array) -> float:
        """When the last byte arrives."""
        size = len(num_bytes)
        left = {
            (u, v): float(num_bytes[u, v])
            for u in range(size)
            for v in range(size)
            if u != v
        }
        left = {edge: each for edge, each in left.items() if each > 0}
        now = 0.0
        while left:
            begun = [edge for edge in left if self.alpha[edge] <= now + 1e-12]
            rates = self._rates(begun)
            events = [self.alpha[edge] - now for edge in left if edge not in begun]
            events += [left[edge] / rates[edge] for edge in begun]
            step = min(events)
            now += step
            for edge in begun:
                left[edge] -= rates[edge] * step
            left = {edge: each for edge, each in left.items() if each > 1e-6}
        return now

    def _rates(self, flows: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
        """Raise all rates together; a flow stops at its edge's rate, or when a port of
        its is full.
        """
        rates: dict[tuple[int, int], float] = {}
        room = {
            (end, n): 1 / each
            for end in (0, 1)
            for n, each in enumerate(self.ports[end])
            if each > 0
        }
        rising = set(flows)
        while rising:
            of_port = {
                port: [f for f in rising if f[port[0]] == port[1]] for port in room
            }
            limits = {f: 1 / self.beta[f] for f in rising}
            for port, users in of_port.items():
                for flow in users:
                    limits[flow] = min(limits[flow], room[port] / len(users))
            lowest = min(limits.values())
            for flow in [f for f in rising if limits[f] <= lowest * (1 + 1e-9)]:
                rates[flow] = lowest
                rising.discard(flow)
                for end in (0, 1):
                    if (end, flow[end]) in room:
                        room[end, flow[end]] -= lowest
        return rates


class Sleeping(Testbed):
    """The same in real time, by the clock; an exchange that a busy machine has held up
    is made again.
    """

    def __call__(self, num_bytes: Array) -> float:
        self.calls += 1
        seconds = self.seconds(num_bytes)
        for _ in range(50):
            began = time.perf_counter()
            time.sleep(max(0.0, seconds - 5e-4))
            while time.perf_counter() - began < seconds:
                pass
            if (took := time.perf_counter() - began) < 1.003 * seconds:
                return took
        raise AssertionError(f"the machine is too busy to sleep {seconds:g} s")


def routed_counts(
    strength: float, alpha: Array, beta: Array, num_layers: int = 4
) -> Array:
    """Counts [L, N, N] of 512 tokens per endpoint, each to 4 of 32 experts with unequal
    popularity.

    Logits lose `strength` times the z-score of what an edge costs each of its sources
    (CAMoE, equations 10 to 13).
    """
    size, rng = len(alpha), np.random.default_rng(3)
    home = np.arange(32) // (32 // size)
    logits = rng.normal(size=(num_layers, size, 512, 32)) + rng.normal(
        size=(num_layers, 1, 1, 32)
    )

    def counts(given: Array) -> Array:
        chosen = home[np.argsort(-given, -1)[..., :4]]
        return np.stack(
            [(chosen == target).sum((-2, -1)) for target in range(size)], -1
        ).astype(np.float64)

    cost = (
        alpha + beta * counts(logits) * 1024 + alpha.T + beta.T * counts(logits) * 1024
    )
    score = (cost - cost.mean(-1, keepdims=True)) / cost.std(-1, keepdims=True)
    return counts(logits - strength * score[:, :, None, home])


def exchange_counts(
    exchange: Callable[[Array], float], counts: Array, payload: Payload
) -> ExchangeTimes:
    """Exchange what the counts [..., N, N] stand for, and measure what `simulate`
    predicts; every rank calls this.

    Rows go out and come back, and the counts go before, for each layer; the minimum of
    three repeats.
    """
    size = counts.shape[-1]

    def seconds(num_bytes: Array) -> Array:
        flat = [
            min(exchange(each) for _ in range(REPEATS))
            for each in num_bytes.reshape(-1, size, size)
        ]
        return np.array(flat).reshape(counts.shape[:-2])

    return ExchangeTimes(
        metadata=seconds(np.full(counts.shape, float(payload.metadata_bytes))),
        dispatch=seconds(counts * payload.dispatch_bytes),
        combine=seconds(np.swapaxes(counts, -1, -2) * payload.combine_bytes),
    )


def slowest_edge(links: LinkModel, num_bytes: Array) -> Array:
    """Return the seconds of a dispatch by its slowest edge alone (CAMoE, equation 9),
    whatever ports are shared.
    """
    return np.asarray(edge_times(links, "dispatch", num_bytes).max((-2, -1)))
