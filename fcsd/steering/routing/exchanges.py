"""The times of a model's exchanges on given links, from the experts that its tokens chose batch by batch.

L MoE layers, N endpoints, E experts, J batches. Batch j is at endpoint j mod N; an exchange carries the next `size`
batches of every endpoint.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.steering.network.links import Array, LinkModel
from fcsd.steering.network.simulate import Payload, endpoint_counts, simulate


def exchange_counts(counts: NDArray[np.integer], num_endpoints: int, size: int = 1) -> NDArray[np.int64]:
    """Sum the pairs [J, L, E] of batches into exchanges [X, L, N, E].

    What is left over at the end makes no exchange, unless there is no other.
    """
    each = size * num_endpoints
    whole = max(1, len(counts) // each)
    found = np.zeros((whole, counts.shape[1], num_endpoints, counts.shape[2]), dtype=np.int64)
    for j, batch in enumerate(counts[: whole * each]):
        found[j // each, :, j % num_endpoints] += batch
    return found


def exchange_times(
    links: LinkModel, counts: NDArray[np.integer], placement: NDArray[np.integer], payload: Payload
) -> Array:
    """Return the seconds [X, L] of the exchanges whose pairs are counts [X, L, N, E]; placement [L, E]."""
    return simulate(links, endpoint_counts(counts, placement), payload).total


def time_summary(times: Array) -> dict[str, Any]:
    """Return mean and 95th percentile over exchanges and layers, in seconds, and how many those are."""
    return {
        "mean_s": float(times.mean()),
        "p95_s": float(np.percentile(times, 95)),
        "num_exchanges": int(times.size),
    }
