"""Find what the assistant says in a conversation that a chat template has written.

It says what stands between the opening of its turn, which a prompt ends with, and the
end of it, which is the last that a model must write to stop. Where a turn has no end of
its own, as in GLM-4.5, that is the token with which the next role begins.

Not covered: templates that write one message in several places, or only a part of one;
their examples are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fcsd.base.errors import UserError
from fcsd.data.marks import PRIVATE, TAG, MarkedChat, Message, Render, UnclearTurnError


@dataclass(frozen=True)
class TurnForm:
    """How a template writes turns, as an exchange of three messages shows.

    opening: what it adds for `add_generation_prompt`. header: as much of it as earlier
    turns of the assistant have, too. end: what ends a turn that others follow, "" where
    the next one does. ends: whether a turn that nothing follows has an end; None: not
    known, as the template refuses the exchange. always_open: whether it opens a turn of
    the assistant behind any conversation. tokens: matches what is never cut.
    """

    opening: str = ""
    header: str = ""
    end: str = ""
    ends: bool | None = None
    always_open: bool = False
    tokens: re.Pattern[str] = TAG

    def opened(self, prompt: str, written: str) -> int | None:
        """Return how much of what is `written` before an answer belongs to the
        `prompt`, which both follow on the same text; None: it lacks the opening of the
        assistant's turn.
        """
        number = _shared(prompt, written, self.tokens)
        if number == len(written):
            return number
        if self.opening and prompt.endswith(self.opening):
            return (
                number
                if number >= len(prompt) - len(self.opening) + len(self._least)
                else None
            )
        # Thoughts that are only opened in the last turn.
        before = prompt.removesuffix(self.opening.removeprefix(self.header))
        number = _shared(before, written, self.tokens)
        return (
            self.behind_header(written, number)
            if written.startswith(before.rstrip())
            else None
        )

    def behind_header(self, text: str, place: int) -> int:
        """Return where the header that may stand at a place ends."""
        return (
            place + len(self.header) if text.startswith(self.header, place) else place
        )

    def leaves_open(self, text: str, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether what ends a turn stands behind one of these parts of a text, or nowhere."""
        if not self.end:
            return self.ends is False
        for _, end in spans:
            place = len(text) - len(text[end:].lstrip())
            is_in_span = any(begin <= place < end for begin, end in spans)
            is_written = text[:end].rstrip().endswith(self.end)
            if text.startswith(self.end, place) and not is_in_span and not is_written:
                return True
        return False

    def token(self, text: str, place: int) -> int | None:
        """Return the end of the token that begins at a place, behind white space."""
        token = self.tokens.match(text, len(text) - len(text[place:].lstrip()))
        return token.end() if token else None

    def ends_with_token(self, text: str) -> bool:
        """Whether the last that is written is a token."""
        return any(token.end() == len(text) for token in self.tokens.finditer(text))

    @property
    def _least(self) -> str:
        """The part of the opening that names the assistant."""
        names = [token.start() for token in self.tokens.finditer(self.opening)]
        return self.opening[: names[1] if len(names) > 1 else None].rstrip()


