"""Experts without a gate (Nemotron-H: down(relu(up x)²)) on CPUs, by their equations.

vLLM's kernel for CPUs has gated experts alone, and its config refuses others there. Here
they are stood in for, so that tokens can be compared. Routing, weights and their shards,
shared experts and sums stay vLLM's.
"""

from typing import Any

import torch

ACTIVATION = "relu2_no_mul"


def stand_in() -> None:
    """Put the equations beside vLLM's kernel, before a model is made."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if cpu_moe.cpu_fused_moe is _run:
        return
    experts: Any = cpu_moe.CPUUnquantizedExperts
    ungated = MoEActivation.from_str(ACTIVATION)
    supports, pack = experts._supports_activation, experts.process_weights_after_loading
    check = FusedMoEConfig.__post_init__

    def checked(config: Any) -> None:
        try:
            check(config)
        except NotImplementedError:  # the last statement: all fields are set
            assert config.activation is ungated

    def packed(self: Any, layer: Any) -> None:
        if self.moe_config.activation is not ungated:
            pack(self, layer)

    FusedMoEConfig.__post_init__ = checked
    experts._supports_no_act_and_mul = staticmethod(lambda: True)
    experts._supports_activation = staticmethod(
        lambda activation: activation is ungated or supports(activation)
    )
    experts.process_weights_after_loading = packed
    _STOCK["run"], cpu_moe.cpu_fused_moe = cpu_moe.cpu_fused_moe, _run


_STOCK: dict[str, Any] = {}


def _run(
    output: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *given: Any,
) -> None:
    """Compute what vLLM's function of this signature computes; weights are
    (experts, out, in).
    """
    _, _, weights, ids, activation, *_ = given
    if activation != ACTIVATION:
        _STOCK["run"](output, x, up, down, *given)
        return
    total = torch.zeros_like(output)
    for expert in range(len(up)):
        weight = (weights * (ids == expert)).sum(-1, keepdim=True)
        total += weight * (torch.relu(x @ up[expert].T).square() @ down[expert].T)
    output.copy_(total)
