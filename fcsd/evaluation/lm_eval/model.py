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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    Collator,
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from transformers import LogitsProcessorList

from fcsd.base.errors import UserError
from fcsd.base.text import draws_foreign_bars
from fcsd.data.dates import dated_options
from fcsd.data.thoughts import Thoughts, thinking_options
from fcsd.data.tokenizers import template_errors, tokenizer_name
from fcsd.evaluation.code.generate import (
    OVERFLOW,
    TOKEN_BY_TOKEN,
    RefuseOverflow,
    end_tokens,
)
from fcsd.parallel.ranks import input_device

# A batch is a list of sequences, a sequence the (number, request) that it answers.
_Batches = Iterable[list[list[tuple[int, Any]]]]
Answer = tuple[str, bool]  # a text, and whether the token limit ended it


class LanguageModel(HFLM):
    """HFLM with thoughts on or off, notes of prompts that were cut and answers that hit
    the token limit, and its bars on a terminal only.

    A log has a line at the beginning of each task instead (`fcsd.evaluation.progress`).
    """

    def __init__(self, model: Any, tokenizer: Any, *, silent: bool):
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval changes it
            batch_size=1,  # set for each share
        )
        self.thoughts = Thoughts(self.tokenizer)
        self.think(False)
        self.silent = silent or not draws_foreign_bars()
        # prompts whose beginning was cut off
        self.cut: set[str] = set()

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer, whose last token is no input."""
        return int(self.max_length) + 1

    def think(self, thinking: bool, chat_template: bool = False) -> None:
        """Begin a task, and ask a hybrid's template for thoughts, which are cut off the
        answers, or for none, which leaves all tokens to the answers.

        Other templates ignore the question.
        """
        # With the date of today the prompts for a model would differ from day to day.
        self.chat_template_args = {
            **thinking_options(self.tokenizer, thinking),
            **dated_options(self.tokenizer),
        }
        self.thinking, self.chats = thinking, chat_template
        # task and document of answers that the token limit ended
        self.at_limit: set[tuple[str, int]] = set()

    def has_thoughts(self, context: str) -> bool:
        """Whether the answer to a prompt has thoughts before it."""
        return self.chats and self.thoughts.are_in(context, self.thinking)

    def stops(self, context: str, stop: list[str]) -> list[str]:
        """Return the task's stop strings that end generation: only special tokens,
        since thoughts may contain any text; the others apply to the answer.
        """
        return self.thoughts.ends_of_text(stop) if self.has_thoughts(context) else stop

    def answer_of(self, context: str, text: str, stop: list[str]) -> str:
        """Cut a generated text: thoughts first, and then at the first stop string."""
        if self.has_thoughts(context):
            text = self.thoughts.answer(text, context)
        return str(postprocess_generated_text(text, stop, None))

    def read_tokens(
        self,
        context: str,
        tokens: list[int],
        stop: list[str],
        limit: int,
        ends: Sequence[int],
    ) -> Answer:
        """Return the answer in new tokens, and whether the token limit ended it.

        limit: number of tokens that were allowed. ends: tokens that end a sequence.
        """
        if self.has_thoughts(context):
            text = self.thoughts.decode(tokens)
        else:
            text = str(self.tok_decode(tokens))
        answer = self.answer_of(context, text, stop)
        # Fewer tokens than allowed, or an end token among them: the model ended the
        # answer.
        if len(tokens) < limit or not {*ends, self.tokenizer.pad_token_id}.isdisjoint(
            tokens
        ):
            return answer, False
        # At the limit a stop string may still have ended the answer: it is cut off in
        # the answer, or, as a special token, visible in the raw text only.
        full_answer = self.answer_of(context, text, [])
        raw = str(self.tok_decode(tokens, skip_special_tokens=False))
        stopped = answer != full_answer or any(
            word in raw for word in self.stops(context, stop) if word
        )
        return answer, not stopped

    def noted(self, requests: Sequence[Any], answers: Sequence[Answer]) -> list[str]:
        """Return the texts, and note the answers that the token limit ended."""
        for request, (_, at_limit) in zip(requests, answers, strict=True):
            if at_limit:
                self.at_limit.add((str(request.task_name), int(request.doc_id)))
        return [text for text, _ in answers]

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        """Write turns as text; raises UserError where the template refuses them."""
        with template_errors(tokenizer_name(self.tokenizer), "a prompt"):
            return str(super().apply_chat_template(*arguments, **options))

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

    def check_prompts(self, requests: Any) -> None:
        """Refuse an answer that leaves no room for a prompt, and note which prompts
        will be cut.
        """
        for request in requests:
            context, settings = request.args
            new = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise UserError(
                    f"max_new_tokens {new} leave no room for a prompt in the model's"
                    f" {self.max_length} positions; lower max_new_tokens"
                )
            if len(self.tok_encode(context)) > self.max_length - new:
                self.cut.add(context)


class InMemory(LanguageModel):
    """The model of a `fcsd.evaluation.backend.InMemoryBackend`: a batch size that may
    shrink, and several ranks; lm-eval is asked batch by batch."""

    def __init__(self, backend: Any):
        silent = not (backend.progress and backend.ranks.first)
        super().__init__(backend.model, backend.tokenizer, silent=silent)
        self._device = input_device(backend.model)
        self.source = backend  # `backend` is a word of HFLM

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        self.check_answers(requests)
        numbered = list(enumerate(requests))
        # As lm-eval does, one sequence answers all requests that differ in the last
        # token only.
        sequences = Collator.group(
            numbered,
            lambda numbered_request: (
                numbered_request[1][1] + numbered_request[1][2][:-1]
            ),
            "contexts",
        )
        # Longest first: a batch that does not fit in memory fails immediately.
        order = sorted(sequences, key=lambda tokens: (-len(tokens), tokens))
        size = self._begin(len(order))
        batches = Collator.get_chunks([sequences[tokens] for tokens in order], n=size)
        ask = super()._loglikelihood_tokens
        return self._shared(
            requests,
            batches,
            lambda batch: ask(batch, disable_tqdm=True),
            lambda: self._model_call(self._one_token()),
        )

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as lm-eval does, each rank its share; but thoughts are written to
        their end.
        """
        size = self._begin(len(requests))
        self.check_prompts(requests)
        numbered = list(enumerate(requests))
        groups = Collator.group(
            numbered, lambda numbered_request: numbered_request[1].args[1], "gen_kwargs"
        )

        def longest_first(numbered_request: Any) -> Any:
            context = numbered_request[1].args[0]
            return -len(self.tok_encode(context)), context

        # lm-eval also batches only requests with equal settings.
        batches = [
            [[numbered_request] for numbered_request in chunk]
            for group in groups.values()
            for chunk in Collator.get_chunks(sorted(group, key=longest_first), n=size)
        ]

        def ask(batch: list[Any]) -> list[Answer]:
            # Memory may hold less than the batch: generate it in parts of the present
            # size, longest first, so that each part is padded as little as possible.
            order = sorted(
                range(len(batch)),
                key=lambda position: longest_first((position, batch[position])),
            )
            answers: dict[int, Answer] = {}
            for start in range(0, len(order), size := self.batch_size_per_gpu):
                positions = order[start : start + size]
                generated = self._generate([batch[position] for position in positions])
                answers |= zip(positions, generated, strict=True)
            return [answers[position] for position in range(len(batch))]

        def idle() -> None:
            # The cheapest pass in which this rank takes part in the others' exchanges.
            token = self._one_token()
            self._model_generate(
                token, max_length=2, stop=[], attention_mask=torch.ones_like(token)
            )

        return self.noted(requests, self._shared(requests, batches, ask, idle))

    def _generate(self, requests: Sequence[Any]) -> list[Answer]:
        """Generate the answers to requests with the same settings in one forward pass,
        as HFLM (0.4.13) does.
        """
        contexts = [request.args[0] for request in requests]
        settings: Any = dict(
            normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks)
        )
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        stop = handle_stop_sequences(settings.pop("until"), eos=eos)
        limit = settings.pop("max_gen_toks")
        # A prompt that leaves no room for the answer is cut on the left.
        ids, mask = self.tok_batch_encode(
            contexts,
            left_truncate_len=self.max_length - limit,
            truncation=self.truncation,
        )
        width = ids.shape[1]
        generated = self._model_generate(
            context=ids.to(self.device),
            attention_mask=mask.to(self.device),
            stop=self.stops(contexts[0], stop),
            max_length=settings.pop("max_length", width + limit),
            **settings,
        )
        ends = end_tokens(self.source.model.generation_config, self.tokenizer)
        return [
            self.read_tokens(context, tokens, stop, limit, ends)
            for context, tokens in zip(
                contexts, generated[:, width:].tolist(), strict=True
            )
        ]

    def _shared(
        self,
        requests: Any,
        batches: _Batches,
        ask: Callable[[list[Any]], list[Any]],
        idle: Callable[[], Any],
    ) -> list[Any]:
        """Return the answers to all requests, batch by batch on all ranks.

        batches: in lm-eval's order, so that lm-eval forms the same batches again. ask:
        answers one batch. idle: runs a pass whose result is not used.
        """
        # Every rank holds the same requests, so only their numbers are dealt out.
        numbered = [
            sorted(number for sequence in batch for number, _ in sequence)
            for batch in batches
        ]

        def answer(numbers: list[int], size: int) -> list[tuple[int, Any]]:
            self.batch_size_per_gpu = size
            return list(
                zip(numbers, ask([requests[number] for number in numbers]), strict=True)
            )

        bar = {"desc": "requests", "shown": not self.silent}
        answers = dict(self.source.in_batches(numbered, answer, idle, **bar))
        return [answers[number] for number in range(len(requests))]

    def _begin(self, count: int) -> int:
        self.source.batch.begin(count, self.source.ranks)
        return int(self.source.batch.size)

    def _one_token(self) -> torch.Tensor:
        return torch.full(
            (1, 1), self.prefix_token_id, dtype=torch.long, device=self.device
        )

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        synced = {"synced_gpus": True} if self.source.ranks.lockstep else {}
        checks = LogitsProcessorList([RefuseOverflow()])
        return super()._model_generate(
            *args, **kwargs, **synced, **TOKEN_BY_TOKEN, logits_processor=checks
        )
