"""Head and loss in one pass: divergences and cross entropy from final hidden states, by chunks of tokens.

The logits of a 150k vocabulary outweigh everything else in a distillation step, so they are never kept: the
logits of a chunk (full rows, of student and teacher) give its loss and, in closed form, its gradient, and are
dropped.

    z = logit_scale * (hidden @ weight.T + bias)
    y = softcap * tanh(z / softcap)     (y = z without a softcap)
    p = softmax(y / temperature)        of the student p_s, of the teacher p_t; m = (1-b) p_s + b p_t

    kl          sum_v p_t log(p_t / p_s)                    d/d(y/T) = p_s - p_t
    reverse_kl  sum_v p_s log(p_s / p_t)                    p_s (log(p_s / p_t) - reverse_kl)
    jsd         b KL(p_t || m) + (1-b) KL(p_s || m)         (1-b) p_s (log(p_s / m) - KL(p_s || m))
    ce          -log p_s(label)                             p_s - one-hot

The definitions are those of TRL (`generalized_jsd_loss`, GKD, https://huggingface.co/papers/2306.13649) for
beta = 0, 1 and b. As there, the loss is the divergence at the temperature itself, in nats: it is not
multiplied by T^2, as Hinton et al. do.

Clipping. A token whose divergence d exceeds `clip` counts as min(d, clip): it adds `clip` to the loss and
nothing to the gradient. So the gradient is that of the loss that is reported, a token is either taken as it is
or left out, and those left out are the ones furthest from the teacher. This is the clamp of a token's loss of
verl (`loss_max_clamp`); the clip of OPSD (`jsd_token_clip`) bounds the summands of a token one by one, which
for forward KL turns off the very vocabulary entries that the teacher wants. It is no remedy for a student that
starts far off: with every token above `clip` nothing is learnt.

Four matmuls a chunk (8 D V operations a token; six with a frozen head), none of them again in the
backward pass.

Precision. Logits are float32 whatever the inputs are: the gradient is a difference of two nearly equal
softmaxes once the student is close to the teacher, and logits rounded to bfloat16 leave an error of 23 % in
it at 5e-3 nats a token. On devices whose matmul takes half-precision inputs and leaves float32 (CUDA)
the inputs stay as they are and the gradient of the logits is rounded for the two gradient matmuls (an error
of 2e-3, whatever the KL); elsewhere inputs are widened first. Head gradients are accumulated in float32.
float64 inputs stay float64 throughout.

No collective, no host synchronisation, no data-dependent shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.base.errors import UserError

# Memory for the logits of a chunk where the caller names none, and the fewest tokens in a chunk of a
# trainable head: every chunk reads and writes the (V, D) gradient, and with fewer tokens that traffic costs
# more than the matmuls. On a CPU small tiles stay near the caches.
CHUNK_BYTES = {"cpu": 1 << 25, "accelerator": 1 << 30}
FEWEST_TOKENS = {"cpu": 192, "accelerator": 1024}


class Kernels:
    """The matmuls of the loss, and what else depends on the device: their operands' dtype and the chunks' size.

    A subclass may run or count them otherwise, as `fcsd.planning.cost.trace` does; a head with a loss has its own
    (`kernels`).
    """

    def chunk_tokens(
        self, bytes_per_token: int, chunk_bytes: int | None, device: torch.device, trains_head: bool
    ) -> int:
        """Choose how many tokens a chunk has."""
        if chunk_bytes is not None:
            return max(1, chunk_bytes // bytes_per_token)
        kind = "cpu" if device.type == "cpu" else "accelerator"
        return max(FEWEST_TOKENS[kind] if trains_head else 1, CHUNK_BYTES[kind] // bytes_per_token)

    def widens(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Tell whether the device multiplies this dtype into float32 without rounding the result."""
        return device.type in ("cuda", "xpu") and dtype in (torch.bfloat16, torch.float16)

    def mm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Compute out = a @ b, without rounding to the inputs' dtype."""
        if self.widens(a.device, a.dtype):
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out=out)

    def addmm(self, accumulator: Tensor, a: Tensor, b: Tensor) -> None:
        """Compute accumulator += a @ b, without rounding the result to the inputs' dtype."""
        if self.widens(a.device, a.dtype):
            torch.addmm(accumulator, a, b, out_dtype=torch.float32, out=accumulator)
        else:
            accumulator.addmm_(a, b)


KERNELS = Kernels()


