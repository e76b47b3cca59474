"""Learning-rate schedules, and the demands of a checkpoint on an optimiser."""

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from fcsd.base.errors import UserError
from fcsd.parallel.parts import inner_optimizer
from fcsd.parallel.state import PART_OF


def learning_rate_schedule(
    args: TrainingArguments, optimizer: torch.optim.Optimizer, num_training_steps: int
) -> Any:
    """Make the schedule that the arguments name: one of transformers', or `step`
    (`fcsd.training.config`).
    """
    settings: dict[str, Any] = dict(args.lr_scheduler_kwargs or {})  # type: ignore[arg-type]
    warmup = args.get_warmup_steps(num_training_steps)
    # Milestones and decay are given as shares of the steps, so that one recipe fits
    # trainings of any length.
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
    """Return the rate of `step` (from 0) relative to the highest; the warm-up is linear
    from 0, as in other schedules.
    """
    warm = step / warmup if step < warmup else 1.0
    return warm * gamma ** sum(step >= milestone for milestone in milestones)


def take_rate_of_schedule(scheduler: Any, optimizer: Any) -> None:
    """Give the next step the rate of this schedule, where that of the checkpoint is of a
    training of another length.
    """
    schedule = getattr(scheduler, "scheduler", scheduler)
    # Other schedules know no length.
    if not isinstance(schedule, LambdaLR):
        return
    rates = [
        rate * factor(schedule.last_epoch)
        for factor, rate in zip(schedule.lr_lambdas, schedule.base_lrs, strict=True)
    ]
    for group, rate in zip(inner_optimizer(optimizer).param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates


def note_parts(
    optimizer: torch.optim.Optimizer, model: nn.Module, decayed: Collection[str]
) -> None:
    """Note for each parameter group whether its parameters decay: a checkpoint joins
    the groups by that.
    """
    # A group is homogeneous in this respect, so its first parameter decides.
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group[PART_OF] = int(names[id(group["params"][0])] not in decayed)


def refuse_factored_states(optimizer: Any) -> None:
    """Refuse an optimiser whose states do not have the shapes of its parameters: a
    checkpoint would lose them.
    """
    for parameter, states in optimizer.state.items():
        for name, state in states.items():
            # A number of steps, for example, is no tensor, or has no dimensions.
            if (
                isinstance(state, Tensor)
                and state.ndim > 0
                and state.shape != parameter.shape
            ):
                raise UserError(
                    f"{type(optimizer).__name__}: its state {name!r} does not have the"
                    " shape of its parameter, so fcsd cannot checkpoint it; use another"
                    " optimizer, or save_strategy='no' and save_model()"
                )
