"""lm-eval's interface to a model: what all back ends share, and the model in memory, whole on every rank or sharded
over them (`fcsd.evaluation.lm_eval.served` has the one that a server answers).

lm-eval sees one process: on every rank it builds all requests, and is given all answers. Here, between the two, the
requests are cut into the batches that lm-eval would make of them, and each is asked on one of the ranks.

Importing this imports lm-eval.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs

from fcsd.base.errors import UserError
from fcsd.base.text import draws_foreign_bars
from fcsd.data.chat import template_errors, tokenizer_name
from fcsd.parallel.ranks import input_device

# A batch is a list of sequences, a sequence the (number, request) that it answers.
_Batches = Iterable[list[list[tuple[int, Any]]]]


class LanguageModel(HFLM):
    """HFLM with thoughts on or off, notes of the prompts that were cut, and its bars on a terminal only.

    In a log the line that each task begins with stands for them (`fcsd.evaluation.progress`).
    """

    def __init__(self, model: Any, tokenizer: Any, *, silent: bool):
        super().__init__(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),  # lm-eval changes it
            batch_size=1,  # set for each share
        )
        self.think(False)
        self.silent = silent or not draws_foreign_bars()
        self.cut: set[str] = set()  # the prompts of which the model has seen the end only

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer, whose last token is no input."""
        return int(self.max_length) + 1

    def think(self, thinking: bool) -> None:
        """Ask the template of a hybrid for thoughts, which are cut off its answers, or for none, as they would use up
        the tokens of an answer; other templates pass over it."""
        self.chat_template_args = {"enable_thinking": thinking}
        self.think_end_token = "</think>" if thinking else None

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        """Write turns as text; raises UserError where the template refuses them."""
        with template_errors(tokenizer_name(self.tokenizer), "a prompt"):
            return str(super().apply_chat_template(*arguments, **options))

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as lm-eval does, with bars on the first rank only."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.silent)

    def check_answers(self, requests: Any) -> None:
        """Refuse an answer that is too long to be scored, and note which prompts will be cut."""
        for (context, choice), prompt, answer in requests:
            if not 0 < len(answer) < self.longest:
                raise UserError(
                    f"an answer of {len(answer)} tokens ({choice!r:.40}) cannot be scored; the model has"
                    f" {self.max_length} positions"
                )
            if len(prompt) + len(answer) > self.longest:
                self.cut.add(context)

    def check_prompts(self, requests: Any) -> None:
        """Refuse an answer that leaves no room for a prompt, and note which prompts will be cut."""
        for request in requests:
            context, settings = request.args
            new = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise UserError(
                    f"max_new_tokens {new} leave no room for a prompt in the model's {self.max_length} positions;"
                    " lower max_new_tokens"
                )
            if len(self.tok_encode(context)) > self.max_length - new:
                self.cut.add(context)


class InMemory(LanguageModel):
    """The model of a `fcsd.evaluation.backend.InMemoryBackend`: a batch size that may shrink, and several ranks;
    lm-eval is asked batch by batch."""

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
        # As lm-eval does, one sequence answers all requests that differ in the last token only.
        sequences = Collator.group(numbered, lambda each: each[1][1] + each[1][2][:-1], "contexts")
        order = sorted(sequences, key=lambda tokens: (-len(tokens), tokens))
        size = self._begin(len(order))
        batches = Collator.get_chunks([sequences[tokens] for tokens in order], n=size)
        ask = super()._loglikelihood_tokens
        return self._shared(
            requests,
            batches,
            lambda own: ask(own, disable_tqdm=True),
            lambda: self._model_call(self._one_token()),
        )

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as lm-eval does, each rank its share."""
        size = self._begin(len(requests))
        self.check_prompts(requests)
        numbered = list(enumerate(requests))
        alike = Collator.group(numbered, lambda each: each[1].args[1], "gen_kwargs")

        def longest_first(each: Any) -> Any:
            context = each[1].args[0]
            return -len(self.tok_encode(context)), context

        batches = [
            [[each] for each in chunk]
            for group in alike.values()
            for chunk in Collator.get_chunks(sorted(group, key=longest_first), n=size)
        ]
        ask = super().generate_until

        def idle() -> None:
            token = self._one_token()
            self._model_generate(token, max_length=2, stop=[], attention_mask=torch.ones_like(token))

        return self._shared(requests, batches, lambda own: ask(own, disable_tqdm=True), idle)

    def _shared(
        self,
        requests: Any,
        batches: _Batches,
        ask: Callable[[list[Any]], list[Any]],
        idle: Callable[[], Any],
    ) -> list[Any]:
        """Return the answers to all requests, of which `ask` answers a batch.

        batches: in lm-eval's order, so that lm-eval makes each of them again. idle: a pass whose result nobody reads.
        """
        numbered = [sorted(number for sequence in batch for number, _ in sequence) for batch in batches]

        def answer(numbers: list[int], size: int) -> list[tuple[int, Any]]:
            self.batch_size_per_gpu = size
            return list(zip(numbers, ask([requests[number] for number in numbers]), strict=True))

        bar = {"desc": "requests", "shown": not self.silent}
        answers = dict(self.source.in_batches(numbered, answer, idle, **bar))
        return [answers[number] for number in range(len(requests))]

    def _begin(self, count: int) -> int:
        self.source.batch.begin(count, self.source.ranks)
        return int(self.source.batch.size)

    def _one_token(self) -> torch.Tensor:
        return torch.full((1, 1), self.prefix_token_id, dtype=torch.long, device=self.device)

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        return super()._model_generate(
            *args, **kwargs, **({"synced_gpus": True} if self.source.ranks.lockstep else {})
        )
