"""The backends that answer the questions of an evaluation: a model in memory, or one
behind a server (`fcsd.evaluation.served`).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.errors import UserError
from fcsd.base.memory import free_memory
from fcsd.base.text import progress_bar
from fcsd.data.thoughts import Thoughts
from fcsd.evaluation.config import BatchSize
from fcsd.evaluation.results import Journal
from fcsd.model.preserve import preserved, quiet
from fcsd.parallel.launch import Ranks, gathered_once, input_device
from fcsd.training.generation import (
    Answer,
    Decoding,
    Question,
    Reader,
    batches_of,
    end_tokens,
    generate,
    set_aside,
)

if TYPE_CHECKING:
    from fcsd.evaluation.served import ServedBackend

Key = TypeVar("Key")

# On a CPU memory runs out without an error that could be caught, so "auto" starts low.
_FIRST, _ON_CPU = 128, 16


class BatchSizer:
    """The batch size of an evaluation; "auto" begins every task at 128 and halves when
    memory runs out.

    lm-eval and `InMemoryBackend.new_tokens` begin with the longest sequences, so a
    failure comes early and costs little. Where several ranks hold whole copies, each
    may halve its own.
    """

    def __init__(self, size: BatchSize, model: PreTrainedModel):
        self.automatic = size == "auto"
        self._first = _ON_CPU if model.device.type == "cpu" else _FIRST
        self.size: int = size if isinstance(size, int) else self._first
        self._ran_out = False

    def begin(self, count: int, ranks: Ranks) -> None:
        """Start a task of `count` sequences at the full size again, with some sequences
        for every rank.
        """
        if self.automatic:
            self.size = max(1, min(self._first, math.ceil(count / ranks.size)))

    @contextlib.contextmanager
    def room(self) -> Iterator[int]:
        """Give the block the number of sequences of one pass. If the block runs out of
        memory, it ends there, and the next block gets half as many; UserError where
        there is no half.
        """
        if self._ran_out:
            # Only now: the error's traceback has held tensors of the failed pass.
            free_memory()
            self._ran_out = False
        try:
            yield self.size
        except torch.OutOfMemoryError as error:
            if not self.automatic or self.size == 1:
                hint = "the model leaves no room for one sequence"
                if self.size > 1:
                    hint = "lower it, or use 'auto'"
                raise UserError(
                    f"out of memory with batch_size {self.size}: {hint}"
                ) from error
            self.size //= 2
            self._ran_out = True


Backend: TypeAlias = "InMemoryBackend | ServedBackend"
"""A model that answers questions, wherever it runs."""


@dataclass(frozen=True)
class Batches:
    """A hook that runs before each batch, given the batch's number in its task, and the
    facts that the result records about it.
    """

    begin: Callable[[int], None] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class InMemoryBackend:
    """A model in memory, whole on every rank or sharded over them."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        batch: BatchSize,
        ranks: Ranks,
        batches: Batches | None = None,
        *,
        progress: bool = True,
    ):
        self.model, self.config = model, model.config
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.progress = progress
        self.batch, self.batches = BatchSizer(batch, model), batches or Batches()

    @contextlib.contextmanager
    def asking(self) -> Any:
        """Keep the model's mode, settings and the random generators, and gather sharded
        weights once if they fit.
        """
        with (
            preserved(self.model, self.tokenizer),
            gathered_once(self.model, self.ranks),
        ):
            self.model.eval()
            yield

    def begin(self, journal: Journal) -> None:
        """Do nothing: batches are answered together."""

    @functools.cached_property
    def language_model(self) -> Any:
        """lm-eval's model."""
        with quiet():
            from fcsd.evaluation.lm_eval.model import InMemory

            return InMemory(self)

    @functools.cached_property
    def thoughts(self) -> Thoughts:
        """The marks of the model's thoughts."""
        return Thoughts(self.tokenizer)

    def check_tokens(self, prompts: Iterable[Sequence[int]]) -> None:
        """Raise UserError for a token that the model has no embedding for; a device
        would fail without a reason.
        """
        embeddings = self.model.get_input_embeddings()
        size = getattr(embeddings, "num_embeddings", None)
        largest = max((max(prompt) for prompt in prompts if len(prompt)), default=0)
        if size is not None and largest >= size:
            raise UserError(
                f"the tokenizer gives the token id {largest}, but the model's"
                f" vocabulary has only {size} tokens; use the tokenizer that belongs"
                " to the model"
            )

    def in_batches(
        self,
        batches: Sequence[Any],
        ask: Callable[[Any, int], list[Any]],
        idle: Callable[[], Any],
        description: str,
        shown: bool,
    ) -> list[Any]:
        """Ask batch by batch, each on the rank that it is dealt to; return all answers
        in order, on all ranks.

        ask: takes a batch and the number of its sequences that go into one forward.
        idle: runs a pass whose result is not used. description: of the bar.
        """
        # The bar counts the sequences of this rank alone.
        total = sum(map(len, self.ranks.deal(batches)))
        with (
            progress_bar(total=total, desc=description, shown=shown) as display,
            self.ranks.sharing(batches, idle) as share,
        ):
            for number, batch in share.items:
                if self.batches.begin is not None:
                    self.batches.begin(number)
                answers = None
                while answers is None:
                    with self.batch.room() as size:
                        answers = ask(batch, size)
                share.results.append(answers)
                display.update(len(batch))
        return [answer for answers in share.results for answer in answers]

    @functools.cached_property
    def ends(self) -> list[int]:
        """The tokens that end a sequence."""
        return end_tokens(self.model.generation_config, self.tokenizer)

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """Return the answers, in the order of the questions, on all ranks."""
        texts = self.new_tokens(questions)
        return [
            question.reader.tokens(text)
            for question, text in zip(questions, texts, strict=True)
        ]

    def new_tokens(self, questions: Sequence[Question]) -> list[list[int]]:
        """Return the new tokens after each prompt, and what follows their end in the
        batch, in the order of the questions, which have one decoding; all ranks call
        this together.

        Batches are sorted by prompt length, longest first, and padded on the left; a
        batch ends when all its sequences have. Mode and settings of the model and the
        state of all random generators are as before.
        """
        self.check_tokens(question.prompt for question in questions)
        # Longest first: if memory is too small, the first batch fails.
        lengths = [len(question.prompt) for question in questions]
        order = sorted(range(len(questions)), key=lambda number: -lengths[number])
        self.batch.begin(len(questions), self.ranks)
        alike = questions[0].decoding.needs_one_length(self.model.config)
        batches = [
            [questions[number] for number in numbers]
            for numbers in batches_of(order, lengths, self.batch.size, alike)
        ]
        description, shown = "generation", self.progress and self.ranks.first
        if self.ranks.size > 1:
            description += f" (the first of {self.ranks.size} ranks)"

        def idle() -> None:
            self.idle(questions[0].reader)

        with preserved(self.model), torch.no_grad():
            self.model.eval()
            ask = self.tokens_of_batch
            texts = self.in_batches(batches, ask, idle, description, shown)
        by_number = dict(zip(order, texts, strict=True))
        return [by_number[number] for number in range(len(questions))]

    def tokens_of_batch(self, batch: Sequence[Question], size: int) -> list[list[int]]:
        """Return what `generate` gives for the prompts of a batch, `size` at a time."""
        texts: list[list[int]] = []
        for start in range(0, len(batch), size):
            prompts, readers, seeds, decodings = zip(
                *batch[start : start + size], strict=True
            )
            # Ranks that share the weights must make the same number of forward passes.
            texts += generate(
                self.model,
                prompts,
                [reader.ending for reader in readers],
                seeds,
                decodings[0],
                lockstep=self.ranks.lockstep,
            )
        return texts

    def idle(self, reader: Reader) -> None:
        """Make the cheapest pass in which this rank takes part in the others'
        exchanges.
        """
        token = self.tokenizer.bos_token_id or 0
        self.tokens_of_batch(
            [Question([token], replace(reader, limit=1), 0, Decoding())], 1
        )

    def settings(self) -> dict[str, Any]:
        """Return precision and device, and which settings of the model were not used."""
        return {
            **self.batches.facts,
            "generation_config_unused": set_aside(self.model.generation_config),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": input_device(self.model).type,
        }
