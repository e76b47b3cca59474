"""Simulate the time of an expert-parallel exchange from links and token counts (CAMoE,
equations 8 and 9).

L MoE layers, N endpoints, E experts.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.planning.network.links import Array, LinkModel, Phase


def rows_per_token(
    num_experts: int,
    top_k: int,
    num_ranks: int,
    *,
    groups: tuple[int, int] = (1, 1),
    imbalance: float = 1.0,
) -> float:
    """Return the mean number of rows a token sends, where one row goes to each rank
    that has any of its experts.

    R (1 - C(E - E/R, K) / C(E, K)) for E experts in order over R ranks, any K of which
    are equally likely; it is the same for every rank, and each rank gets 1/R of the
    rows.

    groups: (G, g): the K experts are in g of the G groups into which the experts are
    divided in order; ignored where neither of G and R divides the other. imbalance:
    pairs of the busiest rank over the mean; every rank is charged its rows.
    """
    num_groups, chosen = groups
    if num_groups % num_ranks and num_ranks % num_groups:
        num_groups = chosen = 1
    # A rank holds whole groups, or a part of one: the chosen experts of a token are
    # spread over the g chosen groups.
    rank_groups = max(1, num_groups // num_ranks)
    group_experts = num_experts / max(num_groups, num_ranks)
    eligible_experts = num_experts * chosen // num_groups

    def missed(experts: float) -> float:
        return math.prod(
            max(0.0, 1 - experts / (eligible_experts - i)) for i in range(top_k)
        )

    # Hypergeometric in two stages: how many of the rank's groups are chosen, then
    # whether any of its experts is.
    hit = sum(
        math.comb(rank_groups, j)
        * math.comb(num_groups - rank_groups, chosen - j)
        * (1 - missed(j * group_experts * imbalance))
        for j in range(1, min(rank_groups, chosen) + 1)
    )
    return num_ranks * hit / math.comb(num_groups, chosen)


@dataclass(frozen=True)
class Payload:
    """The bytes of one token on the wire, with a separate row for each of its experts,
    as in CAMoE's equation 8.

    Training with `fcsd.parallel.overlap` sends fewer rows (`rows_per_token`), for which
    this is an upper bound.

    row_width: elements of an expert's input row (`fcsd.model.families.row_width`).
    row_width x value_bytes are sent in both directions, plus weight_bytes on the way
    out; num_experts counts of count_bytes each precede them.
    """

    row_width: int
    num_experts: int
    value_bytes: float = 2
    weight_bytes: float = 4
    count_bytes: int = 8

    @property
    def dispatch_bytes(self) -> float:
        """Bytes of one (token, expert) pair on its way to the expert."""
        return self.row_width * self.value_bytes + self.weight_bytes

    @property
    def combine_bytes(self) -> float:
        """Bytes of one (token, expert) pair on its way back."""
        return self.row_width * self.value_bytes

    @property
    def metadata_bytes(self) -> int:
        """Bytes of the counts from one endpoint to another."""
        return self.num_experts * self.count_bytes


@dataclass(frozen=True)
class ExchangeTimes:
    """Seconds of the three phases, each with the shape of the counts' leading axes."""

    metadata: Array
    dispatch: Array
    combine: Array

    @property
    def total(self) -> Array:
        """T_A2A of equation 9."""
        return self.metadata + self.dispatch + self.combine


def edge_times(links: LinkModel, phase: Phase, num_bytes: Array) -> Array:
    """Return alpha + beta * B for each edge, [..., N, N]; 0 on the diagonal, which
    needs no link.
    """
    return links.alpha(phase) + links.beta(phase) * num_bytes


def path_times(links: LinkModel, phase: Phase, num_bytes: Array) -> Array:
    """Return the seconds of each (source, destination) of an exchange of num_bytes
    [..., N, N]; 0 on the diagonal.

    The time is that of the edge (equation 9) or of the shared port it belongs to,
    whichever is longer. With half-duplex links (gloo's all_to_all_single) it is the
    time of the pair, whose two directions run one after another.

    Raises:
        UserError: the links were measured between other endpoints.
    """
    links.require(num_bytes.shape[-1])
    off = ~np.eye(len(links.endpoints), dtype=bool)
    alpha, sent = links.alpha(phase), np.where(off, num_bytes, 0.0)
    # Both directions share the wire, so each waits for the bytes of both.
    if links.half_duplex:
        wire = links.beta(phase) * sent
        return np.asarray(np.maximum(alpha, alpha.T) + wire + np.swapaxes(wire, -1, -2))
    # A shared port is free once all its bytes have passed, whichever edge they belong
    # to.
    times = edge_times(links, phase, num_bytes)
    egress = np.where(
        links.port("egress") > 0,
        alpha.max(1) + links.port("egress") * sent.sum(-1),
        0.0,
    )
    ingress = np.where(
        links.port("ingress") > 0,
        alpha.max(0) + links.port("ingress") * sent.sum(-2),
        0.0,
    )
    return np.where(
        off,
        np.maximum(times, np.maximum(egress[..., :, None], ingress[..., None, :])),
        0.0,
    )


def exchange_time(links: LinkModel, phase: Phase, num_bytes: Array) -> Array:
    """Return the seconds of one exchange of num_bytes [..., N, N] (source,
    destination): shape [...].
    """
    return np.asarray(path_times(links, phase, num_bytes).max((-2, -1)))


def simulate(links: LinkModel, counts: Array, payload: Payload) -> ExchangeTimes:
    """Simulate an MoE layer's exchanges from counts [..., N, N] of (token, expert)
    pairs by source and by the experts' endpoint.

    The counts are those after dropping, if tokens are dropped. Combine sends the same
    pairs back.
    """
    # Every endpoint sends the counts of all experts to every other, independently of
    # the routing.
    everywhere = np.broadcast_to(np.float64(payload.metadata_bytes), counts.shape)
    return ExchangeTimes(
        metadata=exchange_time(links, "metadata", everywhere),
        dispatch=exchange_time(links, "dispatch", counts * payload.dispatch_bytes),
        combine=exchange_time(
            links, "combine", np.swapaxes(counts, -1, -2) * payload.combine_bytes
        ),
    )


def rank_imbalance(loads: NDArray[Any], ranks: int) -> float:
    """Return the rows of the busiest rank over the mean of all ranks, as a mean over
    layers.

    loads: [L, E], E experts in order over the ranks. The result is at least 1; loads
    summed over a text are more even than those of a single step.
    """
    by_rank = loads.reshape(len(loads), ranks, -1).sum(-1)
    return float((by_rank.max(-1) / by_rank.mean(-1)).mean())
