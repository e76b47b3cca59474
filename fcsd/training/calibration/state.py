"""The state of a calibration: two models, one layer of which is in memory, and their
streams on the same rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fcsd.data.batches import Batch, in_batches, real_tokens
from fcsd.parallel.launch import Ranks
from fcsd.training.calibration.roles import Place, fold_map
from fcsd.training.calibration.solve import LeastSquares, Solution
from fcsd.training.calibration.steps import Steps, Stream

BATCH_TOKENS = 4096
_HELD_OUT = 4  # one row in four tests whether a map fits its own sample only
_SEEN = 4  # length of the n-grams by which distinct tokens are counted


class Models:
    """Teacher and student, both loaded. `Layerwise` holds one layer at a time instead."""

    def __init__(self, student: Steps, teacher: Steps, device: torch.device):
        self.student, self.teacher, self.device = student, teacher, device

    def student_step(self, index: int, batch: Batch, stream: Stream) -> Stream:
        """Return the student's stream after layer `index`, on the device."""
        return self.student.step(index, to(batch, self.device), to(stream, self.device))

    def teacher_step(self, index: int, batch: Batch, stream: Stream) -> Stream:
        """Return the teacher's stream after layer `index`, on the device."""
        return self.teacher.step(index, to(batch, self.device), to(stream, self.device))

    def layer(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Keep the weights of a layer in memory within the block."""
        return contextlib.nullcontext()

    def fold(
        self,
        index: int,
        weights: Sequence[Place],
        matrix: Tensor,
        use: Any,
        expert: int | None = None,
    ) -> None:
        """Fold a map into weights of the student's layer, or into one expert's."""
        fold_map(self.student.layers[index], weights, matrix, use, expert)


@dataclass
class State:
    """The progress of a walk through the layers.

    student: None as long as it equals the teacher's stream. results: one for each layer
    that is solved. written: names of the tensors that are written, with the SHA-256 of
    their bytes.
    """

    next_layer: int
    teacher: list[Stream]
    student: list[Stream] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A rank's share of the text that the maps are solved on.

    held_out: masks (B * T,), one per batch, of the tokens that a map is tested on: those
    of every fourth distinct row, whichever rank has it; with fewer than four distinct
    rows, the last quarter of each. num_tokens: tokens of text on all ranks.
    num_distinct: how many different 4-grams, a token and the three before it in its
    example, there are among them.
    """

    batches: Sequence[Batch]
    held_out: Sequence[Tensor]
    num_tokens: int
    num_distinct: int

    @classmethod
    def of(cls, batches: Sequence[Batch], ranks: Ranks) -> Text:
        """Distribute the batches over the ranks; each rank passes all batches."""
        # Equal rows have the same number, so that no row is held out whose copy the map
        # is solved on.
        row_numbers: dict[tuple[int, ...], int] = {}
        ngrams: set[tuple[int, ...]] = set()
        numbers: list[Tensor] = []  # (B,) for each batch
        num_tokens = 0
        for batch in batches:
            columns = [batch["input_ids"], batch["position_ids"], real_tokens(batch)]
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
            numbers.append(
                torch.tensor(
                    [
                        row_numbers.setdefault(tuple(ids), len(row_numbers))
                        for ids, _, _ in rows
                    ]
                )
            )
            for ids, positions, is_text in rows:
                tokens = zip(positions, is_text, strict=True)
                for end, (position, counts) in enumerate(tokens, 1):
                    # Positions restart with each example: no n-gram spans two of them.
                    if counts and position + 1 >= _SEEN:
                        ngrams.add(tuple(ids[end - _SEEN : end]))
                num_tokens += sum(is_text)
        held_out = []
        for batch, number in zip(batches, numbers, strict=True):
            length = batch["input_ids"].shape[1]
            if len(row_numbers) < _HELD_OUT:
                last_quarter = torch.arange(length) >= length - length // _HELD_OUT
                held_out.append(last_quarter.repeat(len(number)))
            else:
                held_out.append(
                    (number % _HELD_OUT == _HELD_OUT - 1).repeat_interleave(length)
                )
        return cls(ranks.deal(batches), ranks.deal(held_out), num_tokens, len(ngrams))


@dataclass(frozen=True)
class Work:
    """One rewired layer, and a rank's share of the rows that it is calibrated on.

    teacher, student: the streams before the layer. masks: which tokens (B * T,) of each
    batch are text.
    """

    models: Models
    index: int
    text: Text
    masks: Sequence[Tensor]
    teacher: list[Stream]
    student: list[Stream]
    ranks: Ranks

    @property
    def batches(self) -> Sequence[Batch]:
        return self.text.batches

    @property
    def layer(self) -> Any:
        return self.models.student.layers[self.index]

    @property
    def device(self) -> torch.device:
        return self.models.device

    @property
    def width(self) -> int:
        return int(self.models.student.model.config.get_text_config().hidden_size)

    def step(self, batch_index: int) -> Stream:
        """Return the student's stream of a batch after the layer."""
        return self.models.student_step(
            self.index, self.batches[batch_index], self.student[batch_index]
        )

    def rows(self, values: Tensor, batch_index: int) -> Tensor:
        """Select the values (N, ...) at the tokens of text of a batch."""
        flat, mask = values.reshape(-1, values.shape[-1]), self.masks[batch_index]
        # Without padding no copy is needed.
        return flat if bool(mask.all()) else flat[mask.to(flat.device)]

    def problems(self, num_inputs: int = 1) -> tuple[LeastSquares, LeastSquares]:
        """Return two empty problems: the sums to solve, and those of the held-out rows."""
        problem, held_out = (
            LeastSquares(self.width, num_inputs, self.device) for _ in range(2)
        )
        return problem, held_out

    def tested(self, batch_index: int) -> Tensor:
        """Return which tokens of text of a batch, (N,), a map is tested on."""
        return self.rows(self.text.held_out[batch_index][:, None], batch_index)[:, 0]

    def add(
        self,
        problems: tuple[LeastSquares, LeastSquares],
        is_tested: Tensor,
        x: Tensor,
        y: Tensor,
    ) -> None:
        """Add x (N, K·D) and y (N, D), the values at tokens of which some (N,) are
        held out.
        """
        for rows, sums in zip((~is_tested, is_tested), problems, strict=True):
            sums.add(
                x[rows.to(x.device)].to(self.device),
                y[rows.to(y.device)].to(self.device),
            )

    def solve(
        self, problems: tuple[LeastSquares, LeastSquares], ridge: float, name: str
    ) -> Solution:
        """Solve over all ranks. The residual on held-out rows is only reported: it does
        not decide whether the map is taken.
        """
        problem, held_out = problems
        problem.sum_over(self.ranks)
        held_out.sum_over(self.ranks)
        name = f"layer {self.index}, {name}"
        return problem.solve_checked(held_out, ridge, name, self.ranks, limit=math.inf)


def to(values: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Move the tensors of a batch or stream to a device."""
    return {name: value.to(device) for name, value in values.items()}


def move_past(
    step: Callable[[int, Batch, Stream], Stream],
    index: int,
    batches: Sequence[Batch],
    streams: list[Stream],
) -> None:
    """Move the streams of a rank's batches past a layer, in place."""
    # Between layers, streams stay in main memory, so that the device's memory does not
    # grow with the text.
    for number, batch in enumerate(batches):
        streams[number] = to(step(index, batch, streams[number]), "cpu")


def first_stream(steps: Steps, batch: Batch, device: torch.device) -> Stream:
    """Return the stream of a batch before the first layer."""
    return to(steps.step(0, to(batch, device), None), "cpu")


def batches_of(rows: Sequence[Any]) -> list[Batch]:
    """Collate rows into batches of about `BATCH_TOKENS` tokens, in order."""
    return in_batches(rows, max(1, BATCH_TOKENS // len(rows[0]["input_ids"])))
