"""Head and loss in one pass: divergences and cross entropy from final hidden states, by
chunks of tokens.

The logits of a 150k vocabulary outweigh everything else in a distillation step, so they
are never stored: the logits of a chunk (full rows, of student and teacher) give its
loss and, in closed form, its gradient, and are dropped.

    z = logit_scale * (hidden @ weight.T + bias)
    y = softcap * tanh(z / softcap)     (y = z without a softcap)

`fcsd.training.losses.objectives` defines the functions of y.

A chunk takes four matmuls (8 D V FLOPs per token; six with a frozen head), none of which
is repeated in the backward pass.

Precision. Logits are float32 whatever the inputs are: the gradient is a difference of
two nearly equal softmaxes once the student is close to the teacher, and logits rounded
to bfloat16 leave an error of 23 % in it at 5e-3 nats a token. On devices whose matmul
takes half-precision inputs and returns float32 (CUDA) the inputs keep their dtype, and
the gradient of the logits is rounded for the two gradient matmuls (an error of 2e-3,
whatever the KL); elsewhere the inputs are widened first. Head gradients are accumulated
in float32. float64 inputs stay float64 throughout.

No collective, no host synchronisation, no data-dependent shape.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fcsd.base.errors import UserError
from fcsd.training.losses.objectives import MEASURES, ObjectiveConfig

# The default memory for the logits of a chunk, and the fewest tokens in a chunk of a
# trainable head: every chunk reads and writes the (V, D) gradient, and with fewer
# tokens that traffic costs more than the matmuls. On a CPU small tiles fit the caches
# better.
CHUNK_BYTES = {"cpu": 1 << 25, "accelerator": 1 << 30}
FEWEST_TOKENS = {"cpu": 192, "accelerator": 1024}


class Kernels:
    """The device-dependent parts of the loss: the matmuls, the dtype of their operands
    and the size of the chunks.

    A subclass may run or count them differently, as `fcsd.planning.cost.trace` does.
    """

    def chunk_tokens(
        self,
        bytes_per_token: int,
        chunk_bytes: int | None,
        device: torch.device,
        trains_head: bool,
    ) -> int:
        """Choose the number of tokens in a chunk."""
        if chunk_bytes is not None:
            return max(1, chunk_bytes // bytes_per_token)
        kind = "cpu" if device.type == "cpu" else "accelerator"
        # A frozen head has no gradient that small chunks would read and write too
        # often.
        return max(
            FEWEST_TOKENS[kind] if trains_head else 1,
            CHUNK_BYTES[kind] // bytes_per_token,
        )

    def widens(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Tell whether the device multiplies this dtype into float32 without rounding
        the result.
        """
        return device.type in ("cuda", "xpu") and dtype in (
            torch.bfloat16,
            torch.float16,
        )

    def mm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Compute out = a @ b, without rounding to the inputs' dtype."""
        if self.widens(a.device, a.dtype):
            torch.mm(a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out=out)

    def addmm(self, accumulator: Tensor, a: Tensor, b: Tensor) -> None:
        """Compute accumulator += a @ b, without rounding the result to the inputs'
        dtype.
        """
        if self.widens(a.device, a.dtype):
            torch.addmm(accumulator, a, b, out_dtype=torch.float32, out=accumulator)
        else:
            accumulator.addmm_(a, b)


KERNELS = Kernels()


class TokenStatistics(NamedTuple):
    """Figures of each of N tokens, at the temperature of the objective and without
    gradients.

    divergence: (N,) nats. teacher_entropy: (N,) nats. top1_agreement:
    (N,) bool, whether the student's most probable token is the teacher's; among equally
    probable ones the first counts, in both.
    """

    divergence: Tensor
    teacher_entropy: Tensor
    top1_agreement: Tensor


