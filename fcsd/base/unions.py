"""Unions of records that one key tells apart: an objective, a teacher, a suite's task.

Not covered: unions that are tried one after another (`int | Literal["auto"]`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from fcsd.base.strict import Strict, refuse_keys


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
