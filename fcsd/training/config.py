"""Schema of the optimiser, the safety net, the calibration and the sweep."""

import math
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from fcsd.base.errors import UserError
from fcsd.base.strict import Rule, Strict
from fcsd.data.config import RowsConfig
from fcsd.model.config import DROP_NEEDS_A_CAPACITY
from fcsd.training.losses.objectives import ObjectiveConfig


class CosineWithMinLrConfig(Strict):
    """Decay by half a cosine."""

    min_lr_rate: float = Field(ge=0, le=1)  # last rate over first


class StepConfig(Strict):
    """Multiply the rate by `gamma` at each milestone (as
    `torch.optim.lr_scheduler.MultiStepLR`).
    """

    # shares of max_steps
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = Field(min_length=1)
    gamma: float = Field(0.1, gt=0)


class WarmupStableDecayConfig(Strict):
    """Keep the rate, and decay in the last steps; `transformers.get_wsd_schedule` has
    the exact definitions.
    """

    # below 1 a share of max_steps, as for transformers' warm-up
    num_decay_steps: float = Field(gt=0)
    warmup_type: Literal["linear", "cosine", "1-sqrt"] = "linear"
    decay_type: Literal["linear", "cosine", "1-sqrt"] = "cosine"
    # last rate over first; the warm-up also begins there
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    num_cycles: float = Field(0.5, gt=0)  # of the cosine


_SCHEDULES: dict[str, type[Strict]] = {
    "cosine_with_min_lr": CosineWithMinLrConfig,
    "step": StepConfig,
    "warmup_stable_decay": WarmupStableDecayConfig,
}


class ScheduleConfig(Strict):
    """The learning rate's way over the steps of a training."""

    # 0: the initial weights are the result
    max_steps: int = Field(2000, ge=0)
    warmup_steps: int = Field(1000, ge=0)
    lr_scheduler_type: Literal[
        "cosine",
        "cosine_with_min_lr",
        "linear",
        "constant_with_warmup",
        "step",
        "warmup_stable_decay",
    ] = Field("cosine", description="the learning-rate schedule")
    lr_scheduler_kwargs: dict[str, Any] | None = None  # a record of `_SCHEDULES`

    # Without steps there is no schedule.
    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda train: 0 < train.max_steps < train.warmup_steps,
            "warmup_steps ({0.warmup_steps}) is more than max_steps ({0.max_steps})",
        ),
        (
            lambda train: 0 < train.max_steps < train.decay_steps + train.warmup_steps,
            "lr_scheduler_kwargs.num_decay_steps ({0.decay_steps} steps) and"
            " warmup_steps ({0.warmup_steps}) are more than max_steps ({0.max_steps})",
        ),
    )

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _check_schedule_settings(
        cls, value: dict[str, Any] | None, info: ValidationInfo
    ) -> dict[str, Any] | None:
        # The name is absent if it failed its own validation.
        name = info.data.get("lr_scheduler_type")
        if (kind := _SCHEDULES.get(str(name))) is not None:
            return kind.model_validate(value or {}).model_dump()
        if value and name is not None:
            raise ValueError(
                f"no meaning for lr_scheduler_type {name!r}, only for"
                f" {', '.join(_SCHEDULES)}"
            )
        return None

    @property
    def decay_steps(self) -> int:
        return self.num_decay_steps(self.max_steps)

    def num_decay_steps(self, max_steps: int) -> int:
        """Return the number of last steps in which `warmup_stable_decay` decays; 0 for
        other schedules.
        """
        number = (self.lr_scheduler_kwargs or {}).get("num_decay_steps", 0)
        return math.ceil(number * max_steps) if number < 1 else int(number)


