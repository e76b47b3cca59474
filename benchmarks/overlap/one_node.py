"""The paper's backward pass (its section 4): one autograd node an exchange, and sequence numbers that are set.

The node launches, in both passes, and gives a buffer that rows are yet to arrive in. In the forward pass the runtime
waits where its schedule says. In the backward pass a hook on the node behind the exchange, which reads the gradients
next, waits before it. By itself autograd would run that node at once: of the nodes that are ready it takes the one
that was made last. So the exchange's node gets the number of the place where the forward pass has waited for it: it
launches as early as it can, and what was made between launch and wait runs before the hook.

For float32, without FSDP and without checkpointing: an unready buffer travels through autograd, where casts and hooks
would read it.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import fcsd.parallel.overlap.experts as runtime


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, exchange: Any, handles: dict[str, Any]) -> torch.Tensor:
        ctx.exchange, ctx.handles = exchange, handles
        handles["forward"] = _launch(exchange, rows, backward=False)
        return handles["forward"].tensors[0]

    @staticmethod
    def backward(ctx: Any, gradients: torch.Tensor) -> Any:
        ctx.handles["backward"] = _launch(ctx.exchange, gradients, backward=True)
        return ctx.handles["backward"].tensors[0], None, None


def _launch(exchange: Any, rows: torch.Tensor, *, backward: bool) -> Any:
    send, receive = (exchange.receive, exchange.send) if backward else (exchange.send, exchange.receive)
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    return exchange.port.launch(exchange.kind, backward, received, rows.contiguous(), receive, send)


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
    """As `fcsd.parallel.overlap.exchange.DispatchStart`; the weights are a column of the rows."""

    @staticmethod
    def apply(rows: torch.Tensor, weights: torch.Tensor, exchange: Any) -> torch.Tensor:
        return _start(torch.cat([rows, weights.to(rows.dtype).unsqueeze(1)], 1), exchange)


class _DispatchFinish:
    @staticmethod
    def apply(rows: torch.Tensor, exchange: Any, width: int) -> Any:
        rows = _finish(rows, exchange)
        return rows[:, :width], rows[:, width]


class _CombineStart:
    """Weighs the outputs at the expert, where autograd has the weights' gradient."""

    @staticmethod
    def apply(outputs: torch.Tensor, weights: torch.Tensor, exchange: Any) -> torch.Tensor:
        return _start(outputs * weights.unsqueeze(-1), exchange)


class _CombineFinish:
    @staticmethod
    def apply(rows: torch.Tensor, exchange: Any, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return _finish(rows, exchange)[order.argsort()].view(*weights.shape, -1).sum(1)


@contextlib.contextmanager
def one_node() -> Iterator[None]:
    """Let the exchanges of the runtime be of one node each while the context lasts."""
    own = {name: getattr(runtime, name) for name in _NODES}
    vars(runtime).update(_NODES)
    try:
        yield
    finally:
        vars(runtime).update(own)


_NODES = {
    "DispatchStart": _DispatchStart,
    "DispatchFinish": _DispatchFinish,
    "CombineStart": _CombineStart,
    "CombineFinish": _CombineFinish,
}
