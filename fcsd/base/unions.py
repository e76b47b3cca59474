"""Unions of records of which one key says which it is: an objective, a teacher, a
suite's task.

Not covered: unions that are tried one after the other (`int | Literal["auto"]`).
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
    """Stands beside a union of records in `Annotated`, and says which of them a mapping
    is.

    key: the key that decides. members: its values -> records. default: the value of a
    mapping without the key; None: it is required. else_default: another value stands
    for the default, too. name: what messages call the key; "": the value says it all.
    """

    key: str
    members: dict[str, type[Strict]]
    default: str | None = None
    else_default: bool = False
    name: str | None = None

    def tag(self, value: dict[str, Any]) -> str | None:
        """Return the value of the key, or what stands for it; None for one that is not allowed."""
        tag = value.get(self.key, self.default)
        if isinstance(tag, str) and tag in self.members:
            return tag
        return self.default if self.else_default else None

    def member(self, value: Any) -> type[Strict] | None:
        """Return the record of a plain value; None for what is no mapping, or has a
        value that is not allowed.
        """
        return (
            self.members.get(self.tag(value) or "") if isinstance(value, dict) else None
        )

    def __get_pydantic_core_schema__(
        self, union: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
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
        if self.key in kind.model_fields:
            value = {self.key: tag} | value
        name = self.key if self.name is None else self.name
        which = f"{name} {tag!r}" if name else str(tag)
        needs = dict.fromkeys(self._needed_by_some(), f" for {which}") if name else {}
        kind.check_keys(value, self._foreign(kind, which), needs)
        return kind.model_validate(value)

    def _foreign(self, kind: type[Strict], which: str) -> dict[str, str]:
        """Return what is said of keys that other members have, and not `kind`."""
        tags = {
            key: [tag for tag, one in self.members.items() if key in one.model_fields]
            for other in self.members.values()
            for key in other.model_fields.keys() - kind.model_fields.keys()
        }
        return {
            key: f"no meaning for {which}, only for {', '.join(owners)}"
            for key, owners in tags.items()
        }

    def _needed_by_some(self) -> set[str]:
        """Return the keys that not every member requires."""
        every = self.members.values()
        return {
            key
            for one in every
            for key in one.model_fields
            if not all(x.requires(key) for x in every)
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
    """Return the choice of an annotation or a field, be it optional; None for anything else."""
    beside: list[Any] = []
    if isinstance(annotation, FieldInfo):
        annotation, beside = annotation.annotation, annotation.metadata
    elif get_origin(annotation) is Annotated:
        annotation, *beside = get_args(annotation)
    if choice := next((each for each in beside if isinstance(each, OneOf)), None):
        return choice
    inside = (
        get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()
    )
    return next((choice for each in inside if (choice := choice_of(each))), None)


def drop_foreign_keys(
    annotation: Any, raw: Any, changes: Collection[str], prefix: str = ""
) -> None:
    """Take out of plain values, in place, the keys that the record of their union does
    not have; those in `changes`, dotted, or below or above one of them, stay."""
    choice = choice_of(annotation)
    if choice is not None:
        kind = choice.member(raw)
    else:
        own = annotation.annotation if isinstance(annotation, FieldInfo) else annotation
        kinds = [
            each
            for each in (own, *get_args(own))
            if isinstance(each, type) and issubclass(each, Strict)
        ]
        kind = kinds[0] if kinds else None
    if kind is None or not isinstance(raw, dict):
        return
    for key in list(raw):
        dotted = f"{prefix}{key}"
        if key in kind.model_fields:
            drop_foreign_keys(kind.model_fields[key], raw[key], changes, f"{dotted}.")
        elif choice is not None and not any(
            f"{one}.".startswith(f"{other}.")
            for name in changes
            for one, other in ((name, dotted), (dotted, name))
        ):
            del raw[key]
