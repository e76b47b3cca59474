"""Read discriminated unions of pydantic: which class a value's tag names, and what the other classes have.

An objective, a teacher and a suite's task are each one of several classes; a key of theirs (`name`, `backend`, `kind`)
or a function says which. Pydantic puts that tag into the location of an error, where it means nothing to a user.

Not covered: unions that are tried one after the other (`int | Literal["auto"]`).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, Discriminator, Tag
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Choice:
    """A discriminated union.

    key: the key that decides; "" where a function does. tag: what decides of a plain value. members: tag -> class.
    """

    key: str
    tag: Callable[[dict[str, Any]], Any]
    members: dict[Any, type[BaseModel]]

    def member(self, value: Any) -> type[BaseModel] | None:
        """Return the class of a plain value; None for what is no mapping, or has a tag that is not known."""
        tag = self.tag(value) if isinstance(value, dict) else None
        return self.members.get(tag) if isinstance(tag, str) else None

    def tags_with(self, key: str) -> list[str]:
        """Return the tags of the classes that have `key`."""
        return [tag for tag, member in self.members.items() if key in member.model_fields]


@dataclass(frozen=True)
class Place:
    """Where in a document an error lies.

    keys: the location without tags. here: the annotation of what lies there; None for what is not known.
    record: the class that has, or lacks, the last key; None in a free mapping. choice, tag: the union that this class
    belongs to, and its tag there; None for a class of its own.
    """

    keys: list[str | int]
    here: Any
    record: type[BaseModel] | None
    choice: Choice | None
    tag: str | None


def default_tag(key: str, tag: str) -> BeforeValidator:
    """Take a mapping without `key` for one with this tag."""
    return BeforeValidator(lambda value: {key: tag, **value} if isinstance(value, dict) else value)


def choice_of(annotation: Any) -> Choice | None:
    """Return the discriminated union of an annotation or a field, be it optional; None for anything else."""
    inner, discriminator = _inner(annotation)
    if discriminator is None or get_origin(inner) not in (Union, UnionType):
        return None
    members: dict[Any, type[BaseModel]] = {}
    for member in get_args(inner):
        kind, _ = _inner(member)
        if callable(discriminator):
            tags = [each.tag for each in get_args(member)[1:] if isinstance(each, Tag)]
        else:
            tags = list(get_args(kind.model_fields[discriminator].annotation))
        members |= dict.fromkeys(tags, kind)
    if callable(discriminator):
        return Choice("", discriminator, members)
    return Choice(discriminator, lambda value: value.get(discriminator), members)


def _inner(annotation: Any) -> tuple[Any, Any]:
    """Return what is inside Optional and Annotated, and the discriminator beside it."""
    discriminator: Any = None
    while True:
        beside: Sequence[Any] = []
        if isinstance(annotation, FieldInfo):
            beside, annotation = [annotation, *annotation.metadata], annotation.annotation
        elif get_origin(annotation) is Annotated:
            annotation, *beside = get_args(annotation)
        elif get_origin(annotation) in (Union, UnionType) and NoneType in get_args(annotation):
            some = [each for each in get_args(annotation) if each is not NoneType]
            if len(some) > 1:
                return annotation, discriminator
            annotation = some[0]
        else:
            return annotation, discriminator
        for each in beside:
            found = each.discriminator if isinstance(each, FieldInfo | Discriminator) else None
            if isinstance(found, Discriminator):
                found = found.discriminator
            discriminator = discriminator or found


def place_of(kind: Any, location: Sequence[str | int]) -> Place:
    """Follow the location of an error into a class, or into a union of classes."""
    annotation: Any = kind
    keys: list[str | int] = []
    record: type[BaseModel] | None = None
    chosen: tuple[Choice, str] | None = None  # of the class that `annotation` stands for now
    held = chosen  # of `record`
    for part in location:
        choice = choice_of(annotation)
        if choice is not None and part in choice.members:
            annotation, chosen = choice.members[part], (choice, str(part))
            continue
        inner, _ = _inner(annotation)
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            record, held, chosen = inner, chosen, None
            annotation = inner.model_fields.get(str(part))
        elif get_origin(inner) in (list, dict):
            record, annotation = None, get_args(inner)[-1]
        elif _names_a_type(part):
            continue
        else:
            record, annotation = None, None
        keys.append(part)
    choice, tag = held if held is not None and record is not None else (None, None)
    return Place(keys, annotation, record, choice, tag)


def _names_a_type(part: str | int) -> bool:
    """Pydantic adds the types that it tried to a location."""
    return isinstance(part, str) and (
        "[" in part or part[:1].isupper() or part in {"int", "str", "float", "bool"}
    )


def drop_foreign_keys(annotation: Any, raw: Any, given: Collection[str], prefix: str = "") -> None:
    """Take out of plain values, in place, the keys that the class of their tag does not have; those in `given`, dotted,
    or below or above one of them, stay."""
    if not isinstance(raw, dict):
        return
    choice = choice_of(annotation)
    kind = choice.member(raw) if choice is not None else _inner(annotation)[0]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return
    for key in list(raw):
        dotted = f"{prefix}{key}"
        if key in kind.model_fields:
            drop_foreign_keys(kind.model_fields[key], raw[key], given, f"{dotted}.")
        elif choice is not None and not any(
            f"{one}.".startswith(f"{other}.")
            for name in given
            for one, other in ((name, dotted), (dotted, name))
        ):
            del raw[key]