@dataclass(frozen=True)
class Head:
    """The inputs of one model's logits: (N, D) hidden states, (V, D) weight, (V,) bias,
    and its family's scaling (`fcsd.model.families.structure.head_scaling`).
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None

    def check(self, whose: str, vocab_size: int | None) -> None:
        """Raise UserError where the shapes do not fit together."""
        hidden, weight, bias = self.hidden, self.weight, self.bias
        if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
            raise UserError(
                f"{whose}: hidden states {tuple(hidden.shape)} and head"
                f" {tuple(weight.shape)} do not match: they must be (N, D) and (V, D)"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise UserError(
                f"{whose}: head bias {tuple(bias.shape)} for a vocabulary of"
                f" {weight.shape[0]}"
            )
        if vocab_size is not None and not 0 < vocab_size <= weight.shape[0]:
            raise UserError(
                f"{whose}: a vocabulary of {vocab_size} for a head of {weight.shape[0]}"
                " rows"
            )


def fused_linear_loss(
    student: Head,
    target: Head | Tensor,
    objective: ObjectiveConfig,
    *,
    vocab_size: int | None = None,
    statistics: bool = False,
    chunk_bytes: int | None = None,
    kernels: Kernels = KERNELS,
) -> tuple[Tensor, TokenStatistics | None]:
    """Sum a loss over the tokens with these hidden states.

    Args:
        student: with gradients.
        target: for an objective with a teacher its `Head`, without gradients and
            possibly of another width; else labels (N,), integer token ids in 0 …
            vocab_size-1, all of which count (there is no ignore index: leave out the
            tokens without loss).
        objective: selects the measure and temperature.
        vocab_size: rows of the heads from here on are padding: not part of either
            distribution, and without gradient. Needed when the heads differ. None: all
            rows are tokens.
        statistics: whether to return them, None otherwise; needs a teacher.
        chunk_bytes: memory for the logits of one chunk with all temporaries; a chunk
            has at least one token. None: 1 GiB on an accelerator (at least 1024 tokens
            if the head trains), 32 MiB (192) on a CPU.
        kernels: runs the matmuls.

    Returns: a scalar in nats; float32 (float64 for float64 inputs). For N = 0 it is 0,
    not NaN, and still a node of the graph with zero gradients, so that no rank misses a
    collective. A non-finite logit gives a non-finite loss or gradient. The gradients
    are scaled in place, so a retained graph can be differentiated only once; a second
    time is an error.

    Raises: UserError when the vocabularies differ, or the shapes do not fit together.
    """
    # A wrong shape would otherwise show as an opaque error of a kernel.
    student.check("student", vocab_size)
    num_tokens, size = student.hidden.shape[0], student.weight.shape[0]
    if isinstance(target, Tensor):
        if target.shape != (num_tokens,):
            raise UserError(
                f"labels of shape {tuple(target.shape)} for {num_tokens} tokens"
            )
    else:
        target.check("teacher", vocab_size)
        if vocab_size is None and size != target.weight.shape[0]:
            raise UserError(
                "teacher and student differ in vocabulary size"
                f" ({target.weight.shape[0]} and {size}): a divergence needs one"
                " vocabulary; use the student's original as the teacher, or give"
                " vocab_size if the other rows are padding"
            )
        if target.hidden.shape[0] != num_tokens:
            raise UserError(
                f"{target.hidden.shape[0]} tokens of the teacher for {num_tokens} of"
                " the student"
            )
    task = _Task(
        student, target, objective, vocab_size or size, statistics, chunk_bytes, kernels
    )
    # Autograd sees the three tensors that get gradients; all else travels in the task.
    loss, *rows = _FusedLinearLoss.apply(
        student.hidden, student.weight, student.bias, task
    )
    return loss, TokenStatistics(*rows) if statistics else None


@dataclass(frozen=True)
class _Task:
    """The arguments of `fused_linear_loss`, checked."""

    student: Head
    target: Head | Tensor
    objective: Any
    vocab_size: int
    statistics: bool
    chunk_bytes: int | None
    kernels: Kernels


class _Logits:
    """The logits of one model over the temperature, by chunks of tokens, without the
    head's padding.
    """

    def __init__(self, head: Head, task: _Task):
        dtype, size = _operand_dtype(head, task.kernels), task.vocab_size
        self.hidden = head.hidden.detach().to(dtype)
        self.weight = head.weight.detach()[:size].to(dtype)
        self.bias = None if head.bias is None else head.bias.detach()[:size]
        self.softcap = head.softcap
        self.temperature = task.objective.temperature
        self.kernels = task.kernels
        self.logit_scale = head.logit_scale

    @property
    def factor(self) -> float:
        """The derivative of the result by the matmul's output; with a softcap `slope`
        times as much.
        """
        return self.logit_scale / self.temperature

    def of(self, begin: int, end: int, out: Tensor) -> Tensor:
        """Compute the logits of tokens begin … end-1 into (end-begin, V) `out`."""
        self.kernels.mm(self.hidden[begin:end], self.weight.t(), out)
        if self.bias is not None:
            out.add_(self.bias)
        # Scaling and temperature are one multiplication; with a softcap the temperature
        # comes after the tanh.
        scale = self.factor if self.softcap is None else self.logit_scale / self.softcap
        if scale != 1.0:
            out.mul_(scale)
        if self.softcap is None:
            return out
        return out.tanh_().mul_(self.softcap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Compute the elementwise derivative of the softcap from the result of `of`;
        None without a softcap, where it is 1.
        """
        if self.softcap is None:
            return None
        # d/dz softcap·tanh(z/softcap) = 1 - tanh², and `logits` hold tanh·softcap/T.
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1.0)


