"""The schedule of a rewired layer in which norms follow the sums over ranks, as in
Gemma 4; all of its second branch is in flight.

    h_k = o_{k-1} + N_a(A_k),  A_k = sum over ranks of attn_k
    o_k = s (h_k + N_f(N_1(M_k) + N_2(R_k))),  M_k, R_k = sums of the dense MLP and of the routed experts

A sum that is normed cannot be split, so attention of layer k+1 reads s h_k. M_k and R_k
are one collective, begun after the experts and waited for before the MLP of k+1; A_k is
begun before the MLP and waited for after the experts, and ends with its layer. With
`mlp: full`, A_k ends before the MLP, which reads h_k.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fcsd_vllm.schedule import Schedule


@dataclass(eq=False)
class NormedSchedule(Schedule):
    """One rewired layer; `shared` is its dense MLP."""

    before: Any = None
    """The schedule of the layer before, if that is rewired."""

    @property
    def operator(self) -> str:
        """Return the name of the custom op for `after_attention`."""
        return "after_attention_normed" if self.carries else "after_attention"

    @property
    def in_flight(self) -> bool:
        """Return False: M_k is in the same collective as R_k."""
        return False

    def after_attention(
        self, attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        """Compute the rest of the layer; `routed` is M and R of the layer before.

        Returns:
            s h_k, and the rest of o_k; if it is in flight, M_k and R_k side by side.
        """
        layer, attended = self.layer, self._start(attention, "attention")
        stream = base
        if routed is not None:
            arrived = self._wait(routed, "routed", self.first - 1)
            stream = base + self.before.update(arrived)
        if not self.outdated:
            stream = self._attended(stream, attended)
        assert self.shared is not None and self.block is not None
        dense = self.shared(self.norms[1](stream))
        experts = self.block(
            layer.pre_feedforward_layernorm_2(stream), layer.router(stream)
        )
        both = self._start(torch.cat((dense, experts), dim=-1), "routed")
        if self.outdated:
            stream = self._attended(stream, attended)
        if not self.carries:
            both = self.update(self._wait(both, "routed"))
        return stream * layer.layer_scalar, both

    def update(self, both: torch.Tensor) -> torch.Tensor:
        """Return what the stream gets of M_k and R_k, side by side."""
        layer: Any = self.layer
        dense, experts = both.chunk(2, dim=-1)
        total = layer.post_feedforward_layernorm_1(
            dense.contiguous()
        ) + layer.post_feedforward_layernorm_2(experts.contiguous())
        normed: torch.Tensor = layer.post_feedforward_layernorm(total)
        return normed * layer.layer_scalar

    def _attended(self, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Wait for A_k, and return the stream with it."""
        normed: torch.Tensor = self.layer.post_attention_layernorm(
            self._wait(attended, "attention")
        )
        return stream + normed
