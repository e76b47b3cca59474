"""Stands in for SGLang's compiled kernels, which have no CPU build on PyPI: it can be
imported from, not called.
"""

from collections.abc import Callable
from typing import Any

import torch

_operators = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (  # those that `models.qwen3_5` and linear attention take at their import
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _operators.define(f"{_name}(Tensor x) -> Tensor")


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a function that says what is missing."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled kernels")

    return missing