def _operand_dtype(head: Head, kernels: Kernels) -> torch.dtype:
    """Return the common dtype of the matmuls' operands."""
    device = head.hidden.device
    dtype = torch.promote_types(head.hidden.dtype, head.weight.dtype)
    if torch.is_autocast_enabled(device.type) and dtype == torch.float32:
        # the dtype that autocast would give the head alone
        dtype = torch.get_autocast_dtype(device.type)
    if kernels.widens(device, dtype):
        return dtype
    return torch.promote_types(dtype, torch.float32)


def _log_softmax_(x: Tensor, work: Tensor) -> None:
    """Compute log-softmax in place; `work` is scratch of the same shape."""
    largest = x.amax(-1, keepdim=True)
    torch.sub(x, largest, out=work)
    x.sub_(work.exp_().sum(-1, keepdim=True).log_().add_(largest))


class _Sums:
    """The loss sum, its gradients and the tokens' statistics, accumulated chunk by
    chunk in separate buffers.

    wants: whether hidden states, weight and bias need a gradient.
    """

    def __init__(self, task: _Task, wants: tuple[bool, ...]):
        head, self.task = task.student, task
        self.measure, self.wants = MEASURES[task.objective.logged], wants
        self.student = _Logits(head, task)
        self.teacher: _Logits | None = None
        if isinstance(task.target, Head):
            self.teacher = _Logits(task.target, task)
        num_tokens, device = head.hidden.shape[0], head.hidden.device
        dtype = torch.float32
        if self.student.weight.dtype == torch.float64:
            dtype = torch.float64
        num_tiles = self.measure.num_tiles  # the softcap's slope comes on top
        row_bytes = (
            task.vocab_size * dtype.itemsize * (num_tiles + (head.softcap is not None))
        )
        chunk = task.kernels.chunk_tokens(row_bytes, task.chunk_bytes, device, wants[1])
        self.chunk = min(chunk, num_tokens)

        # Tiles are allocated once and reused by every chunk.
        def new(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.loss = torch.zeros((), dtype=dtype, device=device)
        # The padding rows of the head keep a gradient of 0; hidden states are covered
        # completely by the chunks.
        self.grad_hidden = new(*head.hidden.shape) if wants[0] else None
        self.grad_weight = new(*head.weight.shape).zero_() if wants[1] else None
        self.grad_bias = new(head.weight.shape[0]).zero_() if wants[2] else None
        self.tiles = [new(self.chunk, task.vocab_size) for _ in range(num_tiles)]
        self.per_token: list[Tensor] = []
        if task.statistics:
            agreement = torch.empty(num_tokens, dtype=torch.bool, device=device)
            # in the order of TokenStatistics
            self.per_token = [new(num_tokens), new(num_tokens), agreement]

    def add(self, begin: int, end: int) -> None:
        tiles = [tile[: end - begin] for tile in self.tiles]
        s = self.student.of(begin, end, tiles[0])
        slope = self.student.slope(s) if any(self.wants) else None
        # Taken from the logits, because rounding may make log-probabilities equal.
        best = s.max(-1).indices if self.task.statistics else None
        _log_softmax_(s, tiles[-1])
        d = self._compare(begin, end, s, best, tiles)
        if slope is not None:
            d.mul_(slope)
            del slope  # frees a tile before the gradient matmuls
        self._add_gradient(begin, end, d)

    def _compare(
        self, begin: int, end: int, s: Tensor, best: Tensor | None, tiles: list[Tensor]
    ) -> Tensor:
        """Add the loss of (n, V) log p_s, which are overwritten, and return the
        gradient of the logits.

        best: (n,) the student's most probable tokens, for statistics.
        """
        objective, statistics = self.task.objective, self.task.statistics
        # A measure sees labels or a teacher, never both.
        if self.teacher is None:
            assert isinstance(self.task.target, Tensor)
            d, value, _ = self.measure.compare(
                objective, s, self.task.target[begin:end, None], [], False
            )
        else:
            # tiles: 0 the student's log-probabilities, 1 the teacher's, 2 the teacher's
            # probabilities; the last one is scratch until it is needed.
            t = self.teacher.of(begin, end, tiles[1])
            agreement = t.max(-1).indices == best if best is not None else None
            _log_softmax_(t, tiles[-1])
            torch.exp(t, out=tiles[2])
            d, value, entropy = self.measure.compare(
                objective, s, t, tiles[2:], statistics
            )
            if statistics:
                assert entropy is not None and agreement is not None
                figures = value, entropy, agreement
                for buffer, figure in zip(self.per_token, figures, strict=True):
                    buffer[begin:end] = figure
        self.loss += value.sum()
        return d

    def _add_gradient(self, begin: int, end: int, d: Tensor) -> None:
        size, kernels = self.task.vocab_size, self.task.kernels
        if self.student.factor != 1.0:
            d.mul_(self.student.factor)
        if self.grad_bias is not None:
            self.grad_bias[:size] += d.sum(0)
        if self.grad_hidden is None and self.grad_weight is None:
            return
        # Both matmuls take operands of one dtype (see the module's docstring).
        d = d.to(self.student.weight.dtype)
        if self.grad_hidden is not None:
            kernels.mm(d, self.student.weight, self.grad_hidden[begin:end])
        if self.grad_weight is not None:
            kernels.addmm(
                self.grad_weight[:size], d.t(), self.student.hidden[begin:end]
            )


class _FusedLinearLoss(torch.autograd.Function):
    """The loss sum of N tokens; its gradients are computed in the forward pass and
    scaled in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task
    ) -> tuple[Tensor, ...]:
        sums, num_tokens = _Sums(task, ctx.needs_input_grad[:3]), hidden.shape[0]
        # Autocast would round the results of the matmuls below to bfloat16 again.
        with torch.autocast(hidden.device.type, enabled=False):
            for begin in range(0, num_tokens, max(sums.chunk, 1)):
                sums.add(begin, min(begin + sums.chunk, num_tokens))
        ctx.save_for_backward(sums.grad_hidden, sums.grad_weight, sums.grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*sums.per_token)
        return sums.loss, *sums.per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_: Any) -> tuple[Any, ...]:
        # In place, because one of the buffers is as large as the head. A second pass
        # over a retained graph is refused by autograd, which sees that a saved tensor
        # changed.
        grads = [
            None if saved is None else saved.mul_(grad_loss).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None)
