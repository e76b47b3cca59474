"""Learning-rate schedules, and what a checkpoint needs of an optimiser."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from fcsd.base.errors import UserError
from fcsd.parallel.state import PART_OF


def learning_rate_schedule(
    args: TrainingArguments, optimizer: torch.optim.Optimizer, num_training_steps: int
) -> Any:
    """Return the schedule that the arguments name (`fcsd.training.config`):
    transformers' own, or `step`.
    """
    settings: dict[str, Any] = dict(args.lr_scheduler_kwargs or {})  # type: ignore[arg-type]
    warmup = args.get_warmup_steps(num_training_steps)
    if args.lr_scheduler_type == "step":
        milestones = [
            round(share * num_training_steps) for share in settings["milestones"]
        ]
        return LambdaLR(
            optimizer, partial(_step_factor, warmup, milestones, settings["gamma"])
        )
    if 0 < settings.get("num_decay_steps", 0) < 1:
        settings["num_decay_steps"] = math.ceil(
            settings["num_decay_steps"] * num_training_steps
        )
    return get_scheduler(
        args.lr_scheduler_type, optimizer, warmup, num_training_steps, settings
    )


def _step_factor(warmup: int, milestones: list[int], gamma: float, step: int) -> float:
    """Return the rate of `step` (from 0) over the highest: warm-up is linear, from 0,
    as that of other schedules.
    """
    warm = step / warmup if step < warmup else 1.0
    return warm * gamma ** sum(step >= milestone for milestone in milestones)


def note_parts(
    optimizer: torch.optim.Optimizer, model: nn.Module, decayed: Collection[str]
) -> None:
    """Note of each group of parameters, which all decay or all do not, whether they do;
    a checkpoint goes by that.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group[PART_OF] = int(names[id(group["params"][0])] not in decayed)


def refuse_factored_states(optimizer: Any) -> None:
    """Refuse an optimiser whose states are not laid out like its parameters: a
    checkpoint would lose them.
    """
    for parameter, states in optimizer.state.items():
        for name, state in states.items():
            if (
                isinstance(state, Tensor)
                and state.ndim > 0
                and state.shape != parameter.shape
            ):
                raise UserError(
                    f"{type(optimizer).__name__}: its state {name!r} has not the shape"
                    " of its parameter, and no checkpoint can hold it; use another"
                    " optimizer, or save_strategy='no' and save_model()"
                )
