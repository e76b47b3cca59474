"""What Megatron-Core asks of CUDA and of Transformer Engine, answered for a CPU; no
arithmetic is among it.
"""

import contextlib
from typing import Any

import torch


class Stream:
    """Work of a CPU is in order."""

    def wait_stream(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> "Stream":
        return self


def stand_in() -> None:
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.current_stream = Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    initialize_rng_tracker(
        inference_rng_tracker=True
    )  # public; the other one keeps states of CUDA's generators
    # 0.16.1 has it True without Transformer Engine
    multi_latent_attention.HAVE_TE = False
    # 0.16.1 asks whether it is None, and does not define it
    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = on_cpu


def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return sizes of exchanges as numbers, which Megatron does with tensors of a GPU alone."""
    return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor
