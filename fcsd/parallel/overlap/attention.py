"""Cut attention in the middle: between queries, keys and values, and the core.

transformers' attention modules call the function that `config._attn_implementation`
names in a registry. Its functions are wrapped once, in the instance's own table; the
wrapper runs the callback that a layer has left on the attention module, and is
transparent to all other modules. Eager attention is not in the registry, and linear
attention does not use one.
"""

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


# Compiled attention is cut in two graphs here; the exchanges are in neither.
@torch.compiler.disable
def _call_back(module: Any) -> None:
    # A family's own attention class may pass a stand-in (`View`) for itself.
    module = getattr(module, "_module", module)
    # Removed before the call: the callback runs once for each forward.
    callback = module.__dict__.pop(_CALLBACK, None)
    if callback is not None:
        callback()


@contextmanager
def between(attention: nn.Module, callback: Callable[[], None]) -> Iterator[None]:
    """Call back once in the middle of the module's forward.

    Raises:
        RuntimeError: the module has not called a registered function.
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
    # A generated or custom class inherits the forward of a class of transformers.
    library_classes = (
        cls
        for cls in type(attention).__mro__
        if cls.__module__.startswith("transformers.")
    )
    library_class: Any = next(library_classes, type(attention))
    return "ALL_ATTENTION_FUNCTIONS" in _source(library_class)


_source = functools.cache(inspect.getsource)
