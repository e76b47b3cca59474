"""Strict YAML documents: unknown keys are errors with a suggestion, messages name the file and the key.

Recipes and suites are both read through here, so that they fail in the same words.
"""

import difflib
import math
import re
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import UnionType
from typing import Any, Self, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from fcsd.config.unions import Place, choice_of, place_of
from fcsd.errors import UserError
from fcsd.files import read_text

_NO_NUMBER = PydanticCustomError("no_number", "a number is needed")


class Strict(BaseModel):
    """A frozen record that accepts no key it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        wrong = [
            InitErrorDetails(type=_NO_NUMBER, loc=(key,), input=given)
            for key, given in value.items()
            if isinstance(given, bool) and key in cls.model_fields
            # pydantic would take true for 1
            if bool not in (kinds := _kinds(cls.model_fields[key].annotation)) and kinds & {int, float}
        ]
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return value

    @classmethod
    def from_plain(cls, value: Any, where: str) -> Self:
        """Build a record from plain data, as `validate` does."""
        return validate(cls, value, where)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], **own: Any) -> Self:
        """Build a record from the options of a command that are called like its fields; None: not given.

        own: fields that the options do not give as they are.

        Raises:
            UserError: one line that names the option: `--text-examples: …`.
        """
        given = {name: options[name] for name in cls.model_fields if options.get(name) is not None}
        return _build(cls, given | own, "", options=True)


def option(default: Any, help: str, *, metavar: str | None = None, **bounds: Any) -> Any:
    """Declare a field that is an option of a command, too; metavar: what its value is called in the help.

    default: `...` where it must be given.
    """
    return Field(
        default, description=help, json_schema_extra={"metavar": metavar} if metavar else None, **bounds
    )


def like(record: type[BaseModel], name: str) -> Any:
    """Declare a field with the default, the bounds and the description of another record's."""
    return copy(record.model_fields[name])


def _kinds(annotation: Any) -> set[Any]:
    """Return the members of a union, or the one type itself."""
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
    return parse_yaml(read_text(path, "a YAML file"), str(path))


def validate(kind: type[Document], value: Any, where: str) -> Document:
    """Build a `kind` (a class, or a union of classes) from plain data.

    Raises:
        UserError: one line that says what is wrong first: `recipes/x.yaml: train.foo: unknown key …`.
    """
    if not isinstance(value, dict):
        raise UserError(f"{where}: a mapping of keys to values is needed, got {type(value).__name__}")
    return _build(kind, value, f"{where}: ")


def _build(kind: type[Document], value: dict[str, Any], before: str, *, options: bool = False) -> Document:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        # What is missing comes last: often it is there under a wrong name.
        problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] == "missing")
        lines = [_line(kind, problem, options) for problem in problems]
        more = f" (and {len(lines) - 1} more: {'; '.join(lines[1:3])})" if len(lines) > 1 else ""
        raise UserError(f"{before}{lines[0]}{more}") from None


def _line(kind: Any, problem: Any, options: bool) -> str:
    place = place_of(kind, problem["loc"])
    dotted = ".".join(map(str, place.keys))
    if options and (names := [key for key in place.keys if isinstance(key, str)]):
        dotted = f"--{names[-1].replace('_', '-')}"
    if problem["type"] == "extra_forbidden":
        return f"{dotted}: {_unknown(place)}"
    if problem["type"] == "missing":
        return f"{dotted}: is required{_why_required(place)}"
    if problem["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return _wrong_tag(place, problem)
    if problem["type"] in ("model_type", "model_attributes_type"):
        message = "a mapping of keys to values is needed"
    else:
        message = problem["msg"].removeprefix("Value error, ")
    given = problem.get("input")
    shown = f", got {given!r}" if isinstance(given, str | int | float | bool | None) else ""
    place_text = f"{dotted}: " if dotted else ""  # a rule for the whole has none
    return f"{place_text}{message}{shown if 'got' not in message else ''}"


def _unknown(place: Place) -> str:
    """Return what to say of a key that its record does not have."""
    key, record = str(place.keys[-1]), place.record
    if record is None:
        return "unknown key"
    if place.choice is not None and (others := place.choice.tags_with(key)):
        return f"no meaning for {_tag(place)}, only for {', '.join(others)}"
    return f"unknown key{did_you_mean(key, list(record.model_fields))}"


def _why_required(place: Place) -> str:
    """Return what a missing key is for, where its field says so, and that other members of a union need it not."""
    key, record = str(place.keys[-1]), place.record
    if record is None:
        return ""
    others = place.choice.members.values() if place.choice is not None and place.choice.key else [record]
    everywhere = all(key in other.model_fields and other.model_fields[key].is_required() for other in others)
    what = record.model_fields[key].description
    return ("" if everywhere else f" for {_tag(place)}") + (f": {what}" if what else "")


def _tag(place: Place) -> str:
    """Return `backend 'cache'`; `objective 'kl'`, where the key is called name; the tag alone, where no key decides."""
    assert place.choice is not None
    if not place.choice.key:
        return str(place.tag)
    section = str(place.keys[-2]) if len(place.keys) > 1 else ""
    label = section if place.choice.key == "name" else place.choice.key
    return f"{label} {place.tag!r}".strip()


def _wrong_tag(place: Place, problem: Any) -> str:
    choice = choice_of(place.here)
    assert choice is not None
    tags = [repr(tag) for tag in choice.members]
    dotted = ".".join(map(str, [*place.keys, choice.key]))
    allowed = f"{', '.join(tags[:-1])} or {tags[-1]}"
    if problem["type"] == "union_tag_not_found":
        return f"{dotted}: is required: {allowed}"
    return f"{dotted}: Input should be {allowed}, got {problem['input'][choice.key]!r}"


def did_you_mean(word: str, known: list[str]) -> str:
    """Return `; did you mean 'temperature'?`, or what is allowed when nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; allowed: {', '.join(sorted(known))}" if known else ""
