"""Measure a model along its own samples, against its original.

    own_text_kl  mean over a text's tokens of KL(model || original) of the next token
    forward_kl   the same of KL(original || model)
    nats         mean of -log p_original(token)

Both distributions are those of temperature 1 over the whole vocabulary, whatever the
temperature of the samples, from one pass over prompt and text without padding. The end
token is a token like others. A task's figures are means over prompts, of which each
counts the same, however long its text.

Of a model behind a server only the log-probabilities of the likeliest tokens are known:
its own_text_kl is that of these tokens and of all others together, a lower bound, and
it has no forward_kl.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.base.errors import UserError
from fcsd.base.text import progress_bar
from fcsd.data.batches import NO_LOSS, Batch, Collator, next_token_targets
from fcsd.evaluation.backend import Backend, InMemoryBackend
from fcsd.evaluation.config import OwnTextTaskConfig
from fcsd.evaluation.own_text.prompts import Prompt, prompt_hash
from fcsd.evaluation.own_text.text import (
    equal_beginning,
    facts_of,
    lengths_up_to,
    repeated_4grams,
)
from fcsd.evaluation.results import TaskStore, end_of, text_hash
from fcsd.evaluation.scores import Row, Sample
from fcsd.model.families.structure import head_scaling, unpadded_vocab_size
from fcsd.model.load import num_positions
from fcsd.model.preserve import preserved
from fcsd.parallel.launch import input_device
from fcsd.parallel.shard import whole_head
from fcsd.training.generation import (
    OVERFLOW,
    Decoding,
    Question,
    Reader,
    Sampling,
    up_to_end,
)
from fcsd.training.losses.fused import Head, fused_linear_loss
from fcsd.training.losses.head import batch_hidden, head_logits
from fcsd.training.losses.heldout_kl import evaluating, read_rows
from fcsd.training.losses.objectives import (
    CrossEntropyObjectiveConfig,
    KLObjectiveConfig,
)

if TYPE_CHECKING:
    from fcsd.evaluation.served import ServedBackend

OF_ORIGINAL = "name the model that this one was converted from"
# A sample has the seed of its prompt's number; those of two seeds of a row never meet.
_SEEDS = 1_000_000
# What the log-probabilities of a server, in float32, leave of a sum of 1.
_ROUNDING = 1e-6
MakeBackend = Callable[[PreTrainedModel], InMemoryBackend]


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
    """The divergences at each token of a text, and its mean nats under the original.

    forward_kl: None where it is not known.
    """

    own_text_kl: list[float]
    forward_kl: list[float] | None
    nats: float


def own_text(
    backend: Backend,
    row: OwnTextTaskConfig,
    prompts: Sequence[Prompt],
    original: Original,
    facts: Row,
    in_memory: MakeBackend,
) -> list[Sample]:
    """Return a sample of each prompt; all ranks call this and get the same.

    facts: about the task, kept with the original's samples. in_memory: makes the
    backend of the original.
    """
    sampled = write(backend, row, prompts, row.temperature)
    greedy = write(backend, row, prompts, 0.0) if row.temperature else sampled
    own_pass = _own_pass(backend, prompts, sampled)
    # Behind a server, the original's own figures need it in memory, too.
    if original.itself and isinstance(backend, InMemoryBackend):
        there: AbstractContextManager[Any] = contextlib.nullcontext(backend.model)
    else:
        there = original.loaded()
    others = None
    with there as model, preserved(model):
        _check_vocabularies(row, backend.config, model.config)
        figures = own_pass.under(model)
        if not original.itself:
            others = _known_or_new(original, in_memory, model, row, prompts, facts)
    if original.itself:
        # The divergence of a model from itself is 0, without the rounding of a pass.
        figures = [
            Figures([0.0] * len(text.tokens), [0.0] * len(text.tokens), of_text.nats)
            for text, of_text in zip(sampled, figures, strict=True)
        ]
    samples = [
        _sample(backend, row, *of_prompt)
        for of_prompt in zip(prompts, sampled, greedy, figures, strict=True)
    ]
    samples = _beside(samples, others or samples)
    if original.itself:
        original.known[_key(row, prompts)] = samples
    return samples


def _known_or_new(
    original: Original,
    in_memory: MakeBackend,
    model: PreTrainedModel,
    row: OwnTextTaskConfig,
    prompts: Sequence[Prompt],
    facts: Row,
) -> list[Sample]:
    """Return the original's own samples: those that are known or kept, or else new
    ones. model: the original.
    """
    key, backend = _key(row, prompts), in_memory(model)
    if key in original.known:
        return original.known[key]
    store, ranks = original.store, backend.ranks
    kept = ranks.from_first(lambda: store.get(row) if store is not None else None)
    if kept is not None:
        return original.known.setdefault(key, kept[0])
    with backend.asking():
        itself = replace(original, itself=True)
        samples = own_text(backend, row, prompts, itself, facts, in_memory)
    if store is not None and ranks.first:
        store.put(row, samples, {**facts, **facts_of(samples, served=False)})
    return samples


def _key(row: OwnTextTaskConfig, prompts: Sequence[Prompt]) -> str:
    return text_hash(f"{row.model_dump_json()} {[prompt_hash(p) for p in prompts]}")


def _beside(samples: list[Sample], others: Sequence[Sample]) -> list[Sample]:
    """Add to each sample how it compares with the original's own of the same prompt."""
    for sample, other in zip(samples, others, strict=True):
        tokens, other_tokens = sample["greedy_tokens"], other["greedy_tokens"]
        sample |= {
            "original_nats": other["nats"],
            "greedy_equal": equal_beginning(tokens, other_tokens),
            "greedy_longest": max(len(tokens), len(other_tokens)),
        }
    return samples


