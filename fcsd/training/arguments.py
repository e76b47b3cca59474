"""Describe the training of a recipe, and check its settings against the engine and the
installed packages.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations import get_reporting_integration_callbacks

from fcsd.base.errors import UserError, one_line
from fcsd.data.rows_config import RowsConfig
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import Launch
from fcsd.training.config import REPORTERS, SafetyConfig, Sections, TrainConfig
from fcsd.training.early_stopping import EarlyStopper, Score
from fcsd.training.losses.objectives import ObjectiveConfig
from fcsd.training.teachers.base import Teacher

Scorer = Callable[[PreTrainedModel], Score]  # all ranks call it, and all get the score


@dataclass(frozen=True)
class TrainingRun:
    """The inputs of one training run.

    student: in the dtype in which it is saved, whatever dtype it is trained in. data:
    the source of `rows`. owner: the identity of the stage, to which its checkpoints
    belong. score: scores a model for early stopping. adapters: the
    `PeftModel` around a LoRA student. remaining: maps the share of finished steps to
    the remaining time of all stages of the run, or "".
    """

    launch: Launch
    folder: Path
    description: str
    student: PreTrainedModel
    teacher: PreTrainedModel | Teacher | None
    tokenizer: PreTrainedTokenizerBase
    rows: Any
    data: RowsConfig
    objective: ObjectiveConfig
    train: TrainConfig
    seed: int
    owner: Any = ""
    safety: SafetyConfig = field(default_factory=SafetyConfig)
    stopper: EarlyStopper | None = None
    score: Scorer | None = None
    save_model: bool = True
    adapters: Any = None
    remaining: Callable[[float], str] | None = None

    @property
    def keeps_best(self) -> bool:
        """Whether the weights with the best score are kept beside the checkpoints."""
        return self.stopper is not None and self.save_model

    @property
    def sections(self) -> Sections:
        return Sections(
            objective=self.objective,
            train=self.train,
            data=self.data,
            safety=self.safety,
        )


def refuse_what_cannot_be_sharded(
    objective: ObjectiveConfig, engine: Engine, *, by_heldout_kl: bool = False
) -> None:
    """Raise UserError for settings that do not work with sharded weights;
    by_heldout_kl: early stopping uses that score.
    """
    # DeepSpeed 0.19.8: the ranks' gathers fall out of step after the first score; each
    # alone works.
    if engine.uses_deepspeed and by_heldout_kl and objective.l2_coefficient is not None:
        raise UserError(
            "early_stopping.metric: heldout_kl does not work with kl+l2 under"
            " ZeRO-3; use FSDP2, or pass@1"
        )
    if objective.own_text is not None and (
        engine.uses_deepspeed or engine.spreads_experts
    ):
        kind = "ZeRO-3" if engine.uses_deepspeed else "expert parallelism"
        raise UserError(
            f"objective.own_text: a student under {kind} cannot write; launch FSDP2"
            " (configs/fsdp2_8.yaml) or data parallel copies, or leave the key out"
        )


def check_reporters(names: Sequence[str]) -> None:
    """Raise UserError for a reporter of `report_to` that cannot be used here."""
    for name in names:
        if name in REPORTERS:
            if importlib.util.find_spec(name) is None:
                raise UserError(
                    f"train.report_to: {name} is not installed; pip install"
                    f" 'fcsd[{name}]', or leave it out"
                )
            continue
        # transformers says which package is missing, or which reporters there are.
        try:
            for reporter in get_reporting_integration_callbacks([name]):
                reporter()
        except (RuntimeError, ImportError, ValueError) as error:
            raise UserError(f"train.report_to: {one_line(error)}") from None
