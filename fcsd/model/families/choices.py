"""Record which experts a model's routers choose in a forward pass.

Choices are read after the family's own top-k, so that they include groups, correction
biases and fcsd's own bias: from the router's output, or from the arguments of the
experts. E experts, K of them a token. In zaya, a token that chooses no expert is sent
to expert 0 with weight zero, and counts as its token.

Not covered: image tokens in families that have separate experts for them.
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
    """The routing of one router's tokens: the chosen experts (tokens, K) and the logits
    (tokens, E).
    """

    experts: Tensor
    logits: Tensor


class Recording:
    """The choices of a model's routers in the forward passes since the last `take`."""

    def __init__(self, routers: list[Router], *, with_gradient: bool = False):
        self.routers, self.with_gradient = routers, with_gradient
        self._calls: list[list[Routed]] = [[] for _ in routers]

    def take(self) -> list[Routed]:
        """Return the records of each of `routers` since the last call, and clear them.
        Raise UserError if a router has none.
        """
        calls, self._calls = self._calls, [[] for _ in self.routers]
        routed = []
        for router, records in zip(self.routers, calls, strict=True):
            if not records:
                raise UserError(
                    f"router {router.name} chose nothing: its layer has not run"
                )
            experts = torch.cat([record.experts for record in records])
            logits = torch.cat([record.logits for record in records])
            routed.append(Routed(experts, logits))
        return routed

    def hooks(self, index: int) -> tuple[Before, After]:
        """Return the hooks for a router: one before its experts, one after itself."""
        router = self.routers[index]
        logits: list[Tensor] = []

        def after_router(args: Any, kwargs: Any, output: Any) -> None:
            values = output if isinstance(output, tuple) else (output,)
            scores = values[router.logits_index if len(values) > 1 else 0]
            # The classes after the experts' are not theirs.
            scores = scores[..., : router.num_experts]
            scores = scores if self.with_gradient else scores.detach()
            if (chosen := _chosen(router, values)) is None:
                # The MoE block chooses, and passes its choice to the experts.
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
    """Read the chosen experts (tokens, K) from a router's output; None if it returns only
    logits.
    """
    choice = next((value for value in output if _is_choice(value)), None)
    if choice is not None:
        return choice
    sizes = next((value for value in output if isinstance(value, list)), None)
    if sizes is not None:
        # JetMoE returns the pairs sorted by expert, and the number of pairs per expert.
        # Scattering the experts by the order of the sort undoes it.
        order: Tensor = output[0]
        by_expert = torch.arange(len(sizes), device=order.device).repeat_interleave(
            torch.tensor(sizes, device=order.device)
        )
        return (
            torch.empty_like(order).scatter_(0, order, by_expert).view(-1, router.top_k)
        )
    if len(output) == 2:
        # Llama 4 returns scores of all experts, with 0 for those that are not chosen.
        scores: Tensor = output[1 - router.logits_index]
        # Without a gradient: under activation checkpointing the hooks do not run again,
        # so nothing may be saved for the backward pass here.
        return scores.detach().topk(router.top_k, dim=-1).indices
    return None


@contextlib.contextmanager
def recording(model: nn.Module, *, with_gradient: bool = False) -> Iterator[Recording]:
    """Record the choices of each router in the forward passes of the block; `take`
    returns them.

    with_gradient: gradients flow through the logits, also under activation
    checkpointing.

    Under expert or data parallelism only the tokens of this rank are recorded; under
    tensor parallelism every rank of the group records the same ones.

    Raises:
        UserError: the model has no router.
    """
    recorder = Recording(find_routers(model), with_gradient=with_gradient)
    modules = dict(unwrapped(model).named_modules())
    expert_hooks: list[tuple[nn.Module, Before]] = []
    router_hooks: list[tuple[nn.Module, After]] = []
    for index, router in enumerate(recorder.routers):
        before_experts, after_router = recorder.hooks(index)
        router_hooks.append((router.module, after_router))
        experts = modules.get(router.experts_name)
        if experts is not None:
            expert_hooks.append((experts, before_experts))
    # Before all other hooks: those of tensor-parallel plans replace the experts of other
    # ranks in the output.
    with hooked(after=router_hooks, prepend=True), hooked(before=expert_hooks):
        yield recorder
