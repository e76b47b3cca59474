"""Place experts on endpoints: in order, evenly loaded, or so that the measured traffic
avoids slow links.

A placement is an int array [E], or [L, E] with a placement for each MoE layer; every
endpoint holds E / N experts.

Not covered: copies of busy experts (EPLB's redundant ones); moving experts while a
server runs.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.base.errors import UserError
from fcsd.planning.network.links import LinkModel
from fcsd.planning.network.simulate import Payload, edge_times, simulate
from fcsd_steering.config import PlacedBy
from fcsd_steering.routing.exchanges import endpoint_counts

Placement = NDArray[np.int64]

_SWEEPS = 20  # sweeps over all experts of a layer; A.3's links need 2 to 5


def placed(
    by: PlacedBy, counts: NDArray[Any], links: LinkModel, payload: Payload
) -> Placement:
    """Return a placement [L, E] made by one of the functions below; counts: [L, N, E]
    pairs by source endpoint.
    """
    num_layers, num_endpoints, num_experts = counts.shape
    if by == "balanced":
        return balanced(counts.sum(1), num_endpoints)
    if by == "topology_aware":
        return topology_aware(counts, links, payload)
    return np.tile(contiguous(num_experts, num_endpoints), (num_layers, 1))


def contiguous(num_experts: int, num_endpoints: int) -> Placement:
    """Return a placement [E] in order, with experts 0 to E/N - 1 at endpoint 0; raise
    UserError if N does not divide E.
    """
    if num_endpoints < 1 or num_experts % num_endpoints:
        divisors = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise UserError(
            f"{num_experts} experts cannot be divided evenly among {num_endpoints}"
            f" endpoints; allowed: {', '.join(divisors)}"
        )
    return np.arange(num_experts) // (num_experts // num_endpoints)


def balanced(loads: NDArray[Any], num_endpoints: int) -> Placement:
    """Return a placement [..., E] for loads [..., E]: the busiest expert first, each to
    the least loaded endpoint with room.
    """
    room = int(np.bincount(contiguous(loads.shape[-1], num_endpoints))[0])
    placement = np.empty(loads.shape, dtype=np.int64)
    for layer in np.ndindex(loads.shape[:-1]):
        total, held = np.zeros(num_endpoints), np.zeros(num_endpoints, dtype=int)
        # Greedy: heavy experts first leave the light ones to even out the loads.
        for expert in np.argsort(-loads[layer], kind="stable"):
            endpoint = int(np.where(held < room, total, np.inf).argmin())
            placement[(*layer, expert)] = endpoint
            total[endpoint] += loads[(*layer, expert)]
            held[endpoint] += 1
    return placement


def topology_aware(
    counts: NDArray[Any], links: LinkModel, payload: Payload
) -> Placement:
    """Return a placement [L, E]: for each layer swap pairs of experts while that lowers
    the simulated time of its exchanges.

    counts: [L, N, E] pairs by source endpoint. The search starts with contiguous or
    balanced, whichever is faster in a layer, and ends in a local minimum, never slower
    than the start on these counts. Among swaps that do not change the slowest edge, the
    one that most lowers the edges near it is taken, which leaves room for other
    batches.
    """
    num_layers, num_endpoints, num_experts = counts.shape
    links.require(num_endpoints)
    starts = [
        contiguous(num_experts, num_endpoints),
        balanced(counts.sum(1), num_endpoints),
    ]
    placement = np.empty((num_layers, num_experts), dtype=np.int64)
    # Layers are independent: each has its own exchange.
    for layer, pairs in enumerate(counts.astype(np.float64)):
        begins = [np.broadcast_to(start, placement.shape)[layer] for start in starts]
        times = [
            _cost(links, endpoint_counts(pairs, start), payload)[0] for start in begins
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
        sweep_start = best
        for expert in experts:
            endpoint = placement[expert]
            # All swaps of this expert are priced in one vectorised simulation.
            candidates = experts[placement != endpoint]
            # Traffic that this expert's endpoint gains and the other expert's loses.
            moved = (pairs[:, candidates] - pairs[:, [expert]]).T[:, :, None]
            to_endpoint = (endpoints == endpoint).astype(float)
            from_partner = (endpoints == placement[candidates, None]).astype(float)[
                :, None, :
            ]
            time, total = _cost(
                links, traffic + moved * (to_endpoint - from_partner), payload
            )
            # The fastest swap; among equally fast swaps, that with the smaller sum over
            # edges.
            choice = int(np.lexsort((total, time))[0])
            if _less((time[choice], total[choice]), best):
                partner = candidates[choice]
                placement[expert], placement[partner] = placement[partner], endpoint
                traffic = endpoint_counts(pairs, placement)
                best = _cost(links, traffic, payload)
        # A sweep without any improvement is a local minimum.
        if not _less(best, sweep_start):
            break
    return placement


def _cost(links: LinkModel, traffic: NDArray[np.float64], payload: Payload) -> Any:
    """Return the seconds of an exchange of traffic [..., N, N], and the sum of its
    edges' eighth powers: a soft maximum that includes the edges near it. With the plain
    sum, placements were 1 % slower on other batches.
    """
    backward = np.swapaxes(traffic, -1, -2)
    edges = edge_times(links, "dispatch", traffic * payload.dispatch_bytes)
    edges = edges + edge_times(links, "combine", backward * payload.combine_bytes)
    return simulate(links, traffic, payload).total, (edges**8).sum((-2, -1))


def _less(candidate: Any, current: Any) -> bool:
    """Compare (time, sum over edges); the sum decides between equal times. Differences
    by rounding count as equal.
    """
    margin = 1e-9 * current[0]
    if abs(candidate[0] - current[0]) > margin:
        return bool(candidate[0] < current[0])
    return bool(candidate[1] < current[1] * (1 - 1e-9))
