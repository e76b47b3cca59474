"""Exchanges of rows between ranks, which autograd launches at one point and waits for
at another.

An exchange is two autograd nodes, start and finish. Each is where the forward pass
launches or waits, so the backward pass, which runs nodes in the reverse order of their
creation, launches at the finish and waits at the start: it is overlapped by the same
computation. Autograd sees only a ticket of an exchange in flight, an empty tensor; rows and
handles are in the `Exchange`, so that nothing (a cast of FSDP, a hook, a checkpoint)
can read rows that have not arrived.

The routing weights travel with the dispatched rows. The outputs of a rank's experts for
a row are weighted and summed there, and come back as one row; g·w and the gradient of
the weights, g·y, are computed at the expert, too, which has y anyway. So no combined
rows are kept for the backward pass.

Not covered: the choice of rows (`fcsd.parallel.overlap.experts`); their transport
(`fcsd.parallel.overlap.transport`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from fcsd.parallel.overlap.rows import Parcels, gathered, pairs_of, summed
from fcsd.parallel.overlap.transport import Transport

Kind = Literal["dispatch", "combine", "counts"]


@dataclass
class Record:
    """The times of one exchange, in seconds of the port's clock.

    started: it was launched. waiting, waited: the host began to wait, and went on.
    needed: the computation reached the point where it reads the rows; in a blocking
    exchange that is long after `waited`. done: all rows had arrived, if the transport
    reports it.
    """

    kind: Kind
    layer: int
    backward: bool
    num_bytes: int
    started: float
    waiting: float | None = None
    waited: float | None = None
    needed: float | None = None
    done: float | None = None


@dataclass
class Port:
    """Settings that the exchanges of one MoE layer share.

    layer: its index. overlaps: whether exchanges of the forward pass, and of the
    backward pass, are left in flight; otherwise each is waited for at once. records: a
    list that gets (event, record) of each event, "start" or "wait"; None: no list.
    clock: of the records; on a GPU, a clock that waits for the device gives the times
    of the device's work.
    """

    transport: Transport
    layer: int = -1
    overlaps: tuple[bool, bool] = (True, True)
    records: list[tuple[str, Record]] | None = field(default=None, repr=False)
    clock: Callable[[], float] = time.perf_counter

    def launch(
        self,
        kind: Kind,
        backward: bool,
        received: Tensor,
        sent: Tensor,
        receive: list[int],
        send: list[int],
    ) -> Flight:
        """Start an exchange."""
        record = Record(
            kind, self.layer, backward, sent.numel() * sent.element_size(), self.clock()
        )
        # `fcsd.parallel.overlap.measure` finds exchanges in a trace by these labels.
        with torch.profiler.record_function(_label("start", record)):
            work = self.transport.start(received, sent, receive, send)
        if self.records is not None:
            self.records.append(("start", record))
            # Only the works of some transports report when they are done.
            if hasattr(work, "get_future"):
                work.get_future().add_done_callback(lambda _: _note_done(record))
        return Flight(self, record, work, (received, sent))


@dataclass
class Flight:
    """An exchange that is under way; holds its two tensors until it has been waited for."""

    port: Port
    record: Record
    work: Any
    tensors: tuple[Tensor, Tensor]

    def wait(self) -> Tensor:
        """Wait, and return the received rows."""
        if self.work is not None:
            self.record.waiting = self.port.clock()
            try:
                with torch.profiler.record_function(_label("wait", self.record)):
                    self.work.wait()
            # A rank has died, or has not reached this exchange in time.
            except RuntimeError as error:
                error.add_note(f"while this rank waited for {_named(self.record)}")
                raise
            self.record.waited = self.port.clock()
            if self.port.records is not None:
                self.port.records.append(("wait", self.record))
            self.work = None
        return self.tensors[0]


def _label(event: str, record: Record) -> str:
    return (
        f"farskip::{event} {record.kind} {'backward' if record.backward else 'forward'}"
        f" {record.layer}"
    )


def _named(record: Record) -> str:
    return (
        f"the {record.kind} of layer {record.layer},"
        f" {'backward' if record.backward else 'forward'} pass"
    )


def _note_done(record: Record) -> None:
    record.done = time.perf_counter()


class Exchange:
    """One exchange: of rows in the forward pass, and of their gradients, the opposite
    way, in the backward pass.

    send, receive: rows to and from each rank, in the forward pass. absent: the forward
    pass sends nothing, being a recomputation that knows the result.
    """

    # No dataclass: FSDP makes copies of those that it finds in a layer's arguments.
    def __init__(
        self,
        port: Port,
        kind: Kind,
        send: list[int],
        receive: list[int],
        *,
        absent: bool = False,
    ):
        self.port = port
        self.kind = kind
        self.send = send
        self.receive = receive
        self.absent = absent
        self._flight: Flight | None = None

    def start(self, rows: Tensor, *, backward: bool = False) -> None:
        """Launch with rows (N, …), in the order of their destination ranks."""
        if backward:
            # Gradients go back the way that the rows came.
            send, receive = self.receive, self.send
        else:
            send, receive = self.send, self.receive
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        self._flight = self.port.launch(
            self.kind, backward, received, rows.contiguous(), receive, send
        )
        # A blocking exchange is waited for where it starts.
        if not self.port.overlaps[backward]:
            self._flight.wait()

    def finish(self) -> Tensor:
        """Wait; return the rows, in the order of their source ranks."""
        assert self._flight is not None, (
            f"{self.kind} of layer {self.port.layer}: nothing is in flight"
        )
        # A blocking exchange arrived long ago: the difference is its window.
        self._flight.record.needed = self.port.clock()
        received = self._flight.wait()
        self._flight = None
        return received


class DispatchStart(torch.autograd.Function):
    """Send rows (M, D), and the weights (P,) and codes (P,) of their pairs, in parcels;
    return its ticket.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weights: Tensor,
        codes: Tensor,
        sent: Parcels,
        exchange: Exchange,
    ) -> Tensor:
        """Launch."""
        ctx.exchange, ctx.sent, ctx.dtype = exchange, sent, weights.dtype
        exchange.start(sent.pack(rows, weights, codes))
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Wait for the gradients."""
        parcels = ctx.exchange.finish()
        row_positions, weights, _ = ctx.sent.unpack(parcels)
        return parcels[row_positions], weights.to(ctx.dtype), None, None, None


class DispatchFinish(torch.autograd.Function):
    """Return the rows that have arrived, one for each pair (P, D), the weights, and the
    ids, rows and lengths of the pairs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ticket: Tensor,
        received: Parcels,
        num_experts: int,
        exchange: Exchange,
    ) -> Any:
        """Wait."""
        parcels = exchange.finish()
        row_positions, weights, codes = received.unpack(parcels)
        ids, row_of_pair, lengths = pairs_of(codes, received, num_experts)
        ctx.exchange, ctx.received, ctx.lengths = exchange, received, lengths
        # The layout of the pairs consists of integers without gradients.
        ctx.mark_non_differentiable(ids, row_of_pair, lengths)
        return parcels[row_positions[row_of_pair]], weights, ids, row_of_pair, lengths

    @staticmethod
    def backward(ctx: Any, rows: Tensor, weights: Tensor, *_: Any) -> Any:  # type: ignore[override]
        """Launch the gradients."""
        # One gradient per row: the gradients of its pairs are first summed in float32.
        gradient = summed(rows, ctx.lengths).to(rows.dtype)
        ctx.exchange.start(ctx.received.pack(gradient, weights), backward=True)
        return rows.new_empty(0), None, None, None


