"""Workarounds for two faults of vLLM 0.32.0's experts on CPUs.

`CPUUnquantizedExperts.apply` ignores `expert_map`, although its class declares that it
accepts one (vllm issue 57837): it indexes local experts with global ids and crashes.
`CPURouter` without groups of experts ignores the bias by which experts are chosen, and
refuses sigmoids: MiniMax-M2 does not start, ERNIE 4.5 chooses other experts.
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


def choose_by_bias() -> None:
    """Make the router for CPUs choose among all experts as among one group, which it
    does with bias and sigmoid; do nothing if this vLLM lacks the class.
    """
    try:
        from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
    except ImportError:
        return
    stock = CPURouter.__init__
    if getattr(stock, "chooses_by_bias", False):
        return

    @functools.wraps(stock)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        biased = self.e_score_correction_bias is not None
        plain = not self.use_grouped_topk and self.custom_routing_function is None
        if plain and (
            self.scoring_func == "sigmoid"
            or (self.scoring_func == "softmax" and biased)
        ):
            self.use_grouped_topk = True
            self.num_expert_group = self.topk_group = 1

    __init__.chooses_by_bias = True  # type: ignore[attr-defined]
    CPURouter.__init__ = __init__  # type: ignore[method-assign]
