"""Find changes, one after another, until a training fits the memory of a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.text import size
from fcsd.planning.cost.job import Job
from fcsd.planning.cost.memory import Layout, memory_parts
from fcsd.planning.cost.trace import Setting, Trace
from fcsd.planning.cost.training import Training

MORE_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


def activation_bytes(
    trace_of: Callable[[Setting], Trace], setting: Setting, layout: Layout
) -> int | None:
    """Compute the bytes of the activations; None for a family that cannot recompute its layers."""
    try:
        return memory_parts(trace_of(setting), setting, layout).get("activations", 0)
    except UserError:
        return None


def is_supported(training: Training, layout: Layout) -> bool:
    """Tell whether `fcsd distill` runs this training: adapters need whole weights."""
    return training.lora is None or layout.sharding == "none"


def changes(job: Job, available: int) -> Iterator[dict[str, Any]]:
    """Yield changes one after another, each on top of those before, until the run fits."""
    training, trace_of = job.training, job.trace_of
    setting, layout = job.setting, job.layout
    freeze = False

    def row(change: str) -> dict[str, Any]:
        total = sum(
            memory_parts(trace_of(setting), setting, layout, freeze=freeze).values()
        )
        facts = {"change": change, "total_bytes": total, "fits": total <= available}
        return facts | {"supported": is_supported(training, layout)}

    def steps() -> Iterator[dict[str, Any]]:
        nonlocal setting, layout, freeze
        # In the order of their cost to the user: settings of the same training first,
        # then another launch, then training other weights, then more hardware.
        if not setting.checkpointing and activation_bytes(
            trace_of, replace(setting, checkpointing=True), layout
        ):
            setting = replace(setting, checkpointing=True)
            yield row("train.gradient_checkpointing: true")
        if setting.num_rows > 1:
            setting = replace(setting, num_rows=1, accumulates=True)
            yield row("train.per_device_train_batch_size: 1")
        averaged = memory_parts(trace_of(setting), setting, layout).get(
            "averaged weights", 0
        )
        if averaged:
            layout = replace(layout, averages=False)
            yield row(f"train.ema_decay: null ({size(averaged)} of averaged weights)")
        # A cache holds the last hidden states only, so the L2 term needs the teacher's
        # forward pass, and so does text that the student writes.
        if (
            setting.runs_teacher_model
            and setting.objective.l2_coefficient is None
            and setting.objective.own_text is None
        ):
            setting = replace(setting, teacher="cache")
            yield row("teacher.backend: cache, filled in advance")
        if setting.adapters:
            return  # neither shards nor anything below for a LoRA student
        if layout.sharding == "none":
            first = max(layout.num_gpus, MORE_GPUS[0])
            setting = replace(setting, sharded=True)
            layout = replace(layout, sharding="fsdp2", num_gpus=first)
            yield row(f"--sharding fsdp2 --gpus {first}: student and teacher in shards")
        if not setting.freeze_embeddings_and_head:
            freeze = True
            yield row("objective.freeze_embeddings_and_head: true")
        # Offloading and more GPUs are alternatives: more GPUs are tried without
        # offloading.
        base = layout
        layout = replace(layout, offload=True)
        yield row(
            "optimiser states offloaded to the host's memory:"
            " configs/zero3_offload_8.yaml"
        )
        layout = base
        for count in MORE_GPUS:
            if count > layout.num_gpus:
                layout = replace(layout, num_gpus=count)
                yield row(f"--gpus {count} instead of offloading")

    for change in steps():
        yield change
        if change["fits"]:
            return