def write(
    backend: Backend,
    row: OwnTextTaskConfig,
    prompts: Sequence[Prompt],
    temperature: float,
    *,
    first: int = 0,
) -> list[Written]:
    """Continue the prompts, the n-th of all with the n-th seed. first: the number of
    the first one.
    """
    check_positions(row, prompts, backend.config)
    ends, sampling = backend.ends, None
    if temperature:
        # Padding rows of the head are no tokens.
        size = unpadded_vocab_size(backend.config)
        sampling = Sampling(temperature, vocab_size=size)
    reader = Reader(
        backend.thoughts, "", (), row.max_new_tokens, ends, chats=False, thinking=False
    )
    decoding = Decoding(sampling)
    questions = [
        Question(prompt.tokens, reader, row.seed * _SEEDS + number, decoding)
        for number, prompt in enumerate(prompts, start=first)
    ]
    return [cut(tokens, ends) for tokens in backend.new_tokens(questions)]


def cut(tokens: Sequence[int], ends: Sequence[int]) -> Written:
    """Return tokens up to the first one that ends a sequence, which is included."""
    text = up_to_end(tokens, ends)
    return Written(text, bool(text) and text[-1] in ends)


def check_positions(
    row: OwnTextTaskConfig, prompts: Sequence[Prompt], config: Any
) -> None:
    """Raise UserError where the longest prompt and its text do not fit the positions of
    a model with this config.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.tokens))
    length, positions = len(longest.tokens), num_positions(config)
    if positions is not None and length + row.max_new_tokens > positions:
        # A prompt that fills the positions alone leaves no room for a text.
        advice = "lower max_new_tokens"
        if length >= positions:
            advice = "take that row out of the data, or shorten it"
            if not row.chat_template:
                advice += "; of documents, lower prompt_tokens"
        raise UserError(
            f"task {row.task}: {row.dataset}, row {longest.doc_id + 1}: a prompt of"
            f" {length} tokens and max_new_tokens {row.max_new_tokens} do not fit the"
            f" model's {positions} positions; {advice}"
        )


def _check_vocabularies(row: OwnTextTaskConfig, config: Any, original: Any) -> None:
    own, other = (each.get_text_config().vocab_size for each in (config, original))
    if own != other:
        raise UserError(
            f"task {row.task}: the model's vocabulary has {own} tokens, its original's"
            f" {other}; {OF_ORIGINAL}"
        )


def _own_pass(
    backend: Backend, prompts: Sequence[Prompt], texts: Sequence[Written]
) -> "_OwnPass | _ServedPass":
    if isinstance(backend, InMemoryBackend):
        return _OwnPass(backend, prompts, texts)
    return _ServedPass(backend, prompts, texts)


class _OwnPass:
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
        self.progress = backend.progress
        self.device, self.config = input_device(model), model.config
        self.lengths = [len(text.tokens) for text in texts]
        rows = _rows(prompts, texts)

        def prepare(batch: Batch) -> None:
            batch["own_hidden"] = batch_hidden(model, batch)

        with evaluating(model):
            self.batches = read_rows(
                rows,
                prepare,
                model=model,
                device=self.device,
                ranks=self.ranks,
                bar="own text" if self.progress else None,
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
            shown = self.progress and self.ranks.first
            with progress_bar(
                self.batches, desc="its original", unit="text", shown=shown
            ) as bar:
                return [measured(batch) for batch in bar][:count]

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


class _ServedPass:
    """What a server tells of a model at its own tokens: the log-probabilities of the
    likeliest.
    """

    def __init__(
        self,
        backend: "ServedBackend",
        prompts: Sequence[Prompt],
        texts: Sequence[Written],
    ):
        self.rows = _rows(prompts, texts)
        self.places = backend.likeliest(
            [prompt.tokens for prompt in prompts], [text.tokens for text in texts]
        )

    @torch.no_grad()
    def under(self, original: PreTrainedModel) -> list[Figures]:
        """Return the figures of each text under the original."""
        device, size = input_device(original), unpadded_vocab_size(original.config)
        figures = []
        with evaluating(original):
            for row, places in zip(self.rows, self.places, strict=True):
                batch = {
                    name: value.to(device) for name, value in Collator()([row]).items()
                }
                hidden = batch_hidden(original, batch)
                _, targets = next_token_targets(batch["labels"], batch["position_ids"])
                divergences, nats = [], 0.0
                for place, state, target in zip(places, hidden, targets, strict=True):
                    logits = head_logits(original, state)[:size]
                    logprobs = logits.double().log_softmax(-1)
                    nats -= float(logprobs[target])
                    divergences.append(_of_likeliest(place, logprobs))
                figures.append(Figures(divergences, None, nats / len(places)))
        return figures


def _of_likeliest(own: Mapping[int, float], logprobs: Tensor) -> float:
    """Return KL(model || original) of some tokens and of all others together, a lower
    bound of the whole.

    own: token -> log-probability of the model. logprobs: (V,) of the original.
    """
    others = logprobs[torch.tensor(list(own), device=logprobs.device)].tolist()
    pairs = list(zip(own.values(), others, strict=True))
    kl = math.fsum(math.exp(a) * (a - b) for a, b in pairs)
    rest, other_rest = (
        max(1 - math.fsum(math.exp(pair[side]) for pair in pairs), _ROUNDING)
        for side in (0, 1)
    )
    return kl + rest * math.log(rest / other_rest)


def _rows(prompts: Sequence[Prompt], texts: Sequence[Written]) -> list[Row]:
    rows = []
    for prompt, text in zip(prompts, texts, strict=True):
        ids = [*prompt.tokens, *text.tokens]
        labels = [NO_LOSS] * len(prompt.tokens) + text.tokens
        positions = list(range(len(ids)))
        rows.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return rows


def _head(hidden: Tensor, head: nn.Linear, config: Any) -> Head:
    return Head(hidden, head.weight, head.bias, *head_scaling(config))


def _sample(
    backend: Backend,
    row: OwnTextTaskConfig,
    prompt: Prompt,
    sampled: Written,
    greedy: Written,
    figures: Figures,
) -> Sample:
    def mean(values: Sequence[float], length: int | None = None) -> float:
        values = values[:length]
        return math.fsum(values) / len(values)

    def shown(text: Written) -> str:
        return backend.thoughts.decode(text.tokens)

    known, beside = {"own_text_kl": figures.own_text_kl}, {}
    if figures.forward_kl is not None:
        known["forward_kl"] = figures.forward_kl
        beside["forward_kl"] = mean(figures.forward_kl)
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
        **beside,
        "by_length": {
            str(length): {name: mean(known[name], length) for name in known}
            for length in lengths_up_to(row.max_new_tokens)
        },
        "nats": figures.nats,
        "repeated_4grams": repeated_4grams(sampled.tokens),
        "greedy_repeated_4grams": repeated_4grams(greedy.tokens),
    }
