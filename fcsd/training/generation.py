"""Generate answers with a model in memory, and read them, or those of a server: where an
answer ends, and its text without thoughts. The evaluation and the training on a
student's own text generate with it.

An answer depends on its own prompt and tokens alone. A batch goes on until all its
sequences have ended, so what a sequence is given after its end is cut off.

- Rows of a batch end and are drawn one by one.
- The model's own generation settings (`generation_config.json`) give the tokens that
  end a sequence, and nothing else: transformers would fill with them whatever a task
  leaves open.
- Padding on the left changes the answers of some families, and those of penalties that
  read the prompt: then a batch holds prompts of one length.

Not covered: the rounding of a batch's shape, which may turn a tie between two tokens.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fcsd.base.errors import UserError
from fcsd.data.thoughts import Thoughts, answer_after
from fcsd.model.autocast import kept_casts
from fcsd.model.families import family_of
from fcsd.parallel.launch import input_device

HEAD = 24
"""Tokens at the beginning of an answer in which thoughts may open."""

_BLOCK = 512  # tokens whose weights are summed before one of them is drawn
_BELOW_1 = 1 - 2**-52

SAMPLING_SEED = 1234
# A config or generation_config.json may ask for MTP layers: they draft for one sequence
# alone, and are not loaded.
TOKEN_BY_TOKEN = {"use_mtp": False}
OVERFLOW = (
    "the model's logits are NaN or infinite: it overflows in its precision; evaluate it"
    " in bfloat16 or float32"
)
_KEPT = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
"""Settings of a model that an evaluation keeps: they name tokens."""
_NO_TOKEN = frozenset({"transformers_version", "use_cache", "use_mtp"})
"""Settings that change no token."""
_UNTOLD = {
    "num_beams": 1,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "max_length": 20,
}
"""Settings that do nothing at these values; at zero, false or none, hardly one does."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. top_k: 0 for no limit. vocab_size: rows of a padded head
    that are tokens; None: all.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    vocab_size: int | None = None


@dataclass(frozen=True)
class Decoding:
    """How the answers of a task are generated.

    sampling: None takes the likeliest token. settings: others of transformers that a
    task names (beams, a penalty).
    """

    sampling: Sampling | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def needs_one_length(self, config: Any) -> bool:
        """Return whether padding would change the answers of a model with this config:
        penalties and limits of transformers count it as a part of the prompt.
        """
        if self.settings:
            return True
        try:
            return family_of(config).padding == "counts"
        except UserError:  # a model that fcsd does not know
            return False


def first_stop(text: str, stop: Sequence[str]) -> int:
    """Find where the first of the stop strings begins in `text`; its length when there
    is none.
    """
    return min(
        (position for word in stop if word and (position := text.find(word)) >= 0),
        default=len(text),
    )


def _holds(text: str, stop: Sequence[str]) -> bool:
    return first_stop(text, stop) < len(text)


