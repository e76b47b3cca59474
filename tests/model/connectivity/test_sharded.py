"""Rewired models under FSDP2 and DDP in several processes have the gradients of one
process.
"""

import pytest
import torch
import torch.distributed as dist

from tests.float64 import BOUND
from tests.reference.ranks import run_ranks
from tests.reference.tiny import converted
from tests.support import few

X = torch.randint(3, 99, (4, 9), generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("float64")


def gradients(model):
    by_name = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is not None:
            by_name[name.removeprefix("module.")] = (
                gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            )
    return by_name


def one_step(rank, family, strategy, checkpointing):
    model = converted(family).train()
    if checkpointing:
        model.activation_checkpointing_enable(
            {"use_reentrant": checkpointing == "reentrant"}
        )
        if checkpointing == "reentrant":
            model.enable_input_require_grads()
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    rows = X.chunk(dist.get_world_size())[rank]
    model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    return gradients(model) if rank == 0 else list(gradients(model))


@pytest.mark.parametrize("family", few(["deepseek_v2", "qwen3_moe", "llama4_text"], 1))
@pytest.mark.parametrize(
    ("strategy", "checkpointing"),
    [("fsdp2", None), ("fsdp2", "plain"), ("ddp", None), ("ddp", "reentrant")],
)
def test_two_ranks_have_the_gradients_of_one_process(family, strategy, checkpointing):
    model = converted(family).train()
    model(X, labels=X, use_cache=False).loss.backward()
    expected = gradients(model)
    actual, _ = run_ranks(one_step, 2, family, strategy, checkpointing)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (actual[name] - gradient).abs().max() < BOUND * max(
            1.0, float(gradient.abs().max())
        ), name
