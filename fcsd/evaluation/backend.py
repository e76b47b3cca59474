"""The backends that answer the questions of an evaluation: a model in memory, or one
behind a server (`fcsd.evaluation.served`).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from fcsd.base.errors import UserError
from fcsd.base.memory import free_memory
from fcsd.base.text import progress_bar
from fcsd.data.thoughts import Thoughts
from fcsd.evaluation.code.generate import (
    SAMPLING_SEED,
    TOKEN_BY_TOKEN,
    Reader,
    RefuseOverflow,
    StopAtText,
    end_tokens,
    prompt_tokens,
)
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.store import Journal
from fcsd.model.preserve import preserved, quiet
from fcsd.parallel.gathered import gathered_once
from fcsd.parallel.ranks import ALONE, Ranks, input_device

BatchSize = int | Literal["auto"]
Result = TypeVar("Result")
# On a CPU memory runs out without an error that could be caught, so "auto" starts low.
_FIRST, _ON_CPU = 128, 16


def check_batch_size(size: BatchSize, ranks: Ranks = ALONE) -> None:
    """Raise UserError for "auto" where the weights are sharded over the ranks."""
    if size == "auto" and ranks.lockstep:
        raise UserError(
            "batch_size: 'auto' needs a rank that can try again alone, and this launch"
            f" shards the weights over {ranks.size}; give a number"
        )


class BatchSizer:
    """The batch size of an evaluation; "auto" begins every task at 128 and halves when
    memory runs out.

    lm-eval and `InMemoryBackend.complete` begin with the longest sequences, so a
    failure comes early and costs little. Where several ranks hold whole copies, each
    may halve its own.
    """

    def __init__(self, size: BatchSize, model: PreTrainedModel):
        self.automatic = size == "auto"
        self._first = _ON_CPU if model.device.type == "cpu" else _FIRST
        self.size: int = size if isinstance(size, int) else self._first

    def begin(self, count: int, ranks: Ranks) -> None:
        """Start a task of `count` sequences at the full size again, with some sequences
        for every rank.
        """
        if self.automatic:
            self.size = max(1, min(self._first, math.ceil(count / ranks.size)))

    def run(self, work: Callable[[int], Result]) -> Result:
        """Return work(size), with half the size again when out of memory; UserError
        where it cannot be halved.
        """
        while True:
            try:
                return work(self.size)
            except torch.OutOfMemoryError as error:
                if not self.automatic or self.size == 1:
                    hint = "the model leaves no room for one sequence"
                    if self.size > 1:
                        hint = "lower it, or use 'auto'"
                    raise UserError(
                        f"out of memory with batch_size {self.size}: {hint}"
                    ) from error
            # Outside of the handler: the error's traceback holds tensors of the failed
            # pass.
            self.size //= 2
            free_memory()


class Backend(Protocol):
    """A model that answers questions, wherever it runs.

    at_limit: problems of the last code task with a completion that ended at the token
    limit.
    """

    at_limit: set[str]

    def asking(self) -> contextlib.AbstractContextManager[None]:
        """Return the context for all questions; it leaves the model unchanged."""

    def begin(self, journal: Journal) -> None:
        """Start a task, whose single answers may be kept in `journal`."""

    @property
    def language_model(self) -> Any:
        """The model that lm-eval asks, one for all tasks, with `think`, `cut` and
        `at_limit`.
        """

    def complete(
        self, problems: Sequence[Problem], row: CodeTaskConfig
    ) -> dict[str, list[str]]:
        """Return `row.num_samples` completions of every problem: task_id -> texts up to
        the first stop string.
        """

    def settings(self) -> dict[str, Any]:
        """Return the facts about the model that a result records."""


class Served(Backend, Protocol):
    """A model that a server answers for (`fcsd.evaluation.served`)."""

    @property
    def facts(self) -> dict[str, Any]:
        """The engine and its configuration, which the answers depend on."""

    def check(self, evaluation: Any) -> None:
        """Refuse a task of a `PreparedEvaluation` that the server cannot answer."""

    def identify(self, load: Callable[[], PreTrainedModel]) -> None:
        """Check that the server serves this model, which `load` loads into memory."""


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
        self.model = model
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.progress = progress
        self.batch, self.batches = BatchSizer(batch, model), batches or Batches()
        self.at_limit: set[str] = set()

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

    def in_batches(
        self,
        batches: Sequence[Any],
        ask: Callable[[Any, int], list[Any]],
        idle: Callable[[], Any],
        **bar: Any,
    ) -> list[Any]:
        """Ask batch by batch, each on the rank that it is dealt to; return all answers
        in order, on all ranks.

        ask: takes a batch and the number of its sequences that go into one forward.
        idle: runs a pass whose result is not used. bar: options of `progress_bar`.
        """

        def answer(number: int, batch: Any) -> list[Any]:
            if self.batches.begin is not None:
                self.batches.begin(number)
            answers = self.batch.run(functools.partial(ask, batch))
            display.update(len(batch))
            return answers

        # The bar counts the sequences of this rank alone.
        with progress_bar(
            total=sum(map(len, self.ranks.deal(batches))), **bar
        ) as display:
            return [
                item_answer
                for answers in self.ranks.each(batches, answer, idle)
                for item_answer in answers
            ]

    def complete(
        self, problems: Sequence[Problem], row: CodeTaskConfig
    ) -> dict[str, list[str]]:
        """Generate on all ranks, which call this together, and return the completions
        in the order of the problems.

        Temperature 0 is greedy. Samples are drawn from a generator that is seeded for
        every batch, so the same problems and batch size give the same samples, on any
        number of ranks. Batches are sorted by prompt length, longest first, and padded
        on the left; a batch ends when all its sequences have. Mode and settings of the
        model and the state of all random generators are as before.

        Raises:
            UserError: a prompt and its completion do not fit the model's positions; no
                chat template.
        """
        tokens = prompt_tokens(self.model.config, self.tokenizer, problems, row)
        # Longest first: if memory is too small, the first batch fails.
        order = sorted(range(len(problems)), key=lambda index: -len(tokens[index]))
        samples = [index for index in order for _ in range(row.num_samples)]
        self.batch.begin(len(samples), self.ranks)
        size = self.batch.size
        batches = [
            range(start, min(start + size, len(samples)))
            for start in range(0, len(samples), size)
        ]

        def generate_batch(batch: range, size: int) -> list[tuple[str, bool]]:
            return self._generate_pieces(
                {sample: tokens[samples[sample]] for sample in batch}, row, size
            )

        def idle() -> None:
            self._generate(
                [tokens[samples[-1]]], row.model_copy(update={"max_new_tokens": 1})
            )

        share = ""
        if self.ranks.size > 1:
            share = f" (the first of {self.ranks.size} ranks)"
        bar = {
            "desc": f"generation{share}",
            "shown": self.progress and self.ranks.first,
        }
        with preserved(self.model), torch.no_grad():
            self.model.eval()
            texts = self.in_batches(batches, generate_batch, idle, **bar)
        completions: dict[str, list[str]] = {
            problem.task_id: [] for problem in problems
        }
        self.at_limit = set()
        for index, (text, at_limit) in zip(samples, texts, strict=True):
            completions[problems[index].task_id].append(text)
            self.at_limit |= {problems[index].task_id} if at_limit else set()
        return completions

    def _generate_pieces(
        self, sequences: Mapping[int, list[int]], row: CodeTaskConfig, size: int
    ) -> list[tuple[str, bool]]:
        """Generate from the prompts of a batch, `size` at a time; sequences: number
        among all samples -> prompt. Each forward is seeded by its first number.
        """
        numbers, texts = list(sequences), list[tuple[str, bool]]()
        for start in range(0, len(numbers), size):
            piece = numbers[start : start + size]
            torch.manual_seed(SAMPLING_SEED + piece[0])
            texts += self._generate([sequences[number] for number in piece], row)
        return texts

    def _generate(
        self, prompts: Sequence[list[int]], row: CodeTaskConfig
    ) -> list[tuple[str, bool]]:
        model, tokenizer = self.model, self.tokenizer
        readers = [Reader(self.thoughts, row, prompt) for prompt in prompts]
        stop = readers[0].stop
        ends = end_tokens(model.generation_config, tokenizer)
        pad = tokenizer.pad_token_id
        if pad is None:
            # The mask hides padding, so any token will do.
            pad = ends[0] if ends else 0
        # Padding is on the left, so that all sequences are continued at the same
        # position.
        ids = pad_sequence(
            [torch.tensor(prompt, dtype=torch.long) for prompt in prompts],
            True,
            pad,
            "left",
        )
        mask = pad_sequence(
            [torch.ones(len(prompt), dtype=torch.long) for prompt in prompts],
            True,
            0,
            "left",
        )
        width = ids.shape[1]
        sampling: dict[str, Any] = {"do_sample": False}
        if row.temperature:
            # top_k: transformers' own default would cut the distribution to 50 tokens.
            sampling = {
                "do_sample": True,
                "temperature": row.temperature,
                "top_p": row.top_p,
                "top_k": 0,
            }
        # A fresh configuration: the model's own may sample, or penalise repetition.
        config = GenerationConfig(
            **sampling,
            num_beams=1,
            max_new_tokens=row.max_new_tokens,
            eos_token_id=readers[0].ends(ends) or None,
            pad_token_id=pad,
            bos_token_id=tokenizer.bos_token_id,
            use_cache=True,
            **TOKEN_BY_TOKEN,
        )
        criteria = StoppingCriteriaList(
            [StopAtText(tokenizer, stop, width)] if stop else []
        )
        device = input_device(model)
        # Ranks that share the weights must make the same number of forward passes.
        generated = model.generate(  # type: ignore[operator]
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            generation_config=config,
            stopping_criteria=criteria,
            logits_processor=LogitsProcessorList([RefuseOverflow()]),
            synced_gpus=True if self.ranks.lockstep else None,
        )
        new = generated[:, width:].tolist()
        return [
            reader.tokens(tokens, ends)
            for reader, tokens in zip(readers, new, strict=True)
        ]

    def settings(self) -> dict[str, Any]:
        """Return precision and device."""
        return {
            **self.batches.facts,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": input_device(self.model).type,
        }