@dataclass(frozen=True)
class Divergence:
    """The measure by which a student is compared with its teacher; the module's docstring has the formulas.

    temperature: both logits are divided by it. jsd_beta: weight of the teacher in the mixture of `jsd`.
    clip: nats, the most that one token counts; None: no limit.
    """

    name: Literal["kl", "reverse_kl", "jsd"] = "kl"
    temperature: float = 1.0
    jsd_beta: float = 0.5
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("kl", "reverse_kl", "jsd"):
            raise UserError(f"divergence {self.name!r}: allowed are kl, reverse_kl and jsd")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"temperature {self.temperature}: must be a positive number")
        if not 0 < self.jsd_beta < 1:
            raise UserError(
                f"jsd_beta {self.jsd_beta}: must lie between 0 and 1; the limits are called kl and reverse_kl"
            )
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip {self.clip}: must be a positive number of nats")


class TokenStatistics(NamedTuple):
    """Figures of each of N tokens, at the temperature of the divergence; none of them has a gradient.

    divergence: (N,) nats, before clipping. teacher_entropy: (N,) nats. top1_agreement: (N,) bool, whether the
    student's most probable token is the teacher's (a tie agrees).
    """

    divergence: Tensor
    teacher_entropy: Tensor
    top1_agreement: Tensor


def fused_linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    divergence: Divergence,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    vocab_size: int | None = None,
    statistics: bool = False,
    chunk_bytes: int | None = None,
    kernels: Kernels = KERNELS,
) -> tuple[Tensor, TokenStatistics | None]:
    """Sum over tokens of a divergence between teacher and student.

    Args:
        hidden: (N, D) the student's final hidden states of the tokens that carry loss.
        weight: (V, D) the student's head; `bias` (V,).
        teacher_hidden, teacher_weight, teacher_bias: (N, D'), (V', D'), (V',); constants, they get no gradient.
        divergence: which one.
        logit_scale, softcap: what the family does to its logits (`fcsd.model.families.structure.head_scaling`).
        vocab_size: the heads' rows from here on are padding: no part of either distribution, and without
            gradient. Needed when V and V' differ. None: all rows are tokens.
        statistics: give the second result too, None otherwise.
        chunk_bytes: memory for the logits of one chunk with all temporaries; at least one token is taken.
            None: 1 GiB on an accelerator (at least 1024 tokens if the head trains), 32 MiB (192) on a CPU.
        kernels: what runs the matmuls.

    Returns: a scalar, nats; float32 (float64 for float64 inputs). 0, not NaN, for N = 0, and still a node of
    the graph with zero gradients, so that no rank misses a collective. A non-finite logit gives a non-finite
    loss or gradient. The gradients are scaled in place: a retained graph is differentiated once, a second
    time is an error.

    Raises: UserError when the vocabularies differ, or the shapes do not fit together.
    """
    _check("student", hidden, weight, bias, vocab_size)
    _check("teacher", teacher_hidden, teacher_weight, teacher_bias, vocab_size)
    if vocab_size is None and weight.shape[0] != teacher_weight.shape[0]:
        raise UserError(
            "teacher and student differ in vocabulary size "
            f"({teacher_weight.shape[0]} and {weight.shape[0]}): a divergence needs one vocabulary; distil from "
            "the checkpoint that the student was made from, or give vocab_size if the rest is padding"
        )
    if hidden.shape[0] != teacher_hidden.shape[0]:
        raise UserError(
            f"{teacher_hidden.shape[0]} tokens of the teacher for {hidden.shape[0]} of the student"
        )
    temperature = divergence.temperature
    student = _Logits(logit_scale, softcap, temperature, vocab_size or weight.shape[0])
    teacher = _Head(
        teacher_hidden.detach(),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        _Logits(teacher_logit_scale, teacher_softcap, temperature, student.vocab_size),
        kernels,
    )
    target = _Teacher(teacher, divergence, statistics)
    loss, *rows = _FusedLinearLoss.apply(hidden, weight, bias, student, target, chunk_bytes, kernels)
    return loss, TokenStatistics(*rows) if statistics else None


def fused_linear_kl(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, **options: Any
) -> Tensor:
    """Sum over tokens of KL(teacher || student), paper Eq. 4; options as in `fused_linear_divergence`."""
    return fused_linear_divergence(
        hidden, weight, teacher_hidden, teacher_weight, divergence=Divergence("kl"), **options
    )[0]


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_size: int | None = None,
    chunk_bytes: int | None = None,
    kernels: Kernels = KERNELS,
) -> Tensor:
    """Sum over tokens of -log p(label), in nats (paper Eq. 3).

    Args: as `fused_linear_divergence`; labels: (N,) integer token ids in 0 … vocab_size-1, every one of which
    counts (there is no ignore index: leave out the tokens without loss).

    Returns: a scalar, as `fused_linear_divergence`.
    """
    _check("student", hidden, weight, bias, vocab_size)
    if labels.shape != hidden.shape[:1]:
        raise UserError(f"labels of shape {tuple(labels.shape)} for {hidden.shape[0]} tokens")
    student = _Logits(logit_scale, softcap, 1.0, vocab_size or weight.shape[0])
    return _FusedLinearLoss.apply(hidden, weight, bias, student, labels, chunk_bytes, kernels)[0]


