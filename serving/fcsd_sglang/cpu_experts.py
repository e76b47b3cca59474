"""A workaround for expert parallelism on CPUs: SGLang 0.5.23's native experts index
with -1, the id of other ranks' experts.
"""

from typing import Any


def skip_absent_experts() -> None:
    """Make the experts of other ranks contribute nothing in the native experts, which
    run without compiled kernels.
    """
    from sglang.srt.layers.moe import fused_moe_native

    stock = fused_moe_native.moe_forward_native
    if getattr(stock, "skips_absent_experts", False):
        return

    def moe_forward_native(
        layer: Any, x: Any, topk_output: Any, moe_runner_config: Any
    ) -> Any:
        token, choice = (topk_output.topk_ids >= 0).nonzero(as_tuple=True)
        if len(token) == topk_output.topk_ids.numel():
            return stock(layer, x, topk_output, moe_runner_config)
        summed = x.new_zeros(x.shape)
        if len(token):  # each choice of a local expert becomes a token with one expert
            one = topk_output._replace(
                topk_ids=topk_output.topk_ids[token, choice, None],
                topk_weights=topk_output.topk_weights[token, choice, None],
            )
            summed.index_add_(0, token, stock(layer, x[token], one, moe_runner_config))
        return summed

    moe_forward_native.skips_absent_experts = True  # type: ignore[attr-defined]
    fused_moe_native.moe_forward_native = moe_forward_native
