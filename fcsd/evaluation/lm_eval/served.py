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

from fcsd.base.errors import UserError
from fcsd.evaluation.config import LMEvalTaskConfig
from fcsd.evaluation.lm_eval.model import LanguageModel
from fcsd.evaluation.lm_eval.tasks import Tasks, longest_requests


class ServedModel(LanguageModel):
    """Sends requests to the server of a `fcsd.evaluation.served.ServedBackend`; the
    first item that is sampled has `SAMPLING_SEED`, the next one the next number."""

    def __init__(self, backend: Any):
        stand_in = SimpleNamespace(config=backend.config, device=torch.device("cpu"))
        super().__init__(stand_in, backend.tokenizer, silent=False)
        self.backend = backend
        self.ends = backend.ends
        self.context: int = backend.server.context or self.max_length
        self._looking = False

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer: all of it is prompt to a server, which
        must write one token more.
        """
        return min(super().longest, self.context - 1)

    def look(self, row: LMEvalTaskConfig, tasks: Tasks, limit: int | None) -> None:
        """Refuse a task whose longest items the server does not take and the model
        would, without asking it.
        """
        self.think(row)
        # Requests are built and measured as usual, but not sent.
        self._looking = True
        try:
            for requests in longest_requests(self, row, tasks, limit):
                getattr(self, requests[0].request_type)(requests, disable_tqdm=True)
        finally:
            self._looking = False
            self.cut.clear()

    def require_room(self, tokens: int) -> None:
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
            self.require_room(min(len(prompt) + len(answer), self.max_length) + 1)
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
            for logprobs, ranks in self.backend.responses("likelihood", bodies)
        ]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        """Answer as lm-eval does."""
        questions = self.questions(requests, min(self.max_length, self.context))
        for question in questions:
            if unknown := question.decoding.settings.keys() - {"repetition_penalty"}:
                raise UserError(
                    f"the task sets {', '.join(sorted(unknown))} for generation, which"
                    " fcsd cannot set on a server; evaluate it in memory"
                )
        if self._looking:
            return [""] * len(questions)
        return self.noted(requests, self.backend.answers(questions))
