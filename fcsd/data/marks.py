"""Mark the texts of a conversation, to find where a chat template writes them.

A template is a program: it removes thoughts from earlier turns, moves system prompts,
repeats the names of tools. So its source proves nothing. Instead, the texts of all
messages are marked with private characters, and the conversation is rendered with and
without them: the marks must be the only difference. Where they change anything else (a
template looks for tags in a text, or strips it), they are put into words instead of at
the ends, or left out.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fcsd.base.errors import UserError

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]
"""Writes a conversation, if True with the opening of the assistant's next turn; raises
UserError if the template refuses it.
"""

# Matches what templates look for in a text, and most special tokens of chats.
TAG = re.compile(r"</?[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]")
# Characters for private use, which have no meaning.
PRIVATE = [chr(code) for code in range(0xF0000, 0xFFFFE)]

_MARK = re.compile(f"[{PRIVATE[0]}-{PRIVATE[-1]}]")
# Keys of a message that a template compares, or that identify a message.
_NOT_SAID = frozenset(
    [
        "role",
        "name",
        "type",
        "id",
        "tool_call_id",
        "tool_name",
        "channel",
        "recipient",
        "phase",
    ]
)
_PROBES = 3  # private characters reserved for the messages that probe a template
_WORD = re.compile(r"\w+")
_WORDS = 8  # marked at either end of a text and on either side of its tags
_TAGS = 32


class UnclearTurnError(Exception):
    """The written conversation does not show which text is the assistant's."""


@dataclass
class Leaf:
    """One text of a message, at a path of keys, with its marks: (position, character)."""

    message: int
    path: tuple[Any, ...]
    text: str
    marks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def places(self) -> list[list[int]]:
        """Possible positions of its marks, best first: its ends, its words, none."""
        ends, words = self._ends(), self._words()
        # A template may look for a tag at the ends of a text, so marks there would hide
        # it.
        choices = [words, ends] if words and TAG.search(self.text) else [ends, words]
        return [*(choice for choice in choices if choice), []]

    def _ends(self) -> list[int]:
        """Return the ends of the text without white space, which a template may strip."""
        begin = len(self.text) - len(self.text.lstrip()) if self.text.strip() else 0
        return [begin, max(begin, len(self.text.rstrip()))]

    def _words(self) -> list[int]:
        """Return the positions after the first letters of words, which leave tags and
        the ends of the text unchanged.
        """
        tags = [tag.span() for tag in TAG.finditer(self.text)]
        # Only the first and last tags of a long text count, which limits its marks.
        if len(tags) > _TAGS:
            tags = tags[: _TAGS // 2] + tags[-_TAGS // 2 :]
        edges = [0, *(edge for tag in tags for edge in tag), len(self.text)]
        positions: set[int] = set()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):  # between tags
            words = [word.start() + 1 for word in _WORD.finditer(self.text, begin, end)]
            positions.update(words[:_WORDS] + words[-_WORDS:])
        return sorted(positions)

    @property
    def marked(self) -> str:
        edges = [0, *(position for position, _ in self.marks), len(self.text)]
        pieces = [self.text[begin:end] for begin, end in itertools.pairwise(edges)]
        return pieces[0] + "".join(
            mark + piece
            for (_, mark), piece in zip(self.marks, pieces[1:], strict=True)
        )

    def is_torn(self, text: str) -> bool:
        """Whether only one of the marks at its ends is written, that is, half of it."""
        written = [mark in text for _, mark in self.marks]
        return [position for position, _ in self.marks] == self._ends() and len(
            {*written}
        ) == 2

    @property
    def must_be_written(self) -> bool:
        """Whether its text must not be left out; thoughts may be, also those in tags."""
        behind_tags = self.text[max(self.text.rfind("<"), self.text.rfind(">")) + 1 :]
        return (
            self.path[0] in ("content", "tool_calls")
            and _WORD.search(behind_tags) is not None
        )


