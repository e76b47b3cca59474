"""The learning rate over a training: transformers' schedules, and `step`, which it does not have.

Not covered: a rate for each layer, which is the optimiser's.
"""

import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler


def learning_rate_schedule(args: TrainingArguments, optimizer: Optimizer, num_training_steps: int) -> Any:
    """Return the schedule that the arguments name, as `fcsd.training.config` defines its settings."""
    settings: dict[str, Any] = dict(args.lr_scheduler_kwargs or {})  # type: ignore[arg-type]
    warmup = args.get_warmup_steps(num_training_steps)
    if args.lr_scheduler_type == "step":
        milestones = [round(share * num_training_steps) for share in settings["milestones"]]
        return LambdaLR(optimizer, partial(_step_factor, warmup, milestones, settings["gamma"]))
    if 0 < settings.get("num_decay_steps", 0) < 1:
        settings["num_decay_steps"] = math.ceil(settings["num_decay_steps"] * num_training_steps)
    return get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_training_steps, settings)


def _step_factor(warmup: int, milestones: list[int], gamma: float, step: int) -> float:
    """Return the rate of `step` (from 0) over the highest: warm-up is linear, from 0, as that of other schedules."""
    warm = step / warmup if step < warmup else 1.0
    return warm * gamma ** sum(step >= milestone for milestone in milestones)
