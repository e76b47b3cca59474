"""Measure a model along its own samples, against its original.

    own_text_kl  mean over a text's tokens of KL(model || original) of the next token
    forward_kl   the same of KL(original || model)
    nats         mean of -log p_original(token)

Both distributions are those of temperature 1 over the whole vocabulary, whatever the
temperature of the samples, from one pass over prompt and text without padding. The end
token is a token like others. A task's figures are means over prompts, of which each
counts the same, however long its text.

Not covered: samples that a server writes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.data.batches import NO_LOSS, Batch, next_token_targets
from fcsd.evaluation.answers import Reader
from fcsd.evaluation.backend import InMemoryBackend
from fcsd.evaluation.config import OwnTextTaskConfig
from fcsd.evaluation.own_text.prompts import Prompt, prompt_hash
from fcsd.evaluation.own_text.text import (
    equal_beginning,
    lengths_up_to,
    repeated_4grams,
)
from fcsd.evaluation.results import end_of, text_hash
from fcsd.evaluation.store import TaskStore
from fcsd.model.families.structure import head_scaling, unpadded_vocab_size
from fcsd.model.positions import num_positions
from fcsd.model.preserve import preserved
from fcsd.parallel.ranks import input_device
from fcsd.parallel.shard import whole_head
from fcsd.training.generation import OVERFLOW, Decoding, Sampling
from fcsd.training.losses.fused import Head, fused_linear_loss
from fcsd.training.losses.head import batch_hidden
from fcsd.training.losses.kl import evaluating, read_rows
from fcsd.training.losses.objectives import (
    CrossEntropyObjectiveConfig,
    KLObjectiveConfig,
)

Sample = dict[str, Any]
# A sample has the seed of its prompt's number; those of two seeds of a row never meet.
_SEEDS = 1_000_000


@dataclass
class Original:
    """The model that a converted one is compared with.

    loaded: gives it in memory; all ranks enter the context. itself: the evaluated model
    is the original. name: its fingerprint, for the record. store: keeps the original's
    own samples, as those of its evaluation. known: those that this process has made or
    found.
    """

    loaded: Callable[[], AbstractContextManager[PreTrainedModel]]
    itself: bool = False
    name: str | None = None
    store: TaskStore | None = None
    known: dict[str, list[Sample]] = field(default_factory=dict)


class Written(NamedTuple):
    """What a model has written after a prompt: tokens, with the end token if there is
    one, and whether it has ended by itself.
    """

    tokens: list[int]
    ended: bool


class Figures(NamedTuple):
    """The divergences at each token of a text, and its mean nats under the original."""

    own_text_kl: list[float]
    forward_kl: list[float]
    nats: float


def own_text(
    backend: InMemoryBackend,
    row: OwnTextTaskConfig,
    prompts: Sequence[Prompt],
    original: Original,
    facts: Mapping[str, Any],
) -> list[Sample]:
    """Return a sample of each prompt; all ranks call this and get the same.

    facts: about the task, kept with the original's samples.
    """
    sampled = write(backend, row, prompts, row.temperature)
    greedy = sampled
    if row.temperature:
        greedy = write(backend, row, prompts, 0.0)
    own = _Read(backend, prompts, sampled)
    originals = None
    if original.itself:
        # The divergence of a model from itself is 0, without the rounding of a pass.
        figures = [
            Figures([0.0] * len(text.tokens), [0.0] * len(text.tokens), of_text.nats)
            for text, of_text in zip(sampled, own.under(backend.model), strict=True)
        ]
    else:
        with original.loaded() as model, preserved(model):
            figures = own.under(model)
            originals = _samples_of(original, model, backend, row, prompts, facts)
    samples = [
        _sample(backend, row, prompt, (text, greedy_text), of_text)
        for prompt, text, greedy_text, of_text in zip(
            prompts, sampled, greedy, figures, strict=True
        )
    ]
    for sample, other in zip(samples, originals or samples, strict=True):
        tokens, others = sample["greedy_tokens"], other["greedy_tokens"]
        sample |= {
            "original_nats": other["nats"],
            "greedy_equal": equal_beginning(tokens, others),
            "greedy_longest": max(len(tokens), len(others)),
        }
    if original.itself:
        original.known[_key(row, prompts)] = samples
    return samples


def _key(row: OwnTextTaskConfig, prompts: Sequence[Prompt]) -> str:
    return text_hash(f"{row.model_dump_json()} {[prompt_hash(p) for p in prompts]}")


def _samples_of(
    original: Original,
    model: PreTrainedModel,
    backend: InMemoryBackend,
    row: OwnTextTaskConfig,
    prompts: Sequence[Prompt],
    facts: Mapping[str, Any],
) -> list[Sample]:
    """Return the original's own samples: those that are known, or else new ones."""
    key = _key(row, prompts)
    if key in original.known:
        return original.known[key]
    store, ranks = original.store, backend.ranks
    kept = ranks.from_first(lambda: store.get(row) if store is not None else None)
    if kept is not None:
        return original.known.setdefault(key, kept[0])
    of_original = InMemoryBackend(
        model, backend.tokenizer, backend.batch.given, ranks, progress=backend.progress
    )
    with of_original.asking():
        itself = replace(original, itself=True)
        samples = own_text(of_original, row, prompts, itself, facts)
    if store is not None and ranks.first:
        store.put(row, samples, {**facts, **at_limit(samples)})
    return samples


