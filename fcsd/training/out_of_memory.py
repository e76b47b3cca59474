"""Explain an out-of-memory error of a training by the settings that need less."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fcsd.base.errors import UserError, is_out_of_memory


@contextmanager
def explain_oom(device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a `UserError` with advice."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        # Devices, the host's allocator and system calls raise different classes.
        if not is_out_of_memory(error):
            raise
        requested = re.search(
            r"tried to allocate ([\d.]+ ?[A-Za-z]+)", str(error), re.IGNORECASE
        )
        shortfall = f" ({requested[1]} more were requested)" if requested else ""
        raise UserError(
            f"out of memory on {device}{shortfall}. To need less:"
            " train.gradient_checkpointing: true; a smaller"
            " train.per_device_train_batch_size (the step's batch does not change) or"
            " data.max_length; weights in shards over more GPUs (configs/fsdp2_8.yaml,"
            " configs/zero3_offload_8.yaml). `fcsd estimate RECIPE` shows the largest"
            " terms and the effect of each"
        ) from error
