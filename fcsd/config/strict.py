"""Strict YAML documents: unknown keys are errors with a suggestion, messages name the file and the key.

Recipes and suites are both read through here, so that they fail in the same words.
"""

import difflib
import math
import re
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from fcsd.errors import UserError


class Strict(BaseModel):
    """A frozen record that accepts no key it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if bool not in kinds and kinds & {int, float}:
                raise ValueError("a number is needed")  # pydantic would take true for 1
        return value


def _kinds(annotation: Any) -> set[Any]:
    """The members of a union, or the one type itself."""
    if get_origin(annotation) in (Union, UnionType):
        return set(get_args(annotation))
    return {annotation}


Document = TypeVar("Document", bound=Strict)


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-5` as a number (YAML 1.1 wants `2.0e-5`) and refuses a key given twice."""


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | str:
    text = str(loader.construct_scalar(node))
    number = float(text)
    return number if math.isfinite(number) else text


_Loader.add_implicit_resolver(
    "tag:fcsd,2026:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
_Loader.add_constructor("tag:fcsd,2026:float", _float)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, Any] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is given twice", key_node.start_mark
            )
        seen[key] = None
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; a syntax error is a `UserError` that names `where` and the line."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        raise UserError(f"{place}: not valid YAML: {getattr(error, 'problem', error)}") from None


def read_yaml(path: Path) -> Any:
    """Parse the YAML file at `path`."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, a YAML file is needed") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file") from None


def validate(kind: type[Document], value: Any, where: str) -> Document:
    """Build a `kind` from plain data; problems become one line: `recipes/x.yaml: train.foo: unknown key …`."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: a mapping of keys to values is needed, got {type(value).__name__}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        lines = [_line(kind, problem) for problem in problems]
        more = f" (and {len(lines) - 1} more: {'; '.join(lines[1:3])})" if len(lines) > 1 else ""
        raise UserError(f"{where}: {lines[0]}{more}") from None


def _line(kind: type[Strict], problem: Any) -> str:
    location = [part for part in problem["loc"] if not _is_tag(part)]
    dotted = ".".join(str(part) for part in location)
    if problem["type"] == "extra_forbidden":
        return f"{dotted}: unknown key{did_you_mean(str(location[-1]), known_keys(kind, location[:-1]))}"
    if problem["type"] == "missing":
        return f"{dotted}: is required"
    message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = f", got {given!r}" if isinstance(given, str | int | float | bool | None) else ""
    place = f"{dotted}: " if dotted else ""  # a rule for the whole has none
    return f"{place}{message}{shown if 'got' not in message else ''}"


def _is_tag(part: Any) -> bool:
    """Pydantic adds the names of union members to a location; they mean nothing to a user."""
    return isinstance(part, str) and (
        "[" in part or part[:1].isupper() or part in {"int", "str", "float", "bool"}
    )


def known_keys(kind: type[Strict], location: list[Any]) -> list[str]:
    """The field names of the record at `location` inside `kind`; [] when the place is a free mapping."""
    current: Any = kind
    for part in location:
        if isinstance(part, int):
            continue  # an item of a list: `_record` has already looked inside the list
        field = getattr(current, "model_fields", {}).get(part)
        current = _record(field.annotation) if field else None
    return list(getattr(current, "model_fields", {}))


def _record(annotation: Any) -> Any:
    """The record class inside an annotation such as `list[Source] | Source | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, tuple, dict):
        for argument in get_args(annotation):
            found = _record(argument)
            if found is not None:
                return found
    return None


def did_you_mean(word: str, known: list[str]) -> str:
    """`; did you mean 'temperature'?`, or what is allowed when nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; allowed: {', '.join(sorted(known))}" if known else ""
