"""Turn matmuls and bytes sent of one rank into the seconds of an optimiser step."""

from dataclasses import dataclass

from fcsd.cost.hardware import Gpu
from fcsd.cost.memory import GPUS_PER_NODE, Layout, compute_dtype
from fcsd.cost.trace import Setting, Trace


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
    """Estimate how long one optimiser step takes.

    compute: every matmul that runs (teacher and recomputation are work too) at `mfu` times the peak of its dtype;
    matmuls in float32 at the peak without TF32, which torch leaves off. memory: every weight read once a pass,
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
