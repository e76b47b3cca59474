"""Keep the weights that FSDP2 gathers while a model is scored, and free them.

Not covered: sharding (`fcsd.parallel.shard`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fcsd.base.memory import available_memory, free_memory
from fcsd.parallel.ranks import Ranks


@dataclass(frozen=True)
class Shards:
    """The weights that FSDP2 gathers on a rank: its units, each with whether a forward
    pass frees it, and the bytes of all of them.
    """

    units: list[tuple[Any, bool]]
    num_bytes: int
    device: torch.device


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered (generation leaves the head whole)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_WHOLE_AND_REST = 1.1
"""Free memory, as a multiple of all gathered weights, from which on they stay gathered:
a tenth is for caches and activations.
"""


def fits_whole(num_bytes: int, free_bytes: int) -> bool:
    """Tell whether weights of this many bytes stay whole while a model is scored."""
    return _WHOLE_AND_REST * num_bytes <= free_bytes


@contextlib.contextmanager
def gathered_once(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Keep the weights that FSDP2 gathers in the block's first forward pass until the
    block ends, if all ranks have room for them.

    Generation makes a pass for every token, and each would gather all weights. All
    ranks enter the block, and change no weights in it. Expert parallelism gathers as it
    does outside.
    """
    # Only models under FSDP2 have such a record.
    shards: list[Shards] = [
        shard_set.__dict__["_shards"]
        for shard_set in model.modules()
        if "_shards" in shard_set.__dict__
    ]
    num_bytes = sum(shard_set.num_bytes for shard_set in shards)
    # All ranks must decide alike, or their gathers would not match.
    keeps_gathered = False
    if shards:
        keeps_gathered = all(
            ranks.share(lambda: fits_whole(num_bytes, _free_bytes(shards[0].device)))
        )
    if keeps_gathered:
        units = [unit for shard_set in shards for unit in shard_set.units]
    else:
        units = []
    for unit, _ in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit, frees in units:
            unit.set_reshard_after_forward(frees, recurse=False)
        if units:
            reshard(model)


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that this rank may take of its device's memory."""
    if device.type == "cpu":
        return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # Unused blocks of the caching allocator are returned to the device first.
    free_memory()
    return int(torch.cuda.mem_get_info(device)[0])
