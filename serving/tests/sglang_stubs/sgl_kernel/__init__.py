"""Stands in for SGLang's compiled kernels, which have no CPU build on PyPI: it can be
imported from, not called.
"""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a function that says what is missing."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's compiled kernels")

    return missing
