"""Which endpoint holds which expert: in order, evenly loaded, or so that the measured
traffic avoids slow links.

A placement is an int array [E], or [L, E] with one for each MoE layer; every endpoint
holds E / N experts.

Not covered: copies of busy experts (EPLB's redundant ones); moving experts while a
server runs.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.base.errors import UserError
from fcsd.steering.config import PlacedBy
from fcsd.steering.network.links import LinkModel
from fcsd.steering.network.simulate import (
    Payload,
    edge_times,
    endpoint_counts,
    simulate,
)

Placement = NDArray[np.int64]

_SWEEPS = 20  # over all experts of a layer; A.3's links need 2 to 5


def placed(
    by: PlacedBy, counts: NDArray[Any], links: LinkModel, payload: Payload
) -> Placement:
    """Return [L, E] by one of the functions below; counts: [L, N, E] pairs by source endpoint."""
    num_layers, num_endpoints, num_experts = counts.shape
    if by == "balanced":
        return balanced(counts.sum(1), num_endpoints)
    if by == "topology_aware":
        return topology_aware(counts, links, payload)
    return np.tile(contiguous(num_experts, num_endpoints), (num_layers, 1))


def contiguous(num_experts: int, num_endpoints: int) -> Placement:
    """Return [E]: experts 0 to E/N - 1 at endpoint 0, and so on; UserError where N does
    not divide E.
    """
    if num_endpoints < 1 or num_experts % num_endpoints:
        divisors = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise UserError(
            f"{num_experts} experts cannot be shared out evenly over {num_endpoints}"
            f" endpoints; allowed: {', '.join(divisors)}"
        )
    return np.arange(num_experts) // (num_experts // num_endpoints)


def balanced(loads: NDArray[Any], num_endpoints: int) -> Placement:
    """Return loads' shape [..., E]: the busiest expert first, each to the least loaded
    endpoint that has room.
    """
    room = int(np.bincount(contiguous(loads.shape[-1], num_endpoints))[0])
    placement = np.empty(loads.shape, dtype=np.int64)
    for layer in np.ndindex(loads.shape[:-1]):
        total, held = np.zeros(num_endpoints), np.zeros(num_endpoints, dtype=int)
        for expert in np.argsort(-loads[layer], kind="stable"):
            endpoint = int(np.where(held < room, total, np.inf).argmin())
            placement[(*layer, expert)] = endpoint
            total[endpoint] += loads[(*layer, expert)]
            held[endpoint] += 1
    return placement


def topology_aware(
    counts: NDArray[Any], links: LinkModel, payload: Payload
) -> Placement:
    """Return [L, E]: for each layer swap pairs of experts while that lowers the
    simulated time of its exchanges.

    counts: [L, N, E] pairs by source endpoint. Starts with contiguous or balanced,
    whichever is faster in a layer, and is never slower than that on these counts; a
    local minimum. Among swaps that leave the slowest edge alone the one that lowers the
    edges near it most is taken, so that other batches find room there.
    """
    num_layers, num_endpoints, num_experts = counts.shape
    links.require(num_endpoints)
    starts = [
        contiguous(num_experts, num_endpoints),
        balanced(counts.sum(1), num_endpoints),
    ]
    placement = np.empty((num_layers, num_experts), dtype=np.int64)
    for layer, pairs in enumerate(counts.astype(np.float64)):
        begins = [np.broadcast_to(each, placement.shape)[layer] for each in starts]
        times = [
            _cost(links, endpoint_counts(pairs, each), payload)[0] for each in begins
        ]
        placement[layer] = _swapped(
            pairs, begins[int(np.argmin(times))].copy(), links, payload
        )
    return placement


def _swapped(
    pairs: NDArray[np.float64], placement: Placement, links: LinkModel, payload: Payload
) -> Placement:
    """Improve the placement [E] of one layer, pairs [N, E], until no swap does."""
    experts, endpoints = np.arange(len(placement)), np.arange(len(pairs))
    traffic = endpoint_counts(pairs, placement)
    best = _cost(links, traffic, payload)
    for _ in range(_SWEEPS):
        before = best
        for expert in experts:
            here = placement[expert]
            others = experts[placement != here]
            moved = (pairs[:, others] - pairs[:, [expert]]).T[
                :, :, None
            ]  # what `here` gets and the other gives up
            to_here = (endpoints == here).astype(float)
            from_there = (endpoints == placement[others, None]).astype(float)[
                :, None, :
            ]
            time, total = _cost(
                links, traffic + moved * (to_here - from_there), payload
            )
            choice = int(np.lexsort((total, time))[0])
            if _less((time[choice], total[choice]), best):
                other = others[choice]
                placement[expert], placement[other] = placement[other], here
                traffic = endpoint_counts(pairs, placement)
                best = _cost(links, traffic, payload)
        if not _less(best, before):
            break
    return placement


def _cost(links: LinkModel, traffic: NDArray[np.float64], payload: Payload) -> Any:
    """Return the seconds of an exchange of traffic [..., N, N], and the sum of its
    edges' eighth powers: a maximum that sees the edges near it. With the plain sum
    placements were 1 % slower on other batches."""
    backward = np.swapaxes(traffic, -1, -2)
    edges = edge_times(links, "dispatch", traffic * payload.dispatch_bytes)
    edges = edges + edge_times(links, "combine", backward * payload.combine_bytes)
    return simulate(links, traffic, payload).total, (edges**8).sum((-2, -1))


def _less(one: Any, other: Any) -> bool:
    """Compare (time, sum over edges), of which the first counts; rounding is no improvement."""
    margin = 1e-9 * other[0]
    if abs(one[0] - other[0]) > margin:
        return bool(one[0] < other[0])
    return bool(one[1] < other[1] * (1 - 1e-9))
