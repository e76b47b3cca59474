"""Digests of a verified engine's code, one per function that FarSkip layers replace or
call.

A release may change such a function and keep its name. `sources.json` has the digests
of each verified version:

    python -m fcsd_vllm.write_sources

adds those of the installed vLLM; first compare its models with fcsd's
(`serving/tests`). Standard library only.
"""

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("sources.json")
SOURCES: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
"""Version that was verified or read -> function -> digest."""
# absent from some Pythons' syntax trees
_VERSIONED = ("kind", "type_comment", "type_params")


def digest(function: Callable[..., Any]) -> str:
    """Return 16 hex digits that identify a function's code, without comments,
    docstrings, layout and Python's version.
    """
    try:
        text = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return "no source"
    return _hash(_plain(ast.parse(textwrap.dedent(text)).body))[:16]


def digests(functions: Iterable[Callable[..., Any]]) -> dict[str, str]:
    """Return module and name -> digest, without the plugin's own functions."""
    named = {f"{each.__module__}.{each.__qualname__}": each for each in functions}
    return {
        name: digest(each)
        for name, each in sorted(named.items())
        if not name.startswith("fcsd_")
    }


def changed(installed: Mapping[str, str]) -> dict[str, str]:
    """Return those digests that no version in `SOURCES` has."""
    return {
        name: now
        for name, now in installed.items()
        if all(now != each.get(name) for each in SOURCES.values())
    }


def seal(changes: Mapping[str, str]) -> str:
    """Return one digest of several, with which a user confirms that these changes were
    reviewed.
    """
    return _hash(sorted(changes.items()))[:12]


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _plain(node: Any) -> Any:
    """Return a syntax tree as tuples, without docstrings and empty fields."""
    if isinstance(node, list):
        return tuple(_plain(each) for each in node)
    if not isinstance(node, ast.AST):
        return node
    if (
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and ast.get_docstring(node) is not None
    ):
        node.body = node.body[1:]
    fields = [
        (name, _plain(value))
        for name, value in ast.iter_fields(node)
        if name not in _VERSIONED
    ]
    return type(node).__name__, *(
        field for field in fields if field[1] is not None and field[1] != ()
    )
