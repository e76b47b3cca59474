"""An exponential moving average of the trained weights, which is what is scored and left.

Not covered: weights that are sharded over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from fcsd.model.connectivity.spec import changed_by

FILE = "average.safetensors"


class WeightAverage(TrainerCallback):
    """After step t (1, 2, …): average = d·average + (1 - d)·weights, with d = min(decay, (1 + t) / (10 + t)).

    The average begins as the weights before the first step and is kept in float32; the smaller d of the first steps
    lets it leave them. Weights that are calibrated or trained already are a good start, which it does not leave so
    fast: their d is `decay` from the first step. Frozen parameters have none. A step after which `skipped()` is true
    changes nothing.
    """

    def __init__(self, model: nn.Module, decay: float, skipped: Callable[[], bool]):
        self.decay, self.skipped = decay, skipped
        self.keeps_start = changed_by(getattr(model, "config", {})) is not None
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average: dict[str, Tensor] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Start from the weights as they are now, where they belong, unless an average has been loaded."""
        if not self.average:
            self.average = {name: p.detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        """Add one step to the average."""
        if self.skipped():
            return
        leave = 1.0 if self.keeps_start else (1 + state.global_step) / (10 + state.global_step)
        decay = min(self.decay, leave)
        for name, average in self.average.items():
            average.lerp_(self.parameters[name].detach().float(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and its own again behind it."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(own[name])

    @torch.no_grad()
    def apply(self) -> None:
        """Give the model the averaged weights for good."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.average[name])

    def save(self, folder: Path) -> None:
        """Write the average beside the weights of a checkpoint."""
        save_file(self.average, str(folder / FILE))

    def load(self, folder: Path) -> None:
        """Go on from `save`."""
        found = load_file(str(folder / FILE))
        self.average = {name: found[name].to(p.device) for name, p in self.parameters.items()}
