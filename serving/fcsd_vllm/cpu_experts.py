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
        given = signature.bind(*args, **kwargs).arguments
        if (expert_map := given["expert_map"]) is None:
            stock(**given)
            return
        local = expert_map[given["topk_ids"].long()]
        elsewhere = local < 0
        given["topk_ids"] = local.masked_fill(elsewhere, 0).to(given["topk_ids"].dtype)
        given["topk_weights"] = given["topk_weights"].masked_fill(elsewhere, 0)
        given["expert_map"] = None
        stock(**given)
        if given["apply_router_weight_on_input"]:
            given["output"].masked_fill_(
                elsewhere, 0
            )  # one expert per token; its weight is applied elsewhere

    apply.respects_expert_map = True  # type: ignore[attr-defined]
    Experts.apply = apply  # type: ignore[method-assign]
