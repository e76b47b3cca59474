"""Expert parallelism whose dispatch and combine can be started at one point of a
layer and finished at another.

`OverlappedEP` is registered with transformers by the name `IMPLEMENTATION`. Called
directly (regular layers, a regular teacher, a layer without an attached runtime), it
starts each exchange and waits for it. `fcsd.parallel.overlap.layer` calls its halves.

Each rank has different tokens; a token sends one row to each rank that holds one of its
experts. N tokens, K choices, E experts per rank, S ranks, M rows, P pairs of token and
expert.

Not covered: combination with tensor parallelism; not sending dropped pairs.
"""

import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.distributed.expert_parallel import (
    EPImplementation,
    EPImplementationInterface,
)

from fcsd.base.errors import UserError
from fcsd.parallel.overlap.exchange import (
    CombineFinish,
    CombineStart,
    DispatchFinish,
    DispatchStart,
    Exchange,
    Port,
    Weighting,
)
from fcsd.parallel.overlap.rows import Pairs, Parcels, word
from fcsd.parallel.overlap.transport import AllToAll, Transport, groups_beside

IMPLEMENTATION = "farskip"
"""Name of `OverlappedEP` as `DistributedConfig.ep_implementation`."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a rank sends and receives in a dispatch; the combine swaps
    them.
    """

    sent: Parcels
    received: Parcels


@dataclass
class Dispatch:
    """The rows of one layer on their way to the experts, with all that the combine
    needs.

    tokens: (M,) the number of each row's token, below num_tokens. ticket: of
    the exchange, for autograd.
    """

    sizes: Sizes
    tokens: Tensor
    num_tokens: int
    exchange: Exchange
    ticket: Tensor


