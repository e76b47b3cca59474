"""What a calibration works on: two models, of which a layer is in memory, and their
streams of the same rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fcsd.data.batches import Batch, in_batches, real_tokens
from fcsd.parallel.ranks import Ranks
from fcsd.training.calibration.roles import Place, fold_map
from fcsd.training.calibration.solve import LeastSquares, Solution
from fcsd.training.calibration.steps import Steps, Stream

BATCH_TOKENS = 4096
_HELD_OUT = 4  # every so many-th row says whether a map fits the others only
_SEEN = 4  # as many tokens that come again tell nothing new


class Models:
    """Teacher and student, both loaded; `Layerwise` has a layer of them in memory while
    it is worked on.
    """

    def __init__(self, student: Steps, teacher: Steps, device: torch.device):
        self.student, self.teacher, self.device = student, teacher, device

    def teacher_step(self, index: int, batch: Batch, stream: Stream) -> Stream:
        """Return the teacher's stream behind a layer."""
        return self.teacher.step(index, batch, stream)

    def layer(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Have the weights of a layer in memory."""
        return contextlib.nullcontext()

    def fold(
        self,
        index: int,
        places: Sequence[Place],
        matrix: Tensor,
        use: Any,
        expert: int | None = None,
    ) -> None:
        """Fold a map into weights of the student's layer, or into those of one expert."""
        fold_map(self.student.layers[index], places, matrix, use, expert)


@dataclass
class State:
    """How far a walk is. student: None while it is the teacher's stream. results: one
    of each layer that was solved. written: tensors that were written, with the SHA-256
    of their bytes."""

    next_layer: int
    teacher: list[Stream]
    student: list[Stream] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """What a calibration is solved on, a rank's share of it.

    held_out: which tokens (B * T,) of each batch a map is tested on: every fourth row
    of those that differ, whichever rank has them; of fewer rows the last quarter of
    each. num_tokens, num_distinct: of text of all ranks, and how many of them differ,
    they and the three before them in their example.
    """

    batches: Sequence[Batch]
    held_out: Sequence[Tensor]
    num_tokens: int
    num_distinct: int

    @classmethod
    def of(cls, batches: Sequence[Batch], ranks: Ranks) -> Text:
        """Deal out the batches, of which all ranks have all."""
        known: dict[tuple[int, ...], int] = {}
        different: set[tuple[int, ...]] = set()
        numbers: list[Tensor] = []  # (B,) of each batch: equal rows have the same one
        num_tokens = 0
        for batch in batches:
            columns = [batch["input_ids"], batch["position_ids"], real_tokens(batch)]
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
            numbers.append(
                torch.tensor(
                    [known.setdefault(tuple(ids), len(known)) for ids, _, _ in rows]
                )
            )
            for ids, positions, is_text in rows:
                for place, (position, counts) in enumerate(
                    zip(positions, is_text, strict=True), 1
                ):
                    if counts and position + 1 >= _SEEN:
                        different.add(tuple(ids[place - _SEEN : place]))
                num_tokens += sum(is_text)
        held_out = []
        for batch, number in zip(batches, numbers, strict=True):
            length = batch["input_ids"].shape[1]
            if len(known) < _HELD_OUT:
                held_out.append(
                    (torch.arange(length) >= length - length // _HELD_OUT).repeat(
                        len(number)
                    )
                )
            else:
                held_out.append(
                    (number % _HELD_OUT == _HELD_OUT - 1).repeat_interleave(length)
                )
        return cls(
            ranks.deal(batches), ranks.deal(held_out), num_tokens, len(different)
        )


@dataclass(frozen=True)
class Work:
    """One rewired layer and the rows that it is calibrated on, a rank's share of them.

    teacher, student: the streams before it. masks: which tokens (B * T,) of each batch
    are text.
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

    def step(self, place: int) -> Stream:
        """Return the student's stream of a batch behind the layer."""
        batch, stream = (
            to(values, self.device)
            for values in (self.batches[place], self.student[place])
        )
        return self.models.student.step(self.index, batch, stream)

    def rows(self, values: Tensor, place: int) -> Tensor:
        """Return what belongs to the tokens of text of a batch, (N, ...)."""
        flat, mask = values.reshape(-1, values.shape[-1]), self.masks[place]
        return flat if bool(mask.all()) else flat[mask.to(flat.device)]

    def problems(self, num_inputs: int = 1) -> tuple[LeastSquares, LeastSquares]:
        """Return the sums of a problem, and of the rows that its map is tested on."""
        one, other = (
            LeastSquares(self.width, num_inputs, self.device) for _ in range(2)
        )
        return one, other

    def add(
        self,
        problems: tuple[LeastSquares, LeastSquares],
        place: int,
        x: Tensor,
        y: Tensor,
    ) -> None:
        """Add what belongs to the tokens of text of a batch, x (N, K·D), y (N, D)."""
        tested = self.rows(self.text.held_out[place][:, None], place)[:, 0]
        for rows, sums in zip((~tested, tested), problems, strict=True):
            sums.add(x[rows.to(x.device)], y[rows.to(y.device)])

    def solve(
        self, problems: tuple[LeastSquares, LeastSquares], ridge: float, what: str
    ) -> Solution:
        """Solve over all ranks; the rows that it is tested on decide nothing."""
        problem, held_out = problems
        problem.sum_over(self.ranks)
        held_out.sum_over(self.ranks)
        what = f"layer {self.index}, {what}"
        return problem.solve_checked(held_out, ridge, what, self.ranks, limit=math.inf)


def to(values: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in values.items()}


def first_stream(steps: Steps, batch: Batch, device: torch.device) -> Stream:
    """Return the stream of a batch before the first layer."""
    return to(steps.step(0, to(batch, device), None), "cpu")


def batches_of(rows: Sequence[Any]) -> list[Batch]:
    """Collate rows into batches of about `BATCH_TOKENS` tokens, in order."""
    return in_batches(rows, max(1, BATCH_TOKENS // len(rows[0]["input_ids"])))
