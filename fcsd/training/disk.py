"""Compute the disk space that a training needs, and compare it with the free space
before the first step.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fcsd.base.errors import UserError
from fcsd.base.text import size
from fcsd.model.dtypes import dtype_of
from fcsd.training.config import TrainConfig


@dataclass(frozen=True)
class DiskNeed:
    """The most bytes that a training keeps at the same time.

    checkpoint: a single one. num_checkpoints: `save_total_limit`, and the one that is
    being written. best: for early stopping, the best weights, those that are being
    written, and those named by the checkpoint that goes when the next one is complete.
    model: the model that is saved at the end.
    """

    checkpoint: int
    num_checkpoints: int
    best: int
    model: int

    @property
    def total(self) -> int:
        return self.num_checkpoints * self.checkpoint + self.best + self.model


def disk_need(
    train: TrainConfig,
    *,
    num_trained: int,
    num_parameters: int,
    model_itemsize: int,
    keeps_best: bool,
) -> DiskNeed:
    """Compute the space that a training needs: a checkpoint has the trained weights and
    the two moments of AdamW in the training dtype, and with ema_decay the averaged
    weights.

    num_trained, num_parameters: of the student, over all ranks. model_itemsize: bytes
    of a saved weight; 0 where no model is saved. keeps_best: whether early stopping
    keeps weights.
    """
    weights = num_trained * dtype_of(train.dtype).itemsize
    # One every `save_steps`; the last step has one where a model is saved. No steps,
    # none.
    num_saved = max(0, (train.max_steps - 1) // train.save_steps + bool(model_itemsize))
    return DiskNeed(
        checkpoint=weights * (4 if train.ema_decay is not None else 3),
        num_checkpoints=min(train.save_total_limit + 1, num_saved),
        best=3 * weights if keeps_best else 0,
        model=num_parameters * model_itemsize,
    )


def check_disk(folder: Path, need: DiskNeed, train: TrainConfig) -> None:
    """Raise UserError where the disk of a folder has less space than a training needs;
    files that it wrote before a restart count as free.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # A continued run replaces its own files.
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    room = shutil.disk_usage(folder).free + written
    if need.total <= room:
        return
    parts = [f"{need.num_checkpoints} checkpoints of {size(need.checkpoint)}"]
    if need.best:
        parts.append(f"{size(need.best)} for the best weights")
    if need.model:
        parts.append(f"{size(need.model)} for the model")
    advice = "free some space, or choose an output_dir on another disk"
    if train.save_total_limit > 1:
        advice += (
            "; train.save_total_limit: 1 needs"
            f" {size((train.save_total_limit - 1) * need.checkpoint)} less"
        )
    raise UserError(
        f"{folder}: the training needs {size(need.total)} on the disk"
        f" ({', '.join(parts)}), but {size(room)} are free; {advice}"
    )


def trained_and_all(model: nn.Module) -> tuple[int, int]:
    """Count the trained and all parameters of a model, over all ranks that share it."""
    # ZeRO-3's parameters are empty outside a pass; `ds_numel` is their number.
    counts = [
        (getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()
    ]
    return sum(number for number, trained in counts if trained), sum(
        number for number, _ in counts
    )
