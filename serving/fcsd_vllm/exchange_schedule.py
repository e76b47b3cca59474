"""The schedule of a rewired layer with experts sharded over data-parallel ranks; each
rank computes its own attention.

    a | wait C of the layer before | router | start D | b | wait D | experts | start C | shared experts

D is the dispatch of layer k, C its combine; a is attention up to its kernel, b the
rest. So D runs beside b, and C beside the shared experts and a of layer k+1.
`docs/scale.md` has the other cases:

- If nothing is in flight when the layer begins, D starts before attention. If C must
  also end with the layer (`attention: full`), D runs beside a, and C beside b and the
  shared experts.
- The last layer of a run waits for its C.
- With `mlp: full`, or if attention has no single kernel at which to split, C runs
  beside all of attention and D beside the shared experts.
- A selected dense layer, and a mixer alone, wait for C after their attention and
  exchange nothing. Experts alone have D beside their shared experts; behind other
  experts, they run before they wait for C of these.

Attention is split where its kernel is called, inside vLLM's operator: a compiler sees
two operators per layer, and their data dependencies fix the order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention

from fcsd_vllm.exchange import Exchange
from fcsd_vllm.schedule import Schedule


@dataclass(eq=False)
class ExchangeSchedule(Schedule):
    """One rewired layer; between its operators it keeps what an operator cannot take as
    an argument."""

    exchange: Exchange | None = None
    """None for a dense layer."""
    before: Exchange | None = None
    """The exchange of the layer before, if it is in flight when this layer begins."""
    arrived: torch.Tensor | None = None
    """The previous layer's routed output, received from another pipeline stage."""
    base: torch.Tensor | None = None
    """The stream that attention reads."""
    stream: torch.Tensor | None = None
    """The stream that the block reads; set when the dispatch starts."""
    read: torch.Tensor | None = None
    """The same after the norm."""
    experts_ran: bool = False

    @property
    def in_flight(self) -> bool:
        """Return False: nothing but C is in flight."""
        return False

    def layer_input(
        self, stream: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream that attention reads, before and after the norm; it
        includes `routed` unless that is still to be received.
        """
        self.stream, self.experts_ran = None, False
        self.arrived = routed if self.begins_stage else None
        self.base = (
            stream.clone() if routed is None or self.receives else stream + routed
        )
        if self.outdated and not self.dense and not self.receives:
            self._dispatch(self.base)
        return self.base, self.norms[0](self.base)

    def between(self) -> None:
        """Run directly before attention's kernel."""
        if not self.outdated or self.dense:
            return
        if self.stream is None:
            self._dispatch(self._complete())
        elif not self.carries:
            self._run_experts()

    def after_attention(
        self, attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Compute the rest of the layer from its attention output; return the stream
        and the routed output.
        """
        if self.dense:
            return self._dense_layer(attention)
        if self.attention is None:
            return self._experts_alone(base, routed)
        beside_dispatch = self.stream is None
        if self.stream is None:
            stream = self._complete()
            self._dispatch(stream if self.outdated else stream + attention)
        assert self.exchange is not None and self.stream is not None
        parts = [attention] if self.outdated else []
        if self.shared is not None and beside_dispatch:
            parts.append(self.scaled(self.shared(self.read)))
        self._run_experts()
        if self.shared is not None and not beside_dispatch:
            parts.append(self.scaled(self.shared(self.read)))
        return self._ended(sum(parts, self.stream), base)

    def _experts_alone(
        self, base: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        self._dispatch(base)
        parts = []
        if self.shared is not None:
            parts.append(self.scaled(self.shared(self.read)))
        self._run_experts()
        if self.receives:
            assert self.before is not None
            parts.append(self.before.wait())
        return self._ended(sum(parts, base), base)

    def _ended(
        self, stream: torch.Tensor, base: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        assert self.exchange is not None
        self.base = self.stream = self.read = self.arrived = None
        if stream is base:
            stream = stream.clone()
        if self.carries:
            # In flight, the second output only marks the order: nothing is in it yet.
            return stream, torch.empty_like(stream)
        return stream, self.exchange.wait().contiguous()

    def finished(self, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the complete (stream, routed) of a layer that leaves sums in flight,
        for a pipeline boundary.
        """
        assert self.exchange is not None
        return outputs[0].clone(), self.exchange.wait().contiguous()

    def _complete(self) -> torch.Tensor:
        """Wait for the previous layer's routed output, and return the stream with
        it."""
        assert self.base is not None
        if not self.receives:
            return self.base
        if self.arrived is not None:
            return self.base + self.arrived
        assert self.before is not None
        return self.base + self.before.wait()

    def _dispatch(self, stream: torch.Tensor) -> None:
        assert self.exchange is not None
        self.stream, self.read = stream, self.norms[1](stream)
        self.exchange.start(self.read)

    def _run_experts(self) -> None:
        if not self.experts_ran:
            assert self.exchange is not None
            self.exchange.experts()
            self.experts_ran = True

    def _dense_layer(self, attention: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self._complete()
        stream = before + attention
        if self.block is None:
            return stream, torch.zeros_like(stream)
        read = self.norms[1](before if self.outdated else stream)
        out = self._branch(read)
        # The next stage takes hidden_states for a routed output.
        return (
            (stream + out, torch.zeros_like(out)) if self.ends_stage else (stream, out)
        )


def call_before_kernel(attention: nn.Module, run: Callable[[], None]) -> bool:
    """Make attention call `run` before its kernel; return False if it has no single
    kernel, as in linear attention.
    """
    kernels = [
        part
        for part in attention.modules()
        if isinstance(part, Attention | MLAAttention)
    ]
    if len(kernels) != 1:
        return False
    (module,) = kernels
    owner, name = module.impl, "forward"
    if isinstance(module, MLAAttention):
        owner, name = module, "forward_impl"
    kernel = getattr(owner, name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        run()
        return vars(forward)["kernel"](*args, **kwargs)

    vars(forward)["kernel"] = kernel  # here tests can observe it
    setattr(owner, name, forward)
    return True
