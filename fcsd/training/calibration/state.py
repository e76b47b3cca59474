"""What a calibration works on: two models, of which a layer is in memory, and their streams of the same rows."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fcsd.data.batches import Batch
from fcsd.parallel.ranks import Ranks
from fcsd.training.calibration.roles import Place
from fcsd.training.calibration.solve import LeastSquares, Solution
from fcsd.training.calibration.steps import Steps, Stream

_HELD_OUT = 4  # every so many-th row says whether an expert's map fits the others only


class Models(Protocol):
    """Teacher and student, of which a layer is in memory while it is worked on."""

    student: Steps
    device: torch.device

    def teacher_step(self, index: int, batch: Batch, stream: Stream) -> Stream:
        """Return the teacher's stream behind a layer."""

    def teacher_layer(self, index: int) -> nn.Module:
        """Return the module that `teacher_step` runs."""

    def layer(self, index: int) -> contextlib.AbstractContextManager[Any]:
        """Have the weights of a layer in memory."""

    def fold(
        self, index: int, places: Sequence[Place], found: Tensor, side: Any, expert: int | None = None
    ) -> None:
        """Fold a map into weights of the student's layer, or into those of one expert."""


@dataclass
class State:
    """How far a walk is. student: None while it is the teacher's stream. results: one of each layer that was solved."""

    next_layer: int
    teacher: list[Stream]
    student: list[Stream] | None = None
    results: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """One rewired layer and the rows that it is calibrated on, a rank's share of them.

    teacher, student: the streams before it. masks: which tokens (B * T,) of each batch are text.
    """

    models: Models
    index: int
    batches: Sequence[Batch]
    masks: Sequence[Tensor]
    teacher: list[Stream]
    student: list[Stream]
    ranks: Ranks

    @property
    def layer(self) -> Any:
        """The student's."""
        return self.models.student.layers[self.index]

    @property
    def device(self) -> torch.device:
        """Where the layer is."""
        return self.models.device

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.student[0]["o"].shape[-1]

    def step(self, place: int) -> Stream:
        """Return the student's stream of a batch behind the layer."""
        batch, stream = (to(values, self.device) for values in (self.batches[place], self.student[place]))
        return self.models.student.step(self.index, batch, stream)

    def rows(self, values: Tensor, place: int) -> Tensor:
        """Return what belongs to the tokens of text of a batch, (N, ...)."""
        flat, mask = values.reshape(-1, values.shape[-1]), self.masks[place]
        return flat if bool(mask.all()) else flat[mask.to(flat.device)]

    def held_out(self, place: int) -> Tensor:
        """Tell which tokens of a batch (B * T,) an expert's map is tested on."""
        num_rows, length = self.batches[place]["input_ids"].shape
        before = sum(len(batch["input_ids"]) for batch in self.batches[:place])
        held = torch.arange(before, before + num_rows) % _HELD_OUT == _HELD_OUT - 1
        return held.repeat_interleave(length)

    def solve(self, problem: LeastSquares, ridge: float, what: str) -> Solution:
        """Solve over all ranks."""
        problem.sum_over(self.ranks)
        return problem.solve(ridge, f"layer {self.index}, {what}", self.ranks)


def to(values: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    """Return the tensors on a device."""
    return {name: value.to(device) for name, value in values.items()}
