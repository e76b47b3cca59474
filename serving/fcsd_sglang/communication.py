"""All-reduces between SGLang's ranks, with the backends of `fcsd_vllm`."""

from typing import Any

import torch

from fcsd_vllm.communication import Alone, Blocking, Communication, make_communication
from fcsd_vllm.settings import Settings


class BlockingInBreakableGraphs:
    """Use the chosen backend, but the engine's all-reduce in a piecewise graph, which
    no collective may outlive.
    """

    def __init__(self, overlapped: Communication, blocking: Communication) -> None:
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
            is_in_breakable_cuda_graph,
        )

        self.overlapped, self.blocking = overlapped, blocking
        self.in_pieces = is_in_breakable_cuda_graph

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Choose by what SGLang captures or runs."""
        return (self.blocking if self.in_pieces() else self.overlapped).start(x, tag)

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Choose as `start` did."""
        return (self.blocking if self.in_pieces() else self.overlapped).wait(x, tag)


def make(chosen: Settings, group: Any) -> Communication:
    """Return the backend that the settings name, over the ranks of a group coordinator
    of SGLang.
    """
    made = make_communication(chosen, group)
    if isinstance(made, Alone | Blocking):
        return made
    return BlockingInBreakableGraphs(made, Blocking(group))
