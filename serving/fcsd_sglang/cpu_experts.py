"""A workaround for expert parallelism on CPUs: SGLang 0.5.23's native ones index with -1, others' id."""

from typing import Any


def skip_absent_experts() -> None:
    """Let the experts of other ranks add nothing, where the native experts are used: without compiled kernels."""
    from sglang.srt.layers.moe import fused_moe_native

    stock = fused_moe_native.moe_forward_native
    if getattr(stock, "skips_absent_experts", False):
        return

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, moe_runner_config: Any) -> Any:
        absent = topk_output.topk_ids < 0
        if not bool(absent.any()):
            return stock(layer, x, topk_output, moe_runner_config)
        weights = topk_output.topk_weights.masked_fill(absent, 0)
        present = topk_output._replace(topk_ids=topk_output.topk_ids.clamp(min=0), topk_weights=weights)
        return stock(layer, x, present, moe_runner_config)

    moe_forward_native.skips_absent_experts = True  # type: ignore[attr-defined]
    fused_moe_native.moe_forward_native = moe_forward_native
