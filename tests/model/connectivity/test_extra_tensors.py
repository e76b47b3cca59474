"""Layers for multi-token prediction (MTP): no model loads them, but every checkpoint
that is made from another one has them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    load_model,
    unconvert_checkpoint,
)
from fcsd.model.connectivity.export import export_checkpoint
from tests.reference.tiny import tiny_model
from tests.support import few, user_error, write_as

# Their places in released checkpoints (transformers' patterns), and after the last of
# the four decoder layers.
PLACES = {
    "deepseek_v3": ["model.layers.61.", "model.layers.4."],
    "glm4_moe": ["model.layers.92.", "model.layers.46.", "model.layers.4."],
    "qwen3_next": ["mtp.layers.0."],
    "minimax_m2": ["model.mtp.0."],  # which transformers does not know
}
MORE = {
    "bailing_hybrid": ["model.layers.42.", "model.layers.4."],
    "deepseek_v32": ["model.layers.61."],
    "dots3_note_text": ["model.layers.46.", "model.mtp."],
    "ernie4_5_moe": ["model.mtp_block.0."], "exaone_moe": ["mtp.layers.0."], "glm4_moe_lite": ["model.layers.47."],
    "glm_moe_dsa": ["model.layers.78."], "hy_v3": ["model.layers.80."], "inkling_text": ["model.mtp.layers.0."],
    "mellum": ["mtp.layers.0."], "mimo_v2_flash": ["model.mtp.layers.0."], "minimax_m3_vl_text": ["model.mtp.0."],
    "qwen3_5_moe_text": ["mtp.layers.0.", "model.visual.blocks.0."],
}  # fmt: skip
CASES = [
    *((family, prefix) for family, places in PLACES.items() for prefix in places),
    *(
        pytest.param(family, prefix, marks=pytest.mark.breadth)
        for family, places in MORE.items()
        for prefix in places
    ),
]


def with_mtp(
    folder: Path, family: str, prefix: str, **config: Any
) -> dict[str, torch.Tensor]:
    """Write a tiny model with an MTP layer of its own dtypes into `folder`, and return
    that layer's tensors.
    """
    tiny_model(family).save_pretrained(folder)
    values = (
        json.loads((folder / "config.json").read_text())
        | {"num_nextn_predict_layers": 1}
        | config
    )
    (folder / "config.json").write_text(json.dumps(values))
    layer = {
        prefix + name: value
        for name, value in {
            "eh_proj.weight": torch.randn(6, 12).to(torch.bfloat16),
            "enorm.weight": torch.randn(6),
            "mlp.experts.0.up_proj.weight": torch.randn(3, 5).to(torch.float8_e4m3fn),
            "mlp.steps": torch.tensor(3),
        }.items()
    }
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | layer, folder / "model.safetensors", {"format": "pt"})
    return layer


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that the index, or the only file, names."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    files = json.loads(index.read_text())["weight_map"]
    assert {*files.values()} == {file.name for file in folder.glob("*.safetensors")}
    return {name: load_file(folder / file)[name] for name, file in files.items()}


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def write(model: Any, folder: Path) -> Path:
    model.config.use_cache = False  # as in every training
    write_as(model, folder, torch.float32)
    return folder


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize(("family", "prefix"), few(CASES, 3))
def test_a_model_written_from_memory_has_every_tensor_of_its_checkpoint(
    family: str, prefix: str, tmp_path: Path
) -> None:
    layer = with_mtp(tmp_path / "original", family, prefix)
    model = load_model(tmp_path / "original", connectivity=Connectivity("last:1"))
    before, after = (
        tensors_of(tmp_path / "original"),
        tensors_of(write(model, tmp_path / "written")),
    )
    assert before.keys() == after.keys()
    assert all(same_bytes(after[name], before[name]) for name in before)
    assert layer.keys() <= after.keys()
    promised = "num_nextn_predict_layers"
    assert (
        config_of(tmp_path / "written")[promised]
        == config_of(tmp_path / "original")[promised]
        == 1
    )
    again = write(load_model(tmp_path / "written"), tmp_path / "again")
    assert tensors_of(again).keys() == before.keys()


@pytest.mark.parametrize(
    ("family", "prefix", "way_out"),
    [
        ("deepseek_v3", "model.layers.4.", "until `fcsd mtp` trains them (docs/"),
        ("glm4_moe", "model.layers.4.", "until `fcsd mtp` trains them (docs/"),
        ("qwen3_next", "mtp.layers.0.", "until `fcsd mtp` trains them (docs/"),
        (
            "exaone_moe",
            "mtp.layers.0.",
            "and `fcsd mtp` cannot train those of exaone_moe",
        ),
        ("deepseek_v3", None, ""),
    ],
)
def test_a_conversion_says_that_fewer_drafts_will_be_accepted_and_what_mends_it(
    family: str,
    prefix: str | None,
    way_out: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if prefix is None:
        tiny_model(family).save_pretrained(tmp_path / "original")
    else:
        with_mtp(tmp_path / "original", family, prefix)
    convert_checkpoint(tmp_path / "original", tmp_path / "far", alone=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "(MTP)" in line]
    assert len(lines) == (0 if prefix is None else 1)
    for line in lines:
        assert "a server will accept fewer of their drafts" in line and way_out in line
    # Regular layers leave the states as they were.
    none = Connectivity("none")
    convert_checkpoint(tmp_path / "original", tmp_path / "regular", none, alone=True)
    assert "(MTP)" not in capsys.readouterr().err


def test_the_written_folder_is_read_by_transformers_and_counts_all_tensors(
    tmp_path: Path,
) -> None:
    layer = with_mtp(tmp_path / "original", "deepseek_v3", "model.layers.61.")
    model = load_model(tmp_path / "original", connectivity=Connectivity("all"))
    folder = write(model, tmp_path / "written")
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    metadata = json.loads((folder / "model.safetensors.index.json").read_text())[
        "metadata"
    ]
    tensors = tensors_of(folder).values()
    assert metadata["total_size"] == sum(tensor.nbytes for tensor in tensors)
    assert metadata["total_parameters"] == sum(tensor.numel() for tensor in tensors)
    unconvert_checkpoint(folder, tmp_path / "regular")
    assert layer.keys() <= tensors_of(tmp_path / "regular").keys()
    assert config_of(tmp_path / "regular")["num_nextn_predict_layers"] == 1


def test_shards_of_several_files_keep_their_tensors(tmp_path: Path) -> None:
    with_mtp(tmp_path / "original", "glm4_moe", "model.layers.4.")
    tensors = tensors_of(tmp_path / "original")
    (tmp_path / "original" / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        save_file(
            {name: tensors[name] for name in names[number::3]},
            tmp_path / "original" / file,
        )
        weight_map |= dict.fromkeys(names[number::3], file)
    (tmp_path / "original" / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    after = tensors_of(write(load_model(tmp_path / "original"), tmp_path / "written"))
    assert after.keys() == tensors.keys()
    assert all(same_bytes(after[name], value) for name, value in tensors.items())


def test_a_model_may_be_written_over_its_own_checkpoint(tmp_path: Path) -> None:
    layer = with_mtp(tmp_path, "deepseek_v3", "model.layers.61.")
    model = load_model(tmp_path)
    names = tensors_of(tmp_path).keys()
    for _ in range(2):
        write(model, tmp_path)
        assert tensors_of(tmp_path).keys() == names
    assert all(
        same_bytes(tensors_of(tmp_path)[name], value) for name, value in layer.items()
    )


@pytest.mark.parametrize(
    "key", ["num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"]
)
def test_without_its_checkpoint_a_written_model_promises_no_mtp_layers_and_says_so(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_mtp(
        tmp_path / "original",
        "deepseek_v3",
        "model.layers.61.",
        **{key: 1, "use_mtp": True},
    )
    # its settings are then those of config.json
    (tmp_path / "original/generation_config.json").unlink()
    model = load_model(tmp_path / "original")
    shutil.rmtree(tmp_path / "original")
    folder = write(model, tmp_path / "written")
    assert config_of(folder)[key] == 0 and config_of(folder)["use_mtp"] is False
    generation = json.loads((folder / "generation_config.json").read_text())
    # or transformers' generate would look for them
    assert not generation.get("use_mtp")
    assert not [name for name in tensors_of(folder) if ".61." in name]
    said = [line for line in capsys.readouterr().err.splitlines() if "MTP" in line]
    assert len(said) == 1
    assert f"{key}: 0" in said[0]
    assert str(tmp_path / "original") in said[0]
    load_model(folder)


def test_layers_of_another_model_are_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder may hold another model by now, or the model in memory may have fewer
    layers.
    """
    with_mtp(tmp_path / "original", "deepseek_v3", "model.layers.61.")
    model = load_model(tmp_path / "original")
    shutil.rmtree(tmp_path / "original")
    with_mtp(tmp_path / "original", "glm4_moe", "model.layers.46.")
    folder = write(model, tmp_path / "written")
    assert config_of(folder)["num_nextn_predict_layers"] == 0
    assert "now holds another model (model_type differs)" in capsys.readouterr().err


