"""The schedule of a rewired layer: its computation, and where each collective starts
and ends.

    A_k = sum over ranks of attn_k + shared_k     begun before the routed experts of k, waited for before attention k+1
    R_k = sum over ranks of routed_k              begun after them, waited for before the MoE block of k+1

so that routed experts hide A_k, and attention hides R_k. As in the regular model, a
layer has two collectives. The other cases of `fcsd.Connectivity`:

- A selected dense layer: one collective, of attn_k + mlp_k; nothing is in flight after
  it.
- `mlp: full`: A_k sums attn_k only and ends before the MoE block, which reads the
  stream after attention. If attention of k+1 reads the stream without routed_k,
  shared_k needs a third collective, beside the routed experts.
- `attention: full`, and the last layer of a run: A_k and R_k end with the layer.
- Where each layer is one branch, a mixer and the MoE layer behind it are one layer here:
  A_k sums mixer and shared experts, and the next mixer hides R_k. A mixer alone has one
  collective, which ends with it. Experts alone have R_k, and a collective of shared_k if
  R_k is in flight when they end; behind other experts they read the stream without their
  output, whose collective they hide.

The stream o_k passes between layers as the sum of vLLM's pair (hidden_states,
residual): hidden_states is routed_k, residual the rest. In flight, residual is (stream,
A_k): after both waits o_k = routed_k + stream + A_k.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fcsd_vllm.communication import Communication
from fcsd_vllm.field import Field
from fcsd_vllm.refusals import Refused


@dataclass(eq=False)
class Schedule:
    """One rewired layer: its parts, and the sums in flight when it begins and ends."""

    first: int
    """The layer of its attention; another one only where each layer is one branch."""
    index: int
    """The layer of its block, or of its attention if that is alone."""
    name: str
    """Under which the custom ops find it."""
    layer: Any
    """The module of the first."""
    attention: Any
    """None for experts alone."""
    norms: tuple[nn.Module, nn.Module]
    """Before attention; before the MoE block or the dense MLP."""
    factor: float
    """On the output of each branch."""
    block: nn.Module | None
    """MoE block, which gives the routed output alone; or the dense MLP. None for a mixer
    alone."""
    shared: nn.Module | None
    """Shared experts with their gate, taken out of the block."""
    dense: bool
    outdated: bool
    incoming: str
    """The content of the second collective that the previous layer may have in flight,
    named as in `flight`.
    """
    receives: bool
    """The previous layer's routed output comes apart from the stream, in flight unless
    `begins_stage`.
    """
    carries: bool
    """So is the own."""
    begins_stage: bool
    """First layer of a pipeline stage: the previous layer's sums are complete."""
    ends_stage: bool
    communication: Communication

    @property
    def operator(self) -> str:
        """Return the name of the custom op for `after_attention`."""
        return "after_attention_in_flight" if self.in_flight else "after_attention"

    @property
    def in_flight(self) -> bool:
        """Return whether a second collective, beside R_k, is in flight when the layer ends."""
        return self.carries and (self.outdated or self.shared is not None)

    @property
    def flight(self) -> str:
        """Return the content of that collective: attention with shared experts, or
        shared experts alone.
        """
        return _flight(self.outdated)

    def attention_input(
        self, stream: torch.Tensor, flight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the stream without the previous layer's routed output, before and
        after the norm.
        """
        if flight is None:
            base = stream.clone()
        else:
            base = stream + self._wait(flight, self.incoming, self.first - 1)
        return base, self.norms[0](base)

    def scaled(self, output: torch.Tensor) -> torch.Tensor:
        """Return the output of a branch as the stream gets it."""
        return output if self.factor == 1.0 else output * self.factor

    def after_attention(
        self, attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Compute the rest of the layer from its attention output.

        Args:
            attention: this rank's output, scaled and not summed; experts alone do not
                use it.
            base: the stream that attention read.
            routed: the previous layer's routed output, which attention did not read.

        Returns:
            stream, routed output, and A_k in flight (or the shared output with `mlp:
            full`).
        """
        if self.attention is None:
            return self._experts_alone(base, routed)
        early = None
        if not self.outdated or not (self.dense or self.shared is not None):
            early = self._start(attention, "attention")
        if routed is None:
            stream = base.clone()
        elif self.begins_stage:
            stream = base + routed
        else:
            stream = base + self._wait(routed, "routed", self.first - 1)
        if self.block is None:
            return stream, self._wait(early, "attention")
        if not self.outdated:
            stream = stream + self._wait(early, "attention")
        read = self.norms[1](stream)
        if self.dense:
            return self._dense(attention, stream, read)
        if self.outdated:
            return self._outdated(attention, early, stream, read)
        return self._full(stream, read)

    def _experts_alone(
        self, base: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        _, *outputs = self._full(base, self.norms[1](base))
        if routed is None:
            return base.clone(), *outputs
        return base + self._wait(routed, "routed", self.first - 1), *outputs

    def _dense(
        self, attention: torch.Tensor, stream: torch.Tensor, read: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        out = self._branch(read)
        out = self._wait(
            self._start(attention + out if self.outdated else out, "mlp"), "mlp"
        )
        if self.ends_stage:
            # The next stage takes hidden_states for a routed output.
            return stream + out, torch.zeros_like(out)
        return stream, out

    def _outdated(
        self,
        attention: torch.Tensor,
        early: torch.Tensor | None,
        stream: torch.Tensor,
        read: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        flight = early
        if self.shared is not None:
            flight = self._start(
                attention + self.scaled(self.shared(read)), "attention"
            )
        assert flight is not None
        routed = self._start(self._branch(read), "routed")
        if self.carries:
            return stream, routed, flight
        stream = stream + self._wait(flight, "attention")
        return stream, self._wait(routed, "routed")

    def _full(
        self, stream: torch.Tensor, read: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        if self.carries:
            if self.shared is None:
                return stream, self._start(self._branch(read), "routed")
            flight = self._start(self.scaled(self.shared(read)), "shared")
            return stream, self._start(self._branch(read), "routed"), flight
        # First, because experts may write into their input.
        shared = None if self.shared is None else self.scaled(self.shared(read))
        out = self._branch(read)
        if shared is not None:
            out = out + shared
        return stream, self._wait(self._start(out, "routed"), "routed")

    def _branch(self, read: torch.Tensor) -> torch.Tensor:
        assert self.block is not None
        return self.scaled(self.block(read))

    def _start(self, x: torch.Tensor, what: str) -> torch.Tensor:
        return self.communication.start(x, f"{what}.{self.index}")

    def _wait(
        self, x: torch.Tensor | None, what: str, index: int | None = None
    ) -> torch.Tensor:
        assert x is not None
        return self.communication.wait(
            x, f"{what}.{self.index if index is None else index}"
        )

    def finished(self, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the complete (stream, routed) of a layer that leaves sums in flight,
        for a pipeline boundary.
        """
        stream, routed, *flight = outputs
        stream = (
            stream + self._wait(flight[0], self.flight) if flight else stream.clone()
        )
        return stream, self._wait(routed, "routed").clone()


def place(field: Field, k: int, here: list[bool], is_moe: list[bool]) -> dict[str, Any]:
    """Return the fields of a selected layer's schedule that follow from its position.

    here: the layers of this pipeline stage.
    """
    begins_stage = k > 0 and not here[k - 1]
    return {
        "first": k,
        "index": k,
        "name": layer_name(k),
        "dense": not is_moe[k],
        "outdated": k in field.outdated,
        "incoming": _flight(k - 1 in field.outdated),
        "receives": (
            field.partial and k - 1 in field.layers and (begins_stage or is_moe[k - 1])
        ),
        "carries": field.partial and is_moe[k] and k + 1 in field.layers,
        "begins_stage": begins_stage,
        "ends_stage": k + 1 < len(here) and not here[k + 1],
    }


def branches(
    field: Field, here: list[bool], is_moe: list[bool]
) -> Iterator[dict[str, Any]]:
    """Yield what `place` returns of a model in which each layer is one branch: of each
    selected mixer with the selected experts behind it, and of those that are alone.

    Raises:
        Refused: a selected layer is in another pipeline stage.
    """
    for k in field.layers:
        if not here[k]:
            raise Refused(
                f"layer {k}: between pipeline stages, a mixer cannot be computed with"
                " the experts behind it; use --pipeline-parallel-size 1"
            )
        before, behind = k - 1 in field.layers, k + 1 in field.layers
        if not is_moe[k] and behind and is_moe[k + 1]:
            continue  # with its experts
        first = k - 1 if is_moe[k] and before and not is_moe[k - 1] else k
        yield {
            "first": first,
            "index": k,
            "name": layer_name(k),
            "dense": not is_moe[k],
            "outdated": first < k and k in field.outdated,
            "incoming": _flight(
                first - 1 in field.outdated
                and first - 2 in field.layers
                and not is_moe[first - 2]
            ),
            "receives": _is_partial(field, first, is_moe),
            "carries": _is_partial(field, k + 1, is_moe),
            "begins_stage": False,
            "ends_stage": False,
        }


def _is_partial(field: Field, k: int, is_moe: list[bool]) -> bool:
    """Return whether layer k is selected and reads the stream without the routed output
    of a selected layer before it.
    """
    if k not in field.layers or k - 1 not in field.layers or not is_moe[k - 1]:
        return False
    return k in field.outdated if is_moe[k] else field.partial


def _flight(outdated: bool) -> str:
    """Return the content of a layer's second collective: attention with shared experts,
    or shared experts alone.
    """
    return "attention" if outdated else "shared"


def layer_name(k: int) -> str:
    """Return the name under which the custom ops find a layer."""
    return f"fcsd.layers.{k}"


def pair(
    schedule: Schedule, outputs: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, Any]:
    """Return the layer's output in vLLM's loop: (hidden_states, residual)."""
    stream, routed, *flight = outputs
    if schedule.carries and not schedule.ends_stage:
        return routed, (stream, flight[0] if flight else None)
    return routed, stream
