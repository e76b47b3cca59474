"""A workaround for expert parallelism on CPUs: vLLM 0.32.0 indexes local experts with
global ids and crashes.

`CPUUnquantizedExperts.apply` ignores `expert_map`, although its class declares that it
accepts one (vllm issue 57837).
"""

import functools
import inspect
from typing import Any


def respect_expert_map() -> None:
    """Make the experts of other ranks contribute nothing; do nothing if this vLLM lacks
    the class.
    """
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (
            CPUUnquantizedExperts as Experts,
        )
    except ImportError:
        return
    stock = Experts.apply
    if getattr(stock, "respects_expert_map", False):
        return

    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def apply(*args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(*args, **kwargs).arguments
        if (expert_map := arguments["expert_map"]) is None:
            stock(**arguments)
            return
        local = expert_map[arguments["topk_ids"].long()]
        elsewhere = local < 0
        arguments["topk_ids"] = local.masked_fill(elsewhere, 0).to(
            arguments["topk_ids"].dtype
        )
        arguments["topk_weights"] = arguments["topk_weights"].masked_fill(elsewhere, 0)
        arguments["expert_map"] = None
        stock(**arguments)
        if arguments["apply_router_weight_on_input"]:
            # One expert per token; its weight is applied elsewhere.
            arguments["output"].masked_fill_(elsewhere, 0)

    apply.respects_expert_map = True  # type: ignore[attr-defined]
    Experts.apply = apply  # type: ignore[method-assign]
