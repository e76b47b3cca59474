"""Compute the bytes of one rank from a trace: whole copies, or shards."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from fcsd.planning.cost.hardware import Gpu
from fcsd.planning.cost.trace import Setting, Trace
from fcsd.planning.cost.tracker import PERSISTENT

Sharding = Literal["none", "fsdp2", "hsdp", "zero3", "optimizer"]
"""optimizer: as Megatron shards, to compare with its runs: a rank keeps its weights
whole, and they are sent once per step.
"""

FRAGMENTATION = 0.10
"""Assumption: share of all temporary bytes that the caching allocator holds beyond what
is live.
"""

CONTEXT_BYTES = 1 << 30
"""Assumption: the driver's context, kernels and communication buffers of one process."""

GPUS_PER_NODE = 8

# DeepSpeed's defaults: parameters that stay gathered, and the bucket in which gradients
# are reduced.
ZERO3_LIVE_PARAMETERS = 10**9
ZERO3_BUCKET = 5 * 10**8


@dataclass(frozen=True)
class Layout:
    """How the models are laid out over the ranks.

    offload: the optimiser's moments and the weights it updates lie in the host's
    memory. step_tokens: tokens of an optimiser step over all ranks, if the teacher's
    hidden states of the whole step are computed before the student runs; 0 where they
    are computed for each micro-batch (objectives that compare more than the
    distributions). expert_parallel: ranks that share the experts.
    """

    sharding: Sharding
    num_gpus: int
    offload: bool = False
    step_tokens: int = 0
    averages: bool = False
    expert_parallel: int = 1

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the models; with hsdp those of a node."""
        if self.sharding == "none":
            return 1
        if self.sharding == "hsdp":
            return min(self.num_gpus, GPUS_PER_NODE)
        return self.num_gpus


def compute_dtype(setting: Setting) -> torch.dtype:
    """Return the dtype of a model's matmuls: its gathered weights', or autocast's."""
    return torch.bfloat16 if setting.autocast else setting.student_dtype


def memory_parts(
    trace: Trace, setting: Setting, layout: Layout, *, freeze: bool = False
) -> dict[str, int]:
    """Split the bytes of one rank by purpose, at the moment of the peak.

    none: every rank holds the student, the gradients, AdamW's two moments and the
    teacher whole; with several ranks DDP adds buckets as large as the gradients. Only
    the gradients that exist at the peak count. fsdp2: parameters, gradients and moments
    are sharded in `student_dtype` over all ranks. The head is gathered while the loss
    is computed; two layers and the head are gathered in the backward pass, with the
    whole gradient of one of these before it is reduced in `student_dtype`. hsdp: the
    same over the ranks of a node, with a copy on each node. zero3: with autocast,
    weights are in bfloat16; gradients, master weights and moments are in float32;
    DeepSpeed's buffers are added. All of these shard the teacher except its head.
    freeze: estimate frozen embeddings and head from a trace in which they are trained.
    """
    trained = trace.num_trainable - (trace.embeddings_and_head if freeze else 0)
    if layout.sharding == "none":
        parts = _whole_parts(trace, setting, layout, trained)
        moving = {kind: n for kind, n in trace.peak.items() if kind not in PERSISTENT}
    else:
        parts = _sharded_parts(trace, setting, layout, trained)
        moving = dict(trace.transient)
    # The trace has the hidden states of one micro-batch; a step may hold those of all
    # of them.
    if setting.has_teacher:
        token_bytes = trace.hidden_size * setting.teacher_dtype.itemsize
        # of the micro-batch that was traced
        num_tokens = setting.num_rows * setting.num_tokens
        parts["teacher hidden states"] = token_bytes * max(
            num_tokens, layout.step_tokens // layout.num_gpus
        )
        moving["teacher forward"] = max(
            0, moving.get("teacher forward", 0) - token_bytes * num_tokens
        )
    parts |= {
        "activations": sum(n for kind, n in moving.items() if kind != "loss"),
        "loss": moving.get("loss", 0),
    }
    temporary_bytes = parts["activations"] + parts["loss"]
    # These parts are also allocated and freed, so they are subject to fragmentation
    # too.
    temporary_parts = (
        "gathered weights",
        "gradients being reduced",
        "teacher hidden states",
    )
    temporary_bytes += sum(parts.get(name, 0) for name in temporary_parts)
    parts["fragmentation"] = int(FRAGMENTATION * temporary_bytes)
    parts["GPU context"] = CONTEXT_BYTES
    return {name: number for name, number in parts.items() if number}


def room(parts: dict[str, int], gpu: Gpu) -> dict[str, Any]:
    """Return the parts of a rank's memory with their sum, and whether the GPU has that
    much.
    """
    total_bytes = sum(parts.values())
    return {
        "parts": parts,
        "total_bytes": total_bytes,
        "gpu_bytes": gpu.memory_bytes,
        "fits": total_bytes <= gpu.memory_bytes,
    }


def _whole_parts(
    trace: Trace, setting: Setting, layout: Layout, trained: int
) -> dict[str, int]:
    size, peak = setting.student_dtype.itemsize, trace.peak
    return {
        "student weights": peak["student"],
        "gradients": min(peak.get("gradients", 0), trained * size),
        "optimizer states": 0 if layout.offload else 2 * trained * size,
        "averaged weights": 4 * trained if layout.averages else 0,
        "teacher weights": peak.get("teacher", 0),
        "DDP buckets": trained * size if layout.num_gpus > 1 else 0,
    }


def _sharded_parts(
    trace: Trace, setting: Setting, layout: Layout, trained: int
) -> dict[str, int]:
    size, ranks = setting.student_dtype.itemsize, layout.num_shards
    computed, total = compute_dtype(setting).itemsize, trace.num_parameters
    zero3 = layout.sharding == "zero3"
    master = 4 * trained if zero3 and computed < size else 0
    if zero3:
        gathered = computed * min(ZERO3_LIVE_PARAMETERS, total)
        reduced = computed * ZERO3_BUCKET
    else:
        # Only the head is gathered while the loss is computed; the backward pass of a
        # layer comes after the loss's tiles are freed.
        reduced = 0
        in_backward = computed * (trace.head + 2 * trace.largest_layer)
        in_backward += (computed + size) * max(trace.largest_layer, trace.head)
        gathered = max(
            computed * trace.head, in_backward - trace.transient.get("loss", 0)
        )
    teacher = trace.peak.get("teacher", 0)
    head = min(teacher, trace.head * setting.teacher_dtype.itemsize)
    averaged = layout.averages and not layout.offload
    return {
        "student weights": total * (computed if zero3 else size) // ranks,
        "master weights": 0 if layout.offload else master // ranks,
        "gradients": size * trained // ranks,
        "optimizer states": 0 if layout.offload else 2 * size * trained // ranks,
        "averaged weights": 4 * trained // ranks if averaged else 0,
        "teacher weights": (teacher - head) // ranks,
        "teacher head": head,
        "gathered weights": gathered if ranks > 1 else 0,
        "gradients being reduced": reduced if ranks > 1 and trained else 0,
    }