class UpdateConfig(Strict):
    """The way from a batch to new weights: the keys of a recipe's `train` section that
    fcsd's trainer reads itself. `fcsd.FCSDConfig` has them as arguments.
    """

    batch_size_tokens: int | None = Field(
        None, description="tokens of one optimiser step, over all ranks", gt=0
    )
    per_device_train_batch_size: int = Field(
        1, description="rows of one forward pass; fewer if a batch has fewer", gt=0
    )
    learning_rate: float = Field(2e-5, description="the highest learning rate", gt=0)
    weight_decay: float = Field(0.0, description="AdamW's weight decay", ge=0)
    adam_beta2: float = Field(0.95, description="AdamW's beta2", ge=0, lt=1)
    # `fcsd.training.losses.balance`; DeepSeek-V2 has 0.001 to 0.003
    balance_loss_coefficient: float | None = Field(
        None, description="of the loss that balances the experts' loads", gt=0
    )
    balance_loss_over: Literal["sequence", "batch"] = Field(
        "sequence",
        description="sequence; or batch: all ranks and all micro-batches of the step so far",
    )
    # DeepSeek-V3 has 0.001.
    balance_bias_rate: float | None = Field(
        None,
        description="step size of the routers' correction bias, which balances without a loss",
        gt=0,
    )
    # `fcsd.model.families.capacity`: pairs of token and expert above factor x K x
    # tokens / experts of a forward pass of a rank are dropped; null: order
    capacity_factor: float | None = Field(
        None,
        description="the experts' capacity, above which pairs of token and expert are dropped",
        gt=0,
        allow_inf_nan=False,
    )
    capacity_drop: Literal["order", "weight"] | None = Field(
        None,
        description="order: the last pairs are dropped; weight: those of the smallest weights",
    )
    ema_decay: float | None = Field(
        None, description="the weights' moving average is scored and saved", gt=0, lt=1
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the trained weights"
    )
    bf16: bool = Field(False, description="autocast to bfloat16")

    rules: ClassVar[tuple[Rule, ...]] = (
        DROP_NEEDS_A_CAPACITY,
        (
            lambda train: (
                train.balance_loss_over == "batch"
                and train.balance_loss_coefficient is None
            ),
            "balance_loss_over: 'batch' has no meaning without"
            " balance_loss_coefficient; set it, or leave both out",
        ),
    )

    @property
    def balances(self) -> bool:
        return (
            self.balance_loss_coefficient is not None
            or self.balance_bias_rate is not None
        )

    @property
    def depends_on_micro_batches(self) -> bool:
        """Whether the loss of a step depends on how its batch is cut into
        micro-batches.
        """
        return (
            self.balance_loss_coefficient is not None
            and self.balance_loss_over == "batch"
        )


Reporter = Literal["wandb", "trackio", "tensorboard"]
REPORTERS: tuple[str, ...] = get_args(Reporter)
"""The reporters of which fcsd has an extra, by the same name."""


