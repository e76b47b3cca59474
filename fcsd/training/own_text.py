"""Let the student continue the prompts of some rows by its own samples, at its present
weights: on-policy distillation, of which TRL's GKD is the model
(https://huggingface.co/papers/2306.13649).

    row of the data    prompt, given answer   prompt, given answer   padding
    written row        prompt, own text       prompt, own text       padding

- A row is chosen, and its text drawn, by a hash of the seed, the step and the row: what
  is written depends neither on the number of ranks nor on micro-batches, and a run that
  continues writes the same.
- Own text alone has loss. Its tokens are constants: no gradient goes through the draw.
- Of several turns with loss one is drawn, and what is before it is the prompt. Where
  all of an example has loss, as in a document, its first half is the prompt.
- The examples of a row share the room beside their prompts equally.

Not covered: weights that ZeRO-3 or expert parallelism spread, and a teacher that cannot
score new text (a cache); both are refused.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fcsd.data.batches import NO_LOSS, ROW_FEATURES, Batch, row_of
from fcsd.model.families.structure import output_head
from fcsd.model.preserve import preserved
from fcsd.parallel.failure import further_in_step
from fcsd.parallel.launch import Ranks, gathered_once
from fcsd.training.generation import (
    Decoding,
    Ending,
    Sampling,
    batches_of,
    end_tokens,
    generate,
    up_to_end,
)
from fcsd.training.losses.objectives import ObjectiveConfig
from fcsd.training.meters import Meters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_OF_TURN = 2  # last tokens of a turn among which its end is looked for
_SHOWN_PROMPT = 16  # last tokens of a prompt that a sample shows


@dataclass(frozen=True)
class StudentPrompt:
    """The beginning of an example that the student continues, by at most `limit`
    tokens; its text also ends with one of `stops`.
    """

    tokens: list[int]
    stops: frozenset[int]
    limit: int
    seed: int


def is_chosen(digest: bytes, share: float) -> bool:
    """Return whether a row is among those that the student writes."""
    return int.from_bytes(digest[:8]) < share * 2**64


def row_digest(seed: int, step: int, row: dict[str, np.ndarray]) -> bytes:
    """Hash a row at a step: its draws follow from this."""
    digest = hashlib.sha256(f"{seed} {step} ".encode())
    for name in ROW_FEATURES:
        digest.update(np.ascontiguousarray(row[name], np.int32).tobytes())
    return digest.digest()


def prompts_of(
    row: dict[str, np.ndarray],
    digest: bytes,
    ends: frozenset[int],
    special: frozenset[int],
    max_tokens: int | None,
) -> list[StudentPrompt]:
    """Return the prompts of a row (`fcsd.data.batches.row_of`), in order.

    ends: tokens that end every text. special: those of which one may be the end of a
    turn. max_tokens: of a continuation.
    """
    ids, has_loss = row["input_ids"], row["labels"] != NO_LOSS
    begins = [*np.flatnonzero(row["position_ids"] == 0), len(ids)]
    found = []
    for number, (begin, end) in enumerate(pairwise(begins)):
        edges = np.diff(has_loss[begin:end].astype(np.int8), prepend=0, append=0)
        turns = list(
            zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
        )
        if not turns:  # padding
            continue
        draw = hashlib.sha256(digest + number.to_bytes(8)).digest()
        first, behind = map(int, turns[int.from_bytes(draw[:8]) % len(turns)])
        # Nothing stands before the text of a document.
        if first <= 1:
            first = max(1, behind // 2)
        last = ids[begin + max(first, behind - _END_OF_TURN) : begin + behind].tolist()
        stops = ends | {token for token in last if token in special}
        found.append(
            (ids[begin : begin + first].tolist(), stops, int.from_bytes(draw[8:15]))
        )
    # Each example has had a token with loss, so there is room for one.
    room = len(ids) - sum(len(tokens) for tokens, _, _ in found)
    limit = min(room // max(len(found), 1), max_tokens or room)
    return [StudentPrompt(tokens, stops, limit, seed) for tokens, stops, seed in found]


def cut(tokens: Sequence[int], prompt: StudentPrompt) -> list[int]:
    """Return the new tokens of a prompt up to the end of its text, which is included."""
    return up_to_end(tokens[: prompt.limit], prompt.stops)


class OwnText:
    """Writes the student's own text into the micro-batches of a step; `meters` count
    it.

    sample: a text of this rank's last step that had one, as the log shows it.
    """

    def __init__(
        self,
        objective: ObjectiveConfig,
        tokenizer: "PreTrainedTokenizerBase",
        ranks: Ranks,
        seed: int,
        meters: Meters,
    ):
        self.objective: Any = objective
        self.tokenizer, self.ranks, self.seed = tokenizer, ranks, seed
        self.meters = meters
        self.special = frozenset(
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special
        )
        self.sample: str | None = None
        self._shown_in: int | None = None

    def write(self, model: Any, batches: list[Batch], step: int) -> None:
        """Replace the chosen rows in the micro-batches of a step; all ranks call this.

        model: the student with its loss head, without a wrapper.
        """
        start, objective = time.perf_counter(), self.objective
        ends = end_tokens(model.generation_config, self.tokenizer)
        chosen: list[tuple[Batch, int, list[StudentPrompt]]] = []
        for batch in batches:
            columns = {name: batch[name].cpu().numpy() for name in ROW_FEATURES}
            for index in range(len(batch["input_ids"])):
                row = {name: column[index] for name, column in columns.items()}
                digest = row_digest(self.seed, step, row)
                if is_chosen(digest, objective.own_text):
                    prompts = prompts_of(
                        row,
                        digest,
                        frozenset(ends),
                        self.special,
                        objective.own_text_tokens,
                    )
                    chosen.append((batch, index, prompts))
        prompts = [prompt for _, _, of_row in chosen for prompt in of_row]
        texts = self._continued(model, prompts, ends)
        of_rows = iter(texts)
        for batch, index, of_row in chosen:
            self._put(batch, index, [(prompt, next(of_rows)) for prompt in of_row])
        num_ended = sum(
            text[-1] in prompt.stops
            for prompt, text in zip(prompts, texts, strict=True)
        )
        self.meters.add_written(
            rows=len(chosen),
            texts=len(texts),
            ended=num_ended,
            tokens=sum(map(len, texts)),
            seconds=time.perf_counter() - start,
        )
        if texts:
            self.sample = self._shown(prompts[0], texts[0])

    def due_sample(self, step: int) -> str | None:
        """Return the sample for a line of the log, or None where it is not due yet."""
        period = step // self.objective.own_text_sample_steps
        if period == self._shown_in or self.sample is None:
            return None
        self._shown_in = period
        return self.sample

    def _continued(
        self, model: Any, prompts: Sequence[StudentPrompt], ends: Sequence[int]
    ) -> list[list[int]]:
        """Return the student's text for each prompt."""
        head: Any = output_head(model)
        decoding = Decoding(Sampling(1.0, vocab_size=head.vocab_size))
        # Texts that may become long go together.
        order = sorted(
            range(len(prompts)),
            key=lambda number: (-prompts[number].limit, -len(prompts[number].tokens)),
        )
        groups = list(
            batches_of(
                order,
                [len(prompt.tokens) for prompt in prompts],
                self.objective.own_text_batch_size,
                decoding.needs_one_length(model.config),
            )
        )
        idle = StudentPrompt([self.tokenizer.bos_token_id or 0], frozenset(ends), 1, 0)
        texts: dict[int, list[int]] = {}
        with preserved(model), torch.no_grad(), gathered_once(model, self.ranks):
            model.eval()
            # Ranks that share the weights make the same number of forward passes.
            if self.ranks.lockstep:
                number = max(self.ranks.share(lambda: len(groups)))
                groups += [[] for _ in range(number - len(groups))]
            for group in groups:
                further_in_step()
                batch = [prompts[number] for number in group] or [idle]
                new = generate(
                    model,
                    [prompt.tokens for prompt in batch],
                    [
                        Ending(self.tokenizer, prompt.limit, ends, prompt.stops)
                        for prompt in batch
                    ],
                    [prompt.seed for prompt in batch],
                    decoding,
                    lockstep=self.ranks.lockstep,
                )
                texts |= {
                    number: cut(tokens, prompts[number])
                    for number, tokens in zip(group, new, strict=False)
                }
        return [texts[number] for number in range(len(prompts))]

    def _put(
        self,
        batch: Batch,
        index: int,
        written: Sequence[tuple[StudentPrompt, list[int]]],
    ) -> None:
        """Put prompts and own text in the place of a row."""
        examples = []
        for prompt, text in written:
            ids = np.array(prompt.tokens + text, np.int32)
            examples.append((ids, np.arange(len(ids)) >= len(prompt.tokens)))
        pad = self.tokenizer.pad_token_id or 0
        row = row_of(examples, batch["input_ids"].shape[1], pad)
        for name in ROW_FEATURES:
            batch[name][index] = torch.as_tensor(row[name]).to(batch[name])

    def _shown(self, prompt: StudentPrompt, text: list[int]) -> str:
        """Show a text, and the end of its prompt."""
        before = self.tokenizer.decode(prompt.tokens[-_SHOWN_PROMPT:])
        return f"…{before} ▸ {self.tokenizer.decode(text)}"
