"""Strict records: unknown keys are errors with a suggestion, and messages name the file
and the key; rules of what may not be, each with its message; unions of records that one
key tells apart (an objective, a teacher, a suite's task).

Recipes and suites are both read through this module, so that their errors read alike.

Not covered: unions that are tried one after another (`int | Literal["auto"]`).
"""

import difflib
import functools
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
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

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from fcsd.base.errors import CREDENTIALS, UserError, kind_of, places_of_credentials
from fcsd.base.writing import check_path

Rule = tuple[Any, str | Callable[..., str | None]]
"""What may not be, and the message.

What may not be is a fact, or a function that tells it of some values; the message is a
text, in which `{0}` is the first of these values, or a function of them.
"""


def broken(rules: Iterable[Rule], *values: Any) -> str | None:
    """Return the message of the first rule that values break; None: they break none."""
    for fact, message in rules:
        if fact(*values) if callable(fact) else fact:
            if not isinstance(message, str):
                return message(*values)
            return message.format(*values) if values else message
    return None


def refuse(*rules: Rule, of: tuple[Any, ...] = (), where: str = "") -> None:
    """Raise UserError with the message of the first rule that the values `of` break;
    `where` is the beginning of the message.
    """
    if (message := broken(rules, *of)) is not None:
        raise UserError(f"{where}{message}")


def wrong_kind(name: str, value: Any, kinds: Any, expected: str) -> Rule:
    """Return the rule that an argument is of one of these kinds.

    expected: the accepted kinds in words, with their article.
    """
    message = f"{name}: {kind_of(value)}; {expected} is needed"
    return not isinstance(value, kinds), message


