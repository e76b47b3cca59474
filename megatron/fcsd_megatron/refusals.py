"""Options of Megatron-Core that rewired layers do not support, refused before a layer
is built. Does not import Megatron.
"""

from collections.abc import Callable
from typing import Any

from fcsd.base.errors import UserError


def _more_than_one(value: Any) -> bool:
    return (value or 1) > 1


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tensor_model_parallel_size": (
        _more_than_one,
        "was not compared with fcsd; use expert parallelism",
    ),
    "context_parallel_size": (
        _more_than_one,
        "was not compared with fcsd; use expert parallelism",
    ),
    "pipeline_model_parallel_size": (
        _more_than_one,
        "passes one tensor from stage to stage, but a rewired layer passes two; use expert parallelism",
    ),
    "sequence_parallel": (bool, "belongs to tensor parallelism; leave it off"),
    "mtp_num_layers": (
        bool,
        "predicts from layers that fcsd does not convert; leave it out",
    ),
    "recompute_granularity": (
        bool,
        "recomputes parts of a regular layer; leave it None",
    ),
    "cpu_offloading": (bool, "moves what a regular layer keeps; leave it off"),
    "fine_grained_activation_offloading": (
        bool,
        "moves what a regular layer keeps; leave it off",
    ),
    "cuda_graph_impl": (
        lambda value: value not in (None, "none"),
        "captures a regular layer; leave it 'none'",
    ),
    "enable_cuda_graph": (bool, "captures a regular layer; leave it off"),
    "external_cuda_graph": (bool, "captures a regular layer; leave it off"),
    "overlap_moe_expert_parallel_comm": (
        bool,
        "splits regular layers; leave it off",
    ),
    "moe_shared_expert_overlap": (
        bool,
        "adds the shared experts to the routed output; leave it off",
    ),
    "inference_fuse_tp_communication": (
        bool,
        "adds the stream in attention's kernel; leave it off",
    ),
    "mlp_chunks_for_prefill": (
        _more_than_one,
        "cuts the MLP of a regular layer; leave it 1",
    ),
    "mlp_chunks_for_training": (
        _more_than_one,
        "cuts the MLP of a regular layer; leave it 1",
    ),
    "fp8": (bool, "was not compared with fcsd; leave it None"),
    "fp4": (bool, "was not compared with fcsd; leave it None"),
    "fp32_residual_connection": (bool, "was not compared with fcsd; leave it off"),
}
"""Field of Megatron's TransformerConfig -> what is refused, and why."""


def check_options(config: Any) -> None:
    """Raise UserError for the first option of a TransformerConfig that rewired layers
    do not support.

    A field that this release lacks is off.
    """
    for name, (refused, reason) in RULES.items():
        if refused(value := getattr(config, name, None)):
            raise UserError(f"fcsd-megatron: {name}={value!r} {reason}")
