"""Imports of the command line: at the top of its modules, and loaded when a name is used."""

import ast
import builtins
from pathlib import Path

import pytest

from fcsd.cli.lazy import lazy_imports
from tests.support import ROOT, start

USED = """
import sys
from fcsd.cli import recipes
assert 'fcsd.recipe.load_recipe' not in sys.modules and 'fcsd.pipeline.distill' not in sys.modules
try: recipes.load_recipe('nowhere.yaml')
except Exception as error: print(type(error).__name__, error)
assert 'fcsd.recipe.load_recipe' in sys.modules and 'torch' not in sys.modules
"""


def test_a_name_is_loaded_when_it_is_used() -> None:
    with start("-c", USED) as child:
        out, error = child.communicate()
    assert (error, out) == ("", "UserError nowhere.yaml: no such file\n")


def test_only_the_command_lines_own_imports_of_fcsd_wait() -> None:
    load = builtins.__import__
    with lazy_imports():
        from fcsd.base.text import nats

        assert isinstance(nats(1.0), str) and type(nats).__name__ == "function"
    with pytest.raises(ModuleNotFoundError), lazy_imports():
        import fcsd.no_such_module  # noqa: F401
    assert builtins.__import__ is load


@pytest.mark.parametrize(
    "path", sorted((ROOT / "fcsd/cli").glob("*.py")), ids=lambda path: path.stem
)
def test_no_function_of_the_command_line_imports_fcsd(path: Path) -> None:
    inside = [
        ast.unparse(each)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        for each in ast.walk(node)
        if isinstance(each, ast.ImportFrom) and str(each.module).startswith("fcsd")
    ]
    assert inside == []