def check_kind(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raise UserError where `wrong_kind` says so."""
    refuse(wrong_kind(name, value, kinds, expected))


class Strict(BaseModel):
    """A frozen record that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    # Keys that a user may expect in this record -> the message where they belong
    # instead.
    elsewhere: ClassVar[dict[str, str]] = {}

    # What may not be of a record whose values are right one by one; those of the
    # classes above it hold, too, and come first.
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        rules = [
            rule
            for cls in reversed(type(self).__mro__)
            for rule in cls.__dict__.get("rules", ())
        ]
        if rules and (message := broken(rules, self)):
            raise ValueError(message)
        return self

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        if isinstance(value, dict):
            cls.check_keys(value)
        return value

    @classmethod
    def requires(cls, key: str) -> bool:
        """Tell whether a key is required."""
        return key in cls.model_fields and cls.model_fields[key].is_required()

    @classmethod
    def open_keys(cls) -> list[str]:
        """Return the keys that can have a value; a record that can only leave one at
        null does not offer it.
        """
        return [
            key
            for key, field in cls.model_fields.items()
            if field.annotation is not type(None)
        ]

    @classmethod
    def has_keys_of(cls, value: Mapping[str, Any]) -> bool:
        """Tell whether plain data have the required keys and no unknown ones."""
        fields = cls.model_fields
        return value.keys() <= fields.keys() and all(
            key in value for key in fields if cls.requires(key)
        )

    @classmethod
    def check_keys(
        cls,
        value: Mapping[str, Any],
        foreign: Mapping[str, str] = MappingProxyType({}),
        needs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Refuse unknown keys, missing required keys, and `true` where a number is
        needed.

        foreign: keys of other members of a union -> the message. needs: required key ->
        what needs it, for the message.
        """
        wrong = {}
        for key, entry in value.items():
            # The most specific explanation of an unknown key wins.
            if key not in cls.model_fields:
                unknown = f"unknown key{did_you_mean(str(key), cls.open_keys())}"
                wrong[key] = foreign.get(key) or cls.elsewhere.get(key) or unknown
            else:
                for dotted_key, boolean in _booleans(
                    cls.model_fields[key].annotation, [(key, entry)]
                ):
                    wrong[dotted_key] = f"a number is needed, got {boolean!r}"
        missing = {}
        for key, field in cls.model_fields.items():
            if cls.requires(key) and key not in value:
                description = f": {field.description}" if field.description else ""
                missing[key] = f"is required{needs.get(key, '')}{description}"
        if wrong or missing:
            refuse_keys(wrong, missing)

    @classmethod
    def from_plain(cls, value: Any, where: str) -> Self:
        """Build a record from plain data, as `validate` does."""
        return validate(cls, value, where)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], **fields: Any) -> Self:
        """Build a record from the options of a command that have the names of its
        fields; None: the option was not given.

        fields: values of fields that no option gives directly.

        Raises:
            UserError: one line that names the option: `--text-examples: …`.
        """
        names = {
            name: flag.lstrip("-").replace("-", "_")
            for name, flag in flags_of(cls).items()
        }
        values = {
            name: options[key]
            for name, key in names.items()
            if options.get(key) is not None
        }
        return _build(cls, values | fields, "", options=True)


@functools.cache
def flags_of(record: Any) -> dict[str, str]:
    """Return the name of the option that mirrors each field of a record: `--tp`, as the
    field's `json_schema_extra` says, or `--tensor-parallel`.
    """
    flags = {}
    for name, field in getattr(record, "model_fields", {}).items():
        extra = field.json_schema_extra or {}
        flags[name] = str(extra.get("flag", _flag(name)))
    return flags


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flag_of(record: Any, name: str) -> str:
    """Return the name of the option that mirrors a field."""
    return flags_of(record).get(name, _flag(name))


def like(record: type[BaseModel], name: str) -> Any:
    """Declare a field with the default, the bounds and the description of another
    record's.
    """
    return copy(record.model_fields[name])


def refuse_keys(
    wrong: Mapping[str, str], missing: Mapping[str, str] = MappingProxyType({})
) -> NoReturn:
    """Raise pydantic's error from messages by key; missing keys are told apart, because
    `validate` puts them last.
    """
    problems = []
    for kind, texts in (("key", wrong), ("missing", missing)):
        for key, text in texts.items():
            # The text is passed as a value, because it may hold braces itself.
            error = PydanticCustomError(kind, "{text}", {"text": text})
            problems.append(InitErrorDetails(type=error, loc=(str(key),), input=None))
    raise ValidationError.from_exception_data("record", problems)


def _kinds(annotation: Any) -> list[Any]:
    """Return the members of a union, or the one type itself, without their bounds."""
    if get_origin(annotation) in (Union, UnionType):
        members = get_args(annotation)
    else:
        members = (annotation,)
    return [
        get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in members
    ]


def _booleans(
    annotation: Any, values: Iterable[tuple[Any, Any]], prefix: str = ""
) -> Iterator[tuple[str, bool]]:
    """Yield the dotted keys of booleans where a number is needed, also in lists and
    mappings: pydantic would read true as 1.

    values: pairs (key, value) of this annotation. prefix: the dotted key of their
    container, with a dot.

    The annotation is analysed once for all items of a list: the links of a thousand
    endpoints are millions of numbers.
    """
    kinds = _kinds(annotation)
    # Where bool itself is allowed, true is no mistake.
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
            yield f"{prefix}{key}", value
        for container, item in inner:
            if isinstance(value, container):
                items = value.items() if container is dict else enumerate(value)
                yield from _booleans(item, items, f"{prefix}{key}.")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(text: str) -> str:
    """Return a text that can be the name of a folder or file; raises ValueError for any
    other.
    """
    if _NAME.fullmatch(text):
        return text
    raise ValueError(
        "must have up to 100 letters (A to Z), digits, '.', '_' and '-', and begin with"
        " a letter or digit; got"
        f" {text if len(text) <= 60 else f'{text[:59]}…'!r}"
    )


Name = Annotated[str, AfterValidator(check_name)]
"""Text that `check_name` accepts."""


def _folder(text: str) -> str:
    try:
        check_path(folder := Path(os.path.expanduser(text)))
    except UserError as error:
        raise ValueError(str(error)) from None
    return str(folder) if text.startswith("~") else text


FolderPath = Annotated[str, AfterValidator(_folder)]
"""A path that a folder can have (`check_path`), with `~` replaced."""

Document = TypeVar("Document", bound=BaseModel)

_TYPES = {
    "int",
    "str",
    "float",
    "bool",
    "constrained-int",
    "constrained-str",
    "constrained-float",
}


def validate(kind: type[Document], value: Any, where: str) -> Document:
    """Build a `kind` (a class, or a union of classes) from plain data, without
    credentials, which would stand in the record of a run.

    Raises:
        UserError: one line with the first problem: `recipes/x.yaml: train.foo: unknown
            key …`.
    """
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: a mapping of keys to values is needed, got"
            f" {type(value).__name__}"
        )
    return _build(kind, value, f"{where}: ")


def _build(
    kind: type[Document], value: dict[str, Any], prefix: str, *, options: bool = False
) -> Document:
    for keys in places_of_credentials(value):
        problem = {"type": "key", "loc": keys, "msg": CREDENTIALS}
        raise UserError(f"{prefix}{_line(problem, kind, options)}")
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        # Missing keys come last: often they are present under a wrong name, which is
        # the problem to show.
        problems = sorted(
            error.errors(include_url=False),
            key=lambda problem: problem["type"] == "missing",
        )
        lines = [_line(problem, kind, options) for problem in problems]
        remainder = ""
        if len(lines) > 1:
            remainder = f" (and {len(lines) - 1} more: {'; '.join(lines[1:3])})"
        raise UserError(f"{prefix}{lines[0]}{remainder}") from None


def _line(problem: Any, kind: Any, options: bool) -> str:
    # For a union, pydantic adds the type that it tried to the location, which is no
    # key.
    keys = [
        key
        for key in problem["loc"]
        if not (isinstance(key, str) and ("[" in key or key in _TYPES))
    ]
    dotted = ".".join(_shown(str(key)) for key in keys)
    message = problem["msg"].removeprefix("Value error, ")
    if options and (names := [key for key in keys if isinstance(key, str)]):
        dotted = flag_of(kind, names[-1])
    elif message.startswith("unknown key"):
        message = _with_place(message, [str(key) for key in keys], kind)
    if problem["type"] in ("model_type", "model_attributes_type", "dict_type"):
        message = "a mapping of keys to values is needed"
    elif problem["type"] == "list_type":
        message = "a list is needed"
    value = problem.get("input")
    if problem["type"] == "string_type" and isinstance(value, int | float):
        message = "a text is needed; put it in quotes, as in '1.10'"
    # Messages of our own rules already quote the value.
    is_shown = problem["type"] not in ("key", "missing") and "got" not in message
    value_text = ""
    if is_shown and isinstance(value, str | int | float | bool | None):
        value_text = f", got {value!r}"
    # A rule of the whole record has no key.
    return f"{dotted}: {message}{value_text}" if dotted else f"{message}{value_text}"


def _with_place(message: str, keys: list[str], kind: Any) -> str:
    """Return the message of an unknown key with the places where other sections have a
    key of this name; as it is if there are none.
    """
    *section, name = keys
    if "did you mean" in message:
        return message
    if "." in name and name in places(kind):
        return f"unknown key; write it as a section: {_as_section(name)}"
    found = places_of(kind, name, section)
    meant = " or ".join(
        repr(place) if "." in place else f"{place!r}, outside {section[0]!r}"
        for place in found[:3]
    )
    return f"unknown key; did you mean {meant}?" if found else message


def places_of(kind: Any, name: str, section: Sequence[str] = ()) -> list[str]:
    """Return the dotted keys of a record, beside those in a section, that end in a name
    (without a section, or in one like it): those nearest to it, of the fewest levels.
    """
    name = GUESSED_NAMES.get(name, name)
    keys = [place.split(".") for place in places(kind)]
    keys = [parts for parts in keys if parts[:-1] != [*section]]
    if not section:
        names = {parts[-1] for parts in keys}
        name = next(iter(difflib.get_close_matches(name, names, 1, 0.8)), name)

    def distance(parts: list[str]) -> tuple[int, int]:
        same = sum(a == b for a, b in zip(section, parts, strict=False))
        return -same, len(parts)

    found = [parts for parts in keys if parts[-1] == name]
    least = min(map(distance, found), default=(0, 0))
    nearest = (".".join(parts) for parts in found if distance(parts) == least)
    return [*dict.fromkeys(nearest)]


def _as_section(dotted: str) -> str:
    first, *others = dotted.split(".")
    inner = "…" if not others else f"{{{_as_section('.'.join(others))}}}"
    return f"{first}: {inner}"


def places(kind: Any) -> Iterator[str]:
    """Yield the dotted keys of a record and of all records in it; 0: of a list."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield name
            yield from (f"{name}.{place}" for place in places(field.annotation))
        return
    prefix = "0." if get_origin(kind) is list else ""
    for member in get_args(kind):
        yield from (f"{prefix}{place}" for place in places(member))


def _shown(key: str) -> str:
    """Return a key in a form that fits into one line."""
    key = key if len(key) <= 120 else f"{key[:119]}…"
    return key if key.isprintable() else repr(key)[1:-1]


GUESSED_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "clip_grad": "max_grad_norm",
    "grad_clip": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "seq_len": "max_length",
    "sequence_length": "max_length",
    "max_tokens": "max_length",
    "precision": "bf16",
    "save_every": "save_steps",
    "eval_every": "eval_steps",
    "log_every": "logging_steps",
}
"""Names that people guess: name -> the one that no similarity of letters finds."""


def did_you_mean(word: str, allowed: list[str]) -> str:
    """Return `; did you mean 'temperature'?`, or the allowed words when none is
    similar.
    """
    word = GUESSED_NAMES.get(word, word)
    near = [name for name in allowed if name.lower() == word.lower()]
    near += difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    if near:
        return f"; did you mean '{near[0]}'?"
    return f"; allowed: {', '.join(sorted(allowed))}" if allowed else ""


@dataclass(frozen=True, eq=False)
class OneOf:
    """The metadata of a union of records in `Annotated`, which selects the record that
    a mapping is read as.

    key: the key that decides. members: its values -> records. default: the value of a
    mapping without the key; None: the key is required. else_default: any other value
    selects the default, too. name: the key's name in messages; "": messages show the
    value alone. advice: what to write instead of another value of the key.
    """

    key: str
    members: dict[str, type[Strict]]
    default: str | None = None
    else_default: bool = False
    name: str | None = None
    advice: str = ""

    def tag(self, value: dict[str, Any]) -> str | None:
        """Return the value of the key, or the default that replaces it; None for a
        value that is not allowed.
        """
        tag = value.get(self.key, self.default)
        if isinstance(tag, str) and tag in self.members:
            return tag
        return self.default if self.else_default else None

    def member(self, value: Any) -> type[Strict] | None:
        """Return the record that a plain value is read as; None unless it is a mapping
        with an allowed value of the key.
        """
        if isinstance(value, dict):
            return self.members.get(self.tag(value) or "")
        return None

    def __get_pydantic_core_schema__(
        self, union: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        # Read before pydantic's own union, which would list the errors of every member.
        return core_schema.no_info_before_validator_function(self._read, handler(union))

    def _read(self, value: Any) -> Any:
        if isinstance(value, tuple(self.members.values())):
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError(
                "mapping", "a mapping of keys to values is needed"
            )
        kind, tag = self.member(value), self.tag(value)
        if kind is None:
            *most, last = map(repr, self.members)
            allowed = f"{', '.join(most)} or {last}"
            if self.key in value:
                refuse_keys(
                    {self.key: f"Input should be {allowed}, got {value[self.key]!r}"}
                )
            refuse_keys({self.key: f"is required: {allowed}"})
        if tag != value.get(self.key, tag) and self.key not in kind.model_fields:
            # Alone, because what the default requires need not be meant.
            names = " or ".join(repr(name) for name in self.members if name != tag)
            refuse_keys(
                {self.key: f"must be {names}, got {value[self.key]!r}{self.advice}"}
            )
        # A record that keeps the key gets it even where the default decided.
        if self.key in kind.model_fields:
            value = {self.key: tag} | value
        if not kind.has_keys_of(value):
            name = self.key if self.name is None else self.name
            which = f"{name} {tag!r}" if name else str(tag)
            # Where all members require a key, its message need not say for which.
            some = self._needed_by_some() if name else ()
            needs = dict.fromkeys(some, f" for {which}")
            kind.check_keys(value, self._foreign(kind, which), needs)
        return kind.model_validate(value)

    def _foreign(self, kind: type[Strict], which: str) -> dict[str, str]:
        """Return the message for each key that other members have and `kind` lacks."""
        tags = {}
        for member in self.members.values():
            for key in member.model_fields.keys() - kind.model_fields.keys():
                tags[key] = [
                    tag
                    for tag, owner in self.members.items()
                    if key in owner.model_fields
                ]
        return {
            key: f"no meaning for {which}, only for {', '.join(owners)}"
            for key, owners in tags.items()
        }

    def _needed_by_some(self) -> set[str]:
        """Return the keys that not every member requires."""
        members = self.members.values()
        return {
            key
            for member in members
            for key in member.model_fields
            if not all(candidate.requires(key) for candidate in members)
        }


def one_of(
    key: str, *kinds: type[Strict], default: str | None = None, name: str | None = None
) -> OneOf:
    """Choose among records by a key that is a `Literal` in each of them."""
    tags = {
        tag: kind
        for kind in kinds
        for tag in get_args(kind.model_fields[key].annotation)
    }
    return OneOf(key, tags, default, name=name)


def choice_of(annotation: Any) -> OneOf | None:
    """Return the `OneOf` of an annotation or a field, optional ones included; None
    where there is none.
    """
    metadata: list[Any] = []
    if isinstance(annotation, FieldInfo):
        annotation, metadata = annotation.annotation, annotation.metadata
    elif get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
    for item in metadata:
        if isinstance(item, OneOf):
            return item
    # `Annotated[A | B, OneOf(…)] | None` holds it one level further down.
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            if choice := choice_of(member):
                return choice
    return None


def drop_foreign_keys(
    annotation: Any, raw: Any, changes: Collection[str], prefix: str = ""
) -> None:
    """Remove from plain values, in place, the keys that the selected record of a union
    does not have. Dotted keys in `changes`, and keys below or above them, stay.
    """
    choice = choice_of(annotation)
    if choice is not None:
        kind = choice.member(raw)
        if choice.else_default and isinstance(raw, dict) and kind is not None:
            # Keys that only the default has choose it, too.
            default = choice.members[choice.default or ""]
            changed = {
                name.removeprefix(prefix).partition(".")[0]
                for name in changes
                if name.startswith(prefix)
            }
            only_default = default.model_fields.keys() - kind.model_fields.keys()
            if choice.key not in changed and changed & only_default:
                del raw[choice.key]
                kind = default
    else:
        if isinstance(annotation, FieldInfo):
            annotation = annotation.annotation
        kinds = [
            member
            for member in (annotation, *get_args(annotation))
            if isinstance(member, type) and issubclass(member, Strict)
        ]
        kind = kinds[0] if kinds else None
    if kind is None or not isinstance(raw, dict):
        return
    for key in list(raw):
        dotted = f"{prefix}{key}"
        if key in kind.model_fields:
            drop_foreign_keys(kind.model_fields[key], raw[key], changes, f"{dotted}.")
        elif choice is not None and any(
            key in member.model_fields for member in choice.members.values()
        ):
            # A key that a user changed on purpose stays, so that it is refused by name.
            is_changed = any(
                f"{name}.".startswith(f"{dotted}.")
                or f"{dotted}.".startswith(f"{name}.")
                for name in changes
            )
            if not is_changed:
                del raw[key]
