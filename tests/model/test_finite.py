"""A model with values that are NaN or infinite is refused at every door, and the tensor
is named.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fcsd
from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_checkpoint
from fcsd.model.load import find_model, load_checkpoint, refuse_not_finite
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.model.quantised.test_dequantize import LAYOUTS, write
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import user_error

WEIGHTS = "model.safetensors"
EXPERT = "model.layers.2.mlp.experts.1.down_proj.weight"
PLACES = [
    EXPERT, "model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.e_score_correction_bias",
    "model.layers.3.input_layernorm.weight", "model.embed_tokens.weight", "lm_head.weight",
]  # fmt: skip
X = torch.randint(3, 99, (24, 16), generator=torch.Generator().manual_seed(0))


def damaged(folder: Path, family: str, name: str, value: float, **sizes: Any) -> Path:
    """Write a checkpoint in several shards in which one value of a tensor is damaged."""
    model = tiny_model(family, **sizes)
    model.save_pretrained(folder, max_shard_size="60KB")
    tiny_tokenizer(sizes.get("vocab_size", 512)).save_pretrained(folder)
    index = json.loads((folder / f"{WEIGHTS}.index.json").read_text())
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name].flatten()[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", PLACES)
def test_one_value_that_is_no_number_is_found_wherever_it_stands(
    name: str, value: float, tmp_path: Path
) -> None:
    folder = damaged(tmp_path, "deepseek_v3", name, value, vocab_size=512)
    # transformers puts the weights of all experts into one tensor.
    found = name.replace("1.down_proj.weight", "down_proj")
    for layers in (None, "all"):
        with user_error(rf"NaN or infinite in 1 tensors: '{found}' \(1 of \d+\)"):
            fcsd.load(folder, layers=layers)


@pytest.mark.parametrize("name", PLACES)
def test_minus_infinity_is_a_fault_in_weights_and_in_a_routers_bias_an_expert_that_is_never_chosen(
    name: str, tmp_path: Path
) -> None:
    folder = damaged(tmp_path / "model", "deepseek_v3", name, -math.inf, vocab_size=512)
    convert_checkpoint(folder, tmp_path / "far", Connectivity("all"))
    push = ["push", str(tmp_path / "far"), "me/x", "--dry-run"]
    if not name.endswith("bias"):
        with user_error("NaN or infinite in 1 tensors"):
            fcsd.load(folder)
        assert main(push) == 2
        return
    model, _ = fcsd.load(folder)
    chosen: list[int] = []
    model.model.layers[2].mlp.experts.register_forward_hook(
        lambda module, inputs, output: chosen.extend(inputs[1].flatten().tolist())
    )
    assert model(X).logits.isfinite().all()
    assert chosen and model.config.n_routed_experts - 1 not in chosen
    assert main(push) == 0


def test_masks_of_minus_infinity_are_no_fault_and_nan_in_them_is() -> None:
    model = nn.Linear(4, 4)
    mask = torch.full((8, 8), -math.inf).triu(1)
    model.register_buffer("causal", mask)
    refuse_not_finite(model, "this")
    mask[0, 0] = math.nan
    with user_error(r"'causal' \(1 of 64\)"):
        refuse_not_finite(model, "this")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_the_largest_numbers_of_a_dtype_are_no_fault_and_one_beside_them_is_counted(
    dtype: torch.dtype,
) -> None:
    model = nn.Linear(64, 64, dtype=dtype)
    most = torch.finfo(dtype).max
    model.weight.data.fill_(most)
    model.bias.data.copy_(torch.tensor([most, -most] * 32, dtype=dtype))
    model.register_buffer("empty", torch.empty(0))
    model.register_buffer("integers", torch.zeros(3, dtype=torch.int64))
    model.register_buffer("elsewhere", torch.full((3,), math.nan, device="meta"))
    refuse_not_finite(model, "this")
    model.weight.data[3, 5:7] = math.inf
    with user_error(r"this: .* 1 tensors: 'weight' \(2 of 4096\)"):
        refuse_not_finite(model, "this")


def test_float8_values_that_are_nan_are_found() -> None:
    model = nn.Linear(8, 8)
    values = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    model.weight = nn.Parameter(values, requires_grad=False)
    refuse_not_finite(model, "this")
    values.view(torch.uint8)[0, 0] = 0x7F
    with user_error(r"'weight' \(1 of 64\)"):
        refuse_not_finite(model, "this")


def test_a_scale_that_is_nan_is_found_in_the_weight_that_it_belongs_to(
    tmp_path: Path,
) -> None:
    write(tmp_path, *LAYOUTS["block fp8"], cache_scale=False)
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"][0, 0] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with user_error(r"'model\.layers\.0\.self_attn\.q_proj\.weight'"):
        load_checkpoint(find_model(ModelConfig(path=str(tmp_path))))


def test_a_rank_finds_what_is_in_its_own_shard() -> None:
    assert run_ranks(_shard_on_rank, 2) == [False, True]


def _shard_on_rank(rank: int) -> bool:
    model = nn.Linear(8, 8)
    model.weight.data[-1, -1] = math.nan
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    try:
        refuse_not_finite(model, "this")
    except UserError:
        return True
    return False


def nan_model(**options: Any) -> Any:
    model = tiny_model("qwen3_moe", vocab_size=512, **options)
    model.model.layers[1].mlp.experts.down_proj.data[2] = math.nan
    return model


def trained(**arguments: Any) -> Any:
    rows = [{"text": "one row of text"}] * 4
    return fcsd.FCSDTrainer(
        args=fcsd.FCSDConfig("unused", layers="all", use_cpu=True, max_length=16),
        train_dataset=rows,
        processing_class=tiny_tokenizer(512),
        **arguments,
    )


DOORS: dict[str, Callable[[Path, Any, Any], Any]] = {
    "load": lambda folder, bad, good: fcsd.load(folder),
    "model in memory": lambda folder, bad, good: trained(model=bad),
    "model by its path": lambda folder, bad, good: trained(model=str(folder)),
    "teacher in memory": lambda folder, bad, good: trained(model=good, teacher=bad),
    "teacher by its path": lambda folder, bad, good: trained(model=good, teacher=str(folder)),
    "calibrate": lambda folder, bad, good: fcsd.calibrate(fcsd.convert(good, "all"), bad, X),
    "evaluate": lambda folder, bad, good: fcsd.evaluate_model(bad, tokenizer=tiny_tokenizer(512)),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_an_expert_that_is_all_nan_passes_no_door_of_python(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad, good = nan_model(), tiny_model("qwen3_moe", vocab_size=512)
    bad.save_pretrained(tmp_path / "bad")
    tiny_tokenizer(512).save_pretrained(tmp_path / "bad")
    with user_error(r"weights are NaN or infinite in 1 tensors"):
        DOORS[door](tmp_path / "bad", bad, good)


@pytest.mark.parametrize("command", ["chat", "push"])
def test_an_expert_that_is_all_nan_is_neither_talked_to_nor_published(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nan_model().save_pretrained(tmp_path / "bad")
    tiny_tokenizer(512).save_pretrained(tmp_path / "bad")
    convert_checkpoint(tmp_path / "bad", tmp_path / "far", Connectivity("all"))
    words = {"chat": [], "push": ["me/x", "--dry-run"]}[command]
    assert main([command, str(tmp_path / "far"), *words]) == 2
    assert "weights are NaN or infinite in 1 tensors" in capsys.readouterr().err
