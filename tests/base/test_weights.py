"""Which weight files of a folder count, and which faults are sought in their values."""

import hashlib
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fcsd.base.weights import (
    check_finite,
    find_weights,
    weight_files,
    weights_fingerprint,
)
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.load import find_model
from tests.reference.tiny import logits, tiny_model
from tests.support import change_json, edited_json, user_error

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def by_transformers(folder: Path) -> torch.Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one model in shards, and another one in a single file; read-only."""
    root = tmp_path_factory.mktemp("weights")
    model = tiny_model("qwen3_moe")
    model.save_pretrained(root / "sharded", max_shard_size="30KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(root / "whole")
    return root


@pytest.fixture
def both(saved: Path, tmp_path: Path) -> Path:
    """The single file beside the older index with its shards."""
    folder = Path(shutil.copytree(saved / "sharded", tmp_path / "both"))
    shutil.copyfile(saved / "whole" / WEIGHTS, folder / WEIGHTS)
    return folder


def test_a_stale_index_is_passed_over_as_transformers_does_and_says_so(
    both: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = len(list((saved / "sharded").glob("*.safetensors")))
    expected = by_transformers(both)
    assert torch.equal(expected, by_transformers(saved / "whole"))
    assert torch.equal(logits(load_model(both)), expected)
    said = capsys.readouterr().err
    assert (
        said.count(f"{INDEX}: is not read, and neither are the {shards} weight files")
        == 1
    )
    assert (
        "in the same folder instead; if the indexed files are the model, remove" in said
    )
    convert_checkpoint(both, tmp_path / "far", Connectivity("all"))
    assert torch.equal(logits(load_model(tmp_path / "far", original=True)), expected)
    assert [file.name for file in (tmp_path / "far").glob("*.safetensors*")] == [
        WEIGHTS
    ]
    assert weights_fingerprint(both) == weights_fingerprint(saved / "whole")
    assert main(["inspect", str(both)]) == 0
    said = capsys.readouterr().out
    assert "1 safetensors" in said and "STALE INDEX" in said


def test_shards_that_are_gone_or_an_index_that_is_damaged_do_not_matter_beside_the_single_file(
    both: Path, saved: Path
) -> None:
    expected = logits(load_model(saved / "whole"))
    next(both.glob("model-*.safetensors")).unlink()
    assert torch.equal(logits(load_model(both)), expected)
    for text in ("{", "[]", '{"weight_map": 3}'):
        (both / INDEX).write_text(text)
        assert torch.equal(logits(load_model(both)), expected)


def test_files_that_no_index_names_do_not_count(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))
    before = weights_fingerprint(folder)
    shutil.copyfile(saved / "whole" / WEIGHTS, folder / "consolidated.safetensors")
    assert weights_fingerprint(folder) == before
    convert_checkpoint(folder, tmp_path / "far", Connectivity("all"))
    assert not (tmp_path / "far" / "consolidated.safetensors").exists()
    assert weights_fingerprint(tmp_path / "far") == before


@pytest.mark.parametrize("index", [False, True])
def test_weights_that_the_config_names_are_taken_as_transformers_does(
    index: bool, both: Path, saved: Path, tmp_path: Path
) -> None:
    """`transformers_weights`, a field of transformers, takes precedence over both usual
    names.
    """
    name = "other.safetensors.index.json" if index else "other.safetensors"
    (both / (INDEX if index else WEIGHTS)).rename(both / name)
    if not index:
        tiny_model("qwen3_moe").save_pretrained(tmp_path / "first")
        shutil.copyfile(tmp_path / "first" / WEIGHTS, both / WEIGHTS)
    change_json(both / "config.json", {"transformers_weights": name})
    expected = by_transformers(both)
    assert torch.equal(
        expected, by_transformers(saved / ("sharded" if index else "whole"))
    )
    assert torch.equal(logits(load_model(both)), expected)
    convert_checkpoint(both, tmp_path / "far", Connectivity("all"))
    assert torch.equal(logits(load_model(tmp_path / "far", original=True)), expected)
    assert read_checkpoint(tmp_path / "far").index == (name if index else None)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "a/b.safetensors", "model.bin", 3]
)
def test_weights_that_the_config_names_outside_the_folder_are_refused(
    name: object, tmp_path: Path
) -> None:
    with user_error(r"config\.json: transformers_weights names .* in this folder is"):
        find_weights(tmp_path, {"transformers_weights": name})


def test_a_tensor_in_two_shards_is_refused_where_transformers_takes_another_than_the_index_names(
    saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))
    first, *_, last = sorted(folder.glob("*.safetensors"))
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(
        load_file(last) | {name: tensors[name] + 1}, last, metadata={"format": "pt"}
    )
    with user_error(
        f"{last.name}: tensor '{name}' is in this file too, .*{first.name}"
    ):
        read_checkpoint(folder)
    with edited_json(folder / INDEX) as index:
        index["weight_map"][name] = last.name
    assert torch.equal(logits(load_model(folder)), by_transformers(folder))


DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite_are_counted_by_dtype(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Tests all bit patterns of 8-bit and 16-bit values, and some of wider ones."""
    width = dtype.itemsize
    if width <= 2:
        values = (
            torch.arange(256**width)
            .to(torch.uint8 if width == 1 else torch.uint16)
            .view(dtype)
        )
    else:
        values = torch.tensor(
            [0.0, -1.0, 1e30, math.inf, -math.inf, math.nan, -math.nan], dtype=dtype
        )
    expected = int((~torch.isfinite(values.double())).sum())
    save_file({"a": values, "b": torch.ones(3)}, tmp_path / WEIGHTS)
    with user_error(
        rf"in 1 tensors: 'a' \({expected} of {len(values)}\); fetch the checkpoint again"
    ):
        check_finite(tmp_path)
    file_hash = hashlib.sha256((tmp_path / WEIGHTS).read_bytes()).hexdigest()
    expected_hash = hashlib.sha256(
        WEIGHTS.encode() + b"\0" + file_hash.encode()
    ).hexdigest()
    assert weights_fingerprint(tmp_path) == expected_hash


def test_integers_and_finite_values_are_no_fault_and_a_damaged_file_is_hashed_all_the_same(
    tmp_path: Path,
) -> None:
    save_file(
        {"a": torch.full((9,), -1, dtype=torch.int8), "b": torch.tensor([3e38])},
        tmp_path / WEIGHTS,
    )
    check_finite(tmp_path)
    whole = weights_fingerprint(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:-1])
    assert weights_fingerprint(tmp_path) != whole
    assert weight_files(tmp_path) == [tmp_path / WEIGHTS]


def test_an_expert_that_is_all_nan_is_refused_as_input_of_a_stage(
    saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved / "whole", tmp_path / "model"))
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    tensors[name].fill_(math.nan)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    size = tensors[name].numel()
    with user_error(rf"1 tensors: '{name}' \({size} of {size}\).*fetch the checkpoint"):
        find_model(ModelConfig(path=str(folder))).fingerprints("original")