class Weighting(torch.autograd.Function):
    """Weight the experts' outputs (P, D) and sum those of a row, (M, D).

    Separate from the combine: this keeps tensors for the backward pass and the combine
    keeps none, so a recomputed layer that keeps nothing behind its combine ends here
    and does not send again.

    row, lengths: as in `Pairs`.
    """

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, weights: Tensor, row: Tensor, lengths: Tensor
    ) -> Tensor:
        """Return the rows."""
        # The outputs are kept for the gradient of the weights, g·y.
        ctx.save_for_backward(outputs, weights, row)
        return summed(outputs * weights.unsqueeze(-1), lengths).to(outputs.dtype)

    @staticmethod
    def backward(ctx: Any, rows: Tensor) -> Any:  # type: ignore[override]
        """Return each pair's gradient, weighted, and those of weights."""
        outputs, weights, row = ctx.saved_tensors
        gradients = rows[row]
        # g·w is the gradient of the outputs.
        weighted = (gradients * weights.unsqueeze(-1)).to(outputs.dtype)
        return weighted, (gradients.to(weights.dtype) * outputs).sum(-1), None, None


class CombineStart(torch.autograd.Function):
    """Send the rows (M, D) of the experts' outputs back; return its ticket."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        """Launch."""
        ctx.exchange = exchange
        if not exchange.absent:
            exchange.start(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Wait for the gradients."""
        return ctx.exchange.finish(), None


class CombineFinish(torch.autograd.Function):
    """Sum, for each of N tokens, the rows that have come back. tokens: (M,) the token
    of each row.
    """

    @staticmethod
    def forward(
        ctx: Any, ticket: Tensor, exchange: Exchange, tokens: Tensor, num_tokens: int
    ) -> Tensor:
        """Wait."""
        ctx.exchange, ctx.tokens = exchange, tokens
        return gathered(exchange.finish(), tokens, exchange.receive, num_tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        """Launch the gradients."""
        ctx.exchange.start(gradient[ctx.tokens], backward=True)
        return gradient.new_empty(0), None, None, None


class Known(torch.autograd.Function):
    """The value of the first pass, in a recomputation that waits for no exchange.

    Its backward never runs: non-reentrant checkpointing runs the graph of the first
    pass.
    """

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, value: Tensor) -> Tensor:
        """Return the value."""
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse."""
        raise RuntimeError(
            "a recomputed layer's own graph was run backwards; re-entrant checkpointing"
            " is refused"
        )