def at_limit(samples: Sequence[Sample]) -> dict[str, int]:
    """Return the fact of a result that counts the texts that the token limit ended."""
    return {"answers_at_limit": sum(not sample["ended"] for sample in samples)}


def write(
    backend: InMemoryBackend,
    row: OwnTextTaskConfig,
    prompts: Sequence[Prompt],
    temperature: float,
    *,
    first: int = 0,
) -> list[Written]:
    """Continue the prompts, the n-th of all with the n-th seed. first: the number of
    the first one.
    """
    _check_positions(row, prompts, backend.model.config)
    ends, sampling = backend.ends, None
    if temperature:
        # Padding rows of the head are no tokens.
        size = unpadded_vocab_size(backend.model.config)
        sampling = Sampling(temperature, vocab_size=size)
    reader = Reader(
        backend.thoughts, "", (), row.max_new_tokens, ends, chats=False, thinking=False
    )
    texts = backend.continued(
        [list(prompt.tokens) for prompt in prompts],
        [reader] * len(prompts),
        [seed_of(row, first + number) for number in range(len(prompts))],
        Decoding(sampling),
    )
    return [cut(tokens[: row.max_new_tokens], ends) for tokens in texts]


def seed_of(row: OwnTextTaskConfig, number: int) -> int:
    """Return the seed of the sample of a prompt."""
    return row.seed * _SEEDS + number


def cut(tokens: list[int], ends: Sequence[int]) -> Written:
    """Return tokens up to the first one that ends a sequence, which is included."""
    for index, token in enumerate(tokens):
        if token in ends:
            return Written(tokens[: index + 1], True)
    return Written(tokens, False)


def _check_positions(
    row: OwnTextTaskConfig, prompts: Sequence[Prompt], config: Any
) -> None:
    longest = max(len(prompt.tokens) for prompt in prompts)
    positions = num_positions(config)
    if positions is not None and longest + row.max_new_tokens > positions:
        raise UserError(
            f"task {row.task}: a prompt of {longest} tokens and max_new_tokens"
            f" {row.max_new_tokens} do not fit the model's {positions} positions;"
            " lower max_new_tokens"
        )


