"""The rewiring with one mistake in it."""

import ast
import sys
import types
from typing import Any

import pytest

from fcsd.model.connectivity.modeling import rewiring_source


def mutated(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the shipped rewiring as a module in which `new` stands in place of `old`.

    The source is that which `ast` writes, so that no mutant depends on line breaks in
    the code.
    """
    source = ast.unparse(ast.parse(rewiring_source()))
    old, new = (text.replace('"', "'") for text in (old, new))
    assert source.count(old) == 1
    module = types.ModuleType("mutant_rewire")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = compile(source.replace(old, new), "mutant_rewire.py", "exec")
    exec(code, module.__dict__)
    return module
