"""Bytes and seconds of one rank, from a trace: whole copies, or the plan of a sharded run."""

from dataclasses import dataclass
from typing import Literal

import torch

from fcsd.estimate.gpus import Gpu
from fcsd.estimate.trace import Setting, Trace

Sharding = Literal["none", "fsdp2", "zero3"]
SHARDINGS: tuple[Sharding, ...] = ("none", "fsdp2", "zero3")
SUPPORTED: tuple[Sharding, ...] = ("none",)
"""What `fcsd distill` runs today; the others are refused there (`fcsd.distill.run`) and are plans here."""

FRAGMENTATION = 0.10
"""Assumption: share by which the caching allocator holds more than what lives, of all that comes and goes."""
CONTEXT_BYTES = 1 << 30
"""Assumption: the driver's context, kernels and communication buffers of one process."""
GPUS_PER_NODE = 8
# DeepSpeed's defaults: parameters that stay gathered, and the bucket that gradients are reduced in.
ZERO3_LIVE_PARAMETERS = 10**9
ZERO3_BUCKET = 5 * 10**8


@dataclass(frozen=True)
class Layout:
    """How the models lie on the ranks.

    offload: the optimiser's moments and the weights it updates lie in the host's memory.
    """

    sharding: Sharding
    num_gpus: int
    offload: bool = False


def compute_dtype(setting: Setting) -> torch.dtype:
    """The dtype of a sharded model's products: that of its gathered weights."""
    return torch.bfloat16 if setting.autocast else setting.student_dtype


def memory_parts(trace: Trace, setting: Setting, layout: Layout, *, freeze: bool = False) -> dict[str, int]:
    """Bytes of one rank by what they are for, at the moment at which most are needed.

    none: every rank holds student, gradients, AdamW's two moments and teacher whole; with several ranks DDP adds
    buckets as large as the gradients. Gradients count as far as they are there when the step needs most.
    fsdp2: parameters, gradients and moments in `student_dtype` over all ranks; gathered are what lies outside the
    layers, two layers, and the teacher's head. zero3: a bfloat16 run holds weights and gradients in bfloat16 and
    master weights and moments in float32. The teacher is sharded as well. freeze: estimate frozen embeddings and
    head from a trace without.
    """
    size = setting.student_dtype.itemsize
    trained = trace.num_trainable - (trace.embeddings_and_head if freeze else 0)
    peak = dict(trace.peak)
    has_teacher = "teacher" in peak
    ranks = layout.num_gpus
    if layout.sharding == "none":
        gradients = min(peak.get("gradients", 0), trained * size)
        parts = {
            "student weights": peak["student"],
            "gradients": gradients,
            "optimizer states": 0 if layout.offload else 2 * trained * size,
            "teacher weights": peak.get("teacher", 0),
            "DDP buckets": trained * size if ranks > 1 else 0,
        }
        moving = {kind: n for kind, n in peak.items() if kind not in _PERSISTENT}
    else:
        computed = compute_dtype(setting).itemsize
        total, master = trace.num_parameters, 0
        if layout.sharding == "zero3" and computed < 4:
            weights, gradients, moments, master = (
                computed * total,
                computed * trained,
                8 * trained,
                4 * trained,
            )
        else:
            weights, gradients, moments = size * total, size * trained, 2 * size * trained
        if layout.sharding == "zero3":
            gathered = computed * (min(ZERO3_LIVE_PARAMETERS, total) + min(ZERO3_BUCKET, trained))
        else:
            gathered = computed * (trace.outside_layers + 2 * trace.largest_layer)
        teacher = trace.num_parameters * setting.teacher_dtype.itemsize if has_teacher else 0
        head = trace.head * setting.teacher_dtype.itemsize if has_teacher else 0
        parts = {
            "student weights": weights // ranks,
            "master weights": 0 if layout.offload else master // ranks,
            "gradients": gradients // ranks,
            "optimizer states": 0 if layout.offload else moments // ranks,
            "teacher weights": teacher // ranks,
            "gathered weights": gathered + head if ranks > 1 else 0,
        }
        moving = dict(trace.transient)
    parts |= {
        "activations": sum(n for kind, n in moving.items() if kind != "loss"),
        "loss": moving.get("loss", 0),
    }
    coming_and_going = parts["activations"] + parts["loss"] + parts.get("gathered weights", 0)
    parts["fragmentation"] = int(FRAGMENTATION * coming_and_going)
    parts["GPU context"] = CONTEXT_BYTES
    return {name: number for name, number in parts.items() if number}


_PERSISTENT = ("student", "teacher", "gradients", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimiser step at the two ends of the range, and what they are made of at its fast end."""

    best: float
    worst: float
    compute: float
    memory: float
    communication: float


def step_time(
    trace: Trace,
    setting: Setting,
    layout: Layout,
    gpu: Gpu,
    micro_batches: int,
    mfu: tuple[float, float],
    network_gb_s: float,
) -> StepTime:
    """How long one optimiser step takes.

    compute: every product that runs (teacher and recomputation are work too) at `mfu` times the peak of its dtype;
    products in float32 at the peak without TF32, which torch leaves off. memory: every weight read once a pass,
    written where it changes, at the published bandwidth: with few tokens all experts are read for little work.
    communication: DDP's all-reduce once a step; sharded, all-gathers and a reduce-scatter every micro-batch; within
    a node at the link's bandwidth, beyond `GPUS_PER_NODE` ranks at the network's.
    best: the highest utilisation, memory and communication hidden behind compute. worst: the lowest, communication
    not hidden at all.
    """
    lowest, highest = mfu
    work = _peak_seconds(trace, gpu) * micro_batches
    computed = compute_dtype(setting).itemsize
    student = trace.num_parameters * (
        computed if layout.sharding != "none" else setting.student_dtype.itemsize
    )
    teacher = trace.peak.get("teacher", 0)
    passes = 5 + setting.checkpointing  # forward, backward, gradient read and written twice
    size = setting.student_dtype.itemsize
    shards = 1 if layout.sharding == "none" else layout.num_gpus
    optimizer = 7 * trace.num_trainable * size / shards  # reads weight, gradient, moments; writes all but it
    memory = (micro_batches * (teacher + passes * student) + optimizer) / (gpu.memory_gb_s * 1e9)
    link = gpu.link_gb_s if layout.num_gpus <= GPUS_PER_NODE else min(network_gb_s, gpu.link_gb_s)
    communication = _sent_bytes(trace, setting, layout, micro_batches, teacher) / (link * 1e9)
    best = max(work / highest, memory, communication)
    worst = max(work / lowest, memory) + communication
    return StepTime(best, worst, work / highest, memory, communication)


def _peak_seconds(trace: Trace, gpu: Gpu) -> float:
    seconds = 0.0
    for counts in trace.flops.values():
        for dtype, number in counts.items():
            tflops = gpu.float32_tflops if dtype in ("float32", "float64") else gpu.bf16_tflops
            seconds += number / (tflops * 1e12)
    return seconds


def _sent_bytes(trace: Trace, setting: Setting, layout: Layout, micro_batches: int, teacher: int) -> float:
    others = (layout.num_gpus - 1) / layout.num_gpus
    if layout.sharding == "none":
        return 2 * others * trace.num_trainable * setting.student_dtype.itemsize
    student = compute_dtype(setting).itemsize * (2 * trace.num_parameters + trace.num_trainable)
    return others * micro_batches * (student + teacher)
