"""Learning rates by layer and Muon, against torch's own optimisers on parameters given
one by one.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fcsd.training.config import TrainConfig
from fcsd.training.optimizer import (
    MuonWithAdamW,
    learning_rate_scales,
    parameter_groups,
)
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import few

ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8}


def groups(
    model: Any, ratio: float = 1.0, with_muon: bool = True
) -> list[dict[str, Any]]:
    decayed = {name for name, p in model.named_parameters() if p.ndim > 1}
    optimizer: Any = "muon" if with_muon else "adamw"
    train = TrainConfig(
        learning_rate=0.01, weight_decay=0.1, layer_lr_ratio=ratio, optimizer=optimizer
    )
    return parameter_groups(model, train, decayed)


def test_rates_go_from_the_first_to_the_last_layer_around_the_one_that_is_set() -> None:
    scales = learning_rate_scales(tiny_model("qwen3_moe", num_hidden_layers=3), 4.0)
    assert (
        scales["model.embed_tokens.weight"]
        == scales["model.layers.0.mlp.gate.weight"]
        == 0.5
    )
    assert scales["model.layers.1.mlp.gate.weight"] == 1.0
    assert (
        scales["model.layers.2.mlp.gate.weight"]
        == scales["model.norm.weight"]
        == scales["lm_head.weight"]
        == 2.0
    )
    assert (
        learning_rate_scales(tiny_model("qwen3_moe", num_hidden_layers=1), 4.0)[
            "model.layers.0.mlp.gate.weight"
        ]
        == 1
    )
    tied = learning_rate_scales(
        tiny_model("qwen3_moe", num_hidden_layers=2, tie_word_embeddings=True), 4.0
    )
    assert tied["model.embed_tokens.weight"] == 0.5 and "lm_head.weight" not in tied


def test_every_trained_parameter_is_in_one_group_with_its_decay_and_its_optimiser() -> (
    None
):
    model = tiny_model("qwen2_moe", num_hidden_layers=2)
    model.lm_head.requires_grad_(False)
    all_groups = groups(model, ratio=4.0)
    placed = {id(p): group for group in all_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in all_groups) == len(placed)
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            assert id(parameter) not in placed
            continue
        group = placed[id(parameter)]
        assert group["muon"] == (".layers." in name and parameter.ndim > 1)
        assert group["weight_decay"] == (0.1 if parameter.ndim > 1 else 0.0)
        assert group["lr"] == 0.01 * group["lr_scale"]
    assert any(
        p.ndim == 3 for group in all_groups if group["muon"] for p in group["params"]
    )


def by_torchs_own(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights after three steps of `torch.optim.Muon` for each matrix by
    itself, and of `torch.optim.AdamW`."""
    matrices: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, p in model.named_parameters():
        if ".layers." in name and p.ndim > 1:
            slices = (
                p.detach().clone().unbind() if p.ndim == 3 else [p.detach().clone()]
            )
            matrices[name] = [torch.nn.Parameter(each.clone()) for each in slices]
        else:
            others[name] = torch.nn.Parameter(p.detach().clone())
    muon = torch.optim.Muon(
        [p for each in matrices.values() for p in each],
        lr=0.01,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in others.values() if p.ndim > 1], "weight_decay": 0.1},
            {
                "params": [p for p in others.values() if p.ndim == 1],
                "weight_decay": 0.0,
            },
        ],
        **ADAMW,
    )
    for gradient in gradients(model):
        for name, grad in gradient.items():
            parts = [others[name]] if name in others else matrices[name]
            for each, own in zip(
                parts, grad if grad.ndim == 3 else [grad], strict=True
            ):
                each.grad = own.clone()
        muon.step()
        adamw.step()
    whole = {name: torch.stack(list(each)) for name, each in matrices.items()}
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return {
        name: p.detach().reshape(shapes[name])
        for name, p in {**others, **whole}.items()
    }


def gradients(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield random gradients of three steps."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        yield {
            name: torch.randn(p.shape, generator=generator)
            for name, p in model.named_parameters()
        }


def test_muon_moves_each_expert_as_torchs_muon_moves_a_matrix_and_the_rest_as_adamw_does() -> (
    None
):
    model = tiny_model("qwen3_moe", num_hidden_layers=2)
    wanted = by_torchs_own(model)
    optimizer = MuonWithAdamW(groups(model), **ADAMW)
    for gradient in gradients(model):
        for name, p in model.named_parameters():
            p.grad = gradient[name]
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, wanted[name]), name


def sharded(rank: int, world: int, replicas: int) -> dict[str, torch.Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    model = tiny_model("qwen3_moe", num_hidden_layers=2, num_experts=5)
    steps = list(gradients(model))
    mesh = init_device_mesh(
        "cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
    )
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh if replicas > 1 else mesh["shard"])
    optimizer = MuonWithAdamW(groups(model), **ADAMW)
    for gradient in steps:
        for name, p in model.named_parameters():
            p.grad = distribute_tensor(gradient[name], p.device_mesh, p.placements)
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("world", "replicas"), few([(2, 1), (4, 2)], 1))
def test_muon_moves_what_fsdp2_has_cut_as_it_moves_whole_matrices(
    world: int, replicas: int
) -> None:
    # 3 on a rank and 2
    wanted = by_torchs_own(tiny_model("qwen3_moe", num_hidden_layers=2, num_experts=5))
    for weights in run_ranks(sharded, world, world, replicas):
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_loaded_state_goes_on_to_the_last_bit() -> None:
    def steps(model: Any, optimizer: Any, seeds: range) -> None:
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    one = tiny_model("qwen3_moe", num_hidden_layers=2)
    first = MuonWithAdamW(groups(one, 2.0), **ADAMW)
    steps(one, first, range(2))
    other = tiny_model("qwen3_moe", num_hidden_layers=2, seed=5)
    other.load_state_dict(one.state_dict())
    second = MuonWithAdamW(groups(other, 2.0), **ADAMW)
    # torch would share the tensors
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(one, first, range(2, 4))
    steps(other, second, range(2, 4))
    assert all(
        torch.equal(p, q)
        for p, q in zip(one.parameters(), other.parameters(), strict=True)
    )


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="matrices and stacks of matrices"):
        MuonWithAdamW(
            [{"params": [torch.nn.Parameter(torch.zeros(3))], "muon": True, "lr": 1.0}],
            **ADAMW,
        )
