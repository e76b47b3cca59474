"""Fit latency and rate of every edge and of shared ports from timed exchanges (CAMoE,
algorithm 1, and equal finish).

An exchange sends the bytes [N, N] between all endpoints and returns the seconds until
the slowest rank has finished. The number is the same on all ranks, so that all choose
the same next exchange. `fcsd_steering.network.exchange` implements it for a process
group.

1. Alone: every edge by itself. In fcsd one collective carries counts, rows and
   returning rows alike (the routing weights travel with the rows), so this is measured
   once, for all three phases.
2. One to many, and many to one: the edge that should be the slowest is sampled under
   contention, in dispatch and in combine. An edge with fewer than three sizes keeps
   what was measured alone.
3. Equal finish: bytes in inverse proportion to beta, so that edges that share nothing
   finish together. Where that takes longer than predicted, they share the endpoint's
   port, which gets a rate of its own; and step 2 is not used there, since it would
   charge the slowest edge for what all of them wait for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from fcsd.planning.network.links import Array, LinkModel

Exchange = Callable[[Array], float]
# Returns the minimum of the repeats for each pattern.
_Seconds = Callable[[Sequence[Array]], Array]

NUM_SIZES = 5
REPEATS = 3
SHARED = 1.15
"""Ratio of observed to predicted time of an equal finish, from which a port counts as
shared.
"""
_MIN_SIZES = 3  # samples of an edge in step 2
_MOST = (
    16  # a fast edge gets at most this many times the largest size in an equal finish
)


@dataclass(frozen=True)
class Line:
    """Seconds alpha, seconds per byte beta, and the share r2 of the times' variance
    that the line explains.
    """

    alpha_s: float
    beta_s_per_byte: float
    r2: float


def fit_line(num_bytes: Array, seconds: Array) -> Line:
    """Fit alpha, beta >= 0 by least squares of the relative errors.

    Errors are relative, since otherwise the largest transfer alone would decide, while
    alpha shows in the smallest. Without the bounds, a burst that a traffic shaper lets
    through makes alpha negative.
    """
    # alpha and beta differ by five orders of magnitude, so both are solved for in units
    # of the data.
    units = np.array([seconds.max(), seconds.max() / num_bytes.max()])
    rows = np.stack([np.ones_like(num_bytes), num_bytes], 1) * units / seconds[:, None]
    alpha, beta = lsq_linear(rows, np.ones_like(seconds), bounds=(0, np.inf)).x * units
    residual = float(((alpha + beta * num_bytes - seconds) ** 2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return Line(float(alpha), float(beta), 1 - residual / spread if spread > 0 else 0.0)


@dataclass
class _Edges:
    """The fitted values of the edges in one phase, [N, N] each."""

    alpha: Array
    beta: Array
    r2: NDArray[Any]
    refined: NDArray[np.bool_]

    def copy(self) -> "_Edges":
        return _Edges(
            self.alpha.copy(), self.beta.copy(), self.r2.copy(), self.refined.copy()
        )

    def put(self, edge: tuple[int, int], line: Line) -> None:
        self.alpha[edge] = line.alpha_s
        self.beta[edge] = line.beta_s_per_byte
        self.r2[edge] = line.r2

    def record(self, repeats: int) -> dict[str, Any]:
        return {
            "alpha_s": self.alpha.tolist(),
            "beta_s_per_byte": self.beta.tolist(),
            "r2": self.r2.tolist(),
            "refined": self.refined.tolist(),
            "repeats": repeats,
        }


def num_exchanges(size: int, repeats: int = REPEATS) -> int:
    """Return the number of exchanges that `profile` makes between `size` endpoints."""
    # For each endpoint and direction: one series for contention, one for the shared
    # port.
    together = 4 if size > 2 else 2  # two endpoints have no port to share
    return (
        size * (size - 1) * (1 + NUM_SIZES * repeats)
        + together * size * NUM_SIZES * repeats
    )


def profile(
    exchange: Exchange,
    facts: dict[str, Any],
    *,
    largest_bytes: int,
    repeats: int = REPEATS,
) -> LinkModel:
    """Measure all links; every rank calls this.

    facts: the fields of `LinkModel` about the measurement: endpoints, collective,
    backend, libraries. largest_bytes: the largest of the five evenly spaced sizes of a
    measurement. The minimum of `repeats` counts.
    """
    # All phases start from the edges measured alone; contention refines dispatch and
    # combine.
    size = len(facts["endpoints"])
    sizes, seconds = _sizes(largest_bytes), _repeated(exchange, repeats)
    alone = _measure_alone(exchange, seconds, sizes, size)
    phases, ports = {"metadata": alone}, {}
    for phase, name in (("dispatch", "egress"), ("combine", "ingress")):
        outward = name == "egress"
        shared = [
            _port(seconds, sizes, alone, endpoint, outward) for endpoint in range(size)
        ]
        ports[f"{name}_s_per_byte"] = shared
        phases[phase] = alone.copy()
        for endpoint in range(size):
            samples = _measure_contended(seconds, sizes, alone, endpoint, outward)
            if shared[endpoint] is None:
                _refine(phases[phase], samples)
    return LinkModel.model_validate(
        {
            **facts,
            "world_size": size,
            **{phase: edges.record(repeats) for phase, edges in phases.items()},
            "ports": ports,
        }
    )


def _sizes(largest_bytes: int) -> Array:
    return np.asarray(np.ceil(largest_bytes * np.arange(1, NUM_SIZES + 1) / NUM_SIZES))


def _repeated(exchange: Exchange, repeats: int) -> _Seconds:
    def seconds(patterns: Sequence[Array]) -> Array:
        # One pass over all sizes after another: a short disturbance then affects one
        # repeat of each size, not all repeats of one.
        return np.min(
            [[exchange(pattern) for pattern in patterns] for _ in range(repeats)],
            axis=0,
        )

    return seconds


def _alone(
    exchange: Exchange,
    seconds: _Seconds,
    sizes: Array,
    size: int,
    edge: tuple[int, int],
) -> Line:
    # The first use of a pair opens connections, which must not be timed.
    exchange(_pattern(size, {edge: sizes[-1]}))
    return fit_line(
        sizes, seconds([_pattern(size, {edge: num_bytes}) for num_bytes in sizes])
    )


def _edges_of(endpoint: int, size: int, outward: bool) -> list[tuple[int, int]]:
    peers = [peer for peer in range(size) if peer != endpoint]
    return [(endpoint, peer) if outward else (peer, endpoint) for peer in peers]


def _pattern(size: int, num_bytes: dict[tuple[int, int], float]) -> Array:
    pattern = np.zeros((size, size))
    for edge, value in num_bytes.items():
        pattern[edge] = value
    return pattern


def _measure_alone(
    exchange: Exchange, seconds: _Seconds, sizes: Array, size: int
) -> _Edges:
    zero = np.zeros((size, size))
    edges = _Edges(
        zero.copy(),
        zero.copy(),
        np.full((size, size), None),
        np.zeros((size, size), bool),
    )
    for endpoint in range(size):
        for edge in _edges_of(endpoint, size, True):
            edges.put(edge, _alone(exchange, seconds, sizes, size, edge))
    return edges


def _measure_contended(
    seconds: _Seconds, sizes: Array, alone: _Edges, endpoint: int, outward: bool
) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Return (bytes, seconds) of the edges that are predicted to be the slowest when
    this endpoint serves all others.
    """
    samples: dict[tuple[int, int], list[tuple[float, float]]] = {}
    edges = _edges_of(endpoint, len(alone.alpha), outward)
    measured = seconds(
        [
            _pattern(len(alone.alpha), dict.fromkeys(edges, num_bytes))
            for num_bytes in sizes
        ]
    )
    for num_bytes, second in zip(sizes, measured, strict=True):
        # The exchange lasts as long as its slowest edge, so the time is credited to the
        # edge predicted to be that.
        times = [alone.alpha[edge] + alone.beta[edge] * num_bytes for edge in edges]
        samples.setdefault(edges[int(np.argmax(times))], []).append((num_bytes, second))
    return samples


