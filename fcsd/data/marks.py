"""Mark the texts of a conversation, to see where a chat template writes them.

A template is a program: it takes thoughts out of earlier turns, moves system prompts,
repeats the names of tools. So nothing is concluded from its source. The texts of all
messages are marked with private characters, and the conversation is rendered with and
without them: the marks must be all that differs. Where they change anything else (a
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
"""Writes a conversation, opened for the assistant's next turn if so wanted; raises
UserError where it is refused.
"""

# what templates look for, and most tokens of chats
TAG = re.compile(r"</?[^<>\s]{1,64}>|\[/?[A-Z_]{2,32}\]")
# characters that mean nothing to anyone
PRIVATE = [chr(code) for code in range(0xF0000, 0xFFFFE)]

_MARK = re.compile(f"[{PRIVATE[0]}-{PRIVATE[-1]}]")
# keys of a message that a template compares, or that tell messages apart
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
_PROBES = 3  # of the private characters are for messages that a template is tried with
_WORD = re.compile(r"\w+")
_WORDS = 8  # that are marked at either end of a text and on either side of its tags
_TAGS = 32


class UnclearTurnError(Exception):
    """What is written does not tell what the assistant says."""


@dataclass
class Leaf:
    """One text of a message, at a path of keys, and the marks in it: where, and which."""

    message: int
    path: tuple[Any, ...]
    text: str
    marks: list[tuple[int, str]] = field(default_factory=list)

    @property
    def places(self) -> list[list[int]]:
        """Where its marks may be, best first: at its ends, in its words, nowhere."""
        ends, words = self._ends(), self._words()
        choices = [words, ends] if words and TAG.search(self.text) else [ends, words]
        return [*(places for places in choices if places), []]

    def _ends(self) -> list[int]:
        """Return where its text begins and ends; a template may strip white space."""
        begin = len(self.text) - len(self.text.lstrip()) if self.text.strip() else 0
        return [begin, max(begin, len(self.text.rstrip()))]

    def _words(self) -> list[int]:
        """Return places behind first letters of words, so that a tag stays whole and a
        text keeps its ends.
        """
        tags = [tag.span() for tag in TAG.finditer(self.text)]
        if len(tags) > _TAGS:
            tags = tags[: _TAGS // 2] + tags[-_TAGS // 2 :]
        edges = [0, *(place for tag in tags for place in tag), len(self.text)]
        chosen: set[int] = set()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):  # between tags
            words = [word.start() + 1 for word in _WORD.finditer(self.text, begin, end)]
            chosen.update(words[:_WORDS] + words[-_WORDS:])
        return sorted(chosen)

    @property
    def marked(self) -> str:
        edges = [0, *(place for place, _ in self.marks), len(self.text)]
        pieces = [self.text[begin:end] for begin, end in itertools.pairwise(edges)]
        return pieces[0] + "".join(
            mark + piece
            for (_, mark), piece in zip(self.marks, pieces[1:], strict=True)
        )

    def is_torn(self, text: str) -> bool:
        """Whether only one of the marks at its ends is written."""
        written = [mark in text for _, mark in self.marks]
        return [place for place, _ in self.marks] == self._ends() and len(
            {*written}
        ) == 2

    @property
    def must_be_written(self) -> bool:
        """Whether a template that leaves it out loses what is said; thoughts may go, in
        tags too.
        """
        behind_tags = self.text[max(self.text.rfind("<"), self.text.rfind(">")) + 1 :]
        return (
            self.path[0] in ("content", "tool_calls")
            and _WORD.search(behind_tags) is not None
        )


class MarkedChat:
    """A conversation with marks: its `messages`, its `text`, and where in it the texts
    of each message stand.

    plain: the text without marks.
    """

    def __init__(self, render: Render, messages: Sequence[Message]):
        self._render, self._messages = render, messages
        self.plain = render(messages, False)
        self._leaves = [
            leaf for i, message in enumerate(messages) for leaf in _leaves(i, message)
        ]
        texts = [self.plain, *(leaf.text for leaf in self._leaves)]
        present = {mark for text in texts for mark in _MARK.findall(text)}
        self._free = (mark for mark in PRIVATE[:-_PROBES] if mark not in present)
        self.messages, self.text = self._mark()
        owners = {mark: leaf.message for leaf in self._leaves for _, mark in leaf.marks}
        self._places = [
            mark.start() for mark in _MARK.finditer(self.text) if mark[0] in owners
        ]
        self._owners = [owners[self.text[place]] for place in self._places]
        # a template may name a tool again where it answers
        self._first: dict[str, int] = {}
        for place in self._places:
            self._first.setdefault(self.text[place], place)

    def _mark(self) -> tuple[list[Message], str]:
        for leaf in self._leaves:
            self._place(leaf, leaf.places[0])
        messages, text = self._rendered(self._leaves)
        if text is not None:
            return messages, text
        for leaf in self._leaves:
            for places in leaf.places:
                self._place(leaf, places)
                if not places or self._rendered([leaf])[1] is not None:
                    break
        messages, text = self._rendered(self._leaves)
        if text is None:
            raise UnclearTurnError(
                "it writes each message otherwise when another one changes"
            )
        return messages, text

    def _place(self, leaf: Leaf, places: list[int]) -> None:
        marks = [*itertools.islice(self._free, len(places))]
        if len(marks) < len(places):
            raise UnclearTurnError("it is too long")
        leaf.marks = [*zip(places, marks, strict=True)]

    def _rendered(self, leaves: Sequence[Leaf]) -> tuple[list[Message], str | None]:
        """Render with the marks of some texts; None: something else has changed, or
        half of a text is not there.
        """
        messages = [*self._messages]
        for leaf in leaves:
            messages[leaf.message] = _with(
                messages[leaf.message], leaf.path, leaf.marked
            )
        try:
            text = self._render(messages, False)
        except UserError:
            return messages, None
        marks = {mark for leaf in leaves for _, mark in leaf.marks}
        if (
            _MARK.sub(lambda mark: "" if mark[0] in marks else mark[0], text)
            != self.plain
        ):
            return messages, None
        return messages, None if any(leaf.is_torn(text) for leaf in leaves) else text

    def lost(self, message: int) -> str | None:
        """Return the key of what is said and not written: that of a call, or of a
        content without any call.
        """
        leaves = [
            leaf
            for leaf in self._leaves
            if leaf.message == message and leaf.must_be_written and leaf.marks
        ]
        lost = {leaf.path[0] for leaf in leaves if not self._written(leaf)}
        if "tool_calls" in lost:
            return "tool_calls"
        calls = any(leaf.path[0] == "tool_calls" for leaf in leaves)
        return "content" if "content" in lost and not calls else None

    def _written(self, leaf: Leaf) -> list[int]:
        return [self._first[mark] for _, mark in leaf.marks if mark in self._first]

    def pieces(self, message: int) -> list[tuple[int, int]]:
        """Return where the texts of a message begin and end, marks included, each time
        that others stand between.
        """
        leaves = (leaf for leaf in self._leaves if leaf.message == message)
        pieces: list[tuple[int, int]] = []
        for place in sorted(place for leaf in leaves for place in self._written(leaf)):
            if pieces and not self.owners(pieces[-1][1], place) - {message}:
                pieces[-1] = pieces[-1][0], place + 1
            else:
                pieces.append((place, place + 1))
        return pieces

    def end_before(self, message: int, place: int) -> int:
        """Return where the texts of other messages end before a place."""
        before = range(bisect.bisect_left(self._places, place) - 1, -1, -1)
        return next(
            (self._places[n] + 1 for n in before if self._owners[n] != message), 0
        )

    def begin_after(self, message: int, place: int) -> int:
        """Return where the texts of other messages begin after a place."""
        after = range(bisect.bisect_left(self._places, place), len(self._places))
        return next(
            (self._places[n] for n in after if self._owners[n] != message),
            len(self.text),
        )

    def owners(self, begin: int, end: int) -> set[int]:
        """Return the messages that have texts in a part of the conversation."""
        first, last = (
            bisect.bisect_left(self._places, place) for place in (begin, end)
        )
        return {*self._owners[first:last]}

    def without_marks(self, place: int) -> int:
        """Return a place of the marked text as one of the plain text."""
        return place - bisect.bisect_left(self._places, place)

    def first_mark(self, text: str) -> int | None:
        """Return where the first mark stands in what was written of some of the marked messages."""
        return next(
            (mark.start() for mark in _MARK.finditer(text) if mark[0] in self._first),
            None,
        )

    def last_mark(self, text: str) -> int | None:
        """Return where the last mark stands in what was written of some of the marked messages."""
        return max(
            (mark.start() for mark in _MARK.finditer(text) if mark[0] in self._first),
            default=None,
        )


def _leaves(index: int, message: Message) -> Iterator[Leaf]:
    """Yield the texts of a message; that of an empty turn is empty."""
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
    """Copy a message with another text at a place."""
    if not path:
        return text
    copy: Any = {**value} if isinstance(value, Mapping) else [*value]
    copy[path[0]] = _with(copy[path[0]], path[1:], text)
    return copy
