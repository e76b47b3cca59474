"""Explain an out-of-memory error of a training: the largest terms, and settings to
change.

Memory that is held throughout is counted from the models; the rest is the difference
from the peak.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError, is_out_of_memory
from fcsd.base.text import size
from fcsd.parallel.shard import own_part
from fcsd.training.config import UpdateConfig
from fcsd.training.teachers.base import ModelTeacher, Teacher

REST = "activations, loss and buffers"


@contextmanager
def explain_oom(
    student: nn.Module,
    teacher: Teacher | None,
    train: UpdateConfig,
    max_length: int,
    device: torch.device,
) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a `UserError` with this rank's
    largest terms and advice.
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        # Devices, the host's allocator and system calls raise different classes.
        if not is_out_of_memory(error):
            raise
        terms = held(student, teacher)
        peak = peak_bytes(device)
        # What the peak has beyond the counted terms is attributed to activations.
        if peak is not None:
            terms[REST] = max(0, peak - sum(terms.values()))
        sizes = [(number, name) for name, number in terms.items() if number]
        largest = sorted(sizes, reverse=True)
        requested = re.search(
            r"tried to allocate ([\d.]+ ?[A-Za-z]+)", str(error), re.IGNORECASE
        )
        shortfall = f", and {requested[1]} more were requested" if requested else ""
        numbers = ", ".join(f"{name} {size(number)}" for number, name in largest)
        changes = "; ".join(
            advice([name for _, name in largest], student, teacher, train, max_length)
        )
        raise UserError(
            f"out of memory on {device}: a rank needs about"
            f" {numbers}{shortfall}. To need less: {changes}; `fcsd"
            " estimate RECIPE` shows the effect of each"
        ) from error


def held(student: nn.Module, teacher: Teacher | None) -> dict[str, int]:
    """Count the bytes that this rank holds from step to step; those of its own shards
    where the models are sharded.
    """
    # A teacher may share parameters with the student: these count once.
    trained = [p for p in student.parameters() if p.requires_grad]
    student_ids = {id(p) for p in student.parameters()}
    if isinstance(teacher, ModelTeacher):
        module = teacher.model
    else:
        module = getattr(teacher, "head", None)
    if isinstance(module, nn.Module):
        teacher_parameters = {id(p): p for p in module.parameters()}
    else:
        teacher_parameters = {}
    gradients = sum(map(_local_bytes, trained))
    return {
        "student weights": sum(map(_local_bytes, student.parameters())),
        "gradients": gradients,
        "optimizer states": 2 * gradients,  # AdamW's two moments
        "teacher weights": sum(
            _local_bytes(p)
            for key, p in teacher_parameters.items()
            if key not in student_ids
        ),
    }


def _local_bytes(parameter: Any) -> int:
    local = own_part(parameter)
    return local.numel() * local.element_size() if isinstance(local, Tensor) else 0


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak of the device, or of this process on a CPU; None if it is
    unknown.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.is_file():
        return None
    # VmHWM is the high-water mark of the resident memory, in KiB.
    lines = [
        line for line in status.read_text().splitlines() if line.startswith("VmHWM:")
    ]
    return int(lines[0].split()[1]) * 1024 if lines else None


def advice(
    largest: list[str],
    student: nn.Module,
    teacher: Teacher | None,
    train: UpdateConfig,
    max_length: int,
) -> list[str]:
    """List changes of the recipe or the launch, beginning with those that reduce the
    largest terms.
    """
    sharded = any(
        hasattr(p, "ds_tensor") or hasattr(p, "device_mesh")
        for p in student.parameters()
    )
    all_trained = all(p.requires_grad for p in student.parameters())
    fewer_activations = []
    if not getattr(student, "is_activation_checkpointing", False):
        fewer_activations.append("train.gradient_checkpointing: true")
    if train.per_device_train_batch_size > 1:
        fewer_activations.append(
            "train.per_device_train_batch_size below"
            f" {train.per_device_train_batch_size} (the step's batch does not change)"
        )
    else:
        fewer_activations.append(f"data.max_length below {max_length}")
    fewer_weights = []
    if not sharded:
        fewer_weights.append(
            "weights in shards over several GPUs (configs/fsdp2_8.yaml,"
            " configs/zero3_8.yaml)"
        )
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fewer_weights.append(
            "more GPUs, or states in the host's memory (configs/zero3_offload_8.yaml)"
        )
    if all_trained:
        fewer_weights.append(
            "a lora section with teacher.backend: adapter_off (one copy of the weights)"
        )
    if isinstance(teacher, ModelTeacher):
        of_the_teacher = ["teacher.backend: cache"]
    else:
        of_the_teacher = []
    # Optimiser states and gradients shrink with the weights, so those share their
    # advice.
    by_term = {
        REST: fewer_activations,
        "teacher weights": of_the_teacher + fewer_weights,
    }
    changes = [
        change for term in largest for change in by_term.get(term, fewer_weights)
    ]
    return list(dict.fromkeys(changes))