def _refine(
    edges: _Edges, samples: dict[tuple[int, int], list[tuple[float, float]]]
) -> None:
    for edge, measured in samples.items():
        num_bytes, seconds = np.array(measured).T
        # Fewer sizes cannot tell a line from noise.
        if len(set(num_bytes)) >= _MIN_SIZES:
            edges.put(edge, fit_line(num_bytes, seconds))
            edges.refined[edge] = True


def _port(
    seconds: _Seconds, sizes: Array, alone: _Edges, endpoint: int, outward: bool
) -> float | None:
    """Return the seconds per byte of the port that an endpoint's edges share; None if
    they finish as predicted.
    """
    edges = _edges_of(endpoint, len(alone.alpha), outward)
    if len(edges) < 2:  # nothing to share
        return None
    alpha, beta = (
        np.array([table[edge] for edge in edges]) for table in (alone.alpha, alone.beta)
    )
    # [sizes, edges]
    # Bytes in inverse proportion to beta let all edges of the endpoint finish together.
    sent = np.ceil(
        sizes[:, None] * np.minimum(_MOST, beta.max() / np.maximum(beta, 1e-30))
    )
    measured = seconds(
        [_pattern(len(alone.alpha), dict(zip(edges, row, strict=True))) for row in sent]
    )
    # Edges that share nothing all finish at this time.
    predicted = (alpha + beta * sent).max(1)
    if np.median(measured / predicted) <= SHARED:
        return None
    return fit_line(sent.sum(1), measured).beta_s_per_byte
