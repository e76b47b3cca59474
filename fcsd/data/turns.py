"""Find the assistant's text in a conversation that a chat template has written.

It reaches from the opening of the assistant's turn, with which a prompt ends, to the
end of the turn, which a model must write to stop. Where a turn has no end of its own,
as in GLM-4.5, the end is the token with which the next role begins.

Not covered: templates that write one message in several places, or only a part of one;
their examples are refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.marks import PRIVATE, TAG, MarkedChat, Message, Render, UnclearTurnError


@dataclass(frozen=True)
class TurnForm:
    """The form of turns in a template, found by an exchange of three messages.

    opening: the text added for `add_generation_prompt`. header: as much of it as
    earlier turns of the assistant have, too. end: the text that ends a turn before
    another one; "": the next turn does. ends: whether the last turn has an end; None:
    unknown, because the template refuses the exchange. always_open: whether the
    template opens a turn of the assistant after any conversation. tokens: matches texts
    that are never cut.
    """

    opening: str = ""
    header: str = ""
    end: str = ""
    ends: bool | None = None
    always_open: bool = False
    tokens: re.Pattern[str] = TAG

    def opened(self, prompt: str, written: str) -> int | None:
        """Return how much of the text `written` before an answer belongs to the
        `prompt`, where both follow the same text; None: the opening of the assistant's
        turn is missing.
        """
        number = _shared(prompt, written, self.tokens)
        if number == len(written):
            return number
        if self.opening and prompt.endswith(self.opening):
            if number >= len(prompt) - len(self.opening) + len(self._role_header):
                return number
            return None
        # A template may open thoughts in the last turn only.
        prompt_header = prompt.removesuffix(self.opening.removeprefix(self.header))
        number = _shared(prompt_header, written, self.tokens)
        if written.startswith(prompt_header.rstrip()):
            return self.behind_header(written, number)
        return None

    def behind_header(self, text: str, position: int) -> int:
        """Return the end of the header at a position, or the position if there is none."""
        if text.startswith(self.header, position):
            return position + len(self.header)
        return position

    def leaves_open(self, text: str, spans: Sequence[tuple[int, int]]) -> bool:
        """Tell whether the end of a turn follows one of these spans, or is missing."""
        if not self.end:
            return self.ends is False
        for _, end in spans:
            # White space may stand between an answer and the end of its turn.
            position = len(text) - len(text[end:].lstrip())
            is_in_span = any(begin <= position < end for begin, end in spans)
            is_written = text[:end].rstrip().endswith(self.end)
            if (
                text.startswith(self.end, position)
                and not is_in_span
                and not is_written
            ):
                return True
        return False

    def token(self, text: str, position: int) -> int | None:
        """Return the end of the token at a position, after white space; None: no token."""
        token = self.tokens.match(text, len(text) - len(text[position:].lstrip()))
        return token.end() if token else None

    def ends_with_token(self, text: str) -> bool:
        """Tell whether a text ends with a token."""
        return any(token.end() == len(text) for token in self.tokens.finditer(text))

    @property
    def _role_header(self) -> str:
        """The part of the opening that names the assistant."""
        names = [token.start() for token in self.tokens.finditer(self.opening)]
        return self.opening[: names[1] if len(names) > 1 else None].rstrip()


def read_form(render: Render, tokens: Collection[str]) -> TurnForm:
    """Find the form of turns in a template. tokens: texts that are single tokens of the
    tokenizer.
    """
    # Longer tokens first: a regular expression takes the first alternative that
    # matches.
    shown_tokens = (t for t in tokens if t.strip() and not TAG.fullmatch(t))
    longest_first = sorted(shown_tokens, key=len)[::-1]
    pattern = re.compile("|".join([*map(re.escape, longest_first), TAG.pattern]))
    user, assistant, follow_up = PRIVATE[-3:]
    # Some templates accept contents only as lists of parts.
    turns = [("user", user), ("assistant", assistant), ("user", follow_up)]
    for as_parts in (False, True):
        exchange: list[dict[str, Any]] = []
        for role, text in turns:
            content = [{"type": "text", "text": text}] if as_parts else text
            exchange.append({"role": role, "content": content})
        try:
            question_text = render(exchange[:1], False)
            opened_text = render(exchange[:1], True)
            answer_text = render(exchange[:2], False)
            exchange_text = render(exchange, False)
        except UserError:
            continue
        parts = re.fullmatch(
            f".*{user}(.*){assistant}(.*){follow_up}.*", exchange_text, re.DOTALL
        )
        if parts is not None and assistant in answer_text and user in question_text:
            break
    else:
        return TurnForm(tokens=pattern)
    before_answer, after_answer = parts.groups()
    tail = answer_text.rpartition(assistant)[2]
    closing = question_text.rpartition(user)[2]
    # The text common to the closing of the question and to the text before the answer
    # belongs to the user's turn; the remainder opens the assistant's.
    opening = ""
    if opened_text.startswith(question_text):
        opening = opened_text[len(question_text) :]
    turn_header = before_answer[_shared(closing, before_answer, pattern) :]
    if opening:
        header = turn_header[: _shared(opening, turn_header, pattern)]
    else:
        header = turn_header
    after_answer = after_answer.lstrip()
    end = after_answer[: _shared(tail.strip(), after_answer, pattern)].strip()
    form = TurnForm(
        opening,
        header if header.strip() else "",
        end,
        bool(tail.strip()),
        False,
        pattern,
    )
    if not end and (token := form.token(after_answer, 0)):
        # The token ends turns, unless a user's turn begins with it, as in GLM-4.5.
        ends_turns = (
            after_answer[:token] in before_answer
            or after_answer[:token] not in question_text.partition(user)[0]
        )
        return replace(form, end=after_answer[:token].strip() if ends_turns else "")
    closed = pattern.search(closing)
    if question_text == opened_text and closed and closed[0] in end:
        return replace(form, end=closed[0], always_open=True)
    return form


class WrittenChat:
    """A conversation as a template writes it: its `text`, and the `spans` of the
    answers.

    continues: whether the text of each beginning of the conversation is a beginning of
    the whole text. unstopped: whether an answer has no token that could end it. stop:
    the text appended because the template leaves the last turn open; "": the
    tokenizer's end of text; None: nothing, the turn has an end.
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
        self.text = self._chat.plain
        self.spans = [span for i in answers for span in self._spans(i)]
        if self.stop is not None:
            self.text += self.stop
            # Also with loss: the model must learn where its answer ends.
            self.spans[-1] = self.spans[-1][0], len(self.text)

    def _spans(self, index: int) -> list[tuple[int, int]]:
        """Return the spans of an answer: one, or several around the answers of tools to
        its calls (Gemma 4).
        """
        chat = self._chat
        if (lost := chat.lost(index)) is not None:
            raise UnclearTurnError(f"it does not write '{lost}' of message {index + 1}")
        opened = self._write_marked(index, True) if index else None
        pieces = chat.pieces(index)
        # An answer without text of its own: its position is the end of the opened
        # prompt.
        if not pieces:
            if opened is None or not chat.text.startswith(opened):
                if self._is_left_out(index):
                    return []
                raise UnclearTurnError(f"it does not show where message {index + 1} is")
            pieces = [(len(opened), len(opened))]
        spans = [
            (position, self._answer_end(index, end, opened)) for position, end in pieces
        ]
        spans[0] = self._answer_begin(index, pieces[0][0], opened), spans[0][1]
        # Another message's text inside a span would get loss; only tools' answers may
        # lie between spans.
        owners_within = chat.owners(spans[0][0], spans[-1][1]) - {index}
        has_foreign_text = any(
            chat.owners(begin, end) - {index} for begin, end in spans
        )
        if (
            has_foreign_text
            or spans[0][0] > pieces[0][0]
            or {chat.messages[i]["role"] for i in owners_within} - {"tool"}
        ):
            raise UnclearTurnError(f"it writes message {index + 1} within another one")
        return [
            (chat.without_marks(begin), chat.without_marks(max(begin, end)))
            for begin, end in spans
        ]

    def _write_marked(self, number: int, opened: bool) -> str | None:
        """Write the first messages, with marks; None: the template refuses them."""
        try:
            return self._render(self._chat.messages[:number], opened)
        except UserError:
            return None

    def _is_left_out(self, index: int) -> bool:
        """Whether the template writes the same without a message."""
        other_messages = [
            message for i, message in enumerate(self._chat.messages) if i != index
        ]
        try:
            return (
                bool(other_messages)
                and self._render(other_messages, False) == self._chat.text
            )
        except UserError:
            return False

    def _answer_begin(self, index: int, position: int, opened: str | None) -> int:
        """Return the beginning of an answer whose first text is at a position."""
        text = self._chat.text
        form = self._form
        previous_end = self._chat.end_before(index, position)
        if (
            opened is not None
            and text.startswith(opened)
            and previous_end <= len(opened) <= position
        ):
            is_open = form.opening and opened.endswith(form.opening)
            if is_open:
                return len(opened)
            return form.behind_header(text[:position], len(opened))
        # The template has written earlier turns in another way: look for the opening of
        # the turn between the previous message's text and this one's.
        self.continues = False
        last = None if opened is None else self._chat.last_mark(opened)
        if (
            opened is not None
            and last is not None
            and opened[last] == text[previous_end - 1 : previous_end]
        ):
            number = form.opened(opened[last + 1 :], text[previous_end:position])
            if number is not None:
                return previous_end + number
        for opening in filter(None, (form.opening, form.header, form.opening.strip())):
            if (begin := text.rfind(opening, previous_end, position)) >= 0:
                return begin + len(opening)
        called = bool(self._chat.messages[index].get("tool_calls"))
        if (index and (form.opening or form.header or form.ends is None)) or called:
            raise UnclearTurnError(f"it does not show where message {index + 1} begins")
        return position

    def _answer_end(self, index: int, position: int, opened: str | None) -> int:
        """Return the end of an answer whose last text ends at a position, including the
        end of its turn.
        """
        text, form = self._chat.text, self._form
        next_begin = self._chat.begin_after(index, position)
        if form.always_open and (end := text.find(form.end, position, next_begin)) >= 0:
            return end + len(form.end)
        if index + 1 == self._number:
            ends = bool(text[position:].strip()) if form.ends is None else form.ends
            if not ends and not (form.end and form.end in text[position:]):
                self._leave_open(text, position)
            return len(text)
        tail, is_last = self._text_behind(index, position, opened)
        following = text[position:next_begin]
        number = _shared(tail, following, form.tokens)
        if form.end and form.end in following[:number]:
            end = following.rfind(form.end, 0, number) + len(form.end)
            return position + number - len(following[end:number].lstrip())
        if (
            is_last
            and form.ends is not False
            and tail.strip()
            and not tail[number:].strip()
        ):
            return position + number
        if form.end and (end := following.find(form.end, number)) >= 0:
            return position + end + len(form.end)
        token = form.token(following, number)
        # If nothing lies between this text and the next one, the turn continues.
        self.unstopped |= (
            bool(following)
            and token is None
            and not form.ends_with_token(following[:number].rstrip())
        )
        return position + (token or number)

    def _text_behind(
        self, index: int, position: int, opened: str | None
    ) -> tuple[str, bool]:
        """Return the text after a text of a message where no message follows, and
        whether that is the message's last text.
        """
        ended_text = self._write_marked(index + 1, False)
        if ended_text is None:
            return "", True
        self.continues &= self._chat.text.startswith(ended_text)
        if not self._chat.pieces(index):
            return ended_text[len(opened or "") :], True
        behind = ended_text.rpartition(self._chat.text[position - 1])[2]
        end = self._chat.first_mark(behind)
        return behind[:end], end is None

    def _leave_open(self, text: str, position: int) -> None:
        """End the last turn with the token with which the next role would begin."""
        self.stop, mark, last = "", PRIVATE[-1], self._chat.messages[-1]
        content: Any = mark
        if isinstance(last["content"], list):
            content = [{"type": "text", "text": mark}]
        # A further message is rendered to see which token the template puts before it.
        for role in ("tool", "user") if last.get("tool_calls") else ("user",):
            try:
                written = self._render(
                    [*self._chat.messages, {"role": role, "content": content}], False
                )
            except UserError:
                continue
            longer = written.partition(mark)[0]
            behind = self._chat.last_mark(longer)
            if longer.startswith(text[:position]) or behind is None:
                begin = position
            else:
                begin = behind + 1
            number = _shared(text[position:], longer[begin:], self._form.tokens)
            if (token := self._form.token(longer, begin + number)) is not None:
                self.stop = longer[begin + number : token].strip()
                return


def _shared(text: str, other_text: str, tokens: re.Pattern[str]) -> int:
    """Count the characters that both texts have in common at the beginning, without
    cutting a token of either.
    """
    pairs = enumerate(zip(text, other_text, strict=False))
    number = next((n for n, (a, b) in pairs if a != b), min(len(text), len(other_text)))
    # A token that differs only in its end is another token: the cut goes before it.
    for written in (text, other_text):
        for token in tokens.finditer(written):
            if token.start() < number < token.end():
                number = token.start()
            if token.end() >= number:
                break
    return number
