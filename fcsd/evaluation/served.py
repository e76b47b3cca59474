"""Evaluate a model behind a server: send questions as token ids, and check that the
server has the right model.

Single answers are kept (`fcsd.evaluation.results.Journal`): an evaluation whose server or
client was killed continues with the next one. Temperature 0 is greedy; a sample is
drawn with a seed of its own, so neither the order of requests nor their concurrency
changes it, but it is not the sample that transformers draws.

Not covered: KL on given text, which needs all logits; several ranks.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.text import progress_bar
from fcsd.data.thoughts import Thoughts
from fcsd.evaluation.config import ServerConfig
from fcsd.evaluation.identity import difference_from_server
from fcsd.evaluation.results import Journal
from fcsd.evaluation.server import Body, Server
from fcsd.model.load import ModelFolder
from fcsd.model.preserve import quiet
from fcsd.training.generation import Answer, Question, end_tokens, set_aside

TOP = 20
"""Log-probabilities at a token that vLLM gives unless it is started with more or fewer
(`--max-logprobs`).
"""
_OVERFLOW = (
    "returns log-probabilities that are NaN or infinite: the model overflows in its"
    " precision; serve it in bfloat16 or float32"
)


class ServedBackend:
    """A checkpoint that a server answers for."""

    def __init__(
        self,
        server: ServerConfig,
        model: ModelFolder,
        tokenizer: PreTrainedTokenizerBase,
    ):
        self.server = Server(server.url, concurrency=server.concurrency)
        self.server.look(model.config.path)
        self.model, self.tokenizer = model, tokenizer
        self.config = model.load_config(any_family=model.config.trust_remote_code)
        # The same two sources as `from_pretrained` has for a model in memory.
        if (model.folder / "generation_config.json").is_file():
            self.generation = GenerationConfig.from_pretrained(model.folder)
        else:
            self.generation = GenerationConfig.from_model_config(self.config)
        self.ends = end_tokens(self.generation, tokenizer)
        self.checked: dict[str, Any] | None = None
        self._journal = Journal()

    @property
    def facts(self) -> dict[str, Any]:
        """The engine and its configuration, which the answers depend on."""
        return self.server.facts

    def identify(self, load: Callable[[], PreTrainedModel]) -> None:
        """Check that the server serves this model; `load` loads it into memory, where
        it is freed afterwards.
        """
        self.checked = difference_from_server(self, load)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Do nothing: the tokenizer that lm-eval changes is a copy."""
        yield

    def begin(self, journal: Journal) -> None:
        """Start a task."""
        self._journal = journal

    @functools.cached_property
    def language_model(self) -> Any:
        """lm-eval's model."""
        with quiet():
            from fcsd.evaluation.lm_eval.served import ServedModel

            return ServedModel(self)

    @functools.cached_property
    def thoughts(self) -> Thoughts:
        """The marks of the model's thoughts."""
        return Thoughts(self.tokenizer)

    def new_tokens(self, questions: Sequence[Question]) -> list[list[int]]:
        """Return the new tokens after each prompt, special ones and what follows an end
        included.
        """
        bodies = [self._body(question, special=True) for question in questions]
        texts = []
        for answer in self.responses("generation", bodies):
            if not isinstance(answer, list):
                ended = [] if answer["at_limit"] else self.ends[:1]
                tokens = self.tokenizer(answer["text"], add_special_tokens=False)
                answer = [*tokens["input_ids"], *ended]
            texts.append(answer)
        return texts

    def likeliest(
        self, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
    ) -> list[list[dict[int, float]]]:
        """Return the log-probabilities of the `TOP` likeliest tokens at each token of
        the texts after these prompts.
        """
        bodies = [
            {"prompt": [*prompt, *text], "answer_tokens": len(text), "top": TOP}
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        rows = self.responses("likeliest", bodies)
        # JSON has no other keys than texts.
        return [
            [{int(token): p for token, p in place.items()} for place in row]
            for row in rows
        ]

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """Return the answers, in the order of the questions."""
        reading = [question.reader for question in questions]
        bodies = [
            self._body(question, special=question.reader.reads_special)
            | {"stop": question.reader.early_stop}
            for question in questions
        ]
        answers = self.responses("generation", bodies)
        # A server knows no thoughts, and has stopped in some at a stop string.
        cut = [n for n, reader in enumerate(reading) if reader.is_cut(answers[n])]
        again = [{**bodies[n], "stop": reading[n].special_stop} for n in cut]
        longer = self.responses("generation", again) if again else []
        for n, answer in zip(cut, longer, strict=True):
            answers[n] = answer
        return [
            reader.tokens(answer)
            if isinstance(answer, list)
            else reader.text(answer["text"], answer["at_limit"])
            for reader, answer in zip(reading, answers, strict=True)
        ]

    def _body(self, question: Question, *, special: bool) -> Body:
        return {
            "prompt": list(question.prompt),
            "max_tokens": question.reader.limit,
            "stop_token_ids": self.ends,
            "skip_special_tokens": not special,
            **_sampled(question),
        }

    def settings(self) -> dict[str, Any]:
        """Return the facts that a result records: the engine, and how the model was
        checked.
        """
        server = self.server
        return {
            "batch_size": None,
            "dtype": server.facts["dtype"],
            "device": None,
            "generation_config_unused": set_aside(self.generation),
            "server": {
                **server.facts,
                "model": server.model,
                "context": server.context,
                "concurrency": server.concurrency,
                "check": self.checked,
            },
        }

    def responses(
        self,
        kind: str,
        bodies: Sequence[Body],
        journal: Journal | None = None,
        *,
        quietly: bool = False,
    ) -> list[Any]:
        """Return the answers to requests; only those that the journal (None: the
        task's) has no answer to are sent.

        The answer to a "likelihood" is [log-probabilities, ranks] of the last
        `answer_tokens` of the prompt; that to "likeliest" has token -> log-probability
        at each of them; that to a "generation" is its token ids, or where
        the server gives no ids {"text": …, "at_limit": …}.
        """
        journal = self._journal if journal is None else journal
        answers = [journal.get(body) for body in bodies]
        missing = [number for number, answer in enumerate(answers) if answer is None]
        read = {
            "likelihood": self._read_likelihood,
            "likeliest": self._read_likeliest,
            "generation": self._read_generation,
        }[kind]
        # Answers in the journal are not requested again.
        requests = [self._request(kind, bodies[number]) for number in missing]
        with progress_bar(
            total=len(bodies),
            initial=len(bodies) - len(missing),
            desc=f"{kind} by {self.server.facts['engine']}",
            shown=not quietly,
        ) as bar:

            def note(index: int, answer: Any) -> None:
                journal.put(bodies[missing[index]], answer)
                bar.update()

            new_answers = self.server.answers(
                requests,
                lambda index, answer: read(bodies[missing[index]], answer),
                note,
            )
        for number, answer in zip(missing, new_answers, strict=True):
            answers[number] = answer
        return answers

    def _request(self, kind: str, body: Body) -> Body:
        """Return the body of the request. A server that returns tokens is told to
        ignore its end tokens, and answers are cut here.
        """
        if kind in ("likelihood", "likeliest"):
            return {
                "prompt": body["prompt"],
                "max_tokens": 1,
                "temperature": 0.0,
                "prompt_logprobs": body.get("top", 0),
            }
        if self.server.token_ids:
            return {**body, "ignore_eos": True, "return_token_ids": True}
        return body

    def _read_likelihood(
        self, body: Body, answer: Body
    ) -> tuple[list[float], list[int]]:
        # An entry names the prompt's token, and perhaps likelier ones beside it.
        tokens = [
            entry[str(token)]
            for entry, token in zip(
                self._prompt_entries(body, answer),
                body["prompt"][-body["answer_tokens"] :],
                strict=True,
            )
        ]
        logprobs = [float(token_entry["logprob"]) for token_entry in tokens]
        if not all(map(math.isfinite, logprobs)):
            raise self.server.error(_OVERFLOW)
        return logprobs, [int(token_entry["rank"]) for token_entry in tokens]

    def _prompt_entries(self, body: Body, answer: Body) -> list[Any]:
        entries = answer["choices"][0]["prompt_logprobs"]
        if len(entries) != len(body["prompt"]):
            raise ValueError(
                f"{len(entries)} prompt_logprobs for {len(body['prompt'])} tokens"
            )
        # The first token of a prompt has no log-probability.
        return list(entries[-body["answer_tokens"] :])

    def _read_likeliest(self, body: Body, answer: Body) -> list[dict[str, float]]:
        places = []
        for entry in self._prompt_entries(body, answer):
            place = {token: float(values["logprob"]) for token, values in entry.items()}
            if len(place) < body["top"]:
                raise self.server.error(
                    f"gives {len(place)} log-probabilities of a token, but own text"
                    f" needs those of the {body['top']} likeliest; start it with"
                    f" --max-logprobs {body['top']} or more"
                )
            if any(map(math.isnan, place.values())):
                raise self.server.error(_OVERFLOW)
            # Those of zero probability add nothing to a divergence.
            places.append({t: p for t, p in place.items() if math.isfinite(p)})
        return places

    def _read_generation(self, body: Body, answer: Body) -> list[int] | Body:
        (choice,) = answer["choices"]
        tokens, limit = choice.get("token_ids"), body["max_tokens"]
        num_generated = (
            (answer.get("usage") or {}).get("completion_tokens", limit)
            if tokens is None
            else len(tokens)
        )
        # A limit of the server's own, which would cut answers unnoticed.
        if choice.get("finish_reason") == "length" and num_generated < limit:
            raise self.server.error(
                f"ends answers after {num_generated} tokens, but the task allows"
                f" {limit}; raise the server's limit"
            )
        if tokens is None:
            if not isinstance(choice["text"], str):
                raise ValueError(f"text: {choice['text']!r}")
            return {
                "text": choice["text"],
                "at_limit": choice.get("finish_reason") == "length",
            }
        # The end token is kept: it tells an answer that ended from one that was cut.
        end = next(
            (index for index, token in enumerate(tokens) if token in self.ends),
            len(tokens),
        )
        return [int(token) for token in tokens[: end + 1]]


def _sampled(question: Question) -> Body:
    """Return the fields of a request for sampling, or for the likeliest token. All are
    sent: a server's own defaults are its administrator's choice.
    """
    sampling = question.decoding.sampling
    # A repetition penalty also changes greedy decoding.
    penalty = question.decoding.settings.get("repetition_penalty", 1.0)
    if sampling is None:
        return {"temperature": 0.0, "repetition_penalty": penalty}
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # transformers writes no limit as top_k 0, vLLM as -1.
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": penalty,
        "seed": question.seed,
    }
