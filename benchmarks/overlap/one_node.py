"""The paper's backward pass (its section 4): one autograd node per exchange, and
sequence numbers that are set.

The node launches the exchange, in both passes, and returns a buffer into which rows
have yet to arrive. In the forward pass the runtime waits where its schedule says. In
the backward pass a hook waits before the node after the exchange, which reads the
gradients next. On its own, autograd would run that node at once: of the nodes that are
ready it takes the one that was created last. The exchange's node therefore gets the
number of the place where the forward pass waited for it: it launches as early as it
can, and the nodes that were created between launch and wait run before the hook.

This works only for float32, without FSDP and without checkpointing: an incomplete
buffer travels through autograd, where casts and hooks would read it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import fcsd.parallel.overlap.experts as runtime
from fcsd.parallel.overlap.rows import pairs_of


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, exchange: Any, handles: dict[str, Any]
    ) -> torch.Tensor:
        ctx.exchange, ctx.handles = exchange, handles
        handles["forward"] = _launch(exchange, rows, backward=False)
        return handles["forward"].tensors[0]

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> Any:
        ctx.handles["backward"] = _launch(ctx.exchange, gradients, backward=True)
        return ctx.handles["backward"].tensors[0], None, None


def _launch(exchange: Any, rows: torch.Tensor, *, backward: bool) -> Any:
    send, receive = (
        (exchange.receive, exchange.send)
        if backward
        else (exchange.send, exchange.receive)
    )
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    return exchange.port.launch(
        exchange.kind, backward, received, rows.contiguous(), receive, send
    )


def _start(rows: torch.Tensor, exchange: Any) -> torch.Tensor:
    handles: dict[str, Any] = {}

    def wait(_: Any) -> None:
        handles["backward"].wait()

    rows.grad_fn.register_prehook(wait)
    out = _Node.apply(rows, exchange, handles)
    exchange.handles, exchange.node = handles, out.grad_fn
    return out


def _finish(rows: torch.Tensor, exchange: Any) -> torch.Tensor:
    exchange.handles["forward"].wait()
    exchange.node._set_sequence_nr(torch.autograd._get_sequence_nr())
    return rows


class _DispatchStart:
    """Like `fcsd.parallel.overlap.exchange.DispatchStart`, but packed where autograd
    sees it.
    """

    @staticmethod
    def apply(
        rows: torch.Tensor,
        weights: torch.Tensor,
        codes: torch.Tensor,
        sent: Any,
        exchange: Any,
    ) -> Any:
        of_rows, of_words = sent.places()
        pairs = torch.stack([codes.int().view(torch.float32), weights.float()], 1).view(
            -1
        )
        parcels = rows.new_zeros(sum(sent.splits), rows.shape[1]).index_put(
            (of_rows,), rows
        )
        packed = parcels.view(-1).index_put((of_words,), pairs).view_as(parcels)
        return _start(packed, exchange)


class _DispatchFinish:
    @staticmethod
    def apply(
        parcels: torch.Tensor, received: Any, num_experts: int, exchange: Any
    ) -> Any:
        parcels = _finish(parcels, exchange)
        of_rows, of_words = received.places()
        codes, weights = parcels.view(-1)[of_words].view(-1, 2).unbind(1)
        ids, row, lengths = pairs_of(
            codes.detach().contiguous().view(torch.int32).long(), received, num_experts
        )
        return parcels[of_rows[row]], weights, ids, row, lengths


class _Weighting:
    """Weights the outputs at the expert, where autograd has the gradient of the
    weights.
    """

    @staticmethod
    def apply(
        outputs: Any, weights: torch.Tensor, row: torch.Tensor, lengths: Any
    ) -> torch.Tensor:
        weighed = outputs * weights.unsqueeze(-1)
        return weighed.new_zeros(len(lengths), weighed.shape[1]).index_add(
            0, row, weighed
        )


class _CombineStart:
    @staticmethod
    def apply(rows: torch.Tensor, exchange: Any) -> Any:
        return _start(rows, exchange)


class _CombineFinish:
    @staticmethod
    def apply(
        rows: torch.Tensor, exchange: Any, tokens: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        rows = _finish(rows, exchange)
        return rows.new_zeros(num_tokens, rows.shape[1]).index_add(0, tokens, rows)


@contextlib.contextmanager
def one_node() -> Iterator[None]:
    """Inside the context, make each exchange of the runtime a single node."""
    own = {name: getattr(runtime, name) for name in _NODES}
    vars(runtime).update(_NODES)
    try:
        yield
    finally:
        vars(runtime).update(own)


_NODES = {
    "DispatchStart": _DispatchStart,
    "DispatchFinish": _DispatchFinish,
    "Weighting": _Weighting,
    "CombineStart": _CombineStart,
    "CombineFinish": _CombineFinish,
}
