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
    communication: DDP's all-reduce once a step; sharded, all-gathers and a reduce-scatter every micro-batch, of
    gradients in the dtype of the weights that are updated; with hsdp also their all-reduce between nodes. Within a node
    at the link's bandwidth; a ring over several nodes is as fast as the network interfaces of a node together, or as
    the links.
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
    optimizer = (
        7 * trace.num_trainable * size / layout.num_shards
    )  # reads weight, gradient, moments; writes all but it
    memory = (micro_batches * (teacher + passes * student) + optimizer) / (gpu.memory_gb_s * 1e9)
    communication = _communication(trace, setting, layout, micro_batches, teacher, gpu, network_gb_s)
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


def _communication(
    trace: Trace,
    setting: Setting,
    layout: Layout,
    micro_batches: int,
    teacher: int,
    gpu: Gpu,
    network_gb_s: float,
) -> float:
    ring = 1e9 * min(gpu.link_gb_s, GPUS_PER_NODE * network_gb_s)  # over several nodes
    gradients = trace.num_trainable * setting.student_dtype.itemsize
    others = 1 - 1 / layout.num_gpus
    if layout.sharding == "none":
        return 2 * others * gradients / (ring if layout.num_gpus > GPUS_PER_NODE else 1e9 * gpu.link_gb_s)
    shards = layout.num_shards
    gathered = 2 * trace.num_parameters * compute_dtype(setting).itemsize + teacher
    sharing = ring if shards > GPUS_PER_NODE else 1e9 * gpu.link_gb_s
    seconds = (1 - 1 / shards) * micro_batches * (gathered + gradients) / sharing
    replicas = layout.num_gpus // shards
    if replicas > 1:  # each rank sums its shard with its peers', over its own interface
        seconds += 2 * (1 - 1 / replicas) * micro_batches * gradients / shards / (1e9 * network_gb_s)
    return seconds
