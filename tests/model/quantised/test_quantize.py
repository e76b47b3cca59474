"""A checkpoint is written in block FP8 with the values that transformers makes, and
loads with and without fcsd.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.core_model_loading import revert_weight_conversion
from transformers.quantizers.auto import AutoHfQuantizer

from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_checkpoint
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.connectivity.load import config_and_class, load_model
from fcsd.model.quantised import quantise
from fcsd.model.quantised.dequantise import dequantize_checkpoint
from fcsd.model.quantised.quantise import quantize_checkpoint
from tests.model.quantised.test_dequantize import fp8
from tests.reference.tiny import tiny_model
from tests.support import user_error

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 256}
MLA = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 128,
}  # fmt: skip
MLP = {"intermediate_size": 128, "moe_intermediate_size": 128}
MLA = MLP | {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": MLP | {"head_dim": 64}, "qwen2_moe": MLP | {"shared_expert_intermediate_size": 128},
    "mixtral": MLP | {"head_dim": 64}, "olmoe": MLP | {"num_key_value_heads": 4}, "deepseek_v3": MLA,
    "instella_moe": MLA, "glm4_moe": MLP | {"head_dim": 64},
}  # fmt: skip
IDS = torch.arange(3, 35).reshape(2, 16)


def farskip(folder: Path, family: str = "qwen3_moe", **sizes: Any) -> Path:
    """Write a FarSkip checkpoint in bfloat16 whose sizes are multiples of 128."""
    model = tiny_model(family, **{**SIZES, **FAMILIES.get(family, {}), **sizes})
    model.bfloat16().save_pretrained(folder / "original")
    convert_checkpoint(folder / "original", folder / "farskip", Connectivity("all"))
    return folder / "farskip"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


E4M3 = torch.tensor([fp8(byte) for byte in range(256) if byte & 127 != 127]).double()


def check_block(
    weight: torch.Tensor, values: torch.Tensor, scale: torch.Tensor
) -> None:
    """Compare a block with its definition, in float64: no value of E4M3 is nearer."""
    assert values.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    expected = weight.double().abs().max() / 448
    torch.testing.assert_close(scale.double(), expected, rtol=2**-22, atol=0)
    wanted = weight.double() / expected
    ordered = E4M3.unique()
    above = torch.searchsorted(ordered, wanted).clamp(1, len(ordered) - 1)
    nearest = torch.minimum(
        (ordered[above - 1] - wanted).abs(), (ordered[above] - wanted).abs()
    )
    distance = (values.double() - wanted).abs()
    assert (distance <= nearest + 2**-20 * wanted.abs()).all()


def test_values_are_the_nearest_of_e4m3_and_scales_the_largest_of_their_block(
    tmp_path: Path,
) -> None:
    source = farskip(tmp_path, moe_intermediate_size=384)
    quantize_checkpoint(source, tmp_path / "out")
    original, quantised = tensors(source), tensors(tmp_path / "out")
    names = [name for name in quantised if name + "_scale_inv" in quantised]
    for name in names:
        scales = quantised[f"{name}_scale_inv"]
        assert scales.shape == tuple(n // 128 for n in original[name].shape)
        for i, j in itertools.product(*map(range, scales.shape)):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            check_block(original[name][place], quantised[name][place], scales[i, j])
    assert len(names) == len(quantised) - len(original) > 20


def test_a_weight_in_pieces_has_the_bytes_that_transformers_makes_of_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = farskip(tmp_path, moe_intermediate_size=384)
    monkeypatch.setattr(quantise, "CHUNK_VALUES", 1)
    monkeypatch.setattr("fcsd.model.quantised.copy.SHARD_BYTES", 300_000)
    quantize_checkpoint(source, tmp_path / "out")
    assert len([*(tmp_path / "out").glob("model-*")]) > 4
    settings = FineGrainedFP8Config()
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    library = quantizer.get_quantize_ops()
    written, expected = tensors(tmp_path / "out"), tensors(source)
    for name in [name for name in written if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        expected |= library.convert({weight: expected[weight]})
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype, name
        assert torch.equal(written[name].view(torch.uint8), tensor.view(torch.uint8))


@torch.no_grad()
def test_it_loads_without_fcsd_and_is_near_the_original(tmp_path: Path) -> None:
    source = farskip(tmp_path)
    assert main(["quantize", str(source), str(tmp_path / "out")]) == 0
    assert not (tmp_path / "out.partial").exists()
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    back, quantised = tensors(tmp_path / "back"), tensors(tmp_path / "out")
    original = tensors(source)
    assert back.keys() == original.keys()
    for name, tensor in back.items():
        if (scales := quantised.get(f"{name}_scale_inv")) is None:
            assert torch.equal(tensor, original[name])
            continue
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(tensor, (quantised[name].float() * spread).bfloat16())

    def logits(folder: Path, **options: Any) -> torch.Tensor:
        return AutoModelForCausalLM.from_pretrained(folder, **options)(IDS).logits

    code = {"trust_remote_code": True}
    loaded, expected = logits(tmp_path / "out", **code), logits(source, **code)
    assert torch.equal(loaded, logits(tmp_path / "back", **code))
    assert torch.equal(loaded, load_model(tmp_path / "out")(IDS).logits)
    error = float((loaded - expected).float().std() / expected.float().std())
    # E4M3 rounds by 2.6 % of a weight; missing scales, or those of other blocks, give
    # errors as large as the logits.
    assert 0 < error < 0.15


@pytest.mark.parametrize("family", FAMILIES)
def test_config_and_files_agree_on_what_is_quantised(
    family: str, tmp_path: Path
) -> None:
    """transformers builds the model that it would load on a GPU from the config alone."""
    quantize_checkpoint(farskip(tmp_path, family), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    settings = config["quantization_config"]
    written = tensors(tmp_path / "out")
    quantised = {name for name in written if written[name].dtype == torch.float8_e4m3fn}
    router = "mlp.gate" if family != "mixtral" else "block_sparse_moe.gate"
    left = settings["modules_to_not_convert"]
    assert {"lm_head", "model.embed_tokens", f"model.layers.1.{router}"} <= {*left}
    assert not [name for name in left if "norm" in name]
    linear = {name.rpartition(".")[2] for name in left if "_proj" in name}
    together = {"kv_a_proj_with_mqa", "q_a_proj"}  # the first has 160 rows
    if family == "instella_moe":
        together.add("gate_proj")  # of attention
    assert linear == (together if FAMILIES[family] is MLA else set())
    if family == "qwen2_moe":
        assert "model.layers.0.mlp.shared_expert_gate" in left

    checkpoint = read_checkpoint(tmp_path / "out")
    model_config, cls = config_and_class(checkpoint)
    with torch.device("meta"):
        model = cls(model_config)
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)
    state = {
        name.removesuffix("_scale_inv"): tensor
        for name, tensor in model.state_dict().items()
        if name.endswith("_scale_inv")
    }
    assert revert_weight_conversion(model, state).keys() == quantised
    assert {f"{name}_scale_inv" for name in quantised} < written.keys()

    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    loaded = load_model(tmp_path / "out").state_dict()
    for name, tensor in load_model(tmp_path / "back").state_dict().items():
        assert torch.equal(loaded[name], tensor), name


def test_layers_that_engines_put_together_stay_in_bfloat16_together(
    tmp_path: Path,
) -> None:
    """Keys of 64 rows are half a block, and share one matrix with queries and
    values.
    """
    source = farskip(
        tmp_path, head_dim=64, num_attention_heads=8, num_key_value_heads=1
    )
    quantize_checkpoint(source, tmp_path / "out")
    written = tensors(tmp_path / "out")
    attention = {name for name in written if "self_attn" in name and "proj" in name}
    assert {
        name.split(".")[4] for name in attention if f"{name}_scale_inv" in written
    } == {"o_proj"}
    assert load_model(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "sizes", "message"),
    [
        ("gpt_oss", {"intermediate_size": 128}, "share one tensor"),
        ("qwen3_moe", {"moe_intermediate_size": 64}, r"\[256, 64\].*multiples of 128"),
    ],
)
def test_experts_that_engines_do_not_take_are_refused(
    family: str, sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = farskip(tmp_path, family, **sizes)
    with user_error(f"tensor 'model.layers.0.mlp.*{message}"):
        quantize_checkpoint(source, tmp_path / "out")
    assert [*tmp_path.glob("out*")] == []


def test_a_weight_that_is_nan_is_named_and_the_copy_continues_when_it_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcsd.model.quantised.copy.SHARD_BYTES", 100_000)
    source = farskip(tmp_path)
    [file] = source.glob("*.safetensors")
    whole = load_file(file)
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    file.unlink()  # a link to the original's file
    save_file({**whole, name: torch.full_like(whole[name], torch.nan)}, file)
    with user_error(f"tensor '{name}': has values that are NaN"):
        quantize_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    save_file(whole, file)
    with user_error("unfinished copy of another checkpoint"):
        quantize_checkpoint(source, tmp_path / "out")


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    quantize_checkpoint(farskip(tmp_path), tmp_path / "out")
    with user_error(r"quantised already, by fp8; `fcsd dequantize"):
        quantize_checkpoint(tmp_path / "out", tmp_path / "again")
