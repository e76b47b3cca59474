"""An exponential moving average of the trained weights, which is scored and saved in
their place. Each rank averages its shard of each parameter, under every engine
(`fcsd.parallel.parts`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState

from fcsd.model.connectivity.marks import changed_by
from fcsd.parallel.parts import Part, compute_with, parts_of
from fcsd.parallel.state import read_average


class WeightAverage(TrainerCallback):
    """After step t (1, 2, …): average = d·average + (1 - d)·weights, with d =
    min(decay, (1 + t) / (10 + t)).

    The average starts from the weights before the first step and is kept in float32;
    the smaller d of the first steps makes it forget them. Calibrated or trained weights
    are a good start, which is worth keeping: their d is `decay` from the first step.
    Frozen parameters have no average. A step after which `skipped()` is true changes
    nothing.

    average: name -> this rank's shard of a parameter, flat, on the shard's device.
    """

    def __init__(self, trainer: Any, decay: float, skipped: Callable[[], bool]):
        self.trainer, self.decay, self.skipped = trainer, decay, skipped
        # calibrated or trained already
        self.keeps_start = changed_by(trainer.plain_model.config) is not None
        self.average: dict[str, Tensor] = {}

    def _parts(self) -> list[Part]:
        trainer = self.trainer
        return parts_of(trainer.plain_model, trainer.optimizer, trainer.launch.ranks)

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start from the present weights, unless an average has been loaded."""
        # A run that continues has loaded the average of its checkpoint.
        if not self.average:
            self.average = {
                part.name: part.of(part.slot).float().clone() for part in self._parts()
            }

    @torch.no_grad()
    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.skipped():
            return
        if self.keeps_start:
            warmup_decay = 1.0
        else:
            warmup_decay = (1 + state.global_step) / (10 + state.global_step)
        # lerp_(weights, 1 - d) is d·average + (1 - d)·weights without a temporary.
        for part in self._parts():
            self.average[part.name].lerp_(
                part.of(part.slot).float(), 1 - min(self.decay, warmup_decay)
            )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights within the block, and its own afterwards.
        All ranks enter it.
        """
        trained_weights = {
            part.name: part.of(part.slot).clone() for part in self._parts()
        }
        self.apply()
        try:
            yield
        finally:
            self._give(trained_weights)

    def apply(self) -> None:
        """Give the model the averaged weights for good."""
        self._give(self.average)

    @torch.no_grad()
    def _give(self, weights: dict[str, Tensor]) -> None:
        parts = self._parts()
        for part in parts:
            part.of(part.slot).copy_(weights[part.name])
        # ZeRO-3 computes with copies of the written values.
        compute_with(parts, self.trainer.optimizer)

    def load(self, folder: Path) -> None:
        trainer = self.trainer
        self.average = read_average(
            folder, trainer.plain_model, trainer.optimizer, trainer.launch.ranks
        )
