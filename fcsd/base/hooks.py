"""Observe the inputs and outputs of modules while they run. Hooks are always removed at
the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Before = Callable[[Any, Any], None]
"""Called with the positional and the keyword arguments of a call."""

After = Callable[[Any, Any, Any], None]
"""Called with the arguments, as `Before`, and with the module's output."""


class Stopped(BaseException):
    """Ends a forward pass as soon as all that is needed has been captured; a hook
    raises it, and the caller of the pass suppresses it.
    """


@contextlib.contextmanager
def hooked(
    *,
    before: Iterable[tuple[nn.Module, Before]] = (),
    after: Iterable[tuple[nn.Module, After]] = (),
    prepend: bool = False,
) -> Iterator[None]:
    """Call functions before and after each call of modules in the block; they must
    return None, since torch replaces a module's inputs or output by any other value.

    prepend: register the hooks before existing ones, not after them.
    """

    # Each makes a new scope: a lambda in the loops below would call the last function.
    def pre_hook(call: Before) -> Any:
        return lambda _, args, kwargs: call(args, kwargs)

    def post_hook(call: After) -> Any:
        return lambda _, args, kwargs, out: call(args, kwargs, out)

    options = {"with_kwargs": True, "prepend": prepend}
    # The stack also removes the first hooks where a later one cannot be registered.
    with contextlib.ExitStack() as stack:
        for module, call in before:
            stack.callback(
                module.register_forward_pre_hook(pre_hook(call), **options).remove
            )
        for module, called in after:
            stack.callback(
                module.register_forward_hook(post_hook(called), **options).remove
            )
        yield


def first_tensor(values: Any) -> Tensor | None:
    """Return the first tensor of a value, at any depth of lists, tuples and
    dictionaries; None where it has none.
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return next(
            (tensor for value in values if (tensor := first_tensor(value)) is not None),
            None,
        )
    return None


def hidden_states(args: Any, kwargs: Any) -> Tensor | None:
    """Return the hidden states that a module is called with, by that name or as the
    first tensor.
    """
    states: Tensor | None = kwargs.get("hidden_states", first_tensor(args))
    return states
