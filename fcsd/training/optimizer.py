"""Update the weights: by AdamW, or Muon for the matrices of the decoder layers; one learning rate, or one a layer.

Not covered: the schedule, which is transformers'; Muon for weights that are sharded over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import muon

from fcsd.base.errors import UserError
from fcsd.model.connectivity.rewire import decoder_layers
from fcsd.model.families import family_of
from fcsd.parallel.state import PART_OF
from fcsd.training.config import TrainConfig


def learning_rate_scales(model: nn.Module, ratio: float) -> dict[str, float]:
    """Return by parameter name the factor of its learning rate: ratio^(d - 1/2) at the relative depth d.

    d = k / (L - 1) in decoder layer k of L; 0 for what comes before the layers (embeddings, a tied head, towers); 1 for
    what comes after them (final norm, head). So the last layer's rate is `ratio` times the first one's, and the rate in
    the middle of the model is the one that is set. A model with one layer has d = 1/2 there.
    """
    layers = decoder_layers(model, family_of(getattr(model, "config", None)))
    depth = {
        id(parameter): (k / (len(layers) - 1) if len(layers) > 1 else 0.5)
        for k, layer in enumerate(layers)
        for parameter in layer.parameters()
    }
    scales, after = {}, False
    for name, parameter in model.named_parameters():
        after = after or id(parameter) in depth
        scales[name] = ratio ** (depth.get(id(parameter), 1.0 if after else 0.0) - 0.5)
    return scales


def parameter_groups(model: nn.Module, train: TrainConfig, decayed: Collection[str]) -> list[dict[str, Any]]:
    """Group the trained parameters that are treated alike.

    decayed: names of the parameters with weight decay. A group says `lr_scale` (see `learning_rate_scales`) and `muon`:
    true for the matrices and the stacks of matrices (experts) of the decoder layers, where that is the optimiser.
    """
    scales = learning_rate_scales(model, train.layer_lr_ratio)
    layers = decoder_layers(model, family_of(getattr(model, "config", None)))
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_muon = train.optimizer == "muon" and id(parameter) in in_layers and parameter.ndim in (2, 3)
            groups.setdefault((by_muon, scales[name], name in decayed), []).append(parameter)
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
    model: nn.Module, train: TrainConfig, decayed: Collection[str], adamw: Any, options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Make the optimiser that the settings ask for; adamw, options: the Trainer's class, and its arguments."""
    kind = MuonWithAdamW if train.optimizer == "muon" else adamw
    optimizer: torch.optim.Optimizer = kind(parameter_groups(model, train, decayed), **options)
    return optimizer


def note_parts(optimizer: torch.optim.Optimizer, model: nn.Module, decayed: Collection[str]) -> None:
    """Note of each group of parameters, which all decay or all do not, whether they do; a checkpoint goes by that."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group[PART_OF] = int(names[id(group["params"][0])] not in decayed)


def refuse_factored_states(optimizer: Any) -> None:
    """Refuse an optimiser whose states are not laid out like its parameters: a checkpoint would lose them."""
    for parameter, states in optimizer.state.items():
        for name, state in states.items():
            if isinstance(state, Tensor) and state.ndim > 0 and state.shape != parameter.shape:
                raise UserError(
                    f"{type(optimizer).__name__}: its state {name!r} has not the shape of its parameter, and no"
                    " checkpoint can hold it; use another optimizer, or save_strategy='no' and save_model()"
                )


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon`'s update for the groups with `muon: True`, `torch.optim.AdamW` for the others.

    Momentum and Newton-Schulz iteration are as `torch.optim.Muon` has them by default, which takes 2-D parameters only.
    A 3-D parameter is a stack of matrices (the experts of a layer), each of which is orthogonalised on its own. The
    step is scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so that both take one learning rate.

    Raises: ValueError for a parameter of a Muon group that has neither two nor three dimensions.
    """

    def __init__(self, groups: list[dict[str, Any]], **adamw: Any):
        for group in groups:
            if group["muon"] and any(parameter.ndim not in (2, 3) for parameter in group["params"]):
                raise ValueError("Muon is for matrices and stacks of matrices")
        super().__init__(groups, {"lr": adamw["lr"], "weight_decay": 0.0, "muon": False})
        own = [group for group in self.param_groups if not group["muon"]]
        self._adamw = torch.optim.AdamW(own, **adamw) if own else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise ValueError("no closure: the gradients are there when the trainer calls")
        for group in self.param_groups:
            if group["muon"]:
                self._muon_step(group)
        if self._adamw is not None:
            # Groups and state are shared; loading a state dict has put new ones in their place.
            self._adamw.param_groups = [group for group in self.param_groups if not group["muon"]]
            self._adamw.state = self.state
            self._adamw.step()

    def _muon_step(self, group: dict[str, Any]) -> None:
        matrices: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            for each, tensor in zip(
                matrices, (parameter, parameter.grad, state["momentum_buffer"]), strict=True
            ):
                each.extend(tensor.unbind() if tensor.ndim == 3 else [tensor])
        muon(
            *matrices,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=0.95,
            nesterov=True,
            ns_coefficients=(3.4445, -4.7750, 2.0315),
            ns_steps=5,
            eps=1e-7,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )
