"""A place in the middle of attention: between queries, keys and values, and the core.

transformers' attention modules call the function that `config._attn_implementation`
names in a registry. The functions in it are wrapped once, in the instance's own table;
the wrapper calls what a layer has left on the attention module, and is transparent to
all other modules. Eager attention is no entry of the registry, and linear attention
asks none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_CALLBACK = "_farskip_between"


def wrap_registry() -> None:
    """Wrap the registered attention functions."""
    for name in ALL_ATTENTION_FUNCTIONS.valid_keys():
        attend = ALL_ATTENTION_FUNCTIONS[name]
        if not hasattr(attend, _CALLBACK):
            ALL_ATTENTION_FUNCTIONS[name] = _calling_back(attend)


def _calling_back(attend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attend)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _call_back(module)
        return attend(module, *args, **kwargs)

    setattr(run, _CALLBACK, True)
    return run


# compiled attention is cut in two there: the exchanges are no part of either graph
@torch.compiler.disable
def _call_back(module: Any) -> None:
    # a family's own class calls it with a stand-in for itself
    module = getattr(module, "_module", module)
    callback = module.__dict__.pop(_CALLBACK, None)
    if callback is not None:
        callback()


@contextmanager
def between(attention: nn.Module, callback: Callable[[], None]) -> Iterator[None]:
    """Call back once in the middle of the module's forward.

    Raises:
        RuntimeError: it has asked the registry for nothing.
    """
    attention.__dict__[_CALLBACK] = callback
    try:
        yield
    except BaseException:
        attention.__dict__.pop(_CALLBACK, None)
        raise
    if attention.__dict__.pop(_CALLBACK, None) is not None:
        raise RuntimeError(
            f"{type(attention).__name__} did not call a registered attention function;"
            " attach with split='end'"
        )


def asks_registry(attention: nn.Module) -> bool:
    """Return whether the module's forward calls the registered function of its configuration."""
    config = getattr(attention, "config", None)
    if getattr(config, "_attn_implementation", "eager") == "eager":
        return False
    # A class that transformers does not have calls the one that it is made of.
    kinds = (
        one
        for one in type(attention).__mro__
        if one.__module__.startswith("transformers.")
    )
    kind: Any = next(kinds, type(attention))
    return "ALL_ATTENTION_FUNCTIONS" in _source(kind)


_source = functools.cache(inspect.getsource)
