"""Weights of a checkpoint in Megatron and back: every tensor, to the bit, on one rank
and on two.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import call, loss_of, make_checkpoint, megatron_model, start, tokens_of
from megatron.core.transformer.spec_utils import ModuleSpec
from safetensors.torch import load_file, save_file

from fcsd.base.errors import UserError
from fcsd.model.connectivity import load_model
from fcsd_megatron import (
    build_model,
    load_weights,
    local_block,
    read_source,
    save_weights,
    transformer_config,
    with_farskip,
)
from tests.float64 import BOUND, error, in_float64
from tests.reference.ranks import run_ranks

OPTIONS: dict[str, Any] = {"use_cpu_initialization": True}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}


def there_and_back(rank: int, folder: Path, out: Path, num_ranks: int) -> None:
    """Load a checkpoint into a float32 model and save it."""
    start(num_ranks)
    model = build_model(folder, **OPTIONS)
    load_weights(model, folder)
    save_weights(model, out, like=folder)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "model, connectivity",
    [
        ("qwen3_moe-dense", "all"),
        ("deepseek_v3", "half"),
        ("deepseek_v3-yarn", "regular"),
    ],
)
def test_what_comes_back_is_the_same_to_the_byte(
    model: str, connectivity: str, dtype: torch.dtype, num_ranks: int, tmp_path: Path
) -> None:
    folder, out = (
        make_checkpoint(tmp_path, model, connectivity, dtype),
        tmp_path / "out",
    )
    run_ranks(there_and_back, num_ranks, folder, out, num_ranks)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        file.name: file.read_bytes() for file in folder.iterdir()
    }


def train(rank: int, folder: Path, out: Path, num_ranks: int) -> torch.Tensor:
    """Take a step of gradient descent, save the model, and return its logits."""
    start(num_ranks)
    model = megatron_model(folder)
    loss_of(call(model, tokens_of(0))).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            # the dtype of the checkpoint
            parameter.copy_((parameter - 1e-3 * parameter.grad).float())
        save_weights(model, out, like=folder)
        return call(model, tokens_of(0)).detach()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v3"])
def test_a_trained_model_is_the_same_in_load_model(
    model: str, num_ranks: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, model, "all")
    logits = run_ranks(train, num_ranks, folder, tmp_path / "out", num_ranks)
    before, after = (
        load_file(place / "model.safetensors") for place in (folder, tmp_path / "out")
    )
    still = {name for name in before if torch.equal(before[name], after[name])}
    no_gradient = {
        name
        for name in before
        if ".experts." in name or name.endswith("e_score_correction_bias")
    }
    assert still < no_gradient  # of the experts those without a token
    loaded = load_model(tmp_path / "out", dtype=torch.float64).double()
    with in_float64(), torch.no_grad():
        loaded.model.rotary_emb = type(loaded.model.rotary_emb)(loaded.config)
        expected = loaded(tokens_of(0), use_cache=False).logits
    assert all(error(each, expected) < BOUND for each in logits)
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["farskip_trained"]
        is True
    )
    assert "farskip_trained" not in json.loads((folder / "config.json").read_text())


def refusal(rank: int, call_with: Any, *arguments: Any) -> str:
    """Return the text of a refusal."""
    start(1)
    with pytest.raises(UserError) as refused:
        call_with(*arguments)
    return str(refused.value)


def other_connectivity(built: Path, loaded: Path) -> None:
    load_weights(build_model(built, **OPTIONS), loaded)


def existing(folder: Path, out: Path) -> None:
    save_weights(build_model(folder, **OPTIONS), out, like=folder)


def with_options(folder: Path, options: dict[str, Any]) -> None:
    build_model(folder, **OPTIONS, **options)


def other_specs(folder: Path, wrong: str) -> None:
    source = read_source(folder)
    block, plans = local_block(transformer_config(source, **OPTIONS)), source.plans
    if wrong == "number":
        plans = plans[:-1]
    else:
        block.layer_specs[1] = ModuleSpec(torch.nn.Identity)
    with_farskip(block, plans)


def other_tensors(folder: Path) -> None:
    model = build_model(folder, **OPTIONS)
    model.decoder.layers[1].mlp.router.extra = torch.nn.Parameter(torch.zeros(2))
    load_weights(model, folder)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    whole, half = (
        make_checkpoint(tmp_path, "qwen3_moe", name) for name in ("all", "half")
    )

    def text(call_with: Any, *arguments: Any) -> str:
        return str(run_ranks(refusal, 1, call_with, *arguments)[0])

    assert "connectivity differs from this" in text(other_connectivity, whole, half)
    assert "exists and is not empty" in text(existing, whole, half)
    assert "3 plans for a spec of 4 layers" in text(other_specs, whole, "number")
    assert "layer 1 is a Identity; FarSkip layers can only replace" in text(
        other_specs, whole, "class"
    )
    assert "'decoder.layers.1.mlp.router.extra' (1 tensors differ)" in text(
        other_tensors, whole
    )
    assert "hidden_size comes from the checkpoint (32)" in text(
        with_options, whole, {"hidden_size": 64}
    )
    for options, name in (
        ({"recompute_granularity": "selective"}, "recompute_granularity='selective'"),
        (
            {
                "moe_shared_expert_overlap": True,
                "moe_token_dispatcher_type": "alltoall",
            },
            "moe_shared_expert_overlap=True",
        ),
        ({"fp32_residual_connection": True}, "fp32_residual_connection=True"),
    ):
        assert name in text(with_options, whole, options)
    if version("megatron-core") == "0.19.2":
        queries = make_checkpoint(tmp_path, "deepseek_v3-full_queries", "all")
        assert "install megatron-core==0.16.1" in text(with_options, queries, {})
    tensors = load_file(whole / "model.safetensors")
    (tmp_path / "extra").mkdir()
    for file in whole.iterdir():
        (tmp_path / "extra" / file.name).write_bytes(file.read_bytes())
    extra = {**tensors, "model.layers.0.mlp.extra.weight": torch.zeros(2)}
    save_file(
        extra, tmp_path / "extra" / "model.safetensors", metadata={"format": "pt"}
    )
    assert "model.layers.0.mlp.extra.weight" in text(
        with_options, tmp_path / "extra", {}
    )
