"""A map of its own for what every routed expert adds, behind the one that all of them share.

    r_t    what is still missing to the original's stream behind the layer, token t (N, D)
    v_e    what expert e adds, weighted by the router, on the tokens that it is chosen for (N_e, D)
    B_e    v_e B_e ≈ v_e + r_e, ridge towards the identity, into what expert e writes;   then r_e <- r_e - v_e (B_e - I)

One expert after another, each sees what those before it have left. One expert's outputs are in memory at a time: the
module that holds them all is called again with the tokens, choices and weights of this one.

Not covered: experts that are not called with (hidden states, choices, weights), or that add something beside them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.calibration.trace import first_tensor


@dataclass(frozen=True)
class Call:
    """What a module of routed experts was called with, hidden (N, D), choices and weights (N, K), and gave, (N, D)."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden: Tensor
    choices: Tensor
    weights: Tensor
    out: Tensor

    def expert(self, module: nn.Module, number: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the tokens (N_e,) that expert `number` is chosen for, of those in `mask`, and what it adds there."""
        chosen = self.choices == number
        if mask is not None:
            chosen = chosen & mask.to(chosen.device)[:, None]
        tokens, slots = chosen.nonzero(as_tuple=True)
        if not len(tokens):
            return tokens, self.out.new_empty(0, self.out.shape[-1])
        given = {
            id(self.hidden): self.hidden[tokens],
            id(self.choices): self.choices[tokens, slots][:, None],
            id(self.weights): self.weights[tokens, slots][:, None],
        }
        args = [given.get(id(value), value) for value in self.args]
        kwargs = {name: given.get(id(value), value) for name, value in self.kwargs.items()}
        out = first_tensor(module(*args, **kwargs))
        assert out is not None
        return tokens, out

    def to(self, device: torch.device) -> Call:
        """Return the same with its tensors on another device."""
        moved = {id(value): value.to(device) for value in (self.hidden, self.choices, self.weights)}
        return Call(
            tuple(moved.get(id(value), value) for value in self.args),
            {name: moved.get(id(value), value) for name, value in self.kwargs.items()},
            moved[id(self.hidden)],
            moved[id(self.choices)],
            moved[id(self.weights)],
            self.out.to(device),
        )


@contextlib.contextmanager
def calls_of(module: nn.Module) -> Iterator[list[Call]]:
    """Give the calls of a module of routed experts; nothing for calls that are of another kind."""
    found: list[Call] = []

    def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        out = first_tensor(out)
        if len(tensors) != 3 or out is None or any(value.ndim != 2 for value in (*tensors, out)):
            return
        hidden, *others = tensors
        choices = [value for value in others if not value.is_floating_point()]
        weights = [value for value in others if value.is_floating_point()]
        if choices and weights and choices[0].shape == weights[0].shape:
            found.append(Call(args, kwargs, hidden, choices[0], weights[0], out))

    hook = module.register_forward_hook(after, with_kwargs=True)
    try:
        yield found
    finally:
        hook.remove()


@torch.no_grad()
def adds_up(module: nn.Module, call: Call, num_experts: int) -> bool:
    """Whether the experts, one at a time, add what the module gave."""
    total = torch.zeros_like(call.out)
    for number in range(num_experts):
        tokens, out = call.expert(module, number)
        total.index_add_(0, tokens, out)
    return bool((total - call.out).abs().max() <= 1e-4 * call.out.abs().max())
