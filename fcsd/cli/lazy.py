"""Imports that stand at the top of a module and load nothing until a name is used, so
that help and mistakes are quick.

    with lazy_imports():
        from fcsd.pipeline.distill import distill

    def _distill(arguments):
        distill(...)  # here torch is loaded

A name stands for what it names where it is called, or an attribute of it is asked for,
and nowhere else: a class is not handed on, a constant is not imported here.
(`importlib.util.LazyLoader` is no choice: what looks through `sys.modules`, as
`inspect.getmodule` does while torch is loaded, loads all of its modules.)
"""

import builtins
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, cast


class _Name:
    """A name of a module that is loaded when the name is used."""

    def __init__(self, module: str, name: str):
        self._place = module, name

    def _target(self) -> Any:
        module, name = self._place
        return getattr(importlib.import_module(module), name)

    def __call__(self, *values: Any, **options: Any) -> Any:
        return self._target()(*values, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)


class _Module:
    """What `from module import name` takes its names from."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> _Name:
        return _Name(self._name, name)


@contextlib.contextmanager
def lazy_imports() -> Iterator[None]:
    """Load nothing for the names that are imported from fcsd in this block, until they
    are used.
    """
    load = builtins.__import__

    def imported(name: str, importer: Any = None, *rest: Any) -> Any:
        here = str((importer or {}).get("__name__")).startswith("fcsd.cli.")
        return (
            _Module(name)
            if here and name.startswith("fcsd.")
            else load(name, importer, *rest)
        )

    builtins.__import__ = cast(Any, imported)
    try:
        yield
    finally:
        builtins.__import__ = load
