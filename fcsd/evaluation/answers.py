"""Read the answers of a model, in memory or behind a server: where an answer ends, and
its text without thoughts.

An answer depends on its own tokens alone. A batch goes on until all its sequences have
ended, so what a sequence is given after its end is cut off here.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fcsd.data.thoughts import Thoughts, answer_after
from fcsd.training.generation import HEAD, Decoding

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Answer(NamedTuple):
    """A text, whether the token limit ended it, and whether the model has written
    thoughts although none were asked for.
    """

    text: str
    at_limit: bool
    thoughts: bool = False


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Find where the first of the stop strings begins in `text`; its length when there
    is none.
    """
    return min(
        (position for word in stop if word and (position := text.find(word)) >= 0),
        default=len(text),
    )


@dataclass(frozen=True)
class Reader:
    """Reads the answer to one prompt.

    prompt: its text, or the end of it. stop: strings before which the answer ends;
    special tokens may be among them, which do not show in the text. limit: tokens that
    are allowed. ends: tokens that end a sequence. chats, thinking: whether the prompt
    is a conversation, and asks for thoughts. clean_up: the tokenizer's own setting if
    None.
    """

    thoughts: Thoughts
    prompt: str
    stop: Sequence[str]
    limit: int
    ends: Sequence[int]
    chats: bool
    thinking: bool
    clean_up: bool | None = None

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self.thoughts.tokenizer

    @functools.cached_property
    def may_think(self) -> bool:
        """Whether the prompt asks for thoughts, or cannot ask for an answer without."""
        return self.chats and self.thoughts.are_in(self.prompt, self.thinking)

    @functools.cached_property
    def special_stop(self) -> list[str]:
        """The stop strings that cannot occur in thoughts."""
        return self.thoughts.ends_of_text(self.stop)

    @functools.cached_property
    def early_stop(self) -> list[str]:
        """The stop strings at which generation ends; thoughts may hold all others."""
        if self.may_think:
            return self.special_stop
        return [word for word in self.stop if word]

    @functools.cached_property
    def look_back(self) -> int:
        """The number of tokens at the end that hold a stop string: each is a byte or
        more.
        """
        return max((len(word.encode()) for word in self.early_stop), default=0) + 1

    def ended(self, head: Sequence[int], tail: Sequence[int]) -> bool:
        """Return whether an answer is complete that begins with the tokens `head` and
        ends with `tail` (`HEAD` and `look_back` tokens, or all of a shorter answer).
        """
        if tail[-1] in self.ends:
            return True
        text = self._raw(tail) if self.early_stop else ""
        if not _holds(text, self.early_stop):
            return False
        # Thoughts that the model begins unasked may hold stop strings, too.
        if self._opens_thoughts(self.thoughts.decode(head)):
            return _holds(text, self.special_stop)
        return True

    def tokens(self, tokens: Sequence[int]) -> Answer:
        """Return the answer that new tokens hold."""
        length = self._length(tokens)
        new = tokens[:length]
        full = length >= self.limit and not self._ended_at(tokens, length)
        # Where a stop string has characters beside a special token, these show.
        raw = self._raw(new)
        after = self.thoughts.without_special(raw[first_stop(raw, self.special_stop) :])
        options = {"clean_up_tokenization_spaces": self.clean_up}
        plain = self.thoughts.tokenizer.decode(new, skip_special_tokens=True, **options)
        marked = self.thoughts.decode(new, **options)
        return self._answer(
            marked.removesuffix(after), str(plain).removesuffix(after), full
        )

    @property
    def reads_special(self) -> bool:
        """Whether a text is needed with its special tokens: some mark thoughts or end
        the answer.
        """
        return bool(self.special_stop or (self.chats and self.thoughts.marks))

    def text(self, text: str, full: bool) -> Answer:
        """Return the answer in a text that was decoded as `reads_special` says.

        full: as many tokens were written as are allowed.
        """
        if not self.reads_special:
            return self._answer(text, text, full)
        return self._answer(
            self.thoughts.without_special(text),
            self.thoughts.without_special(text, marks=True),
            full,
        )

    def is_cut(self, answer: Any) -> bool:
        """Return whether a server has ended an answer (tokens, or a text) at a stop
        string in thoughts that the model began unasked.
        """
        if self.early_stop == self.special_stop:
            return False
        if isinstance(answer, list):
            head = self.thoughts.decode(answer[:HEAD])
            whole = len(answer) >= self.limit or self._ended_at(answer, len(answer))
            return self._opens_thoughts(head) and not whole
        return self._opens_thoughts(answer["text"]) and not answer["at_limit"]

    def _answer(self, marked: str, plain: str, full: bool) -> Answer:
        """Return the answer in a text with the marks of thoughts, or, if it has no
        thoughts, in that without them.
        """
        thoughts, opened = self.thoughts, self.thoughts.opened_by(self.prompt)
        answer, unasked = plain, False
        if self.chats and (self.may_think or thoughts.marked(marked)):
            answer = answer_after(marked, thoughts.markers_for(marked), opened)
            unasked = not self.thinking and thoughts.written(marked, opened)
        end = first_stop(answer, self.stop)
        # At the limit a stop string may still have ended the answer.
        return Answer(answer[:end], full and end == len(answer), unasked)

    def _opens_thoughts(self, text: str) -> bool:
        return self.chats and self.thoughts.opens(text)

    def _length(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens up to the end of the answer."""
        # Most answers that run to the limit hold neither.
        if not set(self.ends).isdisjoint(tokens) or _holds(
            self._raw(tokens), self.early_stop
        ):
            for length in range(1, len(tokens) + 1):
                if self._ended_at(tokens, length):
                    return length
        return len(tokens)

    def _ended_at(self, tokens: Sequence[int], length: int) -> bool:
        if not length:
            return False
        tail = tokens[max(0, length - self.look_back) : length]
        return self.ended(tokens[: min(length, HEAD)], tail)

    def _raw(self, tokens: Sequence[int]) -> str:
        return str(
            self.thoughts.tokenizer.decode(
                tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


class Question(NamedTuple):
    """A prompt, what reads the answer to it, and how the answer is generated.

    seed: for sampling. decoding: the same for all questions of a batch.
    """

    prompt: Sequence[int]
    reader: Reader
    seed: int
    decoding: Decoding


def _holds(text: str, stop: Sequence[str]) -> bool:
    return first_stop(text, stop) < len(text)
