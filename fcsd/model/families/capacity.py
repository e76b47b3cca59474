"""Give each expert a capacity, and drop the pairs of token and expert above it.

capacity = factor x K x tokens / E, rounded up, with E experts, K of them a token. The
article of `docs/steer.md` has two definitions: its text leaves K out, which at top-8
would drop seven of eight pairs of an even routing, and its code rounds down
(`int(load_factor * top_k * B * T // n_experts)`), which drops all pairs of a single
token. A dropped pair gives zero, as in the article's text; its code reads past the end
of the expert's buffer there, for which JAX makes no promise.

The tokens are those of one forward pass of one process, as in the article's text ("each
GPU gathers its tokens into expert-specific buffers"), GShard's groups and Megatron; the
article's code counts those of all devices. Expert parallelism therefore changes
nothing: two ranks drop the same pairs as one process that runs their micro-batches one
after the other. Padding uses no capacity; in training, text after the last token with
loss in a row does not either.

Not covered: saving the work and traffic of dropped pairs.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.model.families.routers import Router, find_routers
from fcsd.model.families.structure import unwrapped

Drop = Literal["order", "weight"]
"""The pairs to drop: those of the last tokens in the pass, or those with the smallest
weights.
"""


def capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return how many tokens of a forward pass one expert takes: ceil(factor * K *
    tokens / experts).
    """
    return math.ceil(round(factor * top_k * num_tokens / num_experts, 9))


def kept_pairs(experts: Tensor, limit: int, weights: Tensor | None = None) -> Tensor:
    """Return which pairs (T, K) are among the first `limit` of their expert.

    experts: (T, K) ids. weights: (T, K); if given, pairs with larger weights come
    first, and equal ones in order. Without them, all come in order.
    """
    flat = experts.reshape(-1)
    order = torch.arange(len(flat), device=flat.device)
    if weights is not None:
        order = weights.reshape(-1).argsort(descending=True, stable=True)
    # The second, stable sort groups the pairs by expert and keeps the order within each.
    order = order[flat[order].argsort(stable=True)]
    ordered = flat[order].contiguous()
    # The rank of a pair within its expert: its index minus the index of the expert's
    # first pair.
    rank = torch.arange(len(flat), device=flat.device) - torch.searchsorted(
        ordered, ordered
    )
    return (
        torch.empty_like(flat, dtype=torch.bool)
        .scatter_(0, order, rank < limit)
        .view(experts.shape)
    )


class Dropping:
    """The capacity of one model's experts, and the counts of pairs since the last call of
    `take`.
    """

    def __init__(
        self, model: nn.Module, factor: float, drop: Drop, training_only: bool
    ):
        self.factor, self.drop, self.training_only = factor, drop, training_only
        self.routers = find_routers(model)
        # (B * T,) bool: the tokens that take room; None: all
        self.tokens: Tensor | None = None
        self.num_tokens = 0
        self._counted: set[int] = set()
        # [dropped, all], one entry for each layer and pass
        self._pairs: list[Tensor] = []

    def begin(self, tokens: Tensor | None) -> None:
        """Start a forward pass. Layers that are recomputed drop the same pairs and are
        not counted again.

        tokens: (B, T), which tokens are not padding; None: all. Padding takes no room.
        """
        self.tokens = None if tokens is None else tokens.reshape(-1).bool()
        self.num_tokens = 0 if self.tokens is None else int(self.tokens.sum())
        self._counted.clear()

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the numbers of dropped and of all pairs over layers and passes, and
        reset them; None if there was no pass.
        """
        pairs, self._pairs = self._pairs, []
        if not pairs:
            return None
        dropped, total = torch.stack(pairs).sum(0)
        return dropped, total

    def weights(
        self, number: int, module: nn.Module, experts: Tensor, weights: Tensor
    ) -> Tensor:
        """Return the routing weights (N, K) of a layer, whose experts are `module`, with 0
        and no gradient for dropped pairs.
        """
        if self.training_only and not module.training:
            return weights
        return weights.masked_fill(~self.kept(number, experts, weights), 0)

    @torch.no_grad()
    def kept(self, number: int, experts: Tensor, weights: Tensor) -> Tensor:
        """Return which pairs (N, K) of a layer's router are kept; padding keeps its
        pairs, whose output is never read.
        """
        router, tokens = self.routers[number], self.tokens
        if tokens is not None and len(tokens) != len(experts):
            raise UserError(
                f"capacity factor: {router.name} has {len(experts)} of the"
                f" batch's {len(tokens)} tokens, so padding cannot be told apart;"
                " leave the factor out"
            )
        num_tokens = len(experts) if tokens is None else self.num_tokens
        limit = capacity(self.factor, num_tokens, router.top_k, router.num_experts)
        order_weights = weights if self.drop == "weight" else None
        # Padding goes to one more expert, so that it fills no real one.
        ids = experts
        if tokens is not None:
            ids = experts.masked_fill(~tokens[:, None], router.num_experts)
        keeps = kept_pairs(ids, limit, order_weights)
        if tokens is not None:
            keeps |= ~tokens[:, None]
        # Activation checkpointing calls the experts again in the backward pass.
        if number not in self._counted:
            self._counted.add(number)
            dropped = (~keeps).sum()
            self._pairs.append(
                torch.stack(
                    [dropped, torch.full_like(dropped, num_tokens * router.top_k)]
                )
            )
        return keeps


def _before_experts(experts: nn.Module, args: Any, kwargs: Any) -> Any:
    """Change the weights that experts are called with."""
    runtime = getattr(experts, "farskip_ep", None)
    if runtime is not None and runtime.has_rows:
        return None  # the rows have been dispatched already
    names = _arguments(experts)
    values = [*args, *(kwargs[name] for name in names[len(args) :])]
    options = {name: value for name, value in kwargs.items() if name not in names}
    return capped(experts, tuple(values)), options


def capped(experts: Any, chosen: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments (rows, choices, weights, ...) with the weights of dropped
    pairs set to 0, for callers that bypass the experts' hooks.
    """
    cap = experts.__dict__.get("farskip_cap")
    if cap is None:
        return chosen
    return (*chosen[:2], cap(*chosen[1:3]), *chosen[3:])


