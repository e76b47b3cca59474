"""Expert parallelism for rewired models with communication overlapped by computation,
in the forward and the backward pass.

    config = DistributedConfig(fsdp_size=W, ep_size=N, ep_implementation="farskip")
    model = load_model(…, distributed_config=config)
    attach(model, "full")

Not covered: regular layers, which have nothing to compute meanwhile; tensor and
pipeline parallelism; CUDA graphs.
"""

from fcsd.parallel.overlap.attach import (
    attach,
    attach_loaded,
    check,
    check_connections,
    detach,
)
from fcsd.parallel.overlap.experts import IMPLEMENTATION, OverlappedEP
from fcsd.parallel.overlap.support import check_transformers, with_plan

__all__ = [
    "IMPLEMENTATION",
    "OverlappedEP",
    "attach",
    "attach_loaded",
    "check",
    "check_connections",
    "check_transformers",
    "detach",
    "with_plan",
]
