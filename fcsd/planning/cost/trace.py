"""Trace one optimiser step of fcsd's own code on tensors without storage: the live
bytes over time, and the matmuls.

The models are built on the meta device and moved to fake tensors, so any family and any
size takes seconds. The traced code is the same as in a real training: the rewired
student, `fcsd.training.losses.head`, the fused loss, transformers' checkpointing.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fcsd.model.autocast import autocast_experts
from fcsd.model.families.structure import output_head
from fcsd.planning.cost.tracker import Interposed, Tracker, counting, give_fake_storage
from fcsd.training.losses.fused import Kernels
from fcsd.training.losses.head import attach_loss_head, body_hidden, final_hidden
from fcsd.training.losses.hidden_terms import captured_streams, squared_distance
from fcsd.training.losses.objectives import ObjectiveConfig
from fcsd.training.prepare import freeze_embeddings_and_head
from fcsd.training.teachers.lora import as_original


@dataclass(frozen=True)
class Setting:
    """The settings on which memory and matmuls of a micro-batch depend.

    sharded: with autocast, weights are gathered in bfloat16 instead of cast from whole
    copies. on_gpu: chunk sizes and matmul dtypes of the loss as on CUDA; else as on a
    CPU. accumulates: the step has several micro-batches, so that gradients exist when
    one begins. teacher: its backend (`fcsd.training.teachers.config.TeacherConfig`). adapters: the
    student is a LoRA student, with its own weights in `teacher_dtype` and the adapters
    in `student_dtype`.
    """

    objective: ObjectiveConfig
    num_rows: int
    num_tokens: int
    student_dtype: torch.dtype
    teacher_dtype: torch.dtype
    autocast: bool
    sharded: bool
    checkpointing: bool
    freeze_embeddings_and_head: bool
    accumulates: bool
    on_gpu: bool
    teacher: Literal["sharded", "adapter_off", "cache"] = "sharded"
    adapters: bool = False

    @property
    def runs_teacher_model(self) -> bool:
        """True when a second model is in memory."""
        return self.has_teacher and self.teacher == "sharded"

    @property
    def has_teacher(self) -> bool:
        """True when the student is compared with a teacher."""
        return self.objective.has_teacher


@dataclass
class Trace:
    """The needs of one optimiser step.

    peak: kind -> bytes at the moment with the most live bytes; transient: the same
    without the `PERSISTENT` kinds, at the moment with the most other bytes. flops:
    phase -> dtype -> operations of one micro-batch. num_pairs: layers that receive the
    pair (o, o - routed), whose checkpointed input is twice as large. The other numbers
    count parameters.
    """

    peak: dict[str, int]
    transient: dict[str, int]
    flops: dict[str, dict[str, int]]
    num_trainable: int
    num_parameters: int
    largest_layer: int
    embeddings_and_head: int
    head: int
    num_layers: int
    num_pairs: int
    hidden_size: int


def trace_step(
    build: Callable[[], nn.Module],
    rewire: Callable[[nn.Module], Any],
    layers: Any,
    setting: Setting,
    *,
    adapt: Callable[[nn.Module], Any] | None = None,
    progress: Callable[[], Any] | None = None,
    subject: str = "the training step",
) -> Trace:
    """Run one optimiser step without storage, as `fcsd.training.trainer` does.

    build: makes the regular model; called on the meta device, and once more for the
    teacher. rewire, adapt: give the student its connectivity, and a LoRA student its
    adapters, in place. layers: returns the layers of a model. progress: called after
    every layer's forward pass. subject: the traced step, named in the error about a
    model that needs data to run.
    """
    tracker = Tracker()
    interposed = _fused(tracker)
    student = _student_on_meta(build, rewire, adapt, setting, interposed)
    teacher = _teacher_on_meta(build, setting) if setting.runs_teacher_model else None
    if progress is not None:

        def layer_done(*_: Any) -> None:
            progress()

        for model in (student,) if teacher is None else (student, teacher):
            for layer in layers(model):
                layer.register_forward_hook(layer_done)
    with counting(tracker, interposed, subject):
        with tracker.making("student"):
            give_fake_storage(student)
        head: Any = output_head(student)
        head.kernels = _CountedKernels(tracker, on_gpu=setting.on_gpu)
        with tracker.making("teacher"):
            if teacher is not None:
                give_fake_storage(teacher)
                head = output_head(teacher)
            # A filled cache needs no teacher model, except for the head that turns
            # hidden states into logits.
            elif setting.has_teacher and setting.teacher == "cache":
                head = nn.Linear(
                    head.in_features,
                    head.out_features,
                    head.bias is not None,
                    dtype=setting.teacher_dtype,
                ).requires_grad_(False)
        trainable = [p for p in student.parameters() if p.requires_grad]
        with tracker.making("optimizer"):
            # AdamW's two moments live during the whole micro-batch.
            moments = [torch.empty_like(p) for p in trainable for _ in range(2)]
        # With several micro-batches gradients exist before this one; otherwise they
        # appear during its backward pass.
        for parameter in trainable:
            if setting.accumulates:
                with tracker.making("gradients"):
                    parameter.grad = torch.empty_like(parameter)
            parameter.register_post_accumulate_grad_hook(
                lambda p: tracker.becomes(p.grad, "gradients")
            )
        tracker.counts_as(output_head(student), "loss")
        _micro_batch(student, teacher, head, tracker, setting)
        trace = _read_trace(tracker, student, layers(student))
        del moments
    return trace


def _student_on_meta(
    build: Callable[[], nn.Module],
    rewire: Callable[[nn.Module], Any],
    adapt: Callable[[nn.Module], Any] | None,
    setting: Setting,
    interposed: Interposed,
) -> Any:
    with torch.device("meta"):
        student: Any = build()
    rewire(student)
    if setting.adapters:
        assert adapt is not None
        nn.Module.to(student, setting.teacher_dtype)
        adapt(student)
    else:
        # Sharded runs gather in bfloat16; whole copies keep their dtype and cast under
        # autocast.
        gathered = setting.sharded and setting.autocast
        nn.Module.to(student, torch.bfloat16 if gathered else setting.student_dtype)
    if setting.freeze_embeddings_and_head:
        freeze_embeddings_and_head(student)
    student.train()
    student.config.use_cache = False
    if setting.checkpointing:
        # Layers run again in the backward pass, outside the mode; the context enters it
        # for them.
        again = {
            "use_reentrant": False,
            "context_fn": lambda: (contextlib.nullcontext(), interposed),
        }
        student.activation_checkpointing_enable(again)
    attach_loss_head(student, setting.objective.vocab_size)
    return student


def _teacher_on_meta(build: Callable[[], nn.Module], setting: Setting) -> Any:
    with torch.device("meta"):
        teacher: Any = build()
    nn.Module.to(teacher, setting.teacher_dtype).eval().requires_grad_(False)
    teacher.config.use_cache = False
    return teacher


def _read_trace(tracker: Tracker, student: Any, stack: Any) -> Trace:
    """Combine the tracker's counts with the sizes of the student that the estimate
    needs.
    """
    plans = [getattr(layer, "farskip_plan", None) for layer in stack]
    modules = (student.get_input_embeddings(), student.get_output_embeddings())
    # By identity: tied embeddings and head are one parameter.
    ends = {id(p): p.numel() for module in modules for p in module.parameters()}
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in stack]
    total = sum(p.numel() for p in student.parameters())
    head = output_head(student).weight
    return Trace(
        peak={kind: n for kind, n in tracker.peak.items() if n},
        transient={kind: n for kind, n in tracker.transient.items() if n},
        flops={kind: dict(counts) for kind, counts in tracker.flops.items()},
        num_trainable=sum(p.numel() for p in student.parameters() if p.requires_grad),
        num_parameters=total,
        largest_layer=max(sizes),
        embeddings_and_head=sum(ends.values()),
        head=head.numel(),
        num_layers=len(sizes),
        num_pairs=sum(plan is not None and plan.carry for plan in plans),
        hidden_size=head.shape[1],
    )


def _micro_batch(
    student: Any, teacher: Any, head: Any, tracker: Tracker, setting: Setting
) -> None:
    """Run the steps of `DistillTrainer.compute_loss` and the backward pass, with every
    token kept.
    """
    shape = (setting.num_rows, setting.num_tokens)
    compares_streams = setting.objective.l2_coefficient is not None

    def watched(model: Any) -> Any:
        return captured_streams(model) if compares_streams else contextlib.nullcontext()

    # As in training: experts' grouped matmuls follow autocast.
    autocast_experts()
    autocast = torch.autocast(
        "cpu", torch.bfloat16, enabled=setting.autocast and not setting.sharded
    )
    with tracker.making("activations"):
        ids = torch.zeros(shape, dtype=torch.long)
        positions = torch.zeros(shape, dtype=torch.long)
        keep = torch.zeros(shape[0] * shape[1], dtype=torch.long)
        extra: dict[str, Any] = {"labels": keep}
    if setting.has_teacher:
        # An adapter-off teacher is the student itself without its adapters.
        original = watched(student if teacher is None else teacher)
        with (
            tracker.making("teacher forward"),
            torch.no_grad(),
            original as teacher_streams,
        ):
            if teacher is not None:
                hidden = final_hidden(teacher, ids, positions, keep)
            elif setting.teacher == "adapter_off":
                with as_original(student):
                    hidden = body_hidden(student, ids, positions, keep)
            else:
                hidden = torch.empty(
                    (len(keep), head.in_features), dtype=setting.teacher_dtype
                )
        extra = {"teacher_hidden": hidden, "teacher_head": head}
    with tracker.making("activations"), autocast, watched(student) as streams:
        extra["objective"] = setting.objective
        loss = student(input_ids=ids, position_ids=positions, keep=keep, **extra)[
            "loss"
        ]
    if compares_streams:
        with tracker.making("loss"):
            loss = loss + squared_distance(streams, teacher_streams, keep)
    with tracker.making("backward"):
        # Not `loss.backward()`, which the mode would intercept as a single call.
        torch.autograd.backward(loss)


class _CountedKernels(Kernels):
    """Count the loss's matmuls instead of running them, with the chunks and dtypes of
    the estimated device.

    They write into existing tensors and allocate nothing, whatever the dtype of their
    operands.
    """

    def __init__(self, tracker: Tracker, *, on_gpu: bool):
        self.tracker, self.device = tracker, torch.device("cuda" if on_gpu else "cpu")

    def chunk_tokens(
        self,
        bytes_per_token: int,
        chunk_bytes: int | None,
        device: torch.device,
        trains_head: bool,
    ) -> int:
        return super().chunk_tokens(
            bytes_per_token, chunk_bytes, self.device, trains_head
        )

    def widens(self, device: torch.device, dtype: torch.dtype) -> bool:
        return super().widens(self.device, dtype)

    def mm(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        self.tracker.add_flops(a.dtype, 2 * a.shape[0] * a.shape[1] * b.shape[1])

    def addmm(self, accumulator: Tensor, a: Tensor, b: Tensor) -> None:
        self.mm(a, b, accumulator)


def _fused(tracker: Tracker) -> Interposed:
    """Make attention whose values are narrower than its keys (MLA) one operation, as it
    is on GPUs.

    A CPU has no such kernel: it would run bmm in float32, with all scores in memory.
    """

    def attention(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if query.shape[-1] == value.shape[-1]:
            return functional.scaled_dot_product_attention(
                query, key, value, *args, **kwargs
            )
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (
                tensor.to(torch.bfloat16) for tensor in (query, key, value)
            )
        return _Attention.apply(query, key, value, tracker)

    return Interposed(attention)


class _Attention(torch.autograd.Function):
    """Allocate and count as the fused operation does: inputs, output and one number for
    each row of scores are kept.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tracker: Tracker) -> Tensor:
        out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        ctx.tracker = tracker
        ctx.save_for_backward(
            q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32)
        )
        tracker.add_attention(q, k, v)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        ctx.tracker.add_attention(q, k, v, gradient=gradients[0])
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
