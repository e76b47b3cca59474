"""Expert parallelism whose dispatch and combine can be started in one place and finished in another.

`OverlappedEP` is registered with transformers by the names in `IMPLEMENTATIONS`. Called plainly (regular layers, a
regular teacher, a layer that nothing was attached to) it is transformers' `all_to_all`, which blocks.
`fcsd.parallel.overlap.layer` calls its halves.

Each rank has tokens of its own; each (token, expert) pair is a row. N tokens, K choices, E experts a rank, S ranks.

Not covered: capacity factors and dropped tokens; one row for several experts of a rank; tensor parallelism beside it.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface

from fcsd.parallel.overlap.exchange import (
    CombineFinish,
    CombineStart,
    DispatchFinish,
    DispatchStart,
    Exchange,
    Port,
)
from fcsd.parallel.overlap.transport import AllToAll, Transport, groups_beside

IMPLEMENTATIONS = {"full": "farskip", "forward": "farskip_forward"}
"""What overlaps -> `DistributedConfig.ep_implementation`. Both are `OverlappedEP`; `attach` makes the difference."""


@dataclass(frozen=True)
class Sizes:
    """Which rows a rank sends and receives in a dispatch; the combine is the other way round.

    received: (S, E) rows from each rank for each expert of this one.
    """

    received: Tensor
    send: list[int]
    receive: list[int]


@dataclass
class Dispatch:
    """The rows of one layer on their way to the experts, and what brings them back.

    order: (N K,) the pairs of token and choice, by expert. weights: (N, K).
    """

    sizes: Sizes
    order: Tensor
    weights: Tensor
    width: int
    exchange: Exchange
    token: Tensor


class OverlappedEP(AllToAllEP):
    """transformers' all-to-all of one MoE layer, in halves."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any):
        super().__init__(experts, ep_mesh, tp_mesh)
        experts.__dict__["farskip_ep"] = self
        self.num_here: int = experts.num_experts
        self.port = Port(AllToAll(ep_mesh.get_group()))
        self._counts: Transport = AllToAll(ep_mesh.get_group())
        self._here = False
        self.scaled = len(inspect.signature(experts.forward).parameters) == 1
        if self.scaled:
            own: Any = type(experts)
            experts.__class__ = _called_with_rows(own)

    def open(self, layer: int, overlaps: tuple[bool, bool], transport: Any = None) -> None:
        """Prepare for the halves; all ranks of the world call this. transport: gives one for a process group."""
        rows, counts = groups_beside(self.ep_mesh.get_group())
        self.port = Port((transport or AllToAll)(rows), layer, overlaps)
        self._counts = AllToAll(counts)

    def start_dispatch(self, rows: Tensor, experts: Tensor, weights: Tensor, sizes: Sizes | None) -> Dispatch:
        """Send each token (N, D) to its experts (N, K), with its weights (N, K).

        sizes: of a first pass whose choices are made again; without them the ranks tell each other.
        """
        expert_ids, choices = experts.reshape(-1), experts.shape[-1]
        order = torch.argsort(expert_ids, stable=True)
        row_bytes = rows.shape[1] * rows.element_size()
        pending = self._start_counts(expert_ids, row_bytes) if sizes is None else None
        chosen, own_weights = rows[order // choices], weights.reshape(-1)[order]
        if self.scaled:
            chosen = chosen * own_weights.unsqueeze(-1)
            own_weights, weights = torch.ones_like(own_weights).detach(), torch.ones_like(weights)
        if pending is not None:
            sizes = self._finish_counts(*pending, row_bytes)
        assert sizes is not None
        exchange = Exchange(self.port, "dispatch", sizes.send, sizes.receive)
        token = DispatchStart.apply(chosen, own_weights, exchange)
        return Dispatch(sizes, order, weights.detach(), rows.shape[1], exchange, token)

    def _start_counts(self, expert_ids: Tensor, row_bytes: int) -> tuple[Tensor, Tensor, Any]:
        """Tell each rank how many rows come for each of its experts, and in a last column of what size."""
        ranks = self.ep_mesh.size()
        counts = expert_ids.new_zeros(self.num_here * ranks, dtype=torch.long)
        counts = counts.scatter_add_(0, expert_ids, torch.ones_like(expert_ids)).view(ranks, -1)
        sent = torch.cat([counts, torch.full_like(counts[:, :1], row_bytes)], 1)
        received = torch.empty_like(sent)
        each = [1] * ranks
        port = Port(self._counts, self.port.layer, records=self.port.records)
        return sent, received, port.launch("counts", False, received, sent, each, each)

    def _finish_counts(self, sent: Tensor, received: Tensor, flight: Any, row_bytes: int) -> Sizes:
        flight.wait()
        received, widths = received[:, :-1], received[:, -1]
        sizes = torch.stack([sent[:, :-1].sum(1), received.sum(1), widths])
        if sizes.is_cuda:
            # Pinned, so that the copy is queued behind the sums and the host waits for it alone.
            pinned = torch.empty(sizes.shape, dtype=sizes.dtype, pin_memory=True)
            pinned.copy_(sizes, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()
            sizes = pinned
        send, receive, every = sizes.tolist()
        if set(every) != {row_bytes}:
            raise RuntimeError(
                f"layer {self.port.layer}: this rank dispatches rows of {row_bytes} bytes, the ranks of its group rows"
                f" of {every}: their models or precisions differ"
            )
        return Sizes(received, send, receive)

    def finish_dispatch(self, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
        """Return the rows (R, D) that have come to this rank's experts, and their weights (R,)."""
        return DispatchFinish.apply(dispatch.token, dispatch.exchange, dispatch.width)  # type: ignore[return-value]

    def run_experts(self, module: Any, rows: Tensor, sizes: Sizes) -> Tensor:
        """Compute the outputs (R, D) of this rank's experts, through the module, whose hooks gather its weights."""
        ids = self._ids(rows, sizes).unsqueeze(-1)
        self._here = True
        try:
            if rows.shape[0]:
                return module(rows, ids, torch.ones_like(ids, dtype=rows.dtype))  # type: ignore[no-any-return]
            # One row of zeros, so that every rank has the same graph, and runs the same exchanges and reductions.
            row = rows.sum(0, keepdim=True)
            return module(row, ids.new_zeros((1, 1)), row.new_ones((1, 1)))[:0]  # type: ignore[no-any-return]
        finally:
            self._here = False

    def start_combine(
        self, outputs: Tensor, weights: Tensor, sizes: Sizes, *, absent: bool = False
    ) -> tuple[Tensor, Exchange]:
        """Send the experts' outputs back; return the token and the exchange. absent: a recomputation sends nothing."""
        exchange = Exchange(self.port, "combine", sizes.receive, sizes.send, absent=absent)
        return CombineStart.apply(outputs, weights, exchange), exchange

    @staticmethod
    def finish_combine(token: Tensor, exchange: Exchange, dispatch: Dispatch) -> Tensor:
        """Return the routed output (N, D)."""
        return CombineFinish.apply(token, exchange, dispatch.order, dispatch.weights)  # type: ignore[no-any-return]

    def _dense(self, rows: Tensor) -> Tensor:
        """Do what the experts do with scaled rows of all of them, (experts x N, D), of which few are not zero."""
        chosen = (rows != 0).any(-1).nonzero().squeeze(-1)
        num_tokens = rows.shape[0] // (self.num_here * self.ep_mesh.size())
        one = rows.new_ones(chosen.shape[0], 1)
        scaled, self.scaled = self.scaled, False  # they are
        dispatch = self.start_dispatch(rows[chosen], (chosen // num_tokens).unsqueeze(-1), one, None)
        self.scaled = scaled
        received, weights = self.finish_dispatch(dispatch)
        ids = self._ids(received, dispatch.sizes)
        if received.shape[0]:
            outputs = padded_experts(self.experts_forward, self.num_here, received, ids)
        else:
            row = received.sum(0, keepdim=True)
            outputs = padded_experts(self.experts_forward, self.num_here, row, chosen.new_zeros(1))[:0]
        token, exchange = self.start_combine(outputs, weights, dispatch.sizes)
        return torch.zeros_like(rows).index_copy(0, chosen, self.finish_combine(token, exchange, dispatch))

    def _ids(self, rows: Tensor, sizes: Sizes) -> Tensor:
        """Return (R,) the expert of this rank that each received row is for."""
        ids = torch.arange(self.num_here, device=rows.device).repeat(self.ep_mesh.size())
        return ids.repeat_interleave(sizes.received.reshape(-1), output_size=rows.shape[0])

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        """Give the experts of this rank their rows, or, called plainly, do what transformers does."""
        if self._here:
            if self.scaled:
                return padded_experts(
                    self.experts_forward, self.num_here, hidden_states, top_k_index.squeeze(-1)
                )
            return self.experts_forward(hidden_states, top_k_index, top_k_weights)
        if self.scaled:
            return self._dense(hidden_states)
        return super().__call__(hidden_states, top_k_index, top_k_weights)


def padded_experts(forward: Any, num_experts: int, rows: Tensor, ids: Tensor) -> Tensor:
    """Compute experts that take the same number of rows each: rows (R, D) of experts ids (R,), padded with zeros."""
    place = (
        torch.nn.functional.one_hot(ids, num_experts).cumsum(0).gather(1, ids.unsqueeze(-1)).squeeze(-1) - 1
    )
    padded = rows.new_zeros(num_experts, int(place.max()) + 1, rows.shape[-1]).index_put((ids, place), rows)
    outputs: Tensor = forward(padded.view(-1, rows.shape[-1]))
    return outputs.view(padded.shape)[ids, place]


@functools.cache
def _called_with_rows(base: Any) -> Any:
    """Return the class of experts that are called with rows alone; transformers' hook around them takes a routing."""

    def __call__(self: Any, rows: Tensor, *routing: Any) -> Any:
        return base.__call__(self, rows, *(routing or (None, None)))

    return type(base.__name__, (base,), {"__call__": __call__})


for _name in IMPLEMENTATIONS.values():
    EPImplementationInterface.register(_name, OverlappedEP)
