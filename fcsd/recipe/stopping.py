"""Schema of early stopping: which score, how often, with how much patience."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fcsd.base.strict import Strict
from fcsd.base.unions import OneOf
from fcsd.evaluation.config import TaskConfig


class StoppingBase(Strict):
    """A score while training, and the end of it (paper 5.1: MBPP+, every 1000 steps, patience 20, delta 2 %)."""

    every_steps: int = Field(1000, gt=0)
    patience: int = Field(20, gt=0)  # evaluations without an improvement
    # An improvement is more than this better than the best so far: a difference of scores, a share of the held-out KL.
    min_delta: float = Field(0.02, ge=0, lt=1)


class HeldoutKLStoppingConfig(StoppingBase):
    """Score by KL(original || student) on data.heldout, in nats per kept token."""

    metric: Literal["heldout_kl"]


class TaskStoppingConfig(StoppingBase):
    """Score by a task, as the evaluation would score that row of a suite."""

    task: TaskConfig = Field(description="a row of a suite (or set metric: heldout_kl)")
    limit: int | None = Field(None, gt=0)  # the first items only; null: all
    batch_size: int = Field(32, gt=0)  # sequences in one forward on a rank

    @model_validator(mode="after")
    def _counts(self) -> "TaskStoppingConfig":
        if not self.task.headline:
            raise ValueError("task.headline has no meaning here, where there is no mean; leave it out")
        return self

    @property
    def metric(self) -> str:
        return self.task.metric


EarlyStoppingConfig = Annotated[
    HeldoutKLStoppingConfig | TaskStoppingConfig,
    OneOf(
        "metric",
        {"heldout_kl": HeldoutKLStoppingConfig, "a task": TaskStoppingConfig},
        default="a task",
        else_default=True,
        name="",
    ),
]
