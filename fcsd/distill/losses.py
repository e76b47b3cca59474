"""Head and loss in one pass: forward KL and cross entropy from final hidden states, by chunks of tokens.

The logits of a 150k vocabulary outweigh everything else in a distillation step, so they are never kept: the
logits of a chunk (full rows, of student and teacher) give its loss and, in closed form, its gradient, and are
dropped.

    z = logit_scale * (hidden @ weight.T + bias)
    s = softcap * tanh(z / softcap)     (s = z without a softcap)
    dL/ds = softmax(s) - q              q: the teacher's distribution (KL) or the one-hot label (cross
    entropy)

Four matrix products a chunk (8 D V operations a token; six with a frozen head), none of them again in the
backward pass.

Precision. Logits are float32 whatever the inputs are: the gradient is a difference of two nearly equal
softmaxes once the student is close to the teacher, and logits rounded to bfloat16 leave an error of 23 % in
it at 5e-3 nats a token. On devices whose matrix product takes half-precision inputs and leaves float32 (CUDA)
the inputs stay as they are and dL/ds is rounded for the two gradient products (an error of 2e-3, whatever the
KL); elsewhere inputs are widened first. Head gradients are accumulated in float32. float64 inputs stay
float64 throughout.

No collective, no host synchronisation, no data-dependent shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.errors import UserError

# Memory for the logits of a chunk where the caller names none, and the fewest tokens in a chunk of a
# trainable head: every chunk reads and writes the (V, D) gradient, and with fewer tokens that traffic costs
# more than the products. On a CPU small tiles stay near the caches.
CHUNK_BYTES = {"cpu": 1 << 25, "accelerator": 1 << 30}
FEWEST_TOKENS = {"cpu": 128, "accelerator": 1024}


def fused_linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Sum over tokens of KL(teacher || student) = sum_v p_t (log p_t - log p_s), paper Eq. 4.

    Args:
        hidden: (N, D) the student's final hidden states of the tokens that carry loss.
        weight: (V, D) the student's head; `bias` (V,).
        teacher_hidden, teacher_weight, teacher_bias: (N, D'), (V, D'), (V,); constants, they get no gradient.
        logit_scale, softcap: what the family does to its logits (`fcsd.distill.head.head_scaling`).
        chunk_bytes: memory for the logits of one chunk with all temporaries; at least one token is taken.
            None: 1 GiB on an accelerator (at least 1024 tokens if the head trains), 32 MiB (128) on a CPU.

    Returns: a scalar, nats; float32 (float64 for float64 inputs). 0, not NaN, for N = 0, and still a node of
    the graph with zero gradients, so that no rank misses a collective. A non-finite logit gives a non-finite
    loss. The gradients are scaled in place: a retained graph is differentiated once, a second time is an
    error.

    Raises: UserError when the vocabularies differ, or the shapes do not fit together.
    """
    _check("student", hidden, weight, bias)
    _check("teacher", teacher_hidden, teacher_weight, teacher_bias)
    if weight.shape[0] != teacher_weight.shape[0]:
        raise UserError(
            "teacher and student differ in vocabulary size "
            f"({teacher_weight.shape[0]} and {weight.shape[0]}): the KL divergence needs one vocabulary; "
            "distil from the checkpoint that the student was made from"
        )
    if hidden.shape[0] != teacher_hidden.shape[0]:
        raise UserError(
            f"{teacher_hidden.shape[0]} tokens of the teacher for {hidden.shape[0]} of the student"
        )
    teacher = _Head(
        teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap
    ).detach()
    return _FusedLinearLoss.apply(hidden, weight, bias, logit_scale, softcap, teacher, chunk_bytes)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Sum over tokens of -log p(label), in nats (paper Eq. 3).

    Args: as `fused_linear_kl`; labels: (N,) integer token ids in 0 … V-1, every one of which counts (there is
    no ignore index: leave out the tokens without loss).

    Returns: a scalar, as `fused_linear_kl`.
    """
    _check("student", hidden, weight, bias)
    if labels.shape != hidden.shape[:1]:
        raise UserError(f"labels of shape {tuple(labels.shape)} for {hidden.shape[0]} tokens")
    return _FusedLinearLoss.apply(hidden, weight, bias, logit_scale, softcap, labels, chunk_bytes)


def _check(whose: str, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(
            f"{whose}: hidden states {tuple(hidden.shape)} and head {tuple(weight.shape)} do not fit "
            "together: (N, D) and (V, D) needed"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"{whose}: head bias {tuple(bias.shape)} for a vocabulary of {weight.shape[0]}")


@dataclass
class _Head:
    """What gives one model's logits: (N, D) hidden states, (V, D) weight, (V,) bias, the post-processing."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    def detach(self) -> _Head:
        bias = None if self.bias is None else self.bias.detach()
        return _Head(self.hidden.detach(), self.weight.detach(), bias, self.logit_scale, self.softcap)

    def operands(self) -> _Head:
        """The same head with hidden states and weight in the one dtype that the products take."""
        dtype = _operand_dtype(self.hidden, self.weight)
        hidden, weight = self.hidden.to(dtype), self.weight.to(dtype)
        return _Head(hidden, weight, self.bias, self.logit_scale, self.softcap)

    def logits(self, begin: int, end: int, out: Tensor) -> Tensor:
        """The post-processed logits of tokens begin … end-1, written into (end-begin, V) `out`."""
        _mm(self.hidden[begin:end], self.weight.t(), out)
        if self.bias is not None:
            out.add_(self.bias)
        if self.logit_scale != 1.0:
            out.mul_(self.logit_scale)
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        return out

    def logit_gradient(self, logits: Tensor) -> Tensor | None:
        """ds/dz, elementwise; None where it is 1."""
        if self.softcap is None:
            return None
        return (logits / self.softcap).square_().neg_().add_(1.0)


