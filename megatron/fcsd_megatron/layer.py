"""FarSkip connectivity as a layer of Megatron-Core. It is blocking: it waits for the
MoE block's exchanges at once.

    o_k = o_{k-1} + attn_k(a) + shared_k(m) + routed_k(m)

`a` and `m` are as in `fcsd.model.connectivity.spec.Connectivity`. The stream without
the routed output in flight passes from layer to layer as the `context` of Megatron's
block, which is otherwise unused in models without cross-attention. o_k - routed_k is a
sum without routed_k; nothing is subtracted. Modules, parameters and the names in the
state dict are those of Megatron's layer.
"""

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from fcsd.base.errors import UserError
from fcsd_megatron.plans import LayerPlan
from fcsd_megatron.refusals import check_options

Branch = tuple[torch.Tensor, torch.Tensor | None]
"""The return value of Megatron's attention and MLPs: output, and bias or None."""


class FarSkipTransformerLayer(TransformerLayer):
    """A rewired layer. `plan` comes from the spec (`fcsd_megatron.spec.with_farskip`),
    all other arguments from Megatron.
    """

    def __init__(
        self, config: Any, *args: Any, plan: LayerPlan, **options: Any
    ) -> None:
        check_options(config)
        super().__init__(config, *args, **options)
        if not isinstance(self.cross_attention, IdentityOp):
            raise UserError(
                "fcsd-megatron: cross-attention is not supported: it reads the"
                " context, in which FarSkip layers pass on a stream"
            )
        self.plan = plan

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
        *,
        padding_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return o_k, and o_k - routed_k if the next layer's attention reads it.

        Args:
            hidden_states: o_{k-1}, (T, B, D).
            context: o_{k-1} - routed_{k-1} if routed_{k-1} is in flight, else None.
            padding_mask: (B, T), True for padding, which Megatron's balance loss
                excludes.
            arguments: attention's arguments, passed on.

        Raises:
            UserError: the layer runs in Megatron's inference engines.
        """
        if inference_context is not None:
            raise UserError(
                "fcsd-megatron: inference in Megatron-Core is untested; serve with vLLM"
            )
        a = hidden_states if context is None else context
        attention = self.self_attention(
            self.input_layernorm(a), attention_mask=attention_mask, **arguments
        )
        stream = self.add(self.self_attn_bda, attention, hidden_states)
        m = self.pre_mlp_layernorm(hidden_states if self.plan.outdated else stream)
        if not self.is_moe_layer:
            return self.add(self.mlp_bda, self.mlp(m), stream), None
        shared, routed = self.branches(m, padding_mask)
        if shared is not None:
            stream = self.add(self.mlp_bda, (shared, None), stream)
        return self.add(self.mlp_bda, (routed, None), stream), (
            stream if self.plan.carry else None
        )

    def add(self, operator: Any, branch: Branch, stream: torch.Tensor) -> torch.Tensor:
        """Add a branch to the stream by Megatron's own operator, with its bias and its dropout."""
        with self.bias_dropout_add_exec_handler():
            total: torch.Tensor = operator(
                self.training, self.config.bias_dropout_fusion
            )(branch, stream, self.hidden_dropout)
        return total

    def branches(
        self, m: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the outputs of shared experts (None without them) and routed experts:
        `MoELayer.forward` in steps.
        """
        moe = self.mlp
        shared = moe.shared_experts_compute(m)
        probabilities, routing = moe.route(
            m, None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        )
        rows, probabilities = moe.preprocess(m, probabilities, routing)
        rows, probabilities = moe.dispatch(rows, probabilities)
        outputs, _ = moe.routed_experts_compute(rows, probabilities)
        return shared, moe.postprocess(moe.combine(outputs), None)
