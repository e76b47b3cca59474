"""Makes head and loss one module, and reaches what else the objectives need from inside a model.

A loss computed outside the model from `lm_head.weight` would miss the hooks by which FSDP2 and ZeRO-3 gather
a parameter and reduce its gradient, and DDP's forward. So the head itself computes the loss, and the model's
own forward calls it:

    attach_loss_head(model)
    teacher_hidden = final_hidden(teacher, input_ids, position_ids, keep)
    loss = model(input_ids=…, position_ids=…, keep=keep, objective="kl",
                 teacher_hidden=teacher_hidden, teacher_head=teacher.lm_head)["loss"]

Parameters, modules and names stay what they are; without `objective` the model is the model that it was.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_masks_for_generate
from transformers.utils import ModelOutput

from fcsd.distill.losses import fused_linear_cross_entropy, fused_linear_kl
from fcsd.errors import UserError

# Families that leave the position ids out when they make their masks (transformers 5.23), so that packed
# examples would see each other. A test goes through all families.
MASKS_IGNORE_POSITIONS = {"gpt_oss", "afmoe"}


@dataclass
class LossOutput(ModelOutput):
    """What a model with a loss head returns in training: the loss sum, or (N, D) hidden states."""

    loss: Tensor | None = None
    hidden: Tensor | None = None


@dataclass
class _Target:
    """What the head compares its logits with. Not a pytree node: no wrapper casts or moves its tensors."""

    labels: Tensor | None = None
    teacher_hidden: Tensor | None = None
    teacher_head: nn.Module | None = None


def head_scaling(config: Any) -> tuple[float, float | None]:
    """(logit_scale, softcap) of a family: its logits are softcap * tanh(logit_scale * head(h) / softcap).

    logit_scale: 1 / `logits_scaling` (granite families), or `logit_scale` (cohere families), else 1.
    softcap: `final_logit_softcapping` (gemma families), else None.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    divisor = getattr(config, "logits_scaling", None)
    factor = getattr(config, "logit_scale", None)
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = 1.0 / divisor if divisor is not None else 1.0
    return scale * (factor if factor is not None else 1.0), softcap


class LossHead(nn.Linear):
    """A head that, given a target, returns the loss sum over (N, D) hidden states instead of logits."""

    _replaced: type[nn.Linear]
    logit_scale: float
    softcap: float | None

    def forward(self, hidden: Tensor, target: _Target | None = None) -> Tensor:
        """`hidden` without a target: (…, D) to logits (…, V), as before; with one: (N, D) to a scalar."""
        if target is None:
            return super().forward(hidden)
        own: dict[str, Any] = {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}
        if target.labels is not None:
            return fused_linear_cross_entropy(hidden, self.weight, target.labels, **own)
        teacher: Any = target.teacher_head
        assert teacher is not None and target.teacher_hidden is not None
        return fused_linear_kl(
            hidden,
            self.weight,
            target.teacher_hidden,
            teacher.weight,
            teacher_bias=teacher.bias,
            # A teacher without a loss head of its own is the original of the student: the same family.
            teacher_logit_scale=getattr(teacher, "logit_scale", self.logit_scale),
            teacher_softcap=getattr(teacher, "softcap", self.softcap),
            **own,
        )


@functools.cache
def _loss_head_class(cls: type[nn.Linear]) -> type[nn.Linear]:
    return type(cls.__name__, (LossHead, cls) if cls is not nn.Linear else (LossHead,), {"_replaced": cls})


def attach_loss_head(model: nn.Module) -> None:
    """Give `model`, a causal language model of transformers, a training forward. Do so before it is wrapped.

    The training forward takes
        input_ids, position_ids (B, T); attention_mask, None when rows are packed
        keep: which positions enter the loss, (B, T) bool, or (N,) int64 indices into the B * T positions (no
              host synchronisation on an accelerator). Position t predicts token t+1; shifting is the caller's
              work, see `fcsd.distill.data.next_token_targets`. None keeps all.
        objective: "ce" with labels (N,); "kl" with teacher_hidden (N, D') and teacher_head, the module with
              the teacher's gathered `weight` and `bias`; "hidden" for the (N, D) final hidden states
              themselves
    and returns a `LossOutput` whose `loss` is a sum over the N positions, in nats.

    Raises: UserError when the model has no `lm_head` that is a Linear, or no `model` to give hidden states.
    """
    head: Any = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear) or not hasattr(model, "model"):
        raise UserError(
            f"{type(model).__name__}: not a causal language model with a `model` and a linear `lm_head`; "
            "fcsd trains such models only"
        )
    if isinstance(head, LossHead):
        return
    logit_scale, softcap = head_scaling(model.config)
    patched: Any = head
    patched.__class__ = _loss_head_class(type(head))  # type: ignore[arg-type]
    patched.logit_scale, patched.softcap = logit_scale, softcap

    family_forward = model.forward
    model.__dict__["_forward_before_loss_head"] = model.__dict__.get("forward")

    # The family's signature stays visible: generate and the Trainer look at it.
    @functools.wraps(getattr(family_forward, "__func__", family_forward))
    def forward(self: nn.Module, *args: Any, objective: str | None = None, **kwargs: Any) -> Any:
        if objective is None:
            return family_forward(*args, **kwargs)
        return _training_forward(self, *args, objective=objective, **kwargs)

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]


