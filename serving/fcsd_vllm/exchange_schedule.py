"""The schedule of a rewired layer whose experts are spread over data-parallel ranks:
attention is this rank's own.

    a | wait C of the layer before | router | start D | b | wait D | experts | start C | shared experts

D is the dispatch of layer k, C its combine, a and b the parts of attention before and
from its kernel on. So D runs beside b, and C beside the shared experts and a of layer
k+1. The other cases are those of `docs/scale.md`:

- Nothing is in flight when the layer begins: D begins before all of attention. Where C
  may not outlast the layer, either (`attention: full`), D runs beside a, C beside b and
  the shared experts.
- The last layer of a run waits for its own C.
- `mlp: full`, and attention without the one kernel to cut at: C runs beside all of
  attention, D beside the shared experts.
- A selected dense layer waits for C after its attention and exchanges nothing.

The cut is made where the kernel is called, inside vLLM's own operator: a compiler sees
a layer's two operators, and their data alone fix the order.
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
    """One rewired layer; what an operator may not take it keeps between its operators."""

    exchange: Exchange | None = None
    """None for a dense layer."""
    before: Exchange | None = None
    """That of the layer before, where that is in flight when this one begins."""
    arrived: torch.Tensor | None = None
    """The routed output of the layer before from another stage of a pipeline."""
    base: torch.Tensor | None = None
    """The stream that attention reads."""
    stream: torch.Tensor | None = None
    """The stream that the block reads, from the start of the dispatch on."""
    read: torch.Tensor | None = None
    """The same after the norm."""
    experts_ran: bool = False

    @property
    def in_flight(self) -> bool:
        """Return False: beside C there is nothing."""
        return False

    def layer_input(
        self, stream: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream that attention reads, and that after the norm; `routed` is
        part of it if not received.
        """
        self.stream, self.experts_ran = None, False
        self.arrived = routed if self.begins_stage else None
        self.base = (
            stream.clone() if routed is None or self.receives else stream + routed
        )
        if self.outdated and not self.dense and not self.receives:
            self._dispatch(self.base)
        return self.base, self.layer.input_layernorm(self.base)

    def between(self) -> None:
        """Run what comes directly before the kernel of attention."""
        if not self.outdated or self.dense:
            return
        if self.stream is None:
            self._dispatch(self._complete())
        elif not self.carries:
            self._run_experts()

    def after_attention(
        self, attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Compute the layer from the output of its attention on; return the stream and
        the routed output.
        """
        if self.dense:
            return self._dense_layer(attention)
        beside_dispatch = self.stream is None
        if self.stream is None:
            stream = self._complete()
            self._dispatch(stream if self.outdated else stream + attention)
        assert self.exchange is not None and self.stream is not None
        parts = [attention] if self.outdated else []
        if self.shared is not None and beside_dispatch:
            parts.append(self.shared(self.read))
        self._run_experts()
        if self.shared is not None and not beside_dispatch:
            parts.append(self.shared(self.read))
        stream = sum(parts, self.stream)
        self.base = self.stream = self.read = self.arrived = None
        if stream is base:
            stream = stream.clone()
        # In flight the second is only what comes before the next layer: nothing is in
        # it yet.
        return stream, (
            torch.empty_like(stream)
            if self.carries
            else self.exchange.wait().contiguous()
        )

    def finished(self, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return (stream, routed) of a layer that carries, complete: for the boundary
        of a pipeline.
        """
        assert self.exchange is not None
        return outputs[0].clone(), self.exchange.wait().contiguous()

    def _complete(self) -> torch.Tensor:
        """Return the stream with the routed output of the layer before, waited for."""
        assert self.base is not None
        if not self.receives:
            return self.base
        if self.arrived is not None:
            return self.base + self.arrived
        assert self.before is not None
        return self.base + self.before.wait()

    def _dispatch(self, stream: torch.Tensor) -> None:
        assert self.exchange is not None
        self.stream, self.read = stream, self.layer.post_attention_layernorm(stream)
        self.exchange.start(self.read)

    def _run_experts(self) -> None:
        if not self.experts_ran:
            assert self.exchange is not None
            self.exchange.experts()
            self.experts_ran = True

    def _dense_layer(self, attention: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = self._complete()
        stream = before + attention
        out = self.block(
            self.layer.post_attention_layernorm(before if self.outdated else stream)
        )
        # The next stage takes hidden_states for a routed output.
        return (
            (stream + out, torch.zeros_like(out)) if self.ends_stage else (stream, out)
        )


def call_before_kernel(attention: nn.Module, run: Callable[[], None]) -> bool:
    """Let attention call `run` before its kernel; return False where it has no single
    one, as linear attention.
    """
    kernels = [
        part
        for part in attention.modules()
        if isinstance(part, Attention | MLAAttention)
    ]
    if len(kernels) != 1:
        return False
    owner, name = (
        (kernels[0], "forward_impl")
        if isinstance(kernels[0], MLAAttention)
        else (kernels[0].impl, "forward")
    )
    kernel = getattr(owner, name)

    def forward(*args: Any, **kwargs: Any) -> Any:
        run()
        return vars(forward)["kernel"](*args, **kwargs)

    vars(forward)["kernel"] = kernel  # where it can be watched
    setattr(owner, name, forward)
    return True
