"""Workarounds for SGLang 0.5.23's native experts, which run on CPUs without compiled
kernels: they index with -1, the id of other ranks' experts, and refuse Llama 4's router
weights, which multiply the input of its experts.
"""

from dataclasses import replace
from typing import Any


def repair_native_experts() -> None:
    """Make the experts of other ranks contribute nothing, and router weights multiply
    inputs where the model says so.
    """
    from sglang.srt.layers.moe import fused_moe_native

    stock = fused_moe_native.moe_forward_native
    if getattr(stock, "is_repaired", False):
        return

    def moe_forward_native(
        layer: Any, x: Any, topk_output: Any, moe_runner_config: Any
    ) -> Any:
        on_input = moe_runner_config.apply_router_weight_on_input
        token, choice = (topk_output.topk_ids >= 0).nonzero(as_tuple=True)
        if not on_input and len(token) == topk_output.topk_ids.numel():
            return stock(layer, x, topk_output, moe_runner_config)
        summed = x.new_zeros(x.shape)
        if len(token):  # each choice of a local expert becomes a token with one expert
            read, weights = x[token], topk_output.topk_weights[token, choice, None]
            if on_input:
                read, weights = (
                    read * weights.to(x.dtype),
                    weights.new_ones(weights.shape),
                )
            one = topk_output._replace(
                topk_ids=topk_output.topk_ids[token, choice, None], topk_weights=weights
            )
            config = replace(moe_runner_config, apply_router_weight_on_input=False)
            summed.index_add_(0, token, stock(layer, read, one, config))
        return summed

    moe_forward_native.is_repaired = True  # type: ignore[attr-defined]
    fused_moe_native.moe_forward_native = moe_forward_native
