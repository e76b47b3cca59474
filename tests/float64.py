"""Models wholly in float64, so that two ways to compute the same equations agree to
1e-13 on every CPU.

`model.double()` is not enough: transformers computes norms, softmaxes, rotations and
routers in float32 whatever the model's dtype. Two orders of summation then differ by
1e-6 to 1e-4, by CPU and by family, and a bound in between is a guess. Under
`in_float64`, code of a model that asks for float32 gets float64.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

BOUND = 1e-9
"""For numbers of size 5, and gradients of size 1. Measured over all families: at most
4e-13; a mutant gives 5e-2 and more."""

ROUNDINGS = 20
"""Where a test has to run in float32: two float32 results of the same equations may be
this many times as far from each other as one of them is from its float64 value."""


class _Float64(TorchFunctionMode):
    """Replace float32 by float64 in every call of torch."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if any(value is torch.float32 for value in args):
            args = map(_double, args)
        # most of the million calls of a module's tests
        if not kwargs and func is not torch.randn:
            return func(*args)
        kwargs = kwargs or {}
        # the numbers that float32 draws, so that models are the same
        if func is torch.randn and "dtype" not in kwargs:
            return func(*args, dtype=torch.float32, **kwargs).double()
        return func(*args, **{name: _double(value) for name, value in kwargs.items()})


def _double(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Make and call models in float64, the default dtype; processes that are forked
    meanwhile do the same.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    # The kernel of grouped matmuls takes no float64; transformers has a loop for such
    # cases.
    loop = mock.patch(
        "transformers.integrations.moe._can_use_grouped_mm", lambda *_: False
    )
    # A mode is off while it handles a call, as that of `backward`, in which
    # checkpointed layers run again.
    engine = torch.autograd._engine_run_backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        with _Float64():
            return engine(*args, **kwargs)

    try:
        with (
            loop,
            mock.patch("torch.autograd._engine_run_backward", backward),
            _Float64(),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, in units of numbers of size 5, of what was
    computed in float64.
    """
    assert actual.dtype == expected.dtype == torch.float64
    return float(
        (actual - expected).abs().max() / (expected.abs().max() / 5).clamp(min=1)
    )


@torch.no_grad()
def call_in_float64(model: Any, inputs: dict[str, Any]) -> Any:
    """Return the output of a model with float32 weights, computed in float64; the model
    is left unchanged.
    """
    assert model.dtype == torch.float32
    wide = {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    model.double()  # and back is exact
    try:
        with in_float64():
            return model(**wide, use_cache=False)
    finally:
        model.float()  # and not `to`, which takes complex buffers for float ones


def logits_in_float64(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the logits of `call_in_float64`."""
    return call_in_float64(model, inputs).logits