def detach_loss_head(model: nn.Module) -> None:
    """Undo `attach_loss_head`; nothing happens to a model that has none."""
    head = model.lm_head
    if not isinstance(head, LossHead):
        return
    head.__class__ = head._replaced  # type: ignore[assignment]
    del head.logit_scale, head.softcap
    earlier = model.__dict__.pop("_forward_before_loss_head")
    del model.__dict__["forward"]
    if earlier is not None:
        model.__dict__["forward"] = earlier


def _training_forward(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    keep: Tensor | None = None,
    *,
    objective: str,
    labels: Tensor | None = None,
    teacher_hidden: Tensor | None = None,
    teacher_head: nn.Module | None = None,
) -> LossOutput:
    hidden = _body(model, input_ids, position_ids, attention_mask, keep)
    if objective == "hidden":
        return LossOutput(hidden=hidden)
    if objective == "ce" and labels is not None:
        return LossOutput(loss=model.lm_head(hidden, _Target(labels=labels)))
    if objective == "kl" and teacher_hidden is not None and teacher_head is not None:
        target = _Target(teacher_hidden=teacher_hidden, teacher_head=teacher_head)
        return LossOutput(loss=model.lm_head(hidden, target))
    raise ValueError(
        f"objective {objective!r}: needed is 'ce' with labels, 'kl' with teacher_hidden and teacher_head, "
        "or 'hidden'"
    )


def _body(
    model: Any,
    input_ids: Tensor,
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    keep: Tensor | None,
) -> Tensor:
    """The (N, D) hidden states after the final norm of the kept positions."""
    config = model.config
    may_be_packed = attention_mask is None and position_ids is not None
    masks: Any = attention_mask
    if may_be_packed and position_ids is not None and "flash" in (config._attn_implementation or ""):
        # transformers hands position ids to the variable-length kernels for a single row only, and would let
        # packed examples see each other in a batch of several. Every row starts at position 0, so one long
        # row is the same.
        input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    elif may_be_packed and config.model_type.removeprefix("farskip_") in MASKS_IGNORE_POSITIONS:
        shape = torch.empty(*input_ids.shape, 1, dtype=model.dtype, device=input_ids.device)
        masks = create_masks_for_generate(config, shape, None, None, position_ids)
    outputs = model.model(
        input_ids=input_ids, attention_mask=masks, position_ids=position_ids, use_cache=False
    )
    return kept(outputs.last_hidden_state, keep)


def kept(hidden: Tensor, keep: Tensor | None) -> Tensor:
    """(B, T, D) to (N, D) at `keep`: (B, T) bool, (N,) int64 indices into B * T, or None for all."""
    flat = hidden.flatten(0, -2)
    if keep is None:
        return flat
    return flat[keep.flatten()] if keep.dtype == torch.bool else flat.index_select(0, keep)


def final_hidden(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor | None, keep: Tensor | None
) -> Tensor:
    """(N, D) hidden states after the final norm of the kept positions: all that a teacher's head needs.

    A model with a loss head is called as a whole, so that its root's FSDP or ZeRO hooks run.
    """
    if isinstance(getattr(_unwrapped(model), "lm_head", None), LossHead):
        return model(input_ids=input_ids, position_ids=position_ids, keep=keep, objective="hidden")["hidden"]
    return _body(model, input_ids, position_ids, None, keep)


@contextmanager
def block_outputs(model: nn.Module, enabled: bool = True) -> Iterator[list[Tensor]]:
    """Collect o_k, the (B, T, D) residual stream after each decoder layer, of one forward pass in the
    context.

    A layer may return o_k or a tuple that starts with it. Gradients flow through what is collected, under
    activation checkpointing too: transformers checkpoints a layer's forward, inside of its hooks.
    """
    blocks: list[Tensor] = []
    if not enabled:
        yield blocks
        return
    layers = _unwrapped(model).model.layers

    def collect(_module: nn.Module, _inputs: Any, output: Any) -> None:
        blocks.append(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(collect) for layer in layers]
    try:
        yield blocks
    finally:
        for handle in handles:
            handle.remove()


def l2_sum(student_blocks: Sequence[Tensor], teacher_blocks: Sequence[Tensor], keep: Tensor | None) -> Tensor:
    """Sum over kept tokens and layers of |o_k(student) - o_k(teacher)|^2, paper Eq. 5; 0 when none is kept.

    Args: for each layer (B, T, D); keep as in `kept`. Returns: a float32 scalar (float64 for float64 inputs).
    """
    if len(student_blocks) != len(teacher_blocks) or not student_blocks:
        raise UserError(
            f"the student has {len(student_blocks)} decoder layers and the teacher {len(teacher_blocks)}: "
            "objective kl+l2 compares them one by one"
        )
    sums = []
    for student, teacher in zip(student_blocks, teacher_blocks, strict=True):
        difference = kept(student, keep) - kept(teacher.detach(), keep)
        sums.append(difference.to(torch.promote_types(difference.dtype, torch.float32)).square().sum())
    return torch.stack(sums).sum()


def _unwrapped(model: nn.Module) -> Any:
    """The model inside DDP or a DeepSpeed engine, both of which call it `module`."""
    return model.module if isinstance(getattr(model, "module", None), nn.Module) else model
