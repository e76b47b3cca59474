"""The surface that users build on: every command with its options, and every key of
recipes and suites.

    python -m tests.reference.surface      writes tests/files/command_line.json and tests/files/recipe_keys.json

Write the files after an intended change, and commit them with it; the difference is
what users have to learn.
"""

import argparse
import json
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from fcsd.base.strict import choice_of
from fcsd.cli.main import build_parser
from fcsd.evaluation.config import SuiteConfig
from fcsd.recipe.recipe import Recipe
from tests.support import ROOT

FILES = {
    "command_line": ROOT / "tests/files/command_line.json",
    "recipe_keys": ROOT / "tests/files/recipe_keys.json",
}


def command_line() -> dict[str, dict[str, str]]:
    """Return every command with its options and arguments, one line each; help texts
    may change freely.
    """
    (commands,) = (
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return {
        name: {
            ", ".join(action.option_strings) or str(action.metavar): _action(action)
            for action in parser._actions
            if action.dest != "help"
        }
        for name, parser in sorted(commands.items())
    }


def _action(action: argparse.Action) -> str:
    facts = {
        "metavar": action.metavar if action.option_strings else None,
        "takes": "nothing" if action.nargs == 0 else action.nargs,
        "type": getattr(action.type, "__name__", None),
        "choices": action.choices,
        "default": None if action.default is argparse.SUPPRESS else action.default,
        "required": action.required or None,
        "several": True if isinstance(action, argparse._AppendAction) else None,
    }
    return ", ".join(
        f"{name} {value}" for name, value in facts.items() if value is not None
    )


def recipe_keys() -> dict[str, dict[str, str]]:
    """Return every dotted key of a recipe and of a suite with type and default; [a] is
    the required tag of a union.
    """
    return {kind.__name__: dict(_keys(kind, "")) for kind in (Recipe, SuiteConfig)}


def _keys(kind: type[BaseModel], prefix: str) -> list[tuple[str, str]]:
    keys = []
    for name, field in kind.model_fields.items():
        dotted = f"{prefix}{name}"
        keys.append((dotted, f"{_type(field)}{_default(field)}"))
        keys += _below(field, dotted)
    return keys


def _below(annotation: Any, dotted: str) -> list[tuple[str, str]]:
    """Return the keys of the records that an annotation can hold."""
    if isinstance(annotation, FieldInfo) and choice_of(annotation) is None:
        annotation = annotation.annotation
    choice = choice_of(annotation)
    if choice is not None:
        return [
            key
            for tag, kind in choice.members.items()
            for key in _keys(kind, f"{dotted}[{tag}].")
        ]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _keys(annotation, f"{dotted}.")
    inside = f"{dotted}.0" if get_origin(annotation) is list else dotted
    return [key for each in get_args(annotation) for key in _below(each, inside)]


def _type(annotation: Any) -> str:
    bounds = []
    if isinstance(annotation, FieldInfo):
        bounds, annotation = annotation.metadata, annotation.annotation
    elif get_origin(annotation) is Annotated:
        annotation, *bounds = get_args(annotation)
        bounds = [
            bound
            for each in bounds
            for bound in (each.metadata if isinstance(each, FieldInfo) else [each])
        ]
    limits = [
        f"{sign} {getattr(bound, name)}"
        for bound in bounds
        for kind, name, sign in (
            (Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="),
        )
        if isinstance(bound, kind)
    ] + [
        f"of at least {bound.min_length}"
        for bound in bounds
        if isinstance(bound, MinLen)
    ]  # fmt: skip
    return " ".join([_plain(annotation), " and ".join(limits)]).strip()


def _plain(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(repr, members))
    if origin in (Union, UnionType):
        names = ["null" if each is NoneType else _type(each) for each in members]
        return " | ".join(dict.fromkeys(names))
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(map(_type, members))}]"
    return getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return ", required"
    return (
        ", given"
        if isinstance(value, BaseModel)
        else f" = {json.dumps(to_jsonable_python(value))}"
    )


def written(name: str) -> str:
    """Return the text of one file as it would be written now."""
    return (
        json.dumps(
            {"command_line": command_line, "recipe_keys": recipe_keys}[name](), indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    for name, path in FILES.items():
        path.write_text(written(name))
        print(path.relative_to(ROOT))
