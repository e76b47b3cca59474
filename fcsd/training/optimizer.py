"""Update the weights: by AdamW, or Muon for the matrices of the decoder layers; one
learning rate, or one a layer.

Not covered: Muon under ZeRO-3, whose optimiser has no matrices but runs of them.
"""

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments, get_scheduler

from fcsd.base.errors import UserError
from fcsd.model.connectivity.rewire import decoder_layers
from fcsd.model.families import family_of
from fcsd.parallel.shard import own_part
from fcsd.parallel.state import PART_OF
from fcsd.training.config import TrainConfig


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


def learning_rate_scales(model: nn.Module, ratio: float) -> dict[str, float]:
    """Return by parameter name the factor of its learning rate: ratio^(d - 1/2) at the
    relative depth d.

    d = k / (L - 1) in decoder layer k of L; 0 for what comes before the layers
    (embeddings, a tied head, towers); 1 for what comes after them (final norm, head).
    So the last layer's rate is `ratio` times the first one's, and the rate in the
    middle of the model is the one that is set. A model with one layer has d = 1/2
    there.
    """
    layers = decoder_layers(model, family_of(getattr(model, "config", None)))
    depth = {
        id(parameter): k / (len(layers) - 1) if len(layers) > 1 else 0.5
        for k, layer in enumerate(layers)
        for parameter in layer.parameters()
    }
    scales, after = {}, False
    for name, parameter in model.named_parameters():
        after = after or id(parameter) in depth
        scales[name] = ratio ** (depth.get(id(parameter), 1.0 if after else 0.0) - 0.5)
    return scales


def parameter_groups(
    model: nn.Module, train: TrainConfig, decayed: Collection[str]
) -> list[dict[str, Any]]:
    """Group the trained parameters that are treated alike.

    decayed: names of the parameters with weight decay. A group says `lr_scale` (see
    `learning_rate_scales`) and `muon`: true for the matrices and the stacks of matrices
    (experts) of the decoder layers, where that is the optimiser.
    """
    scales = learning_rate_scales(model, train.layer_lr_ratio)
    layers = decoder_layers(model, family_of(getattr(model, "config", None)))
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_muon = (
                train.optimizer == "muon"
                and id(parameter) in in_layers
                and parameter.ndim in (2, 3)
            )
            groups.setdefault((by_muon, scales[name], name in decayed), []).append(
                parameter
            )
    return [
        {
            "params": parameters,
            "lr": train.learning_rate * scale,
            "lr_scale": scale,
            "weight_decay": train.weight_decay if decay else 0.0,
            "muon": by_muon,
        }
        for (by_muon, scale, decay), parameters in groups.items()
    ]


def own_optimizer(
    model: nn.Module,
    train: TrainConfig,
    decayed: Collection[str],
    adamw: Any,
    options: dict[str, Any],
) -> torch.optim.Optimizer:
    """Make the optimiser that the settings ask for; adamw, options: the Trainer's
    class, and its arguments.
    """
    kind = MuonWithAdamW if train.optimizer == "muon" else adamw
    optimizer: torch.optim.Optimizer = kind(
        parameter_groups(model, train, decayed), **options
    )
    return optimizer


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


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon`'s update for the groups with `muon: True`, `torch.optim.AdamW`
    for the others.

    Momentum and Newton-Schulz iteration are as `torch.optim.Muon` has them by default,
    which takes 2-D parameters only. A 3-D parameter is a stack of matrices (the experts
    of a layer), each of which is orthogonalised on its own. The step is scaled to the
    size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so that both take one learning
    rate.

    Of a stack that is sharded a rank has some whole matrices, and moves these. A matrix
    that is sharded by rows is put together once a step, orthogonalised on every rank,
    and each moves its rows: what one process does, to the last bit.
    """

    def __init__(self, groups: list[dict[str, Any]], **adamw: Any):
        for group in groups:
            if group["muon"] and any(
                parameter.ndim not in (2, 3) for parameter in group["params"]
            ):
                raise ValueError("Muon is for matrices and stacks of matrices")
        super().__init__(
            groups, {"lr": adamw["lr"], "weight_decay": 0.0, "muon": False}
        )
        own = [group for group in self.param_groups if not group["muon"]]
        self._adamw = torch.optim.AdamW(own, **adamw) if own else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError(
                "no closure: the gradients are there when the trainer calls"
            )
        for group in self.param_groups:
            if group["muon"]:
                self._muon_step(group)
        if self._adamw is not None:
            # Groups and state are shared; loading a state dict has put new ones in
            # their place.
            self._adamw.param_groups = [
                group for group in self.param_groups if not group["muon"]
            ]
            self._adamw.state = self.state
            self._adamw.step()

    def _muon_step(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            own, gradient, momentum = map(
                own_part, (parameter, parameter.grad, state["momentum_buffer"])
            )
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = gradient.lerp(momentum, _MOMENTUM)  # Nesterov's
            own.mul_(1 - group["lr"] * group["weight_decay"])
            step = -_adjust_lr(group["lr"], "match_rms_adamw", parameter.shape[-2:])
            if parameter.ndim == 3:
                for matrix, change in zip(own, update, strict=True):
                    matrix.add_(_orthogonal(change), alpha=step)
            else:
                own.add_(
                    _own_rows(_orthogonal(_whole(update, parameter)), parameter),
                    alpha=step,
                )


_MOMENTUM = 0.95


def _orthogonal(matrix: Tensor) -> Tensor:
    """Orthogonalise a matrix by `torch.optim.Muon`'s iteration, with its defaults."""
    return _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def _whole(own: Tensor, parameter: Any) -> Tensor:
    """Put together what ranks have of a matrix that is laid out as `parameter`; all
    ranks call this.
    """
    if not isinstance(parameter, DTensor):
        return own
    mesh = parameter.device_mesh
    local = own.to(mesh.device_type)
    spread: Any = DTensor.from_local(
        local,
        mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    whole: Tensor = spread.full_tensor()
    return whole


def _own_rows(matrix: Tensor, parameter: Any) -> Tensor:
    if not isinstance(parameter, DTensor):
        return matrix
    mesh, layout = parameter.device_mesh, parameter.placements
    rows = distribute_tensor(matrix, mesh, layout, src_data_rank=None).to_local()
    return rows.to(own_part(parameter).device)
