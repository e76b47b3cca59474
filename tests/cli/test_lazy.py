"""Imports of the command line: at the top of its modules, and loaded when a name is used."""

import builtins

import pytest

from fcsd.cli.lazy import lazy_imports


def test_only_the_command_lines_own_imports_of_fcsd_wait() -> None:
    load = builtins.__import__
    with lazy_imports():
        from fcsd.base.text import nats

        assert isinstance(nats(1.0), str) and type(nats).__name__ == "function"
    with pytest.raises(ModuleNotFoundError), lazy_imports():
        import fcsd.no_such_module  # noqa: F401
    assert builtins.__import__ is load
