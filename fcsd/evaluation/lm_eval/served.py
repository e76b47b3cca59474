"""lm-eval's interface to a model that a server answers for: the same requests, as token
ids.

Tokenizer, chat template, cut prompts, stop strings and end tokens are the same as for a
model in memory; the server only computes the next token. A likelihood is the sum of
`prompt_logprobs`; an answer is greedy where all its tokens have rank 1.

Importing this imports lm-eval.

Not covered: settings of generation that a server does not know (beams).
"""

from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from fcsd.base.errors import UserError
from fcsd.evaluation.code.generate import SAMPLING_SEED
from fcsd.evaluation.config import LMEvalTaskConfig
from fcsd.evaluation.lm_eval.model import Answer, LanguageModel
from fcsd.evaluation.lm_eval.tasks import longest_requests

# Settings that a task may have beyond length and stop strings. All are sent, with the
# values of a model in memory: a server's own defaults are its administrator's choice.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
Body = dict[str, Any]


class ServedModel(LanguageModel):
    """Sends requests to the server of a `fcsd.evaluation.served.ServedBackend`; the
    first item that is sampled has `SAMPLING_SEED`, the next one the next number."""

    def __init__(self, backend: Any):
        stand_in = SimpleNamespace(config=backend.config, device=torch.device("cpu"))
        super().__init__(stand_in, backend.tokenizer, silent=False)
        self.backend = backend
        self.context: int = backend.server.context or self.max_length
        self._looking = False

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer: all of it is prompt to a server, which
        must write one token more.
        """
        return min(super().longest, self.context - 1)

    def look(
        self, row: LMEvalTaskConfig, tasks: dict[str, Any], limit: int | None
    ) -> None:
        """Refuse a task whose longest items the server does not take and the model
        would, without asking it.
        """
        self.think(bool(row.thinking), row.chat_template)
        # Requests are built and measured as usual, but not sent.
        self._looking = True
        try:
            for requests in longest_requests(self, row, tasks, limit):
                getattr(self, requests[0].request_type)(requests, disable_tqdm=True)
        finally:
            self._looking = False
            self.cut.clear()

    def _require_room(self, tokens: int) -> None:
        """Refuse to cut a prompt that fits the model, but not the server as it was
        started.
        """
        if tokens > self.context and self.context < self.max_length:
            raise UserError(
                f"the server accepts {self.context} tokens, but a prompt with its"
                f" answer needs {tokens}; start it with --max-model-len"
                f" {min(tokens, self.max_length)} or more"
            )

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        self.check_answers(requests)
        bodies = []
        for _, prompt, answer in requests:
            # One more, because a server generates at least one token for each request.
            self._require_room(min(len(prompt) + len(answer), self.max_length) + 1)
            bodies.append(
                {
                    "prompt": (prompt + answer)[-self.longest :],
                    "answer_tokens": len(answer),
                }
            )
        # Only the lengths are checked now; the server is queried later.
        if self._looking:
            return [(0.0, False)] * len(bodies)
        return [
            (sum(logprobs), all(rank == 1 for rank in ranks))
            for logprobs, ranks in self.backend.ask("likelihood", bodies)
        ]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as lm-eval does."""
        self.check_prompts(requests)
        eos = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        bodies, stops = [], []
        for number, request in enumerate(requests):
            context, arguments = request.args
            settings: Any = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
            stop = handle_stop_sequences(settings.pop("until"), eos=eos)
            new = settings.pop("max_gen_toks")
            # The beginning is cut so that the answer fits, as in memory.
            ids, _ = self.tok_batch_encode([context])
            self._require_room(min(ids.shape[1], self.max_length - new) + new)
            room = min(self.max_length, self.context) - new
            stops.append(stop)
            bodies.append(
                {
                    "prompt": ids[0, -room:].tolist(),
                    "max_tokens": new,
                    "stop": [word for word in self.stops(context, stop) if word],
                    "stop_token_ids": self.backend.ends,
                    # Stop strings may be special tokens, which a model in memory is
                    # stopped by as well.
                    "skip_special_tokens": False,
                    **self._sampling(settings, SAMPLING_SEED + number),
                }
            )
        if self._looking:
            return [""] * len(bodies)
        answers = self.backend.ask("generation", bodies)
        read = [
            self._read(request.args[0], answer, stop, body["max_tokens"])
            for request, answer, stop, body in zip(
                requests, answers, stops, bodies, strict=True
            )
        ]
        return self.noted(requests, read)

    def _read(self, context: str, answer: Any, stop: list[str], limit: int) -> Answer:
        if isinstance(answer, list):
            return self.read_tokens(context, answer, stop, limit, self.backend.ends)
        text = answer["text"]
        if self.has_thoughts(context):
            text = self.thoughts.without_special(text)
        full_answer = self.answer_of(context, text, [])
        cut_answer = self.answer_of(context, text, stop)
        return cut_answer, answer["at_limit"] and cut_answer == full_answer

    def _sampling(self, settings: Body, seed: int) -> Body:
        sampled = settings.pop("do_sample", False)
        if unknown := settings.keys() - set(_SAMPLING):
            raise UserError(
                f"the task sets {', '.join(sorted(unknown))} for generation, which fcsd"
                " cannot set on a server; evaluate it in memory"
            )
        model_settings = {
            name: getattr(self.backend.generation, name, None) for name in _SAMPLING
        }
        # A repetition penalty also changes greedy decoding.
        penalty = (
            settings.get("repetition_penalty", model_settings["repetition_penalty"])
            or 1.0
        )
        if not sampled:
            return {"temperature": 0.0, "repetition_penalty": penalty}
        # transformers' own defaults, where neither task nor model sets a value
        defaults: dict[str, Any] = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 50,
            "min_p": 0.0,
            "seed": seed,
        }
        # The task's own settings count first, then the model's.
        chosen = {}
        for name, value in defaults.items():
            if model_settings[name] is not None:
                value = model_settings[name]
            chosen[name] = settings.get(name, value)
        # transformers writes no limit as top_k 0, vLLM as -1.
        return {**chosen, "top_k": chosen["top_k"] or -1, "repetition_penalty": penalty}