def test_a_model_of_fewer_files_leaves_no_index_of_an_earlier_one(
    tmp_path: Path,
) -> None:
    with_mtp(tmp_path / "original", "deepseek_v3", "model.layers.61.")
    model = load_model(tmp_path / "original")
    write(model, tmp_path / "written")
    shutil.rmtree(tmp_path / "original")
    write(model, tmp_path / "written")
    load_model(tmp_path / "written")


@pytest.mark.parametrize(
    ("prefix", "promised", "said"),
    [
        ("model.layers.4.", 0, "index 4, but .*num_hidden_layers 4 and no MTP layer"),
        ("model.layers.27.", 1, "index 27, but .*num_hidden_layers 4 and 1 MTP layer"),
    ],
)
def test_an_mtp_layer_that_the_config_does_not_promise_is_refused_with_both_numbers(
    prefix: str, promised: int, said: str, tmp_path: Path
) -> None:
    with_mtp(tmp_path, "deepseek_v3", prefix, num_nextn_predict_layers=promised)
    with user_error(f"eh_proj.weight' belongs to an MTP layer with {said}"):
        load_model(tmp_path)


def test_layers_that_are_no_mtp_layers_still_belong_to_another_model(
    tmp_path: Path,
) -> None:
    tiny_model("deepseek_v3").save_pretrained(tmp_path)
    config = config_of(tmp_path) | {
        "num_hidden_layers": 3,
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with user_error(r"tensors belong to no parameter, the first is 'model\.layers\.3"):
        load_model(tmp_path)


def test_the_export_to_amds_keys_promises_what_the_files_hold(tmp_path: Path) -> None:
    layer = with_mtp(tmp_path / "original", "deepseek_v3", "model.layers.61.")
    convert_checkpoint(
        tmp_path / "original", tmp_path / "converted", Connectivity("all")
    )
    export_checkpoint(tmp_path / "converted", tmp_path / "amd")
    assert layer.keys() <= tensors_of(tmp_path / "amd").keys()
    assert config_of(tmp_path / "amd")["num_nextn_predict_layers"] == 1
    tiny_model("deepseek_v3").save_pretrained(tmp_path / "plain")
    export_checkpoint(tmp_path / "plain", tmp_path / "plain-amd")
    assert config_of(tmp_path / "plain-amd")["num_nextn_predict_layers"] == 0