class _Read:
    """A model's final hidden states at its own tokens, and its head; with them the
    original's pass needs the model no more.
    """

    @torch.no_grad()
    def __init__(
        self,
        backend: InMemoryBackend,
        prompts: Sequence[Prompt],
        texts: Sequence[Written],
    ):
        model, self.ranks = backend.model, backend.ranks
        self.device, self.config = input_device(model), model.config
        self.lengths = [len(text.tokens) for text in texts]
        rows = [
            _row(prompt.tokens, text.tokens)
            for prompt, text in zip(prompts, texts, strict=True)
        ]

        def prepare(batch: Batch) -> None:
            batch["own_hidden"] = batch_hidden(model, batch)

        with evaluating(model):
            self.batches = read_rows(
                rows, prepare, model=model, device=self.device, ranks=self.ranks
            )
            self.head = whole_head(model, self.device).cpu()

    @torch.no_grad()
    def under(self, original: PreTrainedModel) -> list[Figures]:
        """Return the figures of each text under the original, on all ranks."""
        device = input_device(original)
        own_head, head = self.head.to(device), whole_head(original, device)

        def measured(batch: Batch) -> Figures:
            batch = {name: value.to(device) for name, value in batch.items()}
            hidden = batch_hidden(original, batch)
            _, targets = next_token_targets(batch["labels"], batch["position_ids"])
            return self._figures(
                _head(batch["own_hidden"], own_head, self.config),
                _head(hidden, head, original.config),
                targets,
            )

        def own_share() -> list[Figures]:
            # The last ones are dummies of ranks in lockstep.
            count = len(self.ranks.deal(self.lengths))
            return [measured(batch) for batch in self.batches][:count]

        with evaluating(original):
            by_rank = self.ranks.share(own_share)
        size = self.ranks.size
        return [by_rank[n % size][n // size] for n in range(len(self.lengths))]

    def _figures(self, own: Head, original: Head, targets: Tensor) -> Figures:
        # Padding rows of the head are no tokens: their logits are arbitrary.
        vocab_size = unpadded_vocab_size(self.config)

        def by_token(name: Any) -> list[float]:
            objective = KLObjectiveConfig(name=name)
            _, statistics = fused_linear_loss(
                own, original, objective, vocab_size=vocab_size, statistics=True
            )
            assert statistics is not None
            values: list[float] = statistics.divergence.tolist()
            if not all(map(math.isfinite, values)):
                raise UserError(OVERFLOW)
            return values

        # The objectives' student is the model, and their teacher the original.
        nats, _ = fused_linear_loss(
            original,
            targets,
            CrossEntropyObjectiveConfig(name="ce"),
            vocab_size=vocab_size,
        )
        return Figures(
            by_token("reverse_kl"), by_token("kl"), float(nats) / len(targets)
        )


def _row(prompt: Sequence[int], text: Sequence[int]) -> dict[str, Any]:
    ids = [*prompt, *text]
    return {
        "input_ids": ids,
        "position_ids": list(range(len(ids))),
        "labels": [NO_LOSS] * len(prompt) + list(text),
    }


def _head(hidden: Tensor, head: nn.Linear, config: Any) -> Head:
    return Head(hidden, head.weight, head.bias, *head_scaling(config))


def _sample(
    backend: InMemoryBackend,
    row: OwnTextTaskConfig,
    prompt: Prompt,
    texts: tuple[Written, Written],
    figures: Figures,
) -> Sample:
    sampled, greedy = texts

    def mean(values: Sequence[float], length: int | None = None) -> float:
        values = values[:length]
        return math.fsum(values) / len(values)

    def shown(text: Written) -> str:
        return backend.thoughts.decode(text.tokens)

    return {
        "doc_id": prompt.doc_id,
        "doc_hash": text_hash(prompt.source),
        "prompt_hash": prompt_hash(prompt),
        "score": mean(figures.own_text_kl),
        "prompt": end_of(prompt.text),
        "completion": shown(sampled),
        "greedy": shown(greedy),
        "tokens": sampled.tokens,
        "greedy_tokens": greedy.tokens,
        "ended": sampled.ended,
        "forward_kl": mean(figures.forward_kl),
        "by_length": {
            str(length): {
                "own_text_kl": mean(figures.own_text_kl, length),
                "forward_kl": mean(figures.forward_kl, length),
            }
            for length in lengths_up_to(row.max_new_tokens)
        },
        "nats": figures.nats,
        "repeated_4grams": repeated_4grams(sampled.tokens),
        "greedy_repeated_4grams": repeated_4grams(greedy.tokens),
    }
