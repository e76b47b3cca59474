"""From a config alone, a conversion without weights writes what a full one writes
beside the weights; whatever would read its weights says that there are none.
"""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fcsd
from fcsd.base.artifact import read_manifest
from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.inspect import inspect_model, report_table
from fcsd.model.load import load_tokenizer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.real_configs import real_folder
from tests.reference.tiny import tiny_model
from tests.support import Bench, user_error

NO_WEIGHTS = (
    ": was written by `fcsd convert --config-only` and has no weights; `fcsd convert`"
    " of the original writes them; without weights it can only be timed, in a server"
    " with --load-format dummy (`fcsd-bench serve`)"
)
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
PUBLISHED = {  # MoE layers, by the models' cards and papers
    "DeepSeek-V2-Lite": range(1, 27),
    "DeepSeek-V3": range(3, 61),
    "GLM-4.5-Air": range(1, 46),
    "Llama-4-Scout-17B-16E": range(48),
    "Mixtral-8x7B-v0.1": range(32),
    "Moonlight-16B-A3B": range(1, 27),
    "OLMoE-1B-7B-0924": range(16),
    "Qwen3-235B-A22B": range(94),
    "Qwen3-30B-A3B": range(48),
    "gpt-oss-20b": range(24),
}


def remove_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def edit_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a checkpoint except its weights and its record."""
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if ".safetensors" not in file.name and file.name != "manifest.json"
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without weights."""
    folder = tmp_path_factory.mktemp("made")
    tiny_model(
        "qwen2_moe", num_hidden_layers=2, vocab_size=300, num_experts=4
    ).save_pretrained(folder / "model")
    tiny_tokenizer(300).save_pretrained(folder / "model")
    convert_checkpoint(folder / "model", folder / "out", config_only=True)
    return folder / "out"


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_all_but_the_weights_is_that_of_a_full_conversion(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = tmp_path / "original"
    tiny_model(family).save_pretrained(original, max_shard_size="60KB")
    tiny_tokenizer(99).save_pretrained(original)
    words = ["convert", str(original), "--layers", "last:2", "--mlp", "full"]
    assert main([*words, str(tmp_path / "full")]) == 0
    remove_weights(original)
    capsys.readouterr()
    out = tmp_path / "out"
    assert main([*words, str(out), "--config-only"]) == 0
    assert capsys.readouterr() == (f"{out}\n", "")
    assert contents(out) == contents(tmp_path / "full")
    assert {"config.json", "modeling_farskip.py", "tokenizer.json"} <= set(
        contents(out)
    )
    assert config_of(out)["farskip"] == {
        "version": 1, "layers": [2, 3], "attention": "partial", "mlp": "full",
    }  # fmt: skip
    assert not list(out.glob("*.safetensors*"))
    assert read_manifest(out)["config_only"] is True
    assert "config_only" not in read_manifest(tmp_path / "full")
    assert len(load_tokenizer(out)) == 99
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "full", "original", "out",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_moe_layers_of_a_published_model_are_known_from_its_config(
    name: str, tmp_path: Path
) -> None:
    original = real_folder(name, tmp_path / "original")
    out = fcsd.convert_checkpoint(
        original, tmp_path / "out", layers="moe", config_only=True
    )
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json", "manifest.json", "modeling_farskip.py",
    ]  # fmt: skip
    before, after = config_of(original), config_of(out)
    assert after.pop("farskip")["layers"] == [*PUBLISHED[name]]
    assert after.pop("model_type") == f"farskip_{before.pop('model_type')}"
    assert after.pop("architectures") == [f"FarSkip{before.pop('architectures')[0]}"]
    assert "AutoConfig" in after.pop("auto_map")
    assert after == before


def test_amds_published_instella_keeps_its_layers_and_gate(tmp_path: Path) -> None:
    original = real_folder("Instella-MoE-16B-A3B-Think", tmp_path / "original")
    assert convert_checkpoint(original, tmp_path / "out", config_only=True) == [
        *range(27)
    ]
    config = config_of(tmp_path / "out")
    assert config["model_type"] == "farskip_instella_moe" and config["gated_attention"]


# Each as on the command line; `OUT` is the folder without weights, `NEW` a folder to
# create.
READERS = [
    "convert OUT NEW", "unconvert OUT NEW", "dequantize OUT NEW", "quantize OUT NEW", "convert OUT NEW --format amd",
    "calibrate OUT NEW --text TEXT", "evaluate OUT --suite tiny --output NEW",
    "evaluate OUT --suite tiny --output NEW --server http://127.0.0.1:9", "layers OUT --text TEXT --output NEW",
    "chat OUT", "push OUT owner/name --dry-run NEW", "distill RECIPE",
]  # fmt: skip


@pytest.mark.parametrize("words", READERS)
def test_what_reads_weights_says_that_there_are_none(
    words: str,
    written: Path,
    bench: Bench,
    capfd: pytest.CaptureFixture[str],
) -> None:
    new = bench.folder / "new"
    places = {
        "OUT": str(written),
        "NEW": str(new),
        "TEXT": str(bench.rows),
        "RECIPE": str(bench.recipe("r", model={"path": str(written)})),
    }
    command = [places.get(word, word) for word in shlex.split(words)]
    assert main(command) == 2
    *_, line = capfd.readouterr().err.strip().splitlines()
    assert line == f"fcsd {command[0]}: error: {written}{NO_WEIGHTS}"
    assert not new.exists()


