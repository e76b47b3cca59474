"""An exponential moving average of the trained weights, which is scored and saved in
their place. Each rank averages its shard of each parameter, under every engine
(`fcsd.parallel.parts`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.parallel.launch import Ranks
from fcsd.parallel.parts import compute_with, parts_of
from fcsd.parallel.state import read_average


class WeightAverage:
    """After step t (1, 2, …): average = d·average + (1 - d)·weights, with d =
    min(decay, (1 + t) / (10 + t)).

    The average starts from the weights before the first step and is kept in float32;
    the smaller d of the first steps makes it forget them. Calibrated or trained weights
    are a good start, which is worth keeping (`keeps_start`): their d is `decay` from
    the first step. Frozen parameters have no average.

    average: name -> this rank's shard of a parameter, flat, on the shard's device.
    """

    def __init__(self, decay: float, ranks: Ranks, *, keeps_start: bool):
        self.decay, self.ranks, self.keeps_start = decay, ranks, keeps_start
        self.average: dict[str, Tensor] = {}

    def start(self, model: nn.Module, optimizer: Any) -> None:
        """Start from the present weights, unless an average has been loaded."""
        # A run that continues has loaded the average of its checkpoint.
        if not self.average:
            self.average = {
                part.name: part.of(part.slot).float().clone()
                for part in parts_of(model, optimizer, self.ranks)
            }

    @torch.no_grad()
    def update(self, step: int, model: nn.Module, optimizer: Any) -> None:
        """Add the weights after a step, which was not skipped."""
        warmup_decay = 1.0 if self.keeps_start else (1 + step) / (10 + step)
        # lerp_(weights, 1 - d) is d·average + (1 - d)·weights without a temporary.
        for part in parts_of(model, optimizer, self.ranks):
            self.average[part.name].lerp_(
                part.of(part.slot).float(), 1 - min(self.decay, warmup_decay)
            )

    @contextmanager
    def applied(self, model: nn.Module, optimizer: Any) -> Iterator[None]:
        """Give the model the averaged weights within the block, and its own afterwards.
        All ranks enter it.
        """
        trained_weights = {
            part.name: part.of(part.slot).clone()
            for part in parts_of(model, optimizer, self.ranks)
        }
        self.apply(model, optimizer)
        try:
            yield
        finally:
            self._give(trained_weights, model, optimizer)

    def apply(self, model: nn.Module, optimizer: Any) -> None:
        """Give the model the averaged weights for good."""
        self._give(self.average, model, optimizer)

    @torch.no_grad()
    def _give(
        self, weights: dict[str, Tensor], model: nn.Module, optimizer: Any
    ) -> None:
        parts = parts_of(model, optimizer, self.ranks)
        for part in parts:
            part.of(part.slot).copy_(weights[part.name])
        # ZeRO-3 computes with copies of the written values.
        compute_with(parts, optimizer)

    def load(self, folder: Path, model: nn.Module, optimizer: Any) -> None:
        self.average = read_average(folder, model, optimizer, self.ranks)


def scored(
    average: WeightAverage | None, model: nn.Module, optimizer: Any
) -> AbstractContextManager[None]:
    """Give the model, within the block, the weights that are scored and saved: with
    ema_decay their average.
    """
    if average is None or not average.average:
        return nullcontext()
    return average.applied(model, optimizer)
