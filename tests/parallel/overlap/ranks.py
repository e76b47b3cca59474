"""Shared by the tests of overlapped expert parallelism: models spread over ranks,
steps, and comparisons of both.
"""

from pathlib import Path
from typing import Any

import torch

from fcsd.model.connectivity import Connectivity, load_model
from fcsd.model.connectivity.checkpoint import read_config
from fcsd.parallel.overlap import attach, detach, with_plan
from fcsd.parallel.overlap.layer import runtimes

X = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(3))
CHECKPOINTING = {"use_reentrant": False}
Gradients = dict[str, torch.Tensor]
WITHOUT_EFFECT = "layers.0.mlp_input.query"
"""A softmax over one source, before which there are no others (inkling2): its gradient
is rounding errors of zero.
"""


def spread(
    folder: Path, connectivity: Connectivity | None, size: int, **options: Any
) -> Any:
    """Return the model with its experts spread over groups of `size` ranks, and
    everything else sharded by FSDP2 over all ranks.
    """
    from transformers.distributed import DistributedConfig

    world = torch.distributed.get_world_size()
    options = {"ep_implementation": "farskip"} | options
    config = DistributedConfig(fsdp_size=world, ep_size=size, **options)
    config = with_plan(config, read_config(folder).family)
    return load_model(folder, connectivity=connectivity, distributed_config=config)


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = (
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    )
    return full


def step(model: Any, *batches: torch.Tensor) -> Gradients:
    """Return name -> this rank's part of the gradient, summed over the batches; "loss"
    is that of the last batch.
    """
    model.train()
    model.zero_grad(set_to_none=True)
    for x in batches:
        loss = model(x, labels=x, use_cache=False).loss
        loss.backward()
    gradients = {
        n: p.grad.detach().clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
    return {"loss": loss.detach()} | gradients


def local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def same(one: Gradients, other: Gradients) -> bool:
    """Tell whether all gradients are equal to the last bit, on all ranks."""
    equal = one.keys() == other.keys() and all(
        torch.equal(local(one[n]), local(other[n])) for n in one
    )
    if not torch.distributed.is_initialized():
        return equal
    everywhere = torch.tensor(int(equal))
    torch.distributed.all_reduce(everywhere, torch.distributed.ReduceOp.MIN)
    return bool(everywhere)


def worst(actual: Gradients, expected: Gradients | None) -> float:
    """Return the largest error of a gradient, relative to the largest of its tensor; 0
    on a rank that expects nothing.

    All ranks call this function, which gathers the gradients.
    """
    gathered = {name: whole(gradient) for name, gradient in actual.items()}
    if expected is None:
        return 0.0
    assert gathered.keys() == expected.keys(), gathered.keys() ^ expected.keys()
    errors = [
        float((gathered[n] - g).abs().max() / g.abs().max())
        for n, g in expected.items()
        if n != "loss" and g.any() and not n.endswith(WITHOUT_EFFECT)
    ]
    return max(errors)


def attached(model: Any, overlap: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Attach overlap again; return the lists in which exchanges and steps will be
    recorded.
    """
    detach(model)
    attach(model, overlap, **options)
    records: list[Any] = []
    steps: list[Any] = []
    for runtime in runtimes(model):
        runtime.log = steps
        if runtime.ep is not None:
            runtime.ep.port.records = records
    return records, steps