class MarkedChat:
    """A conversation with marks: its `messages`, its `text`, and the positions in it of
    the texts of each message.

    plain: the text without marks.
    """

    def __init__(self, render: Render, messages: Sequence[Message]):
        self._render, self._messages = render, messages
        self.plain = render(messages, False)
        self._leaves = [
            leaf for i, message in enumerate(messages) for leaf in _leaves(i, message)
        ]
        texts = [self.plain, *(leaf.text for leaf in self._leaves)]
        # A text may contain private characters itself; these are not used as marks.
        present = {mark for text in texts for mark in _MARK.findall(text)}
        self._free = (mark for mark in PRIVATE[:-_PROBES] if mark not in present)
        self.messages, self.text = self._mark()
        owners = {mark: leaf.message for leaf in self._leaves for _, mark in leaf.marks}
        self._places = [
            mark.start() for mark in _MARK.finditer(self.text) if mark[0] in owners
        ]
        self._owners = [owners[self.text[position]] for position in self._places]
        # Only the first position counts: a template may repeat a tool's name at its
        # answer.
        self._first: dict[str, int] = {}
        for position in self._places:
            self._first.setdefault(self.text[position], position)

    def _mark(self) -> tuple[list[Message], str]:
        # Usually the best positions work for all texts at once, which takes one
        # rendering.
        for leaf in self._leaves:
            self._place(leaf, leaf.places[0])
        messages, text = self._rendered(self._leaves)
        if text is not None:
            return messages, text
        for leaf in self._leaves:
            # Try each text alone, so that one difficult text does not affect the
            # others.
            for choice in leaf.places:
                self._place(leaf, choice)
                if not choice or self._rendered([leaf])[1] is not None:
                    break
        messages, text = self._rendered(self._leaves)
        if text is None:
            raise UnclearTurnError(
                "it changes how it writes a message when another message changes"
            )
        return messages, text

    def _place(self, leaf: Leaf, positions: list[int]) -> None:
        marks = [*itertools.islice(self._free, len(positions))]
        if len(marks) < len(positions):
            raise UnclearTurnError("it is too long")
        leaf.marks = [*zip(positions, marks, strict=True)]

    def _rendered(self, leaves: Sequence[Leaf]) -> tuple[list[Message], str | None]:
        """Render with the marks of some texts; None: the marks change something else,
        or half of a text is missing.
        """
        messages = [*self._messages]
        for leaf in leaves:
            messages[leaf.message] = _with(
                messages[leaf.message], leaf.path, leaf.marked
            )
        try:
            text = self._render(messages, False)
        except UserError:  # a template may look at its texts, and refuse marks in them
            return messages, None
        marks = {mark for leaf in leaves for _, mark in leaf.marks}
        if (
            _MARK.sub(lambda mark: "" if mark[0] in marks else mark[0], text)
            != self.plain
        ):
            return messages, None
        return messages, None if any(leaf.is_torn(text) for leaf in leaves) else text

    def lost(self, message: int) -> str | None:
        """Return the key of a text that the template does not write: that of a call, or
        of the content of a message without calls.
        """
        leaves = [
            leaf
            for leaf in self._leaves
            if leaf.message == message and leaf.must_be_written and leaf.marks
        ]
        lost = {leaf.path[0] for leaf in leaves if not self._written(leaf)}
        if "tool_calls" in lost:
            return "tool_calls"
        # Templates may leave out what is said beside calls, but not the calls.
        calls = any(leaf.path[0] == "tool_calls" for leaf in leaves)
        return "content" if "content" in lost and not calls else None

    def _written(self, leaf: Leaf) -> list[int]:
        return [self._first[mark] for _, mark in leaf.marks if mark in self._first]

    def pieces(self, message: int) -> list[tuple[int, int]]:
        """Return the spans of a message's texts, marks included; texts of other
        messages separate them.
        """
        leaves = (leaf for leaf in self._leaves if leaf.message == message)
        positions = sorted(place for leaf in leaves for place in self._written(leaf))
        pieces: list[tuple[int, int]] = []
        for position in positions:
            if pieces and not self.owners(pieces[-1][1], position) - {message}:
                pieces[-1] = pieces[-1][0], position + 1
            else:
                pieces.append((position, position + 1))
        return pieces

    def end_before(self, message: int, position: int) -> int:
        """Return the end of the last text of another message before a position."""
        indices = range(bisect.bisect_left(self._places, position) - 1, -1, -1)
        return next(
            (
                self._places[index] + 1
                for index in indices
                if self._owners[index] != message
            ),
            0,
        )

    def begin_after(self, message: int, position: int) -> int:
        """Return the beginning of the first text of another message after a position."""
        indices = range(bisect.bisect_left(self._places, position), len(self._places))
        return next(
            (
                self._places[index]
                for index in indices
                if self._owners[index] != message
            ),
            len(self.text),
        )

    def owners(self, begin: int, end: int) -> set[int]:
        """Return the messages that have texts in a part of the conversation."""
        # Positions are sorted, so those in a part of the text are a slice.
        first, last = (
            bisect.bisect_left(self._places, position) for position in (begin, end)
        )
        return {*self._owners[first:last]}

    def without_marks(self, position: int) -> int:
        """Convert a position in the marked text to one in the plain text."""
        # Each mark before the position is one character.
        return position - bisect.bisect_left(self._places, position)

    def first_mark(self, text: str) -> int | None:
        """Return the position of the first mark in a rendering of some of the messages."""
        return next(
            (mark.start() for mark in _MARK.finditer(text) if mark[0] in self._first),
            None,
        )

    def last_mark(self, text: str) -> int | None:
        """Return the position of the last mark in a rendering of some of the messages."""
        return max(
            (mark.start() for mark in _MARK.finditer(text) if mark[0] in self._first),
            default=None,
        )


def _leaves(index: int, message: Message) -> Iterator[Leaf]:
    """Yield the texts of a message; an empty turn has an empty one."""
    for key, value in message.items():
        if key in ("content", "tool_calls") or (
            isinstance(value, str) and key not in _NOT_SAID
        ):
            for path, text in _texts(value, (key,)):
                if text.strip() or (key == "content" and not message.get("tool_calls")):
                    yield Leaf(index, path, text)


def _texts(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, (*path, number))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            called = path[0] == "tool_calls" and (key == "name" or "arguments" in path)
            if called or key not in _NOT_SAID:
                yield from _texts(item, (*path, key))


def _with(value: Any, path: tuple[Any, ...], text: str) -> Any:
    """Copy a message with another text at a path."""
    if not path:
        return text
    copy: Any = {**value} if isinstance(value, Mapping) else [*value]
    copy[path[0]] = _with(copy[path[0]], path[1:], text)
    return copy
