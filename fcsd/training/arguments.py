"""Say what a recipe's stage asks of a training (`Job`), make the arguments of the
Trainer from its sections, and check sections against the engine and the installed
packages.

    transformers.TrainingArguments
        TrainerArguments            without refusals that are wrong for fcsd's trainer
            RecipeArguments         made from the sections of a recipe, here
            FCSDConfig              given by a script; its sections are made from it (`fcsd.training.fcsd_config`)

Not covered: which of transformers' arguments a script may set
(`fcsd.training.argument_rules`).
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from fcsd.base.errors import UserError, one_line
from fcsd.data.config import RowsConfig
from fcsd.parallel.engine import Engine, checkpoints_activations
from fcsd.parallel.launch import Launch
from fcsd.training.config import REPORTERS, Sections
from fcsd.training.losses.objectives import ObjectiveConfig

if TYPE_CHECKING:
    from fcsd.training.early_stopping import EarlyStopper, Score

# all ranks call it, and all get the score
Scorer = Callable[[PreTrainedModel], "Score"]


class ScoreFailure(Exception):
    """Scoring failed, and all ranks know it; `__cause__` is the reason."""


@dataclass(frozen=True)
class Job:
    """What a recipe's stage asks of one training, beside models, rows and sections.

    description: its name in output. owner: the identity of the stage, to which its
    checkpoints belong. score: scores a model for early stopping. remaining: maps the
    share of finished steps to the remaining time of all stages of the run, or "".
    """

    folder: Path
    description: str
    seed: int
    owner: Any = ""
    stopper: "EarlyStopper | None" = None
    score: Scorer | None = None
    save_model: bool = True
    remaining: Callable[[float], str] | None = None

    @property
    def keeps_best(self) -> bool:
        """Whether the weights with the best score are kept beside the checkpoints."""
        return self.stopper is not None and self.save_model


@dataclass
class TrainerArguments(TrainingArguments):
    """The arguments of transformers, without its refusals and changes of values that are
    right for fcsd's trainer: bf16 without a GPU, and the schedule "step".
    """

    def __post_init__(self) -> None:
        bf16, by_deepspeed = self.bf16, parse_flag_from_env("ACCELERATE_USE_DEEPSPEED")
        if not torch.accelerator.is_available():
            # accelerate cannot combine DeepSpeed with use_cpu
            self.use_cpu, self.dataloader_pin_memory = not by_deepspeed, False
        # without a GPU transformers refuses bf16, DeepSpeed does not
        self.bf16 = bf16 and not by_deepspeed
        schedule = self.lr_scheduler_type
        if schedule == "step":
            # transformers refuses names that are not its own
            self.lr_scheduler_type = "constant_with_warmup"
        super().__post_init__()
        self.bf16 = bf16
        if schedule == "step":
            self.lr_scheduler_type = schedule


@dataclass
class RecipeArguments(TrainerArguments):
    """The arguments that transformers acts on in the training of a recipe; trackers
    (wandb, TensorBoard) show the sections with them.
    """

    sections: Sections | None = None

    @classmethod
    def of(
        cls, sections: Sections, job: Job, launch: Launch, student: PreTrainedModel
    ) -> "RecipeArguments":
        """Return the arguments for the sections of a recipe, whose `train` is whole."""
        train: Any = sections.train
        by_deepspeed = launch.engine.uses_deepspeed
        on_cpu = launch.device.type == "cpu"
        # Keys of `train` that transformers has under the same name; the two that are
        # left out are set below.
        arguments = {argument.name for argument in fields(TrainingArguments)}
        shared = arguments - {"gradient_checkpointing", "report_to"}
        return cls(
            **train.model_dump(include=shared),
            logging_nan_inf_filter=False,
            remove_unused_columns=False,
            ddp_find_unused_parameters=False,
            output_dir=str(job.folder / "checkpoints"),
            run_name=job.description,
            # accelerate cannot combine DeepSpeed with use_cpu
            use_cpu=on_cpu and not by_deepspeed,
            ddp_backend="gloo" if on_cpu and by_deepspeed else None,
            activation_checkpointing=checkpoints_activations(
                train.gradient_checkpointing, student
            ),
            # those of TensorBoard are written to the folder of the job
            report_to=[name for name in train.report_to if name != "tensorboard"],
            seed=job.seed,
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
            sections=sections,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return transformers' arguments and the keys of the sections, flat, as trackers
        show them.
        """
        values = super().to_dict()
        del values["sections"]
        if self.sections is None:
            return values
        shown = self.sections.model_dump(mode="json")
        objective = shown.pop("objective")
        flat = {"objective": objective.pop("name"), **objective}
        # A recipe's section also has the sources.
        row_keys = RowsConfig.model_fields.keys()
        data = {key: value for key, value in shown["data"].items() if key in row_keys}
        return {**flat, **shown["train"], **data, "safety": shown["safety"], **values}


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
