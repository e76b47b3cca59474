"""Strict YAML documents: unknown keys are errors with a suggestion, messages name the
file and the key.

Recipes and suites are both read through here, so that they fail in the same words.
"""

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import check_path, read_text


class Strict(BaseModel):
    """A frozen record that accepts no key it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    # Keys that a user may look for in this record -> what to say of them.
    elsewhere: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        if isinstance(value, dict):
            cls.check_keys(value)
        return value

    @classmethod
    def requires(cls, key: str) -> bool:
        """Tell whether a key must be given."""
        return key in cls.model_fields and cls.model_fields[key].is_required()

    @classmethod
    def check_keys(
        cls,
        value: Mapping[str, Any],
        foreign: Mapping[str, str] = MappingProxyType({}),
        needs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Refuse keys that the record does not know, and those that it misses; `true`
        where a number is needed.

        foreign: key that others of a union know -> what is said of it. needs: required
        key -> for what.
        """
        wrong = {}
        for key, entry in value.items():
            if key not in cls.model_fields:
                unknown = f"unknown key{did_you_mean(str(key), list(cls.model_fields))}"
                wrong[key] = foreign.get(key) or cls.elsewhere.get(key) or unknown
            else:
                for place, boolean in _booleans(
                    cls.model_fields[key].annotation, [(key, entry)]
                ):
                    wrong[place] = f"a number is needed, got {boolean!r}"
        missing = {}
        for key, field in cls.model_fields.items():
            if cls.requires(key) and key not in value:
                what = f": {field.description}" if field.description else ""
                missing[key] = f"is required{needs.get(key, '')}{what}"
        if wrong or missing:
            refuse_keys(wrong, missing)

    @classmethod
    def from_plain(cls, value: Any, where: str) -> Self:
        """Build a record from plain data, as `validate` does."""
        return validate(cls, value, where)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], **own: Any) -> Self:
        """Build a record from the options of a command that are called like its fields;
        None: not given.

        own: fields that the options do not give as they are.

        Raises:
            UserError: one line that names the option: `--text-examples: …`.
        """
        names = {
            name: flag_of(cls, name).lstrip("-").replace("-", "_")
            for name in cls.model_fields
        }
        values = {
            name: options[key]
            for name, key in names.items()
            if options.get(key) is not None
        }
        return _build(cls, values | own, "", options=True)


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    flag: str | None = None,
    **bounds: Any,
) -> Any:
    """Declare a field that is an option of a command, too; metavar: what its value is
    called in the help.

    default: `...` where it must be given. flag: `--tp`, where it is not called like the
    field.
    """
    own: dict[str, Any] = {
        name: text for name, text in (("metavar", metavar), ("flag", flag)) if text
    }
    return Field(default, description=help, json_schema_extra=own or None, **bounds)


def flag_of(record: Any, name: str) -> str:
    """Return what an option that mirrors a field is called: `--tp`, or `--tensor-parallel`."""
    field = getattr(record, "model_fields", {}).get(name)
    own = field.json_schema_extra if field is not None else None
    return str((own or {}).get("flag", f"--{name.replace('_', '-')}"))


def like(record: type[BaseModel], name: str) -> Any:
    """Declare a field with the default, the bounds and the description of another record's."""
    return copy(record.model_fields[name])


def refuse_keys(
    wrong: Mapping[str, str], missing: Mapping[str, str] = MappingProxyType({})
) -> NoReturn:
    """Raise pydantic's error for keys of a mapping -> what is wrong with each."""
    raise ValidationError.from_exception_data(
        "record",
        [
            InitErrorDetails(
                type=PydanticCustomError(kind, "{text}", {"text": text}),
                loc=(str(key),),
                input=None,
            )
            for kind, texts in (("key", wrong), ("missing", missing))
            for key, text in texts.items()
        ],
    )


def _kinds(annotation: Any) -> list[Any]:
    """Return the members of a union, or the one type itself, without their bounds."""
    members = (
        get_args(annotation)
        if get_origin(annotation) in (Union, UnionType)
        else (annotation,)
    )
    return [
        get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in members
    ]


def _booleans(
    annotation: Any, values: Iterable[tuple[Any, Any]], before: str = ""
) -> Iterator[tuple[str, bool]]:
    """Yield the booleans that stand where a number is needed, also in lists and
    mappings: pydantic would take true for
    1. values: (key, value) of this annotation; before: dotted key of what they are in,
       with a dot.

    The annotation is read once for all items of a list: the links of a thousand
    endpoints are millions of numbers.
    """
    kinds = _kinds(annotation)
    are_numbers = bool not in kinds and (int in kinds or float in kinds)
    inner = [
        (get_origin(kind), get_args(kind)[-1])
        for kind in kinds
        if get_origin(kind) in (list, dict)
    ]
    if not (are_numbers or inner):
        return
    for key, value in values:
        if are_numbers and isinstance(value, bool):
            yield f"{before}{key}", value
        for container, item in inner:
            if isinstance(value, container):
                items = value.items() if container is dict else enumerate(value)
                yield from _booleans(item, items, f"{before}{key}.")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(text: str) -> str:
    """Return a name that may become one of a folder or file; raises ValueError for any
    other text.
    """
    if _NAME.fullmatch(text):
        return text
    raise ValueError(
        "up to 100 letters (A to Z), digits, '.', '_' and '-', of which the first is a"
        " letter or digit, are allowed, got"
        f" {text if len(text) <= 60 else f'{text[:59]}…'!r}"
    )


