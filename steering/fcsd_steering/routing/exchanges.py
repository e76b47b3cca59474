"""Sum routed pairs into exchanges, and simulate their times.

X exchanges, L MoE layers, N endpoints, E experts, J batches of a text. Batch j is at
endpoint j mod N.
"""

import numpy as np
from numpy.typing import NDArray

from fcsd.planning.network.links import Array, LinkModel
from fcsd.planning.network.simulate import Payload, simulate


def endpoint_counts(
    counts: NDArray[np.generic], placement: NDArray[np.integer]
) -> Array:
    """Sum counts [..., N, E] of (source, expert) over the experts of each endpoint:
    [..., N, N] (equation 8).

    placement [E] or [..., E] names the endpoint of each expert.
    """
    num_endpoints = counts.shape[-2]
    # [..., E, N]
    # A matrix product sums the experts of each endpoint; an expert without an endpoint
    # (-1) is left out.
    one_hot = (placement[..., None] == np.arange(num_endpoints)).astype(np.float64)
    return np.asarray(counts.astype(np.float64) @ one_hot)


def exchange_counts(
    counts: NDArray[np.integer], num_endpoints: int, size: int = 1
) -> NDArray[np.int64]:
    """Sum the pairs [J, L, E] of batches into exchanges [X, L, N, E], each of the next
    `size` batches of all endpoints.

    An incomplete exchange at the end is dropped, unless it is the only one.
    """
    batches_per_exchange = size * num_endpoints
    num_exchanges = max(1, len(counts) // batches_per_exchange)
    # Batch j of an exchange is at endpoint j mod N.
    exchanges = np.zeros(
        (num_exchanges, counts.shape[1], num_endpoints, counts.shape[2]), dtype=np.int64
    )
    for j, batch in enumerate(counts[: num_exchanges * batches_per_exchange]):
        exchanges[j // batches_per_exchange, :, j % num_endpoints] += batch
    return exchanges


def exchange_times(
    links: LinkModel,
    counts: NDArray[np.integer],
    placement: NDArray[np.integer],
    payload: Payload,
) -> Array:
    """Return the seconds [X, L] of the exchanges whose pairs are counts [X, L, N, E];
    placement [L, E].
    """
    return simulate(links, endpoint_counts(counts, placement), payload).total