@dataclass(frozen=True)
class Ending:
    """Tells where the answer to one prompt ends.

    limit: tokens that are allowed. ends: tokens that end a sequence, equal for the
    prompts of a batch. stops: the tokens that end this answer. early_stop: strings that
    end it; special_stop: those of them that cannot occur in thoughts. opens_thoughts:
    tells whether an answer that begins with some tokens begins with thoughts.
    """

    tokenizer: PreTrainedTokenizerBase
    limit: int
    ends: Sequence[int]
    stops: Collection[int]
    early_stop: Sequence[str] = ()
    special_stop: Sequence[str] = ()
    opens_thoughts: Callable[[Sequence[int]], bool] = lambda tokens: False

    @functools.cached_property
    def look_back(self) -> int:
        """The number of tokens at the end that hold a stop string: each is a byte or
        more.
        """
        return max((len(word.encode()) for word in self.early_stop), default=0) + 1

    def ended(self, head: Sequence[int], tail: Sequence[int]) -> bool:
        """Return whether an answer is complete that begins with the tokens `head` and
        ends with `tail` (`HEAD` and `look_back` tokens, or all of a shorter answer).
        """
        if tail[-1] in self.stops:
            return True
        text = self.text(tail) if self.early_stop else ""
        if not _holds(text, self.early_stop):
            return False
        # Thoughts that the model begins unasked may hold stop strings, too.
        return not self.opens_thoughts(head) or _holds(text, self.special_stop)

    def ended_at(self, tokens: Sequence[int], length: int) -> bool:
        """Return whether an answer is complete with its first `length` tokens."""
        if not length:
            return False
        tail = tokens[max(0, length - self.look_back) : length]
        return self.ended(tokens[: min(length, HEAD)], tail)

    def length(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens up to the end of the answer."""
        # Most answers that run to the limit hold neither.
        if not set(self.stops).isdisjoint(tokens) or _holds(
            self.text(tokens), self.early_stop
        ):
            for length in range(1, len(tokens) + 1):
                if self.ended_at(tokens, length):
                    return length
        return len(tokens)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(
            self.tokenizer.decode(
                list(tokens),
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
        )


def end_tokens(generation: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a sequence, of the tokenizer and of the model's own
    generation settings.
    """
    model_ends = getattr(generation, "eos_token_id", None)
    if model_ends is None:
        ends = []
    else:
        ends = [model_ends] if isinstance(model_ends, int) else list(model_ends)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        ends.append(tokenizer.eos_token_id)
    return [int(end) for end in ends]


def set_aside(generation: Any) -> dict[str, Any]:
    """Return the generation settings of a model that its scores do not depend on, for
    the record of an evaluation.
    """
    return {
        name: value
        for name, value in json.loads(generation.to_json_string()).items()
        if value and value != _UNTOLD.get(name)
        if name not in _KEPT | _NO_TOKEN and not name.startswith("_")
    }


def up_to_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Return tokens up to the first one that ends a sequence, which is included; what
    follows it was generated for others of the batch.
    """
    for index, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: index + 1])
    return list(tokens)


def batches_of(
    order: Sequence[int], lengths: Sequence[int], size: int, one_length: bool
) -> Iterator[list[int]]:
    """Yield batches of up to `size` numbers in the given order; one_length: never with
    prompts of two lengths.
    """
    batch: list[int] = []
    for number in order:
        other = one_length and batch and lengths[number] != lengths[batch[-1]]
        if other or len(batch) == size:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    endings: Sequence[Ending],
    seeds: Sequence[int],
    decoding: Decoding,
    *,
    lockstep: bool = False,
) -> list[list[int]]:
    """Return the new tokens of each prompt, and what follows its end in the batch.

    seeds: of each prompt, for sampling. lockstep: other ranks make the same number of
    forward passes.
    """
    ends = endings[0].ends
    pad = endings[0].tokenizer.pad_token_id
    if pad is None:
        # The mask hides padding, so any token will do.
        pad = ends[0] if ends else 0
    rows = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    # Padding is on the left, so that all sequences are continued at the same position.
    ids = pad_sequence(rows, True, pad, "left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
    config = GenerationConfig(
        **{"num_beams": 1, **decoding.settings},
        do_sample=False,
        max_new_tokens=max(ending.limit for ending in endings),
        eos_token_id=list(ends) or None,
        pad_token_id=pad,
        bos_token_id=endings[0].tokenizer.bos_token_id,
        use_cache=True,
        **TOKEN_BY_TOKEN,
    )
    ended = _Ended(endings, ids.shape[1])
    processors: list[Any] = [_RefuseOverflow(ended)]
    if decoding.sampling is not None:
        processors.append(_Draw(decoding.sampling, seeds))
    device = input_device(model)
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        with kept_casts(device):
            generated = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([ended]),
                logits_processor=LogitsProcessorList(processors),
                # Ranks that share the weights make the same number of forward passes.
                synced_gpus=True if lockstep else None,
            )
    finally:
        model.generation_config = own
    return generated[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]


class _Ended:
    """Ends the sequences whose answers are complete."""

    def __init__(self, endings: Sequence[Ending], prompt_length: int):
        self.endings, self.prompt_length = endings, prompt_length
        self.look_back = max(ending.look_back for ending in endings)
        self.rows: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Tell which of the sequences have ended."""
        new = input_ids[:, self.prompt_length :]
        heads, tails = new[:, :HEAD].tolist(), new[:, -self.look_back :].tolist()
        beams = len(heads) // len(self.endings)
        rows = torch.tensor(
            [
                (ending := self.endings[number // beams]).ended(head, tail)
                or new.shape[1] >= ending.limit
                for number, (head, tail) in enumerate(zip(heads, tails, strict=True))
            ],
            device=input_ids.device,
        )
        # Beams change places, and some are only candidates.
        if beams == 1:
            self.rows = rows if self.rows is None else rows | self.rows
        return rows


class _RefuseOverflow:
    """Refuses logits that are NaN or infinite, of which the largest is no answer."""

    def __init__(self, ended: _Ended):
        self.ended = ended

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits of the B sequences, shape (B, V), as they are."""
        # Single tokens may be ruled out by -inf; the largest logit is finite. What
        # follows an answer's end does not count.
        finite = scores.amax(-1).isfinite()
        if self.ended.rows is not None:
            finite = finite | self.ended.rows
        if not bool(finite.all()):
            raise UserError(OVERFLOW)
        return scores


class _Draw:
    """Draws the tokens of each sequence with its own generator: transformers draws for
    a whole batch with one, so that a sample would depend on its neighbours.
    """

    def __init__(self, sampling: Sampling, seeds: Sequence[int]):
        self.vocab_size = sampling.vocab_size
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        warpers: list[Any] = []
        if sampling.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            warpers.append(MinPLogitsWarper(sampling.min_p))
        self.warpers = LogitsProcessorList(warpers)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Leave of the logits (B, V) that of the drawn token alone, which is then the
        likeliest; they are overwritten.
        """
        warped = self.warpers(input_ids, scores[:, : self.vocab_size].float())  # type: ignore[arg-type]
        weights = warped.sub_(warped.amax(-1, keepdim=True)).exp_()
        drawn = torch.tensor(
            [torch.rand((), generator=g, dtype=torch.double) for g in self.generators],
            dtype=torch.double,
            device=scores.device,
        )
        token = _token_at(weights, drawn[:, None])
        return scores.fill_(-torch.inf).scatter_(-1, token, 0.0)


def _token_at(weights: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Return the first token (B, 1) whose cumulative share of the weights (B, V)
    exceeds the number drawn (B, 1): its block of tokens first, by the blocks' sums, so
    that no more tensors of the vocabulary are written.
    """
    size = weights.shape[-1]
    whole = size - size % _BLOCK
    parts = []
    if whole:
        parts.append(weights[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1))
    if whole < size:
        parts.append(weights[:, whole:].sum(-1, keepdim=True))
    sums = torch.cat(parts, -1).double()
    steps = sums.cumsum(-1)
    # A product that was rounded up to the sum would be behind every token.
    number = drawn.clamp(max=_BELOW_1) * steps[:, -1:]
    # Weights of NaN, of a sequence that has ended, are behind all blocks.
    block = torch.searchsorted(steps, number, right=True).clamp_(max=sums.shape[-1] - 1)
    of_block = sums.gather(-1, block)
    share = (number - (steps.gather(-1, block) - of_block)) / of_block
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(-1, tokens.clamp(max=size - 1)).double()
    steps = inside.masked_fill_(tokens >= size, 0).cumsum(-1)
    share = share.clamp_(0, _BELOW_1)
    place = torch.searchsorted(steps, share * steps[:, -1:], right=True)
    return (block * _BLOCK + place).clamp_(max=size - 1)


class Answer(NamedTuple):
    """A text, whether the token limit ended it, and whether the model has written
    thoughts although none were asked for.
    """

    text: str
    at_limit: bool
    thoughts: bool = False


@dataclass(frozen=True)
class Reader:
    """Reads the answer to one prompt.

    prompt: its text, or the end of it. stop: strings before which the answer ends;
    special tokens may be among them, which do not show in the text. limit: tokens that
    are allowed. ends: tokens that end a sequence. chats, thinking: whether the prompt
    is a conversation, and asks for thoughts. clean_up: the tokenizer's own setting if
    None.
    """

    thoughts: Thoughts
    prompt: str
    stop: Sequence[str]
    limit: int
    ends: Sequence[int]
    chats: bool
    thinking: bool
    clean_up: bool | None = None

    @functools.cached_property
    def ending(self) -> Ending:
        """Where the answer ends."""
        return Ending(
            self.thoughts.tokenizer,
            self.limit,
            self.ends,
            self.ends,
            self.early_stop,
            self.special_stop,
            self._opens_thoughts,
        )

    @functools.cached_property
    def may_think(self) -> bool:
        """Whether the prompt asks for thoughts, or cannot ask for an answer without."""
        return self.chats and self.thoughts.are_in(self.prompt, self.thinking)

    @functools.cached_property
    def special_stop(self) -> list[str]:
        """The stop strings that cannot occur in thoughts."""
        return self.thoughts.ends_of_text(self.stop)

    @functools.cached_property
    def early_stop(self) -> list[str]:
        """The stop strings at which generation ends; thoughts may hold all others."""
        if self.may_think:
            return self.special_stop
        return [word for word in self.stop if word]

    def tokens(self, tokens: Sequence[int]) -> Answer:
        """Return the answer that new tokens hold."""
        ending = self.ending
        length = ending.length(tokens)
        new = tokens[:length]
        full = length >= self.limit and not ending.ended_at(tokens, length)
        # Where a stop string has characters beside a special token, these show.
        raw = ending.text(new)
        after = self.thoughts.without_special(raw[first_stop(raw, self.special_stop) :])
        options = {"clean_up_tokenization_spaces": self.clean_up}
        plain = self.thoughts.tokenizer.decode(new, skip_special_tokens=True, **options)
        marked = self.thoughts.decode(new, **options)
        return self._answer(
            marked.removesuffix(after), str(plain).removesuffix(after), full
        )

    @property
    def reads_special(self) -> bool:
        """Whether a text is needed with its special tokens: some mark thoughts or end
        the answer.
        """
        return bool(self.special_stop or (self.chats and self.thoughts.marks))

    def text(self, text: str, full: bool) -> Answer:
        """Return the answer in a text that was decoded as `reads_special` says.

        full: as many tokens were written as are allowed.
        """
        if not self.reads_special:
            return self._answer(text, text, full)
        return self._answer(
            self.thoughts.without_special(text),
            self.thoughts.without_special(text, marks=True),
            full,
        )

    def is_cut(self, answer: Any) -> bool:
        """Return whether a server has ended an answer (tokens, or a text) at a stop
        string in thoughts that the model began unasked.
        """
        if self.early_stop == self.special_stop:
            return False
        if isinstance(answer, list):
            length = len(answer)
            whole = length >= self.limit or self.ending.ended_at(answer, length)
            return self._opens_thoughts(answer[:HEAD]) and not whole
        opens = self.chats and self.thoughts.opens(answer["text"])
        return opens and not answer["at_limit"]

    def _answer(self, marked: str, plain: str, full: bool) -> Answer:
        """Return the answer in a text with the marks of thoughts, or, if it has no
        thoughts, in that without them.
        """
        thoughts, opened = self.thoughts, self.thoughts.opened_by(self.prompt)
        answer, unasked = plain, False
        if self.chats and (self.may_think or thoughts.marked(marked)):
            answer = answer_after(marked, thoughts.markers_for(marked), opened)
            unasked = not self.thinking and thoughts.written(marked, opened)
        end = first_stop(answer, self.stop)
        # At the limit a stop string may still have ended the answer.
        return Answer(answer[:end], full and end == len(answer), unasked)

    def _opens_thoughts(self, tokens: Sequence[int]) -> bool:
        return self.chats and self.thoughts.opens(self.thoughts.decode(tokens))


class Question(NamedTuple):
    """A prompt, what reads the answer to it, and how the answer is generated.

    seed: for sampling. decoding: the same for all questions of a batch.
    """

    prompt: Sequence[int]
    reader: Reader
    seed: int
    decoding: Decoding
