"""Experts under autocast: their grouped matmul in half precision, which torch leaves in the dtype of the weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# transformers' loop for where torch's kernel cannot be had is an operator of its own.
_OPERATORS = (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback"))
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU"}
_libraries: list[torch.library.Library] = []  # a rule lasts as long as its library


def autocast_experts() -> None:
    """Give autocast a rule for grouped matmuls, as it has one for `mm` and `bmm`, for the rest of the process.

    transformers runs the experts of a MoE in one grouped matmul, for which torch's autocast has no rule
    (https://github.com/pytorch/pytorch/issues/174763): with float32 weights they run in float32, seven times as long
    on an H100 as in bfloat16 (docs/scale.md). Where torch brings a rule of its own, that is kept.
    """
    import transformers.integrations.moe  # noqa: F401, defines the second operator

    if _libraries:
        return
    for namespace, name in _OPERATORS:
        library = torch.library.Library(namespace, "IMPL")
        for device, key in _KEYS.items():
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"{namespace}::{name}", key):
                library.impl(name, _rule(getattr(getattr(torch.ops, namespace), name), device, key), key)
        _libraries.append(library)


def _rule(operator: Callable[..., Tensor], device: str, key: str) -> Callable[..., Tensor]:
    """Make the operator in autocast's dtype: float32 tensors are cast, as autocast does for `mm`."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def grouped(*tensors: Tensor | None, **others: Tensor | torch.dtype | None) -> Tensor:
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Tensor | torch.dtype | None) -> Tensor | torch.dtype | None:
            return x.to(dtype) if isinstance(x, Tensor) and x.dtype == torch.float32 else x

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(*map(cast, tensors), **{name: cast(x) for name, x in others.items()})

    return grouped
