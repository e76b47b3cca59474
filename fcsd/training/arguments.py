"""Describe the training of a recipe, and check its settings against the engine and the
installed packages.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.base.errors import UserError
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import Launch
from fcsd.training.config import SafetyConfig, TrainConfig
from fcsd.training.early_stopping import EarlyStopper, Score
from fcsd.training.losses.objectives import ObjectiveConfig
from fcsd.training.teachers.base import Teacher

Scorer = Callable[[PreTrainedModel], Score]  # all ranks call it, and all get the score


@dataclass(frozen=True)
class TrainingRun:
    """The inputs of one training run.

    student: in the dtype that is saved, whatever dtype it is trained in. max_length:
    tokens in a row of `rows`. score: scores a model for early stopping. adapters: the
    `PeftModel` around a LoRA student. remaining: maps the share of steps that are done
    to the time that all stages of the run still take, or "".
    """

    launch: Launch
    folder: Path
    description: str
    student: PreTrainedModel
    teacher: PreTrainedModel | Teacher | None
    tokenizer: PreTrainedTokenizerBase
    rows: Any
    max_length: int
    objective: ObjectiveConfig
    train: TrainConfig
    seed: int
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    stopper: EarlyStopper | None = None
    score: Scorer | None = None
    save_model: bool = True
    adapters: Any = None
    remaining: Callable[[float], str] | None = None


def micro_batches(
    train: TrainConfig, max_length: int, world_size: int
) -> tuple[int, int]:
    """Return the rows of a micro-batch and the micro-batches of one optimiser step, on
    each rank.

    A batch that is smaller than one forward pass of all ranks is one micro-batch with
    fewer rows. UserError: the batch is no whole number of micro-batches over all ranks.
    """
    rows, row_tokens = train.per_device_train_batch_size, max_length * world_size
    if (
        train.batch_size_tokens < rows * row_tokens
        and train.batch_size_tokens % row_tokens == 0
    ):
        return train.batch_size_tokens // row_tokens, 1
    if train.batch_size_tokens % (rows * row_tokens):
        raise UserError(
            f"train.batch_size_tokens: {train.batch_size_tokens} is not a multiple of"
            f" {rows * row_tokens} (per_device_train_batch_size {rows} x"
            f" data.max_length {max_length} x {world_size} processes);"
            f" {_ways(train.batch_size_tokens, rows, max_length, world_size)}"
        )
    return rows, train.batch_size_tokens // (rows * row_tokens)


def _ways(batch: int, rows: int, max_length: int, world_size: int) -> str:
    """Suggest settings that fit: fewer rows at once, the next larger batch, shorter
    rows or fewer processes.
    """
    step = max_length * world_size
    # The batch is whole rows for every rank: only the rows of a forward pass are too
    # many, and 1 always fits.
    if batch % step == 0:
        fitting_rows = [k for k in range(1, rows) if batch % (k * step) == 0]
        return f"possible: per_device_train_batch_size {max(fitting_rows)}"
    alternatives = [f"a batch of {-(-batch // step) * step}"]
    processes = [k for k in range(1, world_size) if batch % (k * max_length) == 0]
    # Lengths down to an eighth of the present one are tried.
    lengths = [
        k
        for k in range(max_length // 8, max_length)
        if k and batch % (k * world_size) == 0
    ]
    if lengths:
        alternatives.append(f"data.max_length {max(lengths)}")
    if processes:
        alternatives.append(f"{max(processes)} processes")
    return f"possible: {', or '.join(alternatives)}"


def refuse_what_cannot_be_sharded(
    objective: ObjectiveConfig, engine: Engine, *, by_heldout_kl: bool = False
) -> None:
    """Raise UserError for settings that do not work with sharded weights;
    by_heldout_kl: early stopping uses that score.
    """
    # DeepSpeed 0.19.8: the ranks' gathers fall out of step after the first score; each
    # alone works.
    if engine.uses_deepspeed and by_heldout_kl and objective.has_hidden_terms:
        raise UserError(
            "early_stopping.metric: heldout_kl does not work with l2 or router_kl under"
            " ZeRO-3; use FSDP2, or pass@1"
        )


def check_reporters(train: TrainConfig) -> None:
    for name in train.report_to:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"train.report_to: {name} is not installed; pip install 'fcsd[{name}]',"
                " or leave it out"
            )
