"""Record which experts a model's routers choose in a forward pass.

Choices are read behind the family's own top-k, so that groups, correction biases and a
bias of ours are in them: from the router's output, or from what the experts are called
with. E experts, K of them a token.

Not covered: tokens of images in families that have experts of their own for them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.base.hooks import After, Before, hooked
from fcsd.model.families.routers import Router, find_routers
from fcsd.model.families.structure import unwrapped


class Routed(NamedTuple):
    """What one router did with its tokens: experts (tokens, K) that each goes to, and
    the logits (tokens, E).
    """

    experts: Tensor
    logits: Tensor


class Recording:
    """What the routers of a model chose in the forward passes since `take` was called last."""

    def __init__(self, routers: list[Router], *, with_gradient: bool = False):
        self.routers, self.with_gradient = routers, with_gradient
        self._calls: list[list[Routed]] = [[] for _ in routers]

    def take(self) -> list[Routed]:
        """Return, for each of `routers`, all tokens since the last call, and forget
        them; UserError: one has none.
        """
        calls, self._calls = self._calls, [[] for _ in self.routers]
        for router, records in zip(self.routers, calls, strict=True):
            if not records:
                raise UserError(
                    f"router {router.name} chose nothing: no forward pass of its layer was seen"
                )
        return [
            Routed(
                torch.cat([r.experts for r in records]),
                torch.cat([r.logits for r in records]),
            )
            for records in calls
        ]

    def hooks(self, index: int) -> tuple[Before, After]:
        """Return what listens to the experts beside a router, and to the router."""
        router = self.routers[index]
        logits: list[Tensor] = []

        def after_router(args: Any, kwargs: Any, output: Any) -> None:
            values = output if isinstance(output, tuple) else (output,)
            scores = values[router.logits_index if len(values) > 1 else 0]
            scores = scores if self.with_gradient else scores.detach()
            if (chosen := _chosen(router, values)) is None:
                # the block chooses, and calls its experts with the choice
                logits.append(scores)
            else:
                self._calls[index].append(Routed(chosen.detach(), scores))

        def before_experts(args: Any, kwargs: Any) -> None:
            if logits:
                chosen = next(
                    value for value in (*args, *kwargs.values()) if _is_choice(value)
                )
                self._calls[index].append(Routed(chosen.detach(), logits.pop()))

        return before_experts, after_router


def _is_choice(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and not value.is_floating_point() and value.ndim == 2
    )


def _chosen(router: Router, output: tuple[Any, ...]) -> Tensor | None:
    """Read experts (tokens, K) off a router's output; None where it gives logits only."""
    if (
        choice := next((value for value in output if _is_choice(value)), None)
    ) is not None:
        return choice
    sizes = next((value for value in output if isinstance(value, list)), None)
    if sizes is not None:
        # JetMoE: the pairs sorted by expert, and how many each expert has
        order: Tensor = output[0]
        by_expert = torch.arange(len(sizes), device=order.device).repeat_interleave(
            torch.tensor(sizes, device=order.device)
        )
        return (
            torch.empty_like(order).scatter_(0, order, by_expert).view(-1, router.top_k)
        )
    if len(output) == 2:
        # Llama 4: scores of all experts, 0 for those that are not chosen
        scores: Tensor = output[1 - router.logits_index]
        return scores.topk(router.top_k, dim=-1).indices
    return None


@contextlib.contextmanager
def recording(model: nn.Module, *, with_gradient: bool = False) -> Iterator[Recording]:
    """Record what each router chooses in forward passes inside; `take` gives it.

    with_gradient: gradients flow through the logits, under activation checkpointing
    too.

    Under expert or data parallelism it sees the tokens of this rank only; under tensor
    parallelism every rank of the group sees the same ones.

    Raises:
        UserError: the model has no router.
    """
    recorder = Recording(find_routers(model), with_gradient=with_gradient)
    modules = dict(unwrapped(model).named_modules())
    before: list[tuple[nn.Module, Before]] = []
    after: list[tuple[nn.Module, After]] = []
    for index, router in enumerate(recorder.routers):
        before_experts, after_router = recorder.hooks(index)
        after.append((router.module, after_router))
        if (
            experts := modules.get(f"{router.name.rpartition('.')[0]}.experts")
        ) is not None:
            before.append((experts, before_experts))
    # First of the hooks: tensor-parallel plans replace the experts of other ranks in
    # the output.
    with hooked(after=after, prepend=True), hooked(before=before):
        yield recorder
