"""Make head and loss one module.

A loss computed outside the model from `lm_head.weight` would bypass the hooks by which
FSDP2 and ZeRO-3 gather a parameter and reduce its gradient, and DDP's forward.
Therefore the head itself computes the loss, and the model's own forward calls it:

    attach_loss_head(model)
    teacher_hidden = final_hidden(teacher, input_ids, position_ids, keep)
    loss = model(input_ids=…, position_ids=…, keep=keep, objective=KLObjectiveConfig(),
                 teacher_hidden=teacher_hidden, teacher_head=teacher.lm_head)["loss"]

(`output_head(teacher)` for any family.)

Parameters, modules and names do not change; without `objective` the model behaves as
before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import ModelOutput

from fcsd.base.errors import UserError
from fcsd.data.batches import NO_LOSS, Batch, next_token_targets
from fcsd.model.families import FAMILIES, base_model_type
from fcsd.model.families.structure import (
    head_and_body,
    head_scaling,
    output_head,
    unpadded_vocab_size,
    unwrapped,
)
from fcsd.training.losses.fused import KERNELS, Head, Kernels, fused_linear_loss
from fcsd.training.losses.objectives import ObjectiveConfig


@dataclass
class LossOutput(ModelOutput):
    """The output of a model with a loss head in training: the loss sum, or (N, D)
    hidden states.

    A divergence also has the figures of each of the N tokens
    (`fcsd.training.losses.fused.TokenStatistics`).
    """

    loss: Tensor | None = None
    hidden: Tensor | None = None
    divergence: Tensor | None = None
    teacher_entropy: Tensor | None = None
    top1_agreement: Tensor | None = None


@dataclass
class Target:
    """The target that the head compares its logits with: labels or a teacher, never
    both, because a measure sees one of them. It is no pytree node, so that no wrapper
    casts or moves its tensors.

    labels: (N,), for an objective without a teacher. teacher_hidden: (N, D').
    teacher_head: has gathered `weight` and `bias`.
    """

    objective: ObjectiveConfig
    labels: Tensor | None = None
    teacher_hidden: Tensor | None = None
    teacher_head: nn.Module | None = None

    def __post_init__(self) -> None:
        required = {"labels"}
        if self.objective.has_teacher:
            required = {"teacher_hidden", "teacher_head"}
        possible = ("labels", "teacher_hidden", "teacher_head")
        given = {name for name in possible if getattr(self, name) is not None}
        if given != required:
            names = " and ".join(sorted(required, reverse=True))
            raise ValueError(
                f"objective {self.objective.name!r} needs {names}, and nothing beside"
                f" them; got {' and '.join(sorted(given)) or 'none'}"
            )


class LossHead(nn.Linear):
    """A head that, given a target, returns the loss sum over (N, D) hidden states
    instead of logits.
    """

    _replaced: type[nn.Linear]
    logit_scale: float
    softcap: float | None
    vocab_size: int | None
    kernels: Kernels = KERNELS

    def forward(self, hidden: Tensor, target: Target | None = None) -> Any:
        """Map `hidden` (…, D) to logits (…, V); with a target, (N, D) to a scalar and,
        with a teacher, the tokens' statistics.
        """
        if target is None:
            return super().forward(hidden)
        teacher: Any = target.teacher_head
        labels_or_teacher: Any = target.labels
        if teacher is not None:
            # A teacher without its own scaling is the student's original, of the same
            # family.
            scaling = (
                getattr(teacher, name, getattr(self, name))
                for name in ("logit_scale", "softcap")
            )
            labels_or_teacher = Head(
                cast(Tensor, target.teacher_hidden),
                teacher.weight,
                teacher.bias,
                *scaling,
            )
        return fused_linear_loss(
            Head(hidden, self.weight, self.bias, self.logit_scale, self.softcap),
            labels_or_teacher,
            target.objective,
            vocab_size=self.vocab_size,
            statistics=teacher is not None,
            kernels=self.kernels,
        )


@functools.cache
def _loss_head_class(cls: type[nn.Linear]) -> type[nn.Linear]:
    return type(
        cls.__name__,
        (LossHead, cls) if cls is not nn.Linear else (LossHead,),
        {"_replaced": cls},
    )


def attach_loss_head(model: nn.Module, vocab_size: int | None = None) -> None:
    """Give `model`, a causal language model of transformers, a training forward. Do so
    before it is wrapped.

    vocab_size: rows of the head from here on are padding and enter no loss; None: as
    its configuration says.

    The training forward takes
        input_ids, position_ids: (B, T).
        keep: the positions that enter the loss, (B, T) bool, or (N,) int64 indices into
            the B * T positions (no host synchronisation on an accelerator); None: all.
            Position t predicts token t+1 (`fcsd.data.batches.next_token_targets`).
        objective: one of `fcsd.training.losses.objectives`, with the fields of its
            `Target`; "hidden" for the (N, D) final hidden states themselves
    and returns a `LossOutput` whose `loss` is a sum over the N positions, in nats.

    Raises: UserError when the head of the model is no Linear, or it has no body that
    returns hidden states.
    """
    head, _ = head_and_body(model)
    if isinstance(head, LossHead):
        return
    logit_scale, softcap = head_scaling(model.config)
    if vocab_size is None:
        vocab_size = unpadded_vocab_size(model.config)
    # The class is exchanged in place: the module object, its name and its parameters,
    # which may be tied, stay the same.
    patched: Any = head
    patched.__class__ = _loss_head_class(type(head))  # type: ignore[arg-type]
    patched.logit_scale, patched.softcap = logit_scale, softcap
    patched.vocab_size = vocab_size

    # An instance attribute may hide the class's forward already; detaching restores it.
    family_forward = model.forward
    model.__dict__["_forward_before_loss_head"] = model.__dict__.get("forward")

    # `wraps` keeps the family's signature, which `generate` and the Trainer inspect.
    @functools.wraps(getattr(family_forward, "__func__", family_forward))
    def forward(
        self: nn.Module, *args: Any, objective: Any = None, **kwargs: Any
    ) -> Any:
        if objective is None:
            return family_forward(*args, **kwargs)
        return _training_forward(self, *args, objective=objective, **kwargs)

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]


def detach_loss_head(model: nn.Module) -> None:
    """Undo `attach_loss_head`; do nothing to a model without a loss head."""
    head = output_head(model)
    if not isinstance(head, LossHead):
        return
    head.__class__ = head._replaced  # type: ignore[assignment]
    del head.logit_scale, head.softcap, head.vocab_size
    own_forward = model.__dict__.pop("_forward_before_loss_head")
    del model.__dict__["forward"]
    if own_forward is not None:
        model.__dict__["forward"] = own_forward


@contextlib.contextmanager
def loss_head(model: nn.Module, vocab_size: int | None = None) -> Iterator[None]:
    """Give a model a loss head within the block; one that it already has stays."""
    attached = isinstance(output_head(model), LossHead)
    if not attached:
        attach_loss_head(model, vocab_size)
    try:
        yield
    finally:
        if not attached:
            detach_loss_head(model)


def _training_forward(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    objective: Any,
    **fields: Any,
) -> LossOutput:
    target = Target(objective, **fields) if objective != "hidden" else None
    head, body = head_and_body(model)
    hidden = body_hidden(model, input_ids, position_ids, keep, body=body)
    if target is None:
        return LossOutput(hidden=hidden)
    # Called as a module, so that the head's own hooks run.
    loss, statistics = head(hidden, target)
    return LossOutput(
        loss=loss, **(statistics._asdict() if statistics is not None else {})
    )


def body_hidden(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    keep: Tensor | None,
    *,
    body: nn.Module | None = None,
) -> Tensor:
    """Compute the (N, D) hidden states of the kept positions after the final norm,
    bypassing the model's own forward. body: of the model; None: it is looked up.
    """
    config, masks = model.config, None
    if position_ids is not None and "flash" in (config._attn_implementation or ""):
        # transformers passes position ids to the variable-length kernels for a single
        # row only, and would let packed examples see each other in a batch of several
        # rows. Every row starts at position 0, so one long row is equivalent.
        input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    elif position_ids is not None and packing_of(config) == "given_masks":
        shape = torch.empty(
            *input_ids.shape, 1, dtype=model.dtype, device=input_ids.device
        )
        masks = create_masks_for_generate(config, shape, None, None, position_ids)
    body = head_and_body(model)[1] if body is None else body
    outputs = body(
        input_ids=input_ids,
        attention_mask=masks,
        position_ids=position_ids,
        use_cache=False,
    )
    return kept(outputs.last_hidden_state, keep)


def kept(hidden: Tensor, keep: Tensor | None) -> Tensor:
    """Select (N, D) of (B, T, D) at `keep`: (B, T) bool, (N,) int64 indices into B * T,
    or None for all.
    """
    flat = hidden.flatten(0, -2)
    if keep is None:
        return flat
    if keep.dtype == torch.bool:
        return flat[keep.flatten()]
    return flat.index_select(0, keep)


def final_hidden(
    model: nn.Module,
    input_ids: Tensor,
    position_ids: Tensor | None,
    keep: Tensor | None,
) -> Tensor:
    """Compute the (N, D) hidden states of the kept positions after the final norm, the
    input of a teacher's head.

    A model with a loss head is called as a whole, so that the FSDP or ZeRO hooks of its
    root run.
    """
    head, body = head_and_body(unwrapped(model))
    if isinstance(head, LossHead):
        return model(
            input_ids=input_ids,
            position_ids=position_ids,
            keep=keep,
            objective="hidden",
        )["hidden"]
    return body_hidden(model, input_ids, position_ids, keep, body=body)


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """Compute the logits (…, V) of final hidden states (…, D), as the model's own
    forward does.
    """
    logits = output_head(model)(hidden)
    scale, softcap = head_scaling(model.config)
    logits = logits if scale == 1 else logits * scale
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def batch_hidden(model: nn.Module, batch: Batch) -> Tensor:
    """Compute `final_hidden` of the positions of a batch that predict a token with
    loss.
    """
    keep, _ = next_token_targets(batch["labels"], batch["position_ids"])
    return final_hidden(model, batch["input_ids"], batch["position_ids"], keep)


def refuse_packing(model: nn.Module, labels: Tensor, position_ids: Tensor) -> None:
    """Raise UserError when rows (B, T) hold several examples and this model would let
    them see each other.
    """
    config = unwrapped(model).config
    if packing_of(config) != "leaks":
        return
    # Padding begins at position 0, too, but has no token with loss.
    begins = (position_ids[:, 1:] == 0).cumsum(1)
    if bool(((begins > 0) & (labels[:, 1:] != NO_LOSS)).any()):
        raise UserError(
            f"model type '{base_model_type(config.model_type)}' lets packed examples"
            " attend to each other; set data.packing: false"
        )


def packing_of(config: Any) -> Literal["position_ids", "given_masks", "leaks"]:
    """Return how a model with this config keeps the examples of a packed row apart; see
    `Family.packing`.
    """
    return _packing(config.model_type)


@cache
def _packing(model_type: str) -> Literal["position_ids", "given_masks", "leaks"]:
    row = FAMILIES.get(base_model_type(model_type))
    return "position_ids" if row is None else row.packing