def read_form(render: Render, tokens: Collection[str]) -> TurnForm:
    """Read the form of turns off a template. tokens: texts that the tokenizer takes as
    one token.
    """
    longest_first = sorted(
        (token for token in tokens if token.strip() and not TAG.fullmatch(token)),
        key=len,
    )[::-1]
    pattern = re.compile("|".join([*map(re.escape, longest_first), TAG.pattern]))
    user, assistant, again = PRIVATE[-3:]
    for as_parts in (False, True):
        exchange = [
            {
                "role": role,
                "content": [{"type": "text", "text": text}] if as_parts else text,
            }
            for role, text in (
                ("user", user),
                ("assistant", assistant),
                ("user", again),
            )
        ]
        try:
            asked, opened = render(exchange[:1], False), render(exchange[:1], True)
            answered, whole = render(exchange[:2], False), render(exchange, False)
        except UserError:
            continue
        parts = re.fullmatch(f".*{user}(.*){assistant}(.*){again}.*", whole, re.DOTALL)
        if parts is not None and assistant in answered and user in asked:
            break
    else:
        return TurnForm(tokens=pattern)
    before, after = parts.groups()
    tail, closing = answered.rpartition(assistant)[2], asked.rpartition(user)[2]
    opening = opened[len(asked) :] if opened.startswith(asked) else ""
    behind = before[_shared(closing, before, pattern) :]
    header = behind[: _shared(opening, behind, pattern)] if opening else behind
    after = after.lstrip()
    end = after[: _shared(tail.strip(), after, pattern)].strip()
    form = TurnForm(
        opening,
        header if header.strip() else "",
        end,
        bool(tail.strip()),
        False,
        pattern,
    )
    if not end and (token := form.token(after, 0)):
        # It ends turns unless it is what a user's turn begins with, as in GLM-4.5.
        ends_turns = (
            after[:token] in before or after[:token] not in asked.partition(user)[0]
        )
        return replace(form, end=after[:token].strip() if ends_turns else "")
    closed = pattern.search(closing)
    if asked == opened and closed and closed[0] in end:
        return replace(form, end=closed[0], always_open=True)
    return form


