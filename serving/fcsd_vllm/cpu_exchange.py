"""A workaround for data-parallel experts on CPUs: vLLM 0.32.0's CPU communicator lacks
two collectives.

On CPUs, every backend falls back to `allgather_reducescatter`. It exchanges different
numbers of rows with `all_gatherv` and `reduce_scatterv`, which only raise
NotImplementedError there.
"""

from typing import Any

import torch

from fcsd_vllm.transports import gather_rows, scatter_rows


def give_collectives() -> None:
    """Add both to CPU communicators; do nothing if this vLLM has them."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(
        self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None
    ) -> Any:
        if not isinstance(input_, list):
            return all_gatherv(self, [input_], dim, sizes)[0]
        assert dim == 0
        sizes = sizes or [len(input_[0])] * self.world_size
        return [gather_rows(x, sizes, self.device_group)[0] for x in input_]

    def reduce_scatterv(
        self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor:
        assert dim == 0
        sizes = sizes or [len(input_) // self.world_size] * self.world_size
        return scatter_rows(input_, sizes, self.device_group)[0].sum(0)

    for collective in (all_gatherv, reduce_scatterv):
        name = collective.__name__
        if getattr(CpuCommunicator, name) is getattr(DeviceCommunicatorBase, name):
            setattr(CpuCommunicator, name, collective)