def test_it_is_loaded_as_soon_as_there_are_weights(
    written: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        load_model(written)
    assert str(refused.value) == f"{written}{NO_WEIGHTS}"
    folder = Path(shutil.copytree(written, tmp_path / "out"))
    shutil.copyfile(
        written.parent / "model" / "model.safetensors", folder / "model.safetensors"
    )
    assert type(load_model(folder)).__name__ == "FarSkipQwen2MoeForCausalLM"
    assert inspect_model(folder)["config_only"] is False
    # Without the record nobody knows where they went.
    (folder / "manifest.json").unlink()
    remove_weights(folder)
    with user_error(r"out: no weights: neither"):
        load_model(folder)


def test_inspect_says_so_and_how_it_is_served(written: Path) -> None:
    facts = inspect_model(written)
    assert facts["config_only"] and facts["files"] is None
    assert facts["serve_command"] == f"vllm serve {written} --load-format dummy"
    assert facts["memory"]["convert"] is None
    text = report_table(facts)
    assert "weights       none: written by `fcsd convert --config-only`, for" in text
    assert (
        "already FarSkip; `fcsd convert --config-only` can choose other layers" in text
    )
    assert "convert          below" not in text


def test_other_layers_can_be_chosen_again_but_not_the_same(
    written: Path, tmp_path: Path
) -> None:
    layers = convert_checkpoint(
        written, tmp_path / "one", Connectivity("last:1"), config_only=True
    )
    assert layers == config_of(tmp_path / "one")["farskip"]["layers"] == [1]
    with user_error("is already converted with this connectivity"):
        convert_checkpoint(written, tmp_path / "same", config_only=True)


def quantised(folder: Path) -> Path:
    """Return a tiny checkpoint whose projections are FP8 in blocks, as DeepSeek-V3's."""
    tiny_model("deepseek_v3").to(torch.bfloat16).save_pretrained(folder)
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("_proj.weight"):
            tensors[name] = weight.to(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in weight.shape]
            tensors[f"{name}_scale_inv"] = torch.ones(blocks)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=FP8)
    return folder


def test_quantisation_stays_as_in_a_full_conversion_and_is_said_to_be_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = quantised(tmp_path / "original")
    convert_checkpoint(original, tmp_path / "full")
    convert_checkpoint(original, tmp_path / "beside", config_only=True)
    assert capsys.readouterr().err == ""  # the weights say the same
    remove_weights(original)
    convert_checkpoint(original, tmp_path / "out", config_only=True)
    assert (
        f"{original}: quantization_config says fp8; without weights"
        in capsys.readouterr().err
    )
    full = contents(tmp_path / "full")
    assert full == contents(tmp_path / "beside") == contents(tmp_path / "out")
    assert config_of(tmp_path / "out")["quantization_config"] == FP8


def test_quantisation_that_the_weights_show_to_be_left_over_is_left_out(
    tmp_path: Path,
) -> None:
    original = tmp_path / "original"
    tiny_model("qwen3_moe").to(torch.bfloat16).save_pretrained(original)
    edit_config(original, quantization_config=FP8)
    convert_checkpoint(original, tmp_path / "full")
    convert_checkpoint(original, tmp_path / "out", config_only=True)
    assert contents(tmp_path / "full") == contents(tmp_path / "out")
    assert "quantization_config" not in config_of(tmp_path / "out")


def test_quantisation_that_a_full_conversion_refuses_is_refused(tmp_path: Path) -> None:
    original = real_folder("Qwen3-30B-A3B", tmp_path / "original")
    (original / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "NVFP4"}})
    )
    with user_error(r"'modelopt' \(NVFP4\) is not one that"):
        convert_checkpoint(original, tmp_path / "out", config_only=True)
    assert not (tmp_path / "out").exists()


def pointers(folder: Path) -> None:
    """Replace the weights by the pointers of a clone without Git LFS."""
    for file in folder.glob("*.safetensors"):
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@pytest.mark.parametrize(
    "damage",
    [pointers, lambda folder: next(folder.glob("*.safetensors")).unlink()],
    ids=["pointers", "a shard gone"],
)
def test_weights_that_are_not_whole_are_not_asked_for(
    damage: Callable[[Path], Any], tmp_path: Path
) -> None:
    original = tmp_path / "original"
    tiny_model("qwen3_moe").save_pretrained(original, max_shard_size="60KB")
    damage(original)
    assert len(convert_checkpoint(original, tmp_path / "out", config_only=True)) == 4
    assert not list((tmp_path / "out").glob("*.safetensors*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "qwen3"),
        ({"num_attention_heads": 0}, r"config\.json: "),
        ({"architectures": ["MixtralForCausalLM"]}, "architectures names Mixtral"),
        ({"num_hidden_layers": "many"}, r"config\.json: transformers refuses it"),
    ],
    ids=["dense", "no heads", "another class", "no number"],
)
def test_a_config_of_which_no_model_is_made_leaves_nothing_behind(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    original = real_folder("Qwen3-30B-A3B", tmp_path / "original")
    edit_config(original, **changes)
    with user_error(message):
        convert_checkpoint(original, tmp_path / "out", config_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["original"]


def test_without_the_option_weights_are_still_needed(
    written: Path, tmp_path: Path
) -> None:
    original = real_folder("Qwen3-30B-A3B", tmp_path / "original")
    with user_error("original: no weights: neither"):
        convert_checkpoint(original, tmp_path / "out")
    with user_error("and has no weights"):
        read_checkpoint(written)
