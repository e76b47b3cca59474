"""lm-eval's interface to a model: the common part of all backends, and the model in
memory, whole on every rank or sharded (`fcsd.evaluation.lm_eval.served` has the
backend for a server).

lm-eval sees one process: on every rank it builds all requests, and is given all
answers. This module, between the two, splits the requests into the batches that lm-eval
would form, and runs each on one of the ranks.

Importing this imports lm-eval.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
)

from fcsd.base.errors import UserError
from fcsd.base.text import draws_foreign_bars
from fcsd.data.rendering import dated_options, template_errors, tokenizer_name
from fcsd.data.thoughts import Thoughts, thinking_options
from fcsd.evaluation.config import KINDS, LMEvalTaskConfig
from fcsd.parallel.launch import input_device
from fcsd.training.generation import (
    OVERFLOW,
    SAMPLING_SEED,
    Answer,
    Decoding,
    Question,
    Reader,
    Sampling,
    batches_of,
    end_tokens,
)

TASK_SETTINGS = frozenset({
    "num_beams", "length_penalty", "early_stopping", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty", "sequence_bias",
})  # fmt: skip
"""Settings of transformers that a task may have beside length, stop strings and sampling."""


class LanguageModel(HFLM):
    """HFLM with thoughts on or off, notes of prompts that were cut and answers that hit
    the token limit, and its bars on a terminal only.

    A log has a line at the beginning of each task instead (`fcsd.base.text`).
    """

    def __init__(self, model: Any, tokenizer: Any, *, silent: bool):
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval changes it
            batch_size=1,  # set for each share
        )
        self.thoughts = Thoughts(self.tokenizer)
        self.ends: Sequence[int] = ()
        self.closes = False
        self.silent = silent or not draws_foreign_bars()
        # prompts whose beginning was cut off
        self.cut: set[str] = set()

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer, whose last token is no input."""
        return int(self.max_length) + 1

    def think(self, row: LMEvalTaskConfig) -> None:
        """Begin a task, and ask a hybrid's template for thoughts, which are cut off the
        answers, or for none, which leaves all tokens to the answers.

        Other templates ignore the question.
        """
        self.thinking, self.chats = bool(row.thinking), row.chat_template
        # With the date of today the prompts for a model would differ from day to day.
        self.chat_template_args = {
            **thinking_options(self.tokenizer, self.thinking),
            **dated_options(self.tokenizer),
        }
        # Likelihoods are those of answers, which thoughts must not precede.
        self.closes, self.closed = not KINDS[row.kind].writes, ""
        # task and document of answers that the token limit ended, or that have
        # thoughts which were not asked for
        self.at_limit: set[tuple[str, int]] = set()
        self.unasked: set[tuple[str, int]] = set()

    def reader(self, request: Any) -> Reader:
        """Return what reads the answer to a request; UserError for stop strings that
        are none, and for no token.
        """
        context, settings = request.args
        normal = normalize_gen_kwargs(settings, self.max_gen_toks)
        until, limit = normal["until"], int(normal["max_gen_toks"])
        until = [word for word in until if word is not None]
        if limit < 1 or not all(isinstance(word, str) for word in until):
            raise UserError(
                f"the task sets until {until!r:.80} and {limit} new tokens; until must"
                " be a text or a list of texts, and an answer has one token or more"
            )
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        return Reader(
            self.thoughts,
            context,
            handle_stop_sequences(until, eos=eos),
            limit,
            self.ends,
            self.chats,
            self.thinking,
        )

    def decoding(self, request: Any, number: int) -> tuple[Decoding, int]:
        """Return how the answer to a request is generated, and its seed, which follows
        its number in the data set; UserError for a setting that fcsd does not know.
        """
        settings: Any = dict(normalize_gen_kwargs(request.args[1], self.max_gen_toks))
        for name in ("until", "max_gen_toks"):
            del settings[name]
        seed = int(settings.pop("seed", SAMPLING_SEED)) + number
        # The values of transformers where the task sets none
        values = {"temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0}
        chosen: dict[str, Any] = {
            name: default if (value := settings.pop(name, None)) is None else value
            for name, default in values.items()
        }
        chosen["top_k"] = max(0, chosen["top_k"])  # vLLM writes no limit as -1
        drawn = settings.pop("do_sample", False) and chosen["temperature"] > 0
        if unknown := [name for name in settings if name not in TASK_SETTINGS]:
            raise UserError(
                f"the task sets {', '.join(sorted(unknown))} for generation; fcsd knows"
                f" {', '.join(sorted({*TASK_SETTINGS, *values, 'seed'}))}"
            )
        if drawn and settings.get("num_beams", 1) > 1:
            raise UserError(
                "the task asks for beams that are sampled; fcsd has beams without"
                " sampling"
            )
        return Decoding(Sampling(**chosen) if drawn else None, settings), seed

    def questions(self, requests: Any, positions: int) -> list[Question]:
        """Return the requests as questions. A prompt that leaves no room for its answer
        is noted, and cut on the left to fit the positions; UserError for an answer that
        leaves no room for a prompt.
        """
        questions = []
        for number, request in enumerate(requests):
            reader = self.reader(request)
            check_room(reader.limit, self.max_length)
            ids, _ = self.tok_batch_encode([request.args[0]])
            prompt = list(map(int, ids[0].tolist()))
            if len(prompt) > self.max_length - reader.limit:
                self.cut.add(request.args[0])
            self.require_room(min(len(prompt) + reader.limit, self.max_length))
            decoding, seed = self.decoding(request, number)
            prompt = prompt[-(positions - reader.limit) :]
            questions.append(Question(prompt, reader, seed, decoding))
        return questions

    def require_room(self, tokens: int) -> None:
        """Refuse more tokens than the model takes where it runs."""

    def noted(self, requests: Sequence[Any], answers: Sequence[Answer]) -> list[str]:
        """Return the texts, and note the answers that the token limit ended, and those
        with thoughts that were not asked for.
        """
        for request, answer in zip(requests, answers, strict=True):
            item = (str(request.task_name), int(request.doc_id))
            if answer.at_limit:
                self.at_limit.add(item)
            if answer.thoughts:
                self.unasked.add(item)
        return [answer.text for answer in answers]

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        """Write turns as text, up to the place where the answer begins; raises
        UserError where the template refuses them.
        """
        with template_errors(tokenizer_name(self.tokenizer), "a prompt"):
            text = str(super().apply_chat_template(*arguments, **options))
        if not self.closes or not options.get(
            "add_generation_prompt", len(arguments) < 2 or arguments[1]
        ):
            return text
        closing = self.thoughts.closing(text)
        self.closed = closing or self.closed
        return text + closing

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as lm-eval does, with bars on the first rank only; refuse answers that
        are NaN or infinite, among which lm-eval would choose the first.
        """
        answers = super().loglikelihood(
            requests, disable_tqdm=disable_tqdm or self.silent
        )
        if not all(math.isfinite(logprob) for logprob, _ in answers):
            raise UserError(OVERFLOW)
        return answers

    def check_answers(self, requests: Any) -> None:
        """Refuse an answer that is too long to be scored, and note which prompts will
        be cut.
        """
        for (context, choice), prompt, answer in requests:
            if not 0 < len(answer) < self.longest:
                raise UserError(
                    f"an answer of {len(answer)} tokens ({choice!r:.40}) cannot be"
                    f" scored; the model has {self.max_length} positions"
                )
            if len(prompt) + len(answer) > self.longest:
                self.cut.add(context)


def check_room(max_new_tokens: int, positions: int) -> None:
    """Raise UserError where answers leave no room for a prompt."""
    if max_new_tokens >= positions:
        raise UserError(
            f"max_new_tokens {max_new_tokens} leave no room for a prompt in the model's"
            f" {positions} positions; lower max_new_tokens"
        )


class InMemory(LanguageModel):
    """The model of a `fcsd.evaluation.backend.InMemoryBackend`: a batch size that may
    shrink, and several ranks; lm-eval is asked batch by batch."""

    def __init__(self, backend: Any):
        silent = not (backend.progress and backend.ranks.first)
        super().__init__(backend.model, backend.tokenizer, silent=silent)
        self._device = input_device(backend.model)
        self.ends = end_tokens(backend.model.generation_config, self.tokenizer)
        self.source = backend  # `backend` is a word of HFLM

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        self.check_answers(requests)
        self.source.check_tokens(
            tokens for _, prompt, answer in requests for tokens in (prompt, answer)
        )
        # As lm-eval does, one sequence answers all requests that differ in the last
        # token only.
        sequences = Collator.group(
            list(enumerate(requests)),
            lambda numbered: numbered[1][1] + numbered[1][2][:-1],
            "contexts",
        )
        # Longest first: a batch that does not fit in memory fails immediately.
        order = sorted(sequences, key=lambda tokens: (-len(tokens), tokens))
        # In lm-eval's order, so that lm-eval forms the same batches again. Every rank
        # holds the same requests, so only their numbers are dealt out.
        batches = [
            sorted(number for tokens in batch for number, _ in sequences[tokens])
            for batch in Collator.get_chunks(order, n=self._begin(len(order)))
        ]
        ask = super()._loglikelihood_tokens

        def answer(numbers: list[int], size: int) -> list[tuple[int, Any]]:
            self.batch_size_per_gpu = size
            batch = [requests[number] for number in numbers]
            return list(zip(numbers, ask(batch, disable_tqdm=True), strict=True))

        def idle() -> None:
            self._model_call(torch.tensor([[self.prefix_token_id]], device=self.device))

        answers = dict(self._answers(batches, answer, idle))
        return [answers[number] for number in range(len(requests))]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer on all ranks, each its share; but for the rows of a batch that have
        ended, and for thoughts, as lm-eval does.
        """
        size = self._begin(len(requests))
        questions = self.questions(requests, self.max_length)
        self.source.check_tokens(question.prompt for question in questions)
        groups = Collator.group(
            list(enumerate(questions)),
            lambda numbered: requests[numbered[0]].args[1],
            "gen_kwargs",
        )
        lengths = [len(question.prompt) for question in questions]
        order: list[int] = []
        batches = []
        for group in groups.values():
            group.sort(key=lambda numbered: (-lengths[numbered[0]], numbered[1].prompt))
            numbers = [number for number, _ in group]
            alike = group[0][1].decoding.needs_one_length(self.source.config)
            order += numbers
            batches += [
                [questions[number] for number in batch]
                for batch in batches_of(numbers, lengths, size, alike)
            ]

        def idle() -> None:
            self.source.idle(questions[0].reader)

        texts = self._answers(batches, self.source.tokens_of_batch, idle)
        by_number = dict(zip(order, texts, strict=True))
        answers = [
            question.reader.tokens(by_number[number])
            for number, question in enumerate(questions)
        ]
        return self.noted(requests, answers)

    def _answers(self, batches: Any, ask: Any, idle: Any) -> list[Any]:
        shown = not self.silent
        return self.source.in_batches(batches, ask, idle, "requests", shown)

    def _begin(self, count: int) -> int:
        self.source.batch.begin(count, self.source.ranks)
        return int(self.source.batch.size)