Name = Annotated[str, AfterValidator(check_name)]
"""Text that `check_name` accepts."""


def _check_folder(text: str) -> str:
    try:
        check_path(Path(text))
    except UserError as error:
        raise ValueError(str(error)) from None
    return text


FolderPath = Annotated[str, AfterValidator(_check_folder)]
"""A path that a folder can have (`check_path`)."""

Document = TypeVar("Document", bound=Strict)
_TYPES = {
    "int",
    "str",
    "float",
    "bool",
    "constrained-int",
    "constrained-str",
    "constrained-float",
}


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `2e-5` as a number (YAML 1.1 wants `2.0e-5`) and refuses a
    key given twice.
    """


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


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    number = (
        loader.construct_yaml_int(node) if len(node.value) <= _MOST_DIGITS else 1 << 63
    )
    if not -(1 << 63) <= number < 1 << 63:
        raise yaml.constructor.ConstructorError(
            None, None, "an integer of more than 64 bits", node.start_mark
        )
    return int(number)


_MOST_DIGITS = 100  # of 64 bits, in any base, with underscores
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


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
    """Parse YAML text; a syntax error is a `UserError` that names `where` and the line.

    So is a document that is nested too deep, or whose aliases (`*name`) stand for too
    much: what works through it would not end.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {}, 0)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}, line {mark.line + 1}" if mark else where
        raise UserError(
            f"{place}: not valid YAML:"
            f" {getattr(error, 'problem', None) or one_line(error)}"
        ) from None
    except RecursionError:
        raise UserError(f"{where}: not valid YAML: {_TOO_DEEP}") from None
    # a value that is not of its tag: each of PyYAML's constructors raises its own
    except Exception as error:
        raise UserError(
            f"{where}: not valid YAML: a value does not fit its tag ({one_line(error)})"
        ) from None


_SURROGATE = re.compile("[\ud800-\udfff]")
_DEEPEST, _MOST_REPEATED = 100, 100_000
_TOO_DEEP = f"nested deeper than {_DEEPEST} levels"


def _check_size(
    node: yaml.Node, known: dict[int, tuple[int, int] | None], depth: int
) -> tuple[int, int]:
    """Return how many values a node stands for, and in how many levels, each alias
    counted with all that it repeats.

    depth: of the node. known: the same of nodes by `id`; None of those that this one is
    in.
    """

    def refuse(problem: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    if id(node) in known:
        if (counted := known[id(node)]) is None:
            refuse("an alias holds itself")
    else:
        known[id(node)] = None
        children = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in children for child in pair]
        elif isinstance(node, yaml.ScalarNode) and _SURROGATE.search(node.value):
            refuse(f"{node.value!r} holds half a character")
        sizes = [_check_size(child, known, depth + 1) for child in children]
        counted = (
            1 + sum(size for size, _ in sizes),
            1 + max((levels for _, levels in sizes), default=0),
        )
        known[id(node)] = counted
    if depth + counted[1] > _DEEPEST:
        refuse(_TOO_DEEP)
    if counted[0] > len(known) + _MOST_REPEATED:
        refuse(f"aliases stand for more than {_MOST_REPEATED} values")
    return counted


def read_yaml(path: Path) -> Any:
    """Parse the YAML file at `path`."""
    return parse_yaml(read_text(path, "a YAML file"), str(path))


def validate(kind: type[Document], value: Any, where: str) -> Document:
    """Build a `kind` (a class, or a union of classes) from plain data.

    Raises:
        UserError: one line that says what is wrong first: `recipes/x.yaml: train.foo:
            unknown key …`.
    """
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: a mapping of keys to values is needed, got"
            f" {type(value).__name__}"
        )
    return _build(kind, value, f"{where}: ")


def _build(
    kind: type[Document], value: dict[str, Any], before: str, *, options: bool = False
) -> Document:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        # What is missing comes last: often it is there under a wrong name.
        problems = sorted(
            error.errors(include_url=False),
            key=lambda problem: problem["type"] == "missing",
        )
        lines = [_line(problem, kind if options else None) for problem in problems]
        more = (
            f" (and {len(lines) - 1} more: {'; '.join(lines[1:3])})"
            if len(lines) > 1
            else ""
        )
        raise UserError(f"{before}{lines[0]}{more}") from None


def _line(problem: Any, options_of: Any) -> str:
    # pydantic adds the types that it tried to the place of a union that is tried one
    # after the other.
    keys = [
        key
        for key in problem["loc"]
        if not (isinstance(key, str) and ("[" in key or key in _TYPES))
    ]
    dotted = ".".join(_shown(str(key)) for key in keys)
    if options_of and (names := [key for key in keys if isinstance(key, str)]):
        dotted = flag_of(options_of, names[-1])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "model_attributes_type"):
        message = "a mapping of keys to values is needed"
    value = problem.get("input")
    is_shown = problem["type"] not in ("key", "missing") and "got" not in message
    shown = (
        f", got {value!r}"
        if is_shown and isinstance(value, str | int | float | bool | None)
        else ""
    )
    # a rule for the whole has none
    return f"{dotted}: {message}{shown}" if dotted else f"{message}{shown}"


def _shown(key: str) -> str:
    """Return a key as it can stand in one line."""
    key = key if len(key) <= 120 else f"{key[:119]}…"
    return key if key.isprintable() else repr(key)[1:-1]


def did_you_mean(word: str, known: list[str]) -> str:
    """Return `; did you mean 'temperature'?`, or what is allowed when nothing is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; allowed: {', '.join(sorted(known))}" if known else ""
