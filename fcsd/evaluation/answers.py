"""Read the answers of a model, in memory or behind a server: where an answer ends, and
its text without thoughts.

An answer depends on its own tokens alone. A batch goes on until all its sequences have
ended, so what a sequence is given after its end is cut off here.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fcsd.data.thoughts import Thoughts, answer_after
from fcsd.training.generation import HEAD, Decoding, Ending, first_stop


class Answer(NamedTuple):
    """A text, whether the token limit ended it, and whether the model has written
    thoughts although none were asked for.
    """

    text: str
    at_limit: bool
    thoughts: bool = False


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

    @functools.cached_property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(
            self.thoughts.tokenizer,
            self.limit,
            self.ends,
            self.ends,
            self.early_stop,
            self.special_stop,
            self._opens_thoughts,
        )

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

    def tokens(self, tokens: Sequence[int]) -> Answer:
        """Return the answer that new tokens hold."""
        ending = self.ending
        length = ending.length(tokens)
        new = tokens[:length]
        full = length >= self.limit and not ending.ended_at(tokens, length)
        # Where a stop string has characters beside a special token, these show.
        raw = ending.text(new)
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
            length = len(answer)
            whole = length >= self.limit or self.ending.ended_at(answer, length)
            return self._opens_thoughts(answer[:HEAD]) and not whole
        opens = self.chats and self.thoughts.opens(answer["text"])
        return opens and not answer["at_limit"]

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

    def _opens_thoughts(self, tokens: Sequence[int]) -> bool:
        return self.chats and self.thoughts.opens(self.thoughts.decode(tokens))


class Question(NamedTuple):
    """A prompt, what reads the answer to it, and how the answer is generated.

    seed: for sampling. decoding: the same for all questions of a batch.
    """

    prompt: Sequence[int]
    reader: Reader
    seed: int
    decoding: Decoding