class OverlappedEP(EPImplementation):
    """The all-to-all of one MoE layer, in halves."""

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any):
        super().__init__(experts, ep_mesh, tp_mesh)
        # transformers passes both meshes, of which only the experts' is supported.
        if tp_mesh.size() > 1:
            raise UserError(
                "ep_implementation farskip: does not work with tensor parallelism, but"
                f" tp_size is {tp_mesh.size()}; set it to 1, or use all_to_all"
            )
        experts.__dict__["farskip_ep"] = self
        self.num_here: int = experts.num_experts
        self.port = Port(AllToAll(ep_mesh.get_group()))
        self._counts: Transport = AllToAll(ep_mesh.get_group())
        self.has_rows = False
        self.scaled = len(inspect.signature(experts.forward).parameters) == 1
        # A forward with a single argument takes tokens that are scaled already.
        if self.scaled:
            experts_class: Any = type(experts)
            experts.__class__ = _called_with_rows(experts_class)

    def open(
        self, layer: int, overlaps: tuple[bool, bool], transport: Any = None
    ) -> None:
        """Prepare for exchanges that are left in flight; all ranks of the world call
        this. transport: makes a `Transport` for a process group.
        """
        rows, counts = groups_beside(self.ep_mesh.get_group())
        self.port = Port((transport or AllToAll)(rows), layer, overlaps)
        self._counts = AllToAll(counts)

    def start_dispatch(
        self, rows: Tensor, experts: Tensor, weights: Tensor, sizes: Sizes | None
    ) -> Dispatch:
        """Send each token (N, D) to the ranks of its experts (N, K), with its weights
        (N, K).

        sizes: the first pass's sizes, whose choices a recomputation repeats; None: the
        ranks exchange their counts.
        """
        ranks = experts // self.num_here
        is_sent = torch.zeros(
            len(rows), self.ep_mesh.size(), dtype=torch.bool, device=rows.device
        )
        is_sent = is_sent.scatter_(1, ranks, True)
        if sizes is None:
            counts = self._start_counts(is_sent, ranks, rows)
            rank_and_token = is_sent.t().nonzero()
        else:
            # On a GPU, nonzero() makes the host wait for the number of rows; known
            # sizes spare it that.
            num_rows = sum(sizes.sent.rows)
            rank_and_token = torch.nonzero_static(is_sent.t(), size=num_rows)
        # Rows are ordered by rank, then by token; pairs likewise, by a stable sort.
        tokens, order = rank_and_token[:, 1], ranks.view(-1).argsort(stable=True)
        row_of_pair = (is_sent.cumsum(0) - 1).gather(1, ranks)  # numbered per rank
        codes = (row_of_pair * self.num_here + experts % self.num_here).view(-1)[order]
        sent_rows, pair_weights = rows[tokens], weights.reshape(-1)[order]
        # The counts travelled while the rows were being sorted.
        if sizes is None:
            sizes = self._finish_counts(*counts)
        exchange = Exchange(
            self.port, "dispatch", sizes.sent.splits, sizes.received.splits
        )
        ticket = DispatchStart.apply(
            sent_rows, pair_weights, codes, sizes.sent, exchange
        )
        return Dispatch(sizes, tokens, len(rows), exchange, ticket)

    def _start_counts(
        self, is_sent: Tensor, ranks: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, int, Any]:
        """Tell each rank how many rows and pairs will come, and the bytes of a row."""
        pairs = (
            torch.zeros_like(is_sent, dtype=torch.long)
            .scatter_add_(1, ranks, torch.ones_like(ranks))
            .sum(0)
        )
        row_bytes = rows.shape[1] * rows.element_size()
        sent = torch.stack(
            [is_sent.sum(0), pairs, torch.full_like(pairs, row_bytes)], 1
        )
        received, one_per_rank = torch.empty_like(sent), [1] * len(sent)
        # Counts have a separate transport, and are waited for separately.
        port = Port(self._counts, self.port.layer, records=self.port.records)
        flight = port.launch(
            "counts", False, received, sent, one_per_rank, one_per_rank
        )
        return sent, received, row_bytes // word(rows.dtype)[0].itemsize, flight

    def _finish_counts(
        self, sent: Tensor, received: Tensor, row_words: int, flight: Any
    ) -> Sizes:
        flight.wait()
        counts = torch.cat([sent, received], 1)
        if counts.is_cuda:
            # Pinned, so that the copy is queued behind the computation and the host
            # waits only for it.
            pinned = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            pinned.copy_(counts, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            copied.synchronize()
            counts = pinned
        rows, pairs, own_bytes, rows_back, pairs_back, peer_bytes = counts.t().tolist()
        if peer_bytes != own_bytes:
            raise RuntimeError(
                f"layer {self.port.layer}: this rank dispatches rows of {own_bytes[0]}"
                f" bytes, the ranks of its group rows of {peer_bytes}: their models or"
                " precisions differ"
            )
        return Sizes(
            Parcels(sent[:, :2], rows, pairs, row_words),
            Parcels(received[:, :2], rows_back, pairs_back, row_words),
        )

    def finish_dispatch(self, dispatch: Dispatch) -> tuple[Tensor, Pairs]:
        """Return the rows that have arrived at this rank's experts, one for each pair
        (P, D), and the pairs.
        """
        rows, weights, *pair_layout = DispatchFinish.apply(
            dispatch.ticket, dispatch.sizes.received, self.num_here, dispatch.exchange
        )
        # Scaled experts take weighted inputs: the weight is used up before them.
        if self.scaled:
            rows = (rows * weights.unsqueeze(-1)).to(rows.dtype)
            weights = torch.ones_like(weights)
        return rows, Pairs(weights, *pair_layout)

    def run_experts(self, module: Any, rows: Tensor, pairs: Pairs) -> Tensor:
        """Compute the outputs (P, D) of this rank's experts, through the module, whose
        hooks gather its weights.
        """
        self.has_rows = True
        try:
            return _of_rows(module, rows, pairs.ids)
        finally:
            self.has_rows = False

    def start_combine(
        self, outputs: Tensor, pairs: Pairs, sizes: Sizes, *, absent: bool = False
    ) -> tuple[Tensor, Exchange]:
        """Send the experts' outputs back; return the ticket and the exchange. absent: a
        recomputation sends nothing.
        """
        receive, send = list(sizes.sent.rows), list(sizes.received.rows)
        exchange = Exchange(self.port, "combine", send, receive, absent=absent)
        rows = Weighting.apply(outputs, pairs.weights, pairs.row, pairs.lengths)
        ticket = CombineStart.apply(rows, exchange)
        return ticket, exchange  # type: ignore[return-value]

    @staticmethod
    def finish_combine(
        ticket: Tensor, exchange: Exchange, dispatch: Dispatch
    ) -> Tensor:
        """Return the routed output (N, D)."""
        return CombineFinish.apply(
            ticket, exchange, dispatch.tokens, dispatch.num_tokens
        )  # type: ignore[no-any-return]

    def _run_blocking(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the routed output (N, D); each exchange is waited for where it is launched."""
        # The same exchanges, with a port that leaves nothing in flight.
        port, self.port = self.port, replace(self.port, overlaps=(False, False))
        try:
            dispatch = self.start_dispatch(rows, experts, weights, None)
            arrived, pairs = self.finish_dispatch(dispatch)
            outputs = _of_rows(self._experts, arrived, pairs.ids)
            ticket, exchange = self.start_combine(outputs, pairs, dispatch.sizes)
            return self.finish_combine(ticket, exchange, dispatch)
        finally:
            self.port = port

    def _experts(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.scaled:
            return padded_experts(
                self.experts_forward, self.num_here, rows, ids.squeeze(-1)
            )
        return self.experts_forward(rows, ids, weights)  # type: ignore[no-any-return]

    def _run_scaled(self, rows: Tensor) -> Tensor:
        """Compute what experts return that take the scaled tokens of every expert,
        (experts x N, D): only rows that are not zero are sent.
        """
        # transformers multiplies each expert's copy of a token by its score, mostly
        # zero.
        chosen = (rows != 0).any(-1).nonzero().squeeze(-1)
        num_tokens = rows.shape[0] // (self.num_here * self.ep_mesh.size())
        experts = (chosen // num_tokens).unsqueeze(-1)
        outputs = self._run_blocking(
            rows[chosen], experts, rows.new_ones(experts.shape)
        )
        return torch.zeros_like(rows).index_copy(0, chosen, outputs)

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Any:
        """Compute this rank's experts for rows that have arrived, or, called plainly,
        exchange the rows as well.
        """
        # The module is called again from inside, with rows that have arrived.
        if self.has_rows:
            return self._experts(hidden_states, top_k_index, top_k_weights)
        if self.scaled:
            return self._run_scaled(hidden_states)
        return self._run_blocking(hidden_states, top_k_index, top_k_weights)


def _of_rows(experts: Any, rows: Tensor, ids: Tensor) -> Tensor:
    """Compute the outputs of rows (P, D), each by the expert that ids (P,) names.

    A rank without rows computes one of zeros, so that every rank has the same graph,
    and runs the same exchanges and reductions.
    """
    if not len(rows):
        return _of_rows(experts, rows.sum(0, keepdim=True), ids.new_zeros(1))[:0]
    ids = ids.unsqueeze(-1)
    return experts(rows, ids, torch.ones_like(ids, dtype=rows.dtype))  # type: ignore[no-any-return]


def padded_experts(forward: Any, num_experts: int, rows: Tensor, ids: Tensor) -> Tensor:
    """Compute experts that take equally many rows each: rows (R, D) of the experts
    ids (R,) are padded with zeros.
    """
    # The index of each row among its expert's rows.
    slot = (
        torch.nn.functional.one_hot(ids, num_experts)
        .cumsum(0)
        .gather(1, ids.unsqueeze(-1))
        .squeeze(-1)
        - 1
    )
    padded = rows.new_zeros(num_experts, int(slot.max()) + 1, rows.shape[-1]).index_put(
        (ids, slot), rows
    )
    outputs: Tensor = forward(padded.view(-1, rows.shape[-1]))
    return outputs.view(padded.shape)[ids, slot]


@functools.cache
def _called_with_rows(base: Any) -> Any:
    """Return a class of experts that can be called with rows alone; transformers' hook
    around them expects a routing, too.
    """

    def __call__(self: Any, rows: Tensor, *routing: Any) -> Any:
        return base.__call__(self, rows, *(routing or (None, None)))

    return type(base.__name__, (base,), {"__call__": __call__})


EPImplementationInterface.register(IMPLEMENTATION, OverlappedEP)