@contextlib.contextmanager
def dropping(
    model: nn.Module,
    factor: float,
    drop: Drop = "order",
    *,
    training_only: bool = False,
) -> Iterator[Dropping]:
    """Drop pairs above a capacity in the forward passes of the block, in an original or
    a converted model.

    A dropped pair has weight zero: it adds nothing and has no gradient. The weights of
    a token's other pairs stay the same. The `attention_mask` of a call marks padding,
    which uses no capacity. training_only: passes in evaluation mode drop nothing, and
    `begin` marks padding instead of the call.

    Raises:
        UserError: the model has no routers, its experts are not called with choices and
            weights (JetMoE, Llama 4), it has a capacity already, its ranks share their
            tokens, or the factor is not above 0.
    """
    if not (math.isfinite(factor) and factor > 0) or drop not in ("order", "weight"):
        raise UserError(
            f"capacity factor {factor}, drop {drop!r}: the factor must be above 0, and"
            " drop must be order or weight"
        )
    owner, state = unwrapped(model), Dropping(model, factor, drop, training_only)
    all_experts = [_experts_of(owner, router) for router in state.routers]

    def begin_pass(_: nn.Module, args: Any, kwargs: Any) -> None:
        mask = kwargs.get("attention_mask")
        inputs = [*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")]
        length = next(
            (value.shape[1] for value in inputs if isinstance(value, Tensor)), None
        )
        if mask is not None and (
            not isinstance(mask, Tensor) or mask.ndim != 2 or length is None
        ):
            raise UserError(
                "capacity factor: needs an attention_mask (B, T), got another mask"
            )
        # With a cache, the mask also covers earlier tokens; those of this pass come
        # last.
        state.begin(None if mask is None or length is None else mask[:, -length:])

    with contextlib.ExitStack() as stack:
        if not training_only:
            stack.callback(
                owner.register_forward_pre_hook(begin_pass, with_kwargs=True).remove
            )
        for number, experts in enumerate(all_experts):
            stack.callback(
                experts.register_forward_pre_hook(
                    _before_experts, with_kwargs=True
                ).remove
            )
            cap = functools.partial(state.weights, number, experts)
            experts.__dict__["farskip_cap"] = cap
            stack.callback(experts.__dict__.pop, "farskip_cap")
        yield state


def _arguments(experts: Any) -> list[str]:
    """Return the names of the experts' first three arguments (rows, choices and
    weights), whether peft adapts the experts or not.
    """
    base = experts.get_base_layer() if hasattr(experts, "get_base_layer") else experts
    return list(inspect.signature(type(base).forward).parameters)[1:4]


def _experts_of(owner: Any, router: Router) -> nn.Module:
    """Return the experts whose choices a router makes, if pairs of them can be dropped."""
    # Experts that choices and weights are passed to lie beside their router.
    experts = dict(owner.named_modules()).get(router.experts_name)
    if experts is None or len(_arguments(experts)) < 3:
        raise UserError(
            f"capacity factor: the experts of model type '{owner.config.model_type}' are"
            " not called with the choices and weights of a router, so no pair can be dropped; leave"
            " the factor out"
        )
    if "farskip_cap" in experts.__dict__:
        raise UserError(f"capacity factor: {type(owner).__name__} already has one")
    if (
        getattr(getattr(owner.config, "distributed_config", None), "tp_size", None) or 1
    ) > 1:
        raise UserError(
            "capacity factor: ranks under tensor parallelism share their tokens;"
            " distribute the experts by all-to-all"
        )
    return experts