class _FusedLinearLoss(torch.autograd.Function):
    """The loss sum of N tokens; gradients are computed in the forward pass, scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        logit_scale: float,
        softcap: float | None,
        target: _Head | Tensor,
        chunk_bytes: int | None,
    ) -> Tensor:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        student = _Head(hidden, weight, bias, logit_scale, softcap).operands()
        teacher = target.operands() if isinstance(target, _Head) else None
        num_tokens, num_vocab = hidden.shape[0], weight.shape[0]
        dtype = torch.float64 if student.weight.dtype == torch.float64 else torch.float32
        num_tiles = (3 if teacher is not None else 2) + (softcap is not None)
        row_bytes = num_vocab * dtype.itemsize * num_tiles
        chunk = min(_chunk_tokens(row_bytes, chunk_bytes, hidden.device, wants_weight), num_tokens)

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=hidden.device)

        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        grad_hidden = new(*hidden.shape) if wants_hidden else None
        grad_weight = new(*weight.shape).zero_() if wants_weight else None
        grad_bias = new(num_vocab).zero_() if wants_bias else None
        student_tile = new(chunk, num_vocab)
        teacher_tile = new(chunk, num_vocab) if teacher is not None else None

        # Inside an autocast region the products below would be rounded to bfloat16 again.
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, num_tokens, max(chunk, 1)):
                end = min(begin + chunk, num_tokens)
                s = student.logits(begin, end, student_tile[: end - begin])
                factor = student.logit_gradient(s) if any(ctx.needs_input_grad[:3]) else None
                s.sub_(torch.logsumexp(s, -1, keepdim=True))  # log p_s
                if teacher is not None and teacher_tile is not None:
                    t = teacher.logits(begin, end, teacher_tile[: end - begin])
                    t.sub_(torch.logsumexp(t, -1, keepdim=True))  # log p_t
                    p = t.exp()
                    loss += t.sub_(s).mul_(p).sum()
                    d = s.exp_().sub_(p)
                    del p
                    # sum(p_s - p_t) is 0 but for the rounding of the two log-sum-exps, which enters the sum
                    # above with the opposite sign: without this line the KL of a converged student is
                    # rounding noise.
                    loss += d.sum()
                else:
                    assert isinstance(target, Tensor)
                    labels = target[begin:end].unsqueeze(1)
                    loss -= s.gather(1, labels).sum()
                    d = s.exp_()
                    d.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=dtype))
                if factor is not None:
                    d.mul_(factor)
                    del factor
                if logit_scale != 1.0:
                    d.mul_(logit_scale)
                if grad_bias is not None:
                    grad_bias += d.sum(0)
                if grad_hidden is None and grad_weight is None:
                    continue
                d = d.to(student.weight.dtype)
                if grad_hidden is not None:
                    _mm(d, student.weight, grad_hidden[begin:end])
                if grad_weight is not None:
                    _addmm(grad_weight, d.t(), student.hidden[begin:end])
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:
        # In place: the buffers are ours, and one is as large as the head. A second pass over a retained graph
        # is refused by autograd, which sees that a saved tensor changed.
        grads = [
            None if saved is None else saved.mul_(grad_loss).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


def _chunk_tokens(
    bytes_per_token: int, chunk_bytes: int | None, device: torch.device, trains_head: bool
) -> int:
    if chunk_bytes is not None:
        return max(1, chunk_bytes // bytes_per_token)
    kind = "cpu" if device.type == "cpu" else "accelerator"
    return max(FEWEST_TOKENS[kind] if trains_head else 1, CHUNK_BYTES[kind] // bytes_per_token)


def _widening_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device multiplies this dtype into float32 without rounding the result."""
    return device.type in ("cuda", "xpu") and dtype in (torch.bfloat16, torch.float16)


def _operand_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(hidden.device.type)  # what the head alone would be given
    if dtype == torch.float64 or _widening_product(hidden.device, dtype):
        return dtype
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, without rounding to the inputs' dtype."""
    if _widening_product(a.device, a.dtype):
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        torch.mm(a, b, out=out)


def _addmm(accumulator: Tensor, a: Tensor, b: Tensor) -> None:
    """accumulator += a @ b, without rounding the product to the inputs' dtype."""
    if _widening_product(a.device, a.dtype):
        torch.addmm(accumulator, a, b, out_dtype=torch.float32, out=accumulator)
    else:
        accumulator.addmm_(a, b)