def _check(whose: str, hidden: Tensor, weight: Tensor, bias: Tensor | None, vocab_size: int | None) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise UserError(
            f"{whose}: hidden states {tuple(hidden.shape)} and head {tuple(weight.shape)} do not fit "
            "together: (N, D) and (V, D) needed"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError(f"{whose}: head bias {tuple(bias.shape)} for a vocabulary of {weight.shape[0]}")
    if vocab_size is not None and not 0 < vocab_size <= weight.shape[0]:
        raise UserError(f"{whose}: a vocabulary of {vocab_size} for a head of {weight.shape[0]} rows")


@dataclass(frozen=True)
class _Logits:
    """From the matmuls of one model to what its softmax is taken of."""

    logit_scale: float
    softcap: float | None
    temperature: float
    vocab_size: int

    @property
    def factor(self) -> float:
        """Derivative of the result by what the matmul gave; `slope` times as much with a softcap."""
        return self.logit_scale / self.temperature

    def finish(self, results: Tensor) -> Tensor:
        """Scale and cap matmul results in place."""
        before = self.factor if self.softcap is None else self.logit_scale / self.softcap
        if before != 1.0:
            results.mul_(before)
        return results if self.softcap is None else results.tanh_().mul_(self.softcap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Compute the derivative of the softcap, elementwise, from what `finish` gave; None where it is 1."""
        if self.softcap is None:
            return None
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


@dataclass(frozen=True)
class _Head:
    """The operands of one model's logits: (N, D) hidden states, (V, D) weight, (V,) bias, the post-processing."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    post: _Logits
    kernels: Kernels

    def operands(self) -> _Head:
        """Return the same head without its padding, hidden states and weight in the one dtype of the matmuls."""
        dtype, size = _operand_dtype(self.hidden, self.weight, self.kernels), self.post.vocab_size
        bias = None if self.bias is None else self.bias[:size]
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight[:size].to(dtype), bias=bias)

    def logits(self, begin: int, end: int, out: Tensor) -> Tensor:
        """Compute what the softmax is taken of, for tokens begin … end-1, into (end-begin, V) `out`."""
        self.kernels.mm(self.hidden[begin:end], self.weight.t(), out)
        if self.bias is not None:
            out.add_(self.bias)
        return self.post.finish(out)


@dataclass(frozen=True)
class _Teacher:
    head: _Head
    divergence: Divergence
    statistics: bool


def _log_softmax_(x: Tensor, work: Tensor) -> None:
    """Compute log-softmax in place; `work` is scratch of the same shape."""
    largest = x.amax(-1, keepdim=True)
    torch.sub(x, largest, out=work)
    x.sub_(work.exp_().sum(-1, keepdim=True).log_().add_(largest))


def _compare(
    s: Tensor, t: Tensor, work: list[Tensor], target: _Teacher
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compare (n, V) log p_s and log p_t, all of which are overwritten; `work`: tiles of the same shape.

    Each log-sum-exp carries a rounding error, which moves all log-probabilities of a row by the same small
    number, and the sum of the row's probabilities with them. Adding sum(p_s - p_t), 0 but for these errors,
    takes them out of both KLs again: without it the KL of a converged student is rounding noise.

    Returns: the gradient of the logits (n, V), and of each token divergence, entropy and agreement.
    """
    by, p = target.divergence, work[0]
    entropy = agreement = None
    if target.statistics:
        best = t.argmax(-1, keepdim=True)
        agreement = s.gather(1, best).squeeze(1) >= s.amax(-1)
    torch.exp(t, out=p)
    if by.name == "kl":
        if target.statistics:
            t.mul_(p)
            entropy = -t.sum(-1)
            value = t.addcmul_(p, s, value=-1.0).sum(-1)
        else:
            value = t.sub_(s).mul_(p).sum(-1)
        gradient = s.exp_().sub_(p)
        value += gradient.sum(-1)
    elif by.name == "reverse_kl":
        teacher_sum = p.sum(-1)
        if target.statistics:
            entropy = -p.mul_(t).sum(-1)
        gradient = torch.sub(s, t, out=t)
        p_s = s.exp_()
        raw = torch.mul(p_s, gradient, out=p).sum(-1)
        value = raw + (teacher_sum - p_s.sum(-1))
        gradient.sub_(raw.unsqueeze(1)).mul_(p_s)
    else:
        # With u = log(p_t / p_s): log(m / p_s) = log(1 + b (e^u - 1)), exact for small u too. Above 80 the
        # exponential overflows, and p_s is nothing beside p_t.
        b, r = by.jsd_beta, work[1]
        if target.statistics:
            entropy = -torch.mul(p, t, out=r).sum(-1)
        u = t.sub_(s).clamp_(max=80.0)
        p_s = s.exp_()
        torch.expm1(u, out=r).mul_(b).log1p_()
        student_part = u.sub_(r).mul_(p).mul_(b)  # of the teacher's KL to m, before the sum
        value = student_part.addcmul_(p_s, r, value=b - 1.0).sum(-1)
        mean = torch.mul(p_s, r, out=p).sum(-1, keepdim=True)
        gradient = r.sub_(mean).mul_(p_s).mul_(b - 1.0)
    return gradient, value, entropy, agreement


def _num_tiles(target: _Teacher | Tensor) -> int:
    """Count the (chunk, V) tiles that a chunk needs: the logits of both models, and one or two of work."""
    if not isinstance(target, _Teacher):
        return 2
    return 4 if target.divergence.name == "jsd" else 3


class _FusedLinearLoss(torch.autograd.Function):
    """The loss sum of N tokens; gradients are computed in the forward pass, scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        post: _Logits,
        target: _Teacher | Tensor,
        chunk_bytes: int | None,
        kernels: Kernels,
    ) -> tuple[Tensor | None, ...]:
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        student = _Head(hidden, weight, bias, post, kernels).operands()
        teacher = target.head.operands() if isinstance(target, _Teacher) else None
        clip = target.divergence.clip if isinstance(target, _Teacher) else None
        num_tokens, num_vocab = hidden.shape[0], post.vocab_size
        dtype = torch.float64 if student.weight.dtype == torch.float64 else torch.float32
        num_tiles = _num_tiles(target)  # the softcap's slope comes on top
        row_bytes = num_vocab * dtype.itemsize * (num_tiles + (post.softcap is not None))
        chunk = min(kernels.chunk_tokens(row_bytes, chunk_bytes, hidden.device, wants_weight), num_tokens)

        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=hidden.device)

        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        grad_hidden = new(*hidden.shape) if wants_hidden else None
        grad_weight = new(*weight.shape).zero_() if wants_weight else None
        grad_bias = new(weight.shape[0]).zero_() if wants_bias else None
        whole_tiles = [new(chunk, num_vocab) for _ in range(num_tiles)]
        per_token: list[Tensor | None] = [None, None, None]
        if isinstance(target, _Teacher) and target.statistics:
            agreement = torch.empty(num_tokens, dtype=torch.bool, device=hidden.device)
            per_token = [new(num_tokens), new(num_tokens), agreement]

        # Inside an autocast region the matmuls below would be rounded to bfloat16 again.
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, num_tokens, max(chunk, 1)):
                end = min(begin + chunk, num_tokens)
                tiles = [tile[: end - begin] for tile in whole_tiles]
                s = student.logits(begin, end, tiles[0])
                slope = post.slope(s) if any(ctx.needs_input_grad[:3]) else None
                _log_softmax_(s, tiles[-1])
                if teacher is not None and isinstance(target, _Teacher):
                    t = teacher.logits(begin, end, tiles[1])
                    _log_softmax_(t, tiles[-1])
                    d, divergence, *more = _compare(s, t, tiles[2:], target)
                    if clip is None:
                        loss += divergence.sum()
                    else:
                        loss += divergence.clamp(max=clip).sum()
                        d.mul_((divergence <= clip).unsqueeze(1))
                    for whole, part in zip(per_token, (divergence, *more), strict=True):
                        if whole is not None and part is not None:
                            whole[begin:end] = part
                else:
                    assert isinstance(target, Tensor)
                    labels = target[begin:end].unsqueeze(1)
                    loss -= s.gather(1, labels).sum()
                    d = s.exp_()
                    d.scatter_add_(1, labels, torch.full_like(labels, -1, dtype=dtype))
                if slope is not None:
                    d.mul_(slope)
                    del slope
                if post.factor != 1.0:
                    d.mul_(post.factor)
                if grad_bias is not None:
                    grad_bias[:num_vocab] += d.sum(0)
                if grad_hidden is None and grad_weight is None:
                    continue
                d = d.to(student.weight.dtype)
                if grad_hidden is not None:
                    kernels.mm(d, student.weight, grad_hidden[begin:end])
                if grad_weight is not None:
                    kernels.addmm(grad_weight[:num_vocab], d.t(), student.hidden[begin:end])
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*(rows for rows in per_token if rows is not None))
        return loss, *per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Any, ...]:
        # In place: the buffers are ours, and one is as large as the head. A second pass over a retained graph
        # is refused by autograd, which sees that a saved tensor changed.
        grads = [
            None if saved is None else saved.mul_(grad_loss).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


def _operand_dtype(hidden: Tensor, weight: Tensor, kernels: Kernels) -> torch.dtype:
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(hidden.device.type) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(hidden.device.type)  # what the head alone would be given
    return dtype if kernels.widens(hidden.device, dtype) else torch.promote_types(dtype, torch.float32)