class TrainConfig(UpdateConfig, ScheduleConfig):
    """The optimiser's settings; names as in `transformers.TrainingArguments`, if it has
    them.
    """

    batch_size_tokens: int = Field(131072, gt=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    gradient_checkpointing: bool | None = None  # null: from 1e9 parameters on
    logging_steps: int = Field(10, description="steps between two logs", gt=0)
    save_steps: int = Field(500, gt=0)
    save_total_limit: int = Field(2, gt=0)
    report_to: list[Reporter] = Field(default_factory=list)

    @field_validator("report_to", mode="before")
    @classmethod
    def _as_list_of_reporters(cls, value: Any) -> Any:
        """Also accept transformers' forms: one name, or "none"."""
        if value == "none":
            return []
        return [value] if isinstance(value, str) else value


def micro_batches(
    train: UpdateConfig,
    max_length: int,
    world_size: int,
    key: str = "train.batch_size_tokens",
) -> tuple[int, int]:
    """Return the rows of a micro-batch and the micro-batches of one optimiser step, on
    each rank.

    A batch that is smaller than one forward pass of all ranks is one micro-batch with
    fewer rows. key: where the batch is given. UserError: the batch is no whole number
    of micro-batches over all ranks.
    """
    rows, row_tokens = train.per_device_train_batch_size, max_length * world_size
    batch = train.batch_size_tokens
    assert batch is not None  # None: `FCSDConfig` gives the batch in rows
    if batch < rows * row_tokens and batch % row_tokens == 0:
        return batch // row_tokens, 1
    if batch % (rows * row_tokens):
        raise UserError(
            f"{key}: {batch} is not a multiple of"
            f" {rows * row_tokens} (per_device_train_batch_size {rows} x"
            f" data.max_length {max_length} x {world_size} processes);"
            f" {_ways(batch, rows, max_length, world_size)}"
        )
    return rows, batch // (rows * row_tokens)


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


MAY_CHANGE = (
    # outputs, and when they are written
    "train.logging_steps",
    "train.save_steps",
    "train.save_total_limit",
    "train.report_to",
    "objective.own_text_sample_steps",
    # how a step fits into memory
    "train.per_device_train_batch_size",
    "train.gradient_checkpointing",
    "objective.own_text_batch_size",
    "data.on_bad_row",
)
"""Settings that may change when a training is continued: the result does not depend on
them, except for the order of float sums and the fate of an example that would end the
run.
"""


def may_change(train: UpdateConfig) -> tuple[str, ...]:
    """Return `MAY_CHANGE`, without the rows of a forward pass where the result depends
    on them: with a capacity, which holds for a pass, and with a balance over the batch.
    """
    if train.capacity_factor is None and not train.depends_on_micro_batches:
        return MAY_CHANGE
    return tuple(
        key for key in MAY_CHANGE if key != "train.per_device_train_batch_size"
    )


class SafetyConfig(Strict):
    """The reaction of every training of the recipe to a step that goes wrong
    (`fcsd.training.safety`).
    """

    # consecutive steps with a loss or gradient that is not finite
    max_skipped_steps: int = Field(10, ge=0)


class Sections(Strict):
    """The settings that fcsd's trainer reads itself; `transformers.TrainingArguments`
    has the others.

    They are the sections of a recipe, or those that `FCSDConfig.sections` makes.
    """

    objective: ObjectiveConfig
    train: UpdateConfig
    data: RowsConfig
    safety: SafetyConfig = Field(default_factory=SafetyConfig)


class CalibrationConfig(Strict):
    """Fold closed-form maps into the converted weights, before any training
    (docs/convert.md).
    """

    # of data.train
    tokens: int = Field(
        262_144,
        description="number of tokens of the text on which to fit the maps",
        gt=0,
    )
    ridge: float = Field(
        1e-3,
        description=(
            "regularisation of the maps towards the identity, relative to the mean"
            " diagonal of the Gram matrix"
        ),
        ge=0,
        lt=1,
    )
    # Whether trainings start from the calibrated weights; false: they are only
    # evaluated, as one more model.
    starts_training: bool = True


class MtpConfig(Strict):
    """Train the MTP layers of a converted model on its hidden states (`fcsd mtp`)."""

    tokens: int = Field(
        1_048_576, description="number of tokens of the text to train on", gt=0
    )
    learning_rate: float = Field(1e-4, description="highest learning rate", gt=0, lt=1)
    batch_size: int = Field(8, description="rows of text in a step", gt=0)


class SweepConfig(Strict):
    """Batch size first, at train.learning_rate; then learning rate, at the best batch
    size (paper 5.1).

    The paper's runs have equally many steps, so that a larger batch sees more tokens.
    With `equal: tokens` the number of steps holds for train.batch_size_tokens, and all
    other runs see as many tokens.
    """

    equal: Literal["steps", "tokens"] = "steps"
    batch_size_tokens: list[Annotated[int, Field(gt=0)]] = Field(
        default_factory=lambda: [2**16, 2**17, 2**18], min_length=1
    )
    learning_rate: list[Annotated[float, Field(gt=0)]] = Field(
        default_factory=lambda: [2e-5, 4e-5, 8e-5], min_length=1
    )
    steps: int = Field(2000, gt=0)  # of every run
    warmup_steps: int = Field(1000, ge=0)  # left out: at most half of steps
    # The lowest mean training loss over this many last steps wins; left out: at most
    # all.
    last_steps: int = Field(100, gt=0)
    # null: by that loss; else by the score that the recipe's early_stopping names, of
    # the weights with which a run ends
    choose_by: Literal["early_stopping"] | None = None
    # Tokens of the distillation that follows: its train.max_steps is this over the
    # chosen batch size; null: train.max_steps stays
    train_tokens: int | None = Field(None, gt=0)

    rules: ClassVar[tuple[Rule, ...]] = (
        (
            lambda sweep: sweep.warmup_steps > sweep.steps,
            "warmup_steps ({0.warmup_steps}) is more than steps ({0.steps})",
        ),
        (
            lambda sweep: sweep.last_steps > sweep.steps,
            "last_steps ({0.last_steps}) is more than steps ({0.steps})",
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _fit_defaults_to_short_runs(cls, value: Any) -> Any:
        # A short sweep need not set warmup_steps and last_steps. Steps of a wrong kind
        # are left to their own validation.
        steps = value.get("steps") if isinstance(value, dict) else None
        if not isinstance(steps, int) or steps < 1:
            return value
        return {
            "warmup_steps": min(1000, steps // 2),
            "last_steps": min(100, steps),
            **value,
        }

    def steps_of(
        self, batch_size_tokens: int, train: TrainConfig, steps: int | None = None
    ) -> int:
        """Return the steps of a run with this batch size, or the equivalent of `steps`
        steps with `train`'s batch size.
        """
        steps = self.steps if steps is None else steps
        if self.equal == "steps" or not steps:
            return steps
        return max(1, round(steps * train.batch_size_tokens / batch_size_tokens))
