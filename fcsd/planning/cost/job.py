"""Put one training of a recipe on a machine: the ranks that share its weights, its
traced step, its seconds per step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fcsd.base.errors import UserError
from fcsd.base.strict import refuse
from fcsd.planning.cost.assumptions import ASSUMPTIONS
from fcsd.planning.cost.machine import Machine, make_machine
from fcsd.planning.cost.memory import GPUS_PER_NODE, Layout, compute_dtype
from fcsd.planning.cost.operations import ModelWork, as_run, trace_layers
from fcsd.planning.cost.roofline import Roofline
from fcsd.planning.cost.settings import Hardware
from fcsd.planning.cost.stored import BFLOAT16, FLOAT32
from fcsd.planning.cost.times import Step, step_time
from fcsd.planning.cost.trace import Setting, Trace
from fcsd.planning.cost.training import (
    Training,
    built,
    micro_batch_setting,
    spread,
    tracer,
)
from fcsd.training.config import micro_batches

SHARES = ("gemm", "grouped", "core", "fused_core")
"""Assumptions that `--mfu` replaces: the shares of the peak that matmuls reach."""
ENDS = (*SHARES, "prefetch")
"""Assumptions that give an estimate its range; all of them take the same end of their
ranges together.
"""


def machine_of(hardware: Hardware) -> Machine:
    """Return the machine; raise UserError for an unknown GPU, or a layout that no
    launch has.
    """
    ranks = hardware.expert_parallel
    refuse(
        (
            hardware.sharding == "hsdp" and hardware.num_gpus % GPUS_PER_NODE,
            f"--sharding hsdp: a copy is shared by the {GPUS_PER_NODE} GPUs of a node,"
            f" so --gpus must be a multiple of {GPUS_PER_NODE}, got {hardware.num_gpus}",
        ),
        (
            hardware.num_gpus % ranks,
            f"--expert-parallel {ranks}: does not divide the {hardware.num_gpus} GPUs"
            " (--gpus)",
        ),
        (
            ranks > 1 and hardware.sharding != "fsdp2",
            f"--expert-parallel {ranks}: shards all other weights as well, by FSDP2;"
            " add --sharding fsdp2",
        ),
    )
    return make_machine(
        hardware.gpu, hardware.num_gpus, GPUS_PER_NODE, hardware.network_gb_s
    )


def assumed_values(mfu: tuple[float, float] | None) -> list[dict[str, float]]:
    """Return the values of the assumptions at their fast ends, as expected, and at
    their slow ends.
    """
    cases = [
        {name: getattr(ASSUMPTIONS[name], end) for name in ENDS}
        for end in ("high", "value", "low")
    ]
    if mfu is not None:
        for values, share in zip(cases, (mfu[1], sum(mfu) / 2, mfu[0]), strict=True):
            values.update(dict.fromkeys(SHARES, share))
    return cases


@dataclass(frozen=True)
class Job:
    """A training to estimate. work: the operations of a micro-batch's forward pass by
    layer and step.
    """

    training: Training
    hardware: Hardware
    machine: Machine
    layout: Layout
    setting: Setting
    micro_batches: int
    trace_of: Callable[[Setting], Trace]
    work: ModelWork

    @property
    def trace(self) -> Trace:
        """The trace of this job's micro-batch."""
        return self.trace_of(self.setting)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.setting.num_rows * self.setting.num_tokens


def job_of(training: Training, hardware: Hardware) -> Job:
    """Trace a micro-batch of a training; raise UserError for an impossible machine,
    batch or model.
    """
    machine, ranks = machine_of(hardware), hardware.expert_parallel
    rows, number = micro_batches(training.train, training.max_length, hardware.num_gpus)
    # A teacher returns the hidden states of all micro-batches of a step together.
    objective = training.objective
    ends = objective.l2_coefficient is None or objective.l2_until is not None
    layout = Layout(
        hardware.sharding,
        hardware.num_gpus,
        step_tokens=(training.train.batch_size_tokens if ends else 0),
        averages=training.train.ema_decay is not None,
        expert_parallel=ranks,
    )
    setting = replace(micro_batch_setting(training, layout, number), num_rows=rows)
    trace_of = tracer(training)
    # Traced here, so that a model that cannot be traced is refused early.
    trace_of(setting)
    family, _, build = built(training)
    work = trace_layers(
        build, family, training.where, setting.num_rows, setting.num_tokens
    )
    if work.num_experts % ranks:
        raise UserError(
            f"--expert-parallel {ranks}: does not divide the {work.num_experts} experts"
            f" of {training.where}"
        )
    trace_of = spread(trace_of, training, work, ranks)
    # A rank that has all experts runs the family's code; ranks that share them run only
    # the chosen ones.
    run = as_run(work) if ranks == 1 else work
    return Job(training, hardware, machine, layout, setting, number, trace_of, run)


def step_times(job: Job) -> list[dict[str, Any]]:
    """Return the results of `step_time` with the assumptions at their fast ends, as
    expected, and at their slow ends.
    """
    setting, trace = job.setting, job.trace
    weights_dtype = setting.teacher_dtype if setting.adapters else setting.student_dtype
    teacher = None
    if setting.has_teacher and setting.teacher != "cache":
        teacher = roofline_of(job, setting.teacher_dtype)
    step = Step(
        job.work,
        roofline_of(job, torch.bfloat16 if setting.autocast else weights_dtype),
        job.layout,
        job.micro_batches,
        num_trained=trace.num_trainable,
        trained_bytes=setting.student_dtype.itemsize,
        adapters=setting.adapters,
        recomputes=setting.checkpointing,
        teacher=teacher,
        # Logits and the gradients of their two factors; a teacher's logits are one
        # more, a frozen head needs no gradient.
        loss_matmuls=3 + setting.has_teacher - setting.freeze_embeddings_and_head,
    )
    return [
        step_time(step.assuming(values)) for values in assumed_values(job.hardware.mfu)
    ]


def gather_s(job: Job) -> float:
    """Return the seconds that a rank takes to receive all weights once, in the dtype of
    the computation.
    """
    roofline, layout = roofline_of(job, compute_dtype(job.setting)), job.layout
    forward_s, _, _ = roofline.sharding(
        job.work, layout.num_shards, layout.expert_parallel
    )
    return forward_s


def roofline_of(job: Job, dtype: torch.dtype) -> Roofline:
    """Return the roofline of the job's machine for matmuls of this dtype."""
    stored = FLOAT32 if dtype is torch.float32 else BFLOAT16
    return Roofline(job.machine, stored, fused=job.training.attention != "eager")