class WrittenChat:
    """A conversation as a template writes it: `text`, and from where to where each
    answer goes.

    continues: whether what is written of its beginnings is the beginning of what is
    written of all. unstopped: whether there is an answer after which nothing could end
    it. stop: what the text ends with, as the template leaves the last turn open; "":
    whatever ends texts; None: nothing, it has an end.
    """

    def __init__(
        self,
        render: Render,
        messages: Sequence[Message],
        answers: Sequence[int],
        form: TurnForm,
    ):
        self._render, self._form, self._number = render, form, len(messages)
        self._chat = MarkedChat(render, messages)
        self.continues, self.unstopped = True, False
        self.stop: str | None = None
        self.text, self.spans = (
            self._chat.plain,
            [span for i in answers for span in self._spans(i)],
        )
        if self.stop is not None:
            self.text += self.stop
            self.spans[-1] = self.spans[-1][0], len(self.text)

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """Return where an answer goes: one span, or several around what tools answer to
        its calls (Gemma 4).
        """
        chat = self._chat
        if (lost := chat.lost(index)) is not None:
            raise UnclearTurnError(f"it does not write '{lost}' of message {index + 1}")
        opened = self._written(index, True) if index else None
        pieces = chat.pieces(index)
        if not pieces:
            if opened is None or not chat.text.startswith(opened):
                if self._is_left_out(index):
                    return []
                raise UnclearTurnError(f"it does not show where message {index + 1} is")
            pieces = [(len(opened), len(opened))]
        spans = [(place, self._end(index, end, opened)) for place, end in pieces]
        spans[0] = self._begin(index, pieces[0][0], opened), spans[0][1]
        between = chat.owners(spans[0][0], spans[-1][1]) - {index}
        within = any(chat.owners(begin, end) - {index} for begin, end in spans)
        if (
            within
            or spans[0][0] > pieces[0][0]
            or {chat.messages[i]["role"] for i in between} - {"tool"}
        ):
            raise UnclearTurnError(f"it writes message {index + 1} within another one")
        return [
            (chat.without_marks(begin), chat.without_marks(max(begin, end)))
            for begin, end in spans
        ]

    def _written(self, number: int, opened: bool) -> str | None:
        """Write the first messages, marked; None: the template refuses to."""
        try:
            return self._render(self._chat.messages[:number], opened)
        except UserError:
            return None

    def _is_left_out(self, index: int) -> bool:
        """Whether the template writes the same without a message."""
        others = [
            message for i, message in enumerate(self._chat.messages) if i != index
        ]
        try:
            return bool(others) and self._render(others, False) == self._chat.text
        except UserError:
            return False

    def _begin(self, index: int, place: int, opened: str | None) -> int:
        """Return where the assistant begins to say what has its first text at a place."""
        text, form, left = (
            self._chat.text,
            self._form,
            self._chat.end_before(index, place),
        )
        if (
            opened is not None
            and text.startswith(opened)
            and left <= len(opened) <= place
        ):
            is_open = form.opening and opened.endswith(form.opening)
            return (
                len(opened)
                if is_open
                else form.behind_header(text[:place], len(opened))
            )
        self.continues = False
        last = None if opened is None else self._chat.last_mark(opened)
        if (
            opened is not None
            and last is not None
            and opened[last] == text[left - 1 : left]
        ):
            number = form.opened(opened[last + 1 :], text[left:place])
            if number is not None:
                return left + number
        for opening in filter(None, (form.opening, form.header, form.opening.strip())):
            if (begin := text.rfind(opening, left, place)) >= 0:
                return begin + len(opening)
        called = bool(self._chat.messages[index].get("tool_calls"))
        if (index and (form.opening or form.header or form.ends is None)) or called:
            raise UnclearTurnError(f"it does not show where message {index + 1} begins")
        return place

    def _end(self, index: int, place: int, opened: str | None) -> int:
        """Return where what has its last text before a place ends, with the end of its turn."""
        text, form = self._chat.text, self._form
        right = self._chat.begin_after(index, place)
        if form.always_open and (end := text.find(form.end, place, right)) >= 0:
            return end + len(form.end)
        if index + 1 == self._number:
            ends = bool(text[place:].strip()) if form.ends is None else form.ends
            if not ends and not (form.end and form.end in text[place:]):
                self._leave_open(text, place)
            return len(text)
        tail, is_last = self._tail(index, place, opened)
        rest = text[place:right]
        number = _shared(tail, rest, form.tokens)
        if form.end and form.end in rest[:number]:
            end = rest.rfind(form.end, 0, number) + len(form.end)
            return place + number - len(rest[end:number].lstrip())
        if (
            is_last
            and form.ends is not False
            and tail.strip()
            and not tail[number:].strip()
        ):
            return place + number
        if form.end and (end := rest.find(form.end, number)) >= 0:
            return place + end + len(form.end)
        token = form.token(rest, number)
        # Where nothing stands between this text and the next one, the turn goes on.
        self.unstopped |= (
            bool(rest)
            and token is None
            and not form.ends_with_token(rest[:number].rstrip())
        )
        return place + (token or number)

    def _tail(self, index: int, place: int, opened: str | None) -> tuple[str, bool]:
        """Return what stands behind a text of a message where nothing follows it, and
        whether it is its last text.
        """
        whole = self._written(index + 1, False)
        if whole is None:
            return "", True
        self.continues &= self._chat.text.startswith(whole)
        if not self._chat.pieces(index):
            return whole[len(opened or "") :], True
        behind = whole.rpartition(self._chat.text[place - 1])[2]
        end = self._chat.first_mark(behind)
        return behind[:end], end is None

    def _leave_open(self, text: str, place: int) -> None:
        """End the last turn with the token with which the next role would begin."""
        self.stop, mark, last = "", PRIVATE[-1], self._chat.messages[-1]
        content = (
            [{"type": "text", "text": mark}]
            if isinstance(last["content"], list)
            else mark
        )
        for role in ("tool", "user") if last.get("tool_calls") else ("user",):
            try:
                written = self._render(
                    [*self._chat.messages, {"role": role, "content": content}], False
                )
            except UserError:
                continue
            longer = written.partition(mark)[0]
            behind = self._chat.last_mark(longer)
            begin = (
                place
                if longer.startswith(text[:place]) or behind is None
                else behind + 1
            )
            number = _shared(text[place:], longer[begin:], self._form.tokens)
            if (token := self._form.token(longer, begin + number)) is not None:
                self.stop = longer[begin + number : token].strip()
                return


def _shared(text: str, other: str, tokens: re.Pattern[str]) -> int:
    """Count the characters with which both texts begin, without a token that only one
    of them has.
    """
    pairs = enumerate(zip(text, other, strict=False))
    number = next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))
    for written in (text, other):
        for token in tokens.finditer(written):
            if token.start() < number < token.end():
                number = token.start()
            if token.end() >= number:
                break
    return number
