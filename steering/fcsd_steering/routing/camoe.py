"""Compute CAMoE's bias: the time of each path, standardised over destinations
(equations 10 to 13).

L MoE layers, N endpoints, E experts. The diagonal, where tokens stay, costs nothing and
counts in mean and deviation, as printed in the paper; without it the bias overshoots:
on CAMoE's own links (A.3) a strength of 0.5 made exchanges 4 % slower.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.base.errors import UserError
from fcsd.planning.network.links import Array, LinkModel
from fcsd.planning.network.simulate import Payload
from fcsd_steering.config import SIGMA_FLOOR
from fcsd_steering.routing.exchanges import endpoint_counts


def camoe(
    counts: NDArray[Any],
    links: LinkModel,
    payload: Payload,
    placement: NDArray[np.integer],
    strength: float,
    *,
    logit_std: Array | None = None,
    sigma_floor: float = SIGMA_FLOOR,
) -> NDArray[np.float32]:
    """Return the tables [L, N, E] from the pairs [L, N, E] of one exchange; 0 for
    experts without an endpoint.

    strength: lambda of equation 13, in logits; with logit_std [L], in standard
    deviations of a layer's logits. placement: [L, E] or [E], -1: no endpoint.
    sigma_floor: least standard deviation of a row, as a fraction of its mean: among
    many equal links the printed z-score (floor 0) turns noise into large biases.

    Raises:
        UserError: strength is negative; the links have another number of endpoints.
    """
    if strength < 0:
        raise UserError(
            f"strength (lambda) {strength:g} is negative: it would push tokens to slow links"
        )
    links.require(counts.shape[-2])
    placement = np.broadcast_to(placement, (counts.shape[0], counts.shape[2]))
    pairs = endpoint_counts(counts, placement)  # equation 10
    dispatch = (
        links.alpha("dispatch")
        + links.beta("dispatch") * pairs * payload.dispatch_bytes
    )
    # The combine runs from the expert's endpoint back to the source, so its links are
    # transposed.
    combine = (
        links.alpha("combine").T
        + links.beta("combine").T * pairs * payload.combine_bytes
    )
    cost = dispatch + combine  # equation 11
    mean = cost.mean(-1, keepdims=True)
    sigma = np.maximum(cost.std(-1, keepdims=True), sigma_floor * mean)
    # equation 12
    standardised = np.divide(
        cost - mean, sigma, out=np.zeros(cost.shape), where=sigma > 0
    )
    # In deviations of the layer's logits, one strength pushes equally in all layers.
    unit = np.ones(len(counts)) if logit_std is None else logit_std
    return for_experts(-strength * unit[:, None, None] * standardised, placement)


def for_experts(values: Array, placement: NDArray[np.integer]) -> NDArray[np.float32]:
    """Give each expert its endpoint's value from [L, N, N]: [L, N, E]; 0 for an expert
    without an endpoint.
    """
    by_expert = np.take_along_axis(
        values, np.maximum(placement, 0)[:, None, :], axis=-1
    )
    return np.where(placement[:, None, :] < 0, 0, by_expert).astype(np.float32)
