"""Quantised checkpoints behave as described: inspect, convert and load agree."""

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from fcsd.base.errors import UserError
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.connectivity.modeling import classes_of
from fcsd.model.families import FAMILIES
from fcsd.model.inspect import inspect_model, report_table
from fcsd.model.quantised.tensors import missing_tensors, quantised_tensors
from tests.model.connectivity.test_load import change_tensors
from tests.reference.tiny import TINY, logits, tiny_config, tiny_model
from tests.support import change_json, few, user_error

ALL = Connectivity("all")
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16},
}
Tensors = dict[str, torch.Tensor]


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def to_fp8(name: str, weight: torch.Tensor) -> Tensors:
    scale = torch.ones([-(-size // 128) for size in weight.shape])
    return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def to_nvfp4(name: str, weight: torch.Tensor) -> Tensors:
    """Pack as ModelOpt does: two numbers per byte, a scale for each 16 numbers, and one
    for all.
    """
    rows, columns = weight.shape
    return {
        name: torch.zeros(rows, columns // 2, dtype=torch.uint8),
        f"{name}_scale": torch.ones(rows, -(-columns // 16)).to(torch.float8_e4m3fn),
        f"{name}_scale_2": torch.ones(1),
    }


def to_packed_nvfp4(name: str, weight: torch.Tensor) -> Tensors:
    """Pack as compressed-tensors does."""
    packed, scale, whole = to_nvfp4(name, weight).values()
    return {
        f"{name}_packed": packed,
        f"{name}_scale": scale,
        f"{name}_global_scale": whole,
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def quantised(plain: Path, tmp_path: Path) -> Callable[..., Path]:
    """Make a copy with quantised weights, and declare them in config.json or in
    ModelOpt's file.
    """

    def make(
        pack: Callable[[str, torch.Tensor], Tensors] | None,
        config: dict[str, Any] | None = None,
        modelopt: dict[str, Any] | None = None,
    ) -> Path:
        folder = Path(shutil.copytree(plain, tmp_path / "quantised"))
        tensors: Tensors = {}
        for name, weight in load_file(folder / "model.safetensors").items():
            tensors |= (
                pack(name, weight)
                if pack is not None and is_quantised(name)
                else {name: weight}
            )
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if config is not None:
            edit_config(folder, quantization_config=config)
        if modelopt is not None:
            (folder / "hf_quant_config.json").write_text(json.dumps(modelopt))
        return folder

    return make


def edit_config(folder: Path, **changes: Any) -> None:
    change_json(folder / "config.json", changes)


def assert_refused(folder: Path, sentence: str) -> None:
    """Check that inspect says that it cannot be converted, and that converting and
    loading refuse it in the same words.
    """
    facts = inspect_model(folder)
    assert not facts["can_be_converted"] and sentence in facts["reason"]
    assert f"not possible: {facts['reason']}" in report_table(facts)
    for act in (
        lambda: convert_checkpoint(folder, folder.parent / "far", ALL),
        lambda: load_model(folder),
    ):
        with pytest.raises(UserError) as refused:
            act()
        assert str(refused.value) == facts["reason"]
    assert not (folder.parent / "far").exists()


@pytest.mark.parametrize(
    ("config", "modelopt", "said"),
    [
        ({"quant_method": "nvfp4"}, None, "quantization_config.quant_method 'nvfp4' is not one"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"}, MODELOPT,
            "quantization_config.quant_method 'modelopt' (NVFP4) is not one",
        ),
        (None, MODELOPT, "hf_quant_config.json: 'modelopt' (NVFP4) is not one"),
    ],
)  # fmt: skip
def test_nvfp4_that_transformers_cannot_load_is_refused_everywhere_in_one_sentence(
    quantised: Callable[..., Path], config: Any, modelopt: Any, said: str
) -> None:
    folder = quantised(to_nvfp4, config, modelopt)
    assert_refused(folder, f"{said} that the installed transformers can load")
    assert "NVFP4" in report_table(inspect_model(folder)) or "nvfp4" in report_table(
        inspect_model(folder)
    )


def test_weights_that_a_missing_package_would_load_are_converted_and_inspect_names_the_package(
    quantised: Callable[..., Path], tmp_path: Path
) -> None:
    if importlib.util.find_spec("compressed_tensors") is not None:
        pytest.skip("compressed-tensors is installed")
    settings = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {},
    }
    folder = quantised(to_packed_nvfp4, settings)
    facts = inspect_model(folder)
    assert facts["can_be_converted"]
    assert facts["quantization"] == "compressed-tensors (nvfp4-pack-quantized)"
    assert "compressed-tensors" in facts["loading_problem"]
    assert "not on this machine: " in report_table(facts)
    convert_checkpoint(folder, tmp_path / "far", ALL)
    for place in (folder, tmp_path / "far"):
        with user_error(r"quantised by compressed-tensors .*, cannot be loaded here: "):
            load_model(place)


@pytest.mark.parametrize(
    "lost", [EXPERT, f"{EXPERT}_scale_inv", "model.layers.1.mlp.gate.weight"]
)
def test_a_tensor_that_is_missing_of_quantised_weights_is_noticed(
    quantised: Callable[..., Path], lost: str, tmp_path: Path
) -> None:
    folder = quantised(to_fp8, FP8)
    assert inspect_model(folder)["can_be_converted"]
    convert_checkpoint(folder, tmp_path / "whole", ALL)
    change_tensors(folder, lambda tensors: tensors.pop(lost))
    assert_refused(folder, f"1 tensors are missing, the first is '{lost}'")


def test_a_missing_tensor_of_fused_experts_is_noticed(tmp_path: Path) -> None:
    """As in gpt-oss: blocks and scales in place of one tensor for all experts."""
    base = tmp_path / "base"
    tiny_model("gpt_oss").save_pretrained(base)
    experts = "model.layers.2.mlp.experts.down_proj"

    def pack(tensors: Tensors) -> None:
        for name in [
            name for name in tensors if name.endswith(("down_proj", "gate_up_proj"))
        ]:
            del tensors[name]
            tensors |= {f"{name}_blocks": torch.zeros(4, dtype=torch.uint8)}
            tensors |= {f"{name}_scales": torch.zeros(1, dtype=torch.uint8)}

    change_tensors(base, pack)
    edit_config(base, quantization_config={"quant_method": "mxfp4"})
    convert_checkpoint(base, tmp_path / "whole", ALL)
    change_tensors(base, lambda tensors: tensors.pop(f"{experts}_blocks"))
    with user_error(f"1 tensors are missing, the first is '{experts}'"):
        convert_checkpoint(base, tmp_path / "far", ALL)


def test_a_plain_tensor_of_quantised_weights_has_the_shape_that_the_config_says(
    quantised: Callable[..., Path],
) -> None:
    folder = quantised(to_fp8, FP8)
    change_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)})
    )
    assert_refused(
        folder, "tensor 'model.norm.weight' has shape [7], but config.json says"
    )


@pytest.mark.parametrize(
    "method",
    ["fp8", "compressed-tensors", "modelopt", "nvfp4", "gptq", "only modelopt"],
)
def test_fields_left_over_beside_plain_weights_are_said_and_left_out(
    quantised: Callable[..., Path],
    plain: Path,
    tmp_path: Path,
    method: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    only = method == "only modelopt"
    folder = quantised(
        None, None if only else {"quant_method": method}, MODELOPT if only else None
    )
    assert torch.equal(logits(load_model(folder)), logits(load_model(plain)))
    place = "hf_quant_config.json" if only else "quantization_config"
    assert f"{folder}: {place} says" in (said := capsys.readouterr().err)
    assert "is left over" in said
    facts = inspect_model(folder)
    assert facts["can_be_converted"] and facts["quantization"] is None
    assert "are left over, and `fcsd convert` leaves them out" in report_table(facts)
    convert_checkpoint(folder, tmp_path / "far", ALL)
    assert "quantization_config" not in json.loads(
        (tmp_path / "far" / "config.json").read_text()
    )
    assert not (tmp_path / "far" / "hf_quant_config.json").exists()
    assert torch.equal(
        logits(load_model(tmp_path / "far")),
        logits(load_model(plain, connectivity=ALL)),
    )


def test_quantisation_inside_the_text_config_counts_as_that_beside_it(
    tmp_path: Path,
) -> None:
    tiny_model("glm4v_moe").save_pretrained(tmp_path / "base")
    text = json.loads((tmp_path / "base" / "config.json").read_text())["text_config"]
    edit_config(tmp_path / "base", text_config=text | {"quantization_config": FP8})
    checkpoint = read_checkpoint(tmp_path / "base")
    assert checkpoint.leftover
    assert "quantization_config" not in checkpoint.config["text_config"]
    load_model(tmp_path / "base")
    edit_config(
        tmp_path / "base",
        text_config=text | {"quantization_config": {"quant_method": "mine"}},
    )
    assert_refused(
        tmp_path / "base",
        "text_config.quantization_config.quant_method 'mine' is not one",
    )


def test_fields_left_over_do_not_count_in_a_model_that_fcsd_does_not_know(
    tmp_path: Path,
) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=99,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    expected = logits(load_model(tmp_path / "dense", any_family=True))
    edit_config(tmp_path / "dense", quantization_config=FP8)
    assert torch.equal(
        logits(load_model(tmp_path / "dense", any_family=True)), expected
    )


def test_the_quantisation_of_kimi_k25_is_shown(tmp_path: Path) -> None:
    """Its text config has it, as published; the wrapper does not belong to a family
    that can be converted.
    """
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {},
    }
    text = {
        "model_type": "kimi_k2",
        "n_routed_experts": 384,
        "quantization_config": settings,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": text})
    )
    facts = inspect_model(tmp_path)
    assert facts["quantization"] == "compressed-tensors (pack-quantized)"
    assert not facts["can_be_converted"] and "kimi_k25" in facts["reason"]


def test_quantised_weights_of_which_no_file_says_how_are_not_called_another_models(
    quantised: Callable[..., Path],
) -> None:
    assert_refused(
        quantised(to_fp8),
        "is of quantised weights, but neither quantization_config in config.json",
    )


@pytest.mark.parametrize("family", few(sorted(FAMILIES.keys() & TINY.keys())))
def test_no_name_of_a_plain_model_is_taken_for_one_of_a_quantised_and_packed_ones_are_complete(
    family: str,
) -> None:
    with torch.device("meta"):
        state = classes_of(FAMILIES[family]).model(tiny_config(family)).state_dict()
    assert quantised_tensors(dict.fromkeys(state, "BF16")) == []
    packed = {
        key: "I32"
        for name in state
        for key in (
            [f"{name}_packed", f"{name}_scale"] if is_quantised(name) else [name]
        )
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert missing_tensors(shapes, packed, ()) == []


def test_experts_that_are_modules_stand_for_one_tensor_of_all_when_none_is_missing():
    """As llm-compressor writes Llama 4, whose family has fused experts."""
    expected = {"m.experts.gate_up_proj": (2, 8, 4), "m.experts.down_proj": (2, 4, 8)}
    names = [
        f"m.experts.{k}.{part}_proj.weight"
        for k in range(2)
        for part in ("gate", "up", "down")
    ]
    packed = {f"{name}_{kind}": "I32" for name in names for kind in ("packed", "scale")}
    assert missing_tensors(expected, packed, ()) == []
    del packed["m.experts.1.up_proj.weight_packed"]
    assert missing_tensors(expected, packed, ()) == ["m.experts.gate_up_proj"]
