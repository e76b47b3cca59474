"""A quantised checkpoint is loaded with exactly the values of its formula, or refused
with what to do.

The values are those that `test_dequantize` computes one by one, in float64.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import fcsd
from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.inspect import inspect_model, report_table
from fcsd.model.quantised.dequantise import dequantize_checkpoint
from fcsd.model.quantised.methods import DEQUANTISED
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.model.quantised.test_dequantize import (
    Made,
    block_fp8,
    mxfp8,
    renamed,
    row_fp8,
    tensor_fp8,
    write,
    write_gpt_oss,
)
from tests.reference.tiny import tiny_model
from tests.support import change_json, edited_json, few, user_error

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="without a GPU transformers dequantises FP8"
)
PROJECTION = "model.layers.0.self_attn.q_proj.weight"


def exponents(rows: int, columns: int, dtype: torch.dtype) -> Made:
    """Scale blocks of 16 x 16 by powers of two, in the dtype of exponents."""
    parts, _ = block_fp8(rows, columns)
    powers = 2.0 ** torch.floor(torch.log2(parts["_scale_inv"]))
    values = parts[""].double() * powers.double().repeat_interleave(
        16, 0
    ).repeat_interleave(16, 1)
    stored = powers.to(torch.float8_e8m0fnu)
    return {"": parts[""], "_scale_inv": stored.view(dtype)}, values


def vector(rows: int, columns: int) -> Made:
    parts, values = row_fp8(rows, columns)
    return {"": parts[""], "_scale_inv": parts["_scale"].flatten()}, values


def named(make: Callable[..., Made], end: str = "_scale_inv") -> Callable[..., Made]:
    return lambda rows, columns: renamed(make(rows, columns), end)


def blocks(height: int, width: int) -> Callable[..., Made]:
    return lambda rows, columns: block_fp8(rows, columns, (height, width))


# Rows and columns are 64 and 32.
EXACT: dict[str, tuple[Callable[..., Made], dict[str, Any]]] = {
    "even blocks": (block_fp8, {"weight_block_size": [16, 16]}),
    "blocks that are not square": (blocks(32, 8), {"weight_block_size": [32, 8]}),
    "a block larger than the weight": (blocks(128, 128), {"weight_block_size": [128, 128]}),
    "exponents in float8": (
        lambda r, c: exponents(r, c, torch.float8_e8m0fnu), {"weight_block_size": [16, 16], "scale_fmt": "ue8m0"},
    ),
    "exponents in bytes": (
        lambda r, c: exponents(r, c, torch.uint8), {"weight_block_size": [16, 16], "scale_fmt": "ue8m0"},
    ),
    "one scale": (named(tensor_fp8), {"weight_block_size": None}),
    "one scale, of static activations": (
        named(tensor_fp8), {"weight_block_size": None, "activation_scheme": "static"},
    ),
    "a scale for each row": (named(row_fp8), {"weight_block_size": None}),
    "scales of DeepSeek-V4": (named(block_fp8, ".scale"), {"weight_block_size": [16, 16]}),
    "scales of Mistral": (named(block_fp8, ".qscale_weight"), {"weight_block_size": [16, 16]}),
    "mxfp8": (named(mxfp8), {"quant_method": "mxfp8", "weight_block_size": [1, 32]}),
}  # fmt: skip
REFUSED: dict[str, tuple[Callable[..., Made], dict[str, Any]]] = {
    "a last block of fewer rows": (blocks(24, 16), {"weight_block_size": [24, 16]}),
    "a last block of fewer columns": (blocks(16, 24), {"weight_block_size": [16, 24]}),
    "a last block that divides the rows evenly by chance": (blocks(48, 16), {"weight_block_size": [48, 16]}),
    "partial blocks of exponents": (
        lambda r, c: renamed(blocks(48, 48)(r, c), ".scale"), {"weight_block_size": [48, 48]},
    ),
    "scales in a vector": (vector, {"weight_block_size": None}),
    "scales of another name": (named(block_fp8, "_scale"), {"weight_block_size": [16, 16]}),
}  # fmt: skip


def written(
    folder: Path, make: Callable[..., Made], settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", **settings}
    return write(folder, make, settings, cache_scale=False)


@pytest.mark.parametrize("form", few(EXACT, 5))
def test_what_transformers_dequantises_as_the_formula_says_is_loaded(
    form: str, tmp_path: Path
) -> None:
    values = written(tmp_path / "q", *EXACT[form])
    # The same values, in the files of a model that is not quantised.
    plain = Path(shutil.copytree(tmp_path / "q", tmp_path / "plain"))
    for file in plain.glob("*.safetensors*"):
        file.unlink()
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    with edited_json(plain / "config.json") as config:
        del config["quantization_config"]
    expected = load_model(plain).state_dict()
    loaded = load_model(tmp_path / "q").state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("form", REFUSED)
def test_what_transformers_would_dequantise_otherwise_is_refused_and_dequantize_reads_it(
    form: str, tmp_path: Path
) -> None:
    written(tmp_path / "q", *REFUSED[form])
    convert_checkpoint(tmp_path / "q", tmp_path / "far", Connectivity("all"))
    for folder in (tmp_path / "q", tmp_path / "far"):
        with user_error(r"; `fcsd dequantize` writes them"):
            load_model(folder)
    dequantize_checkpoint(tmp_path / "q", tmp_path / "plain")
    load_model(tmp_path / "plain")


def test_convert_and_inspect_say_of_a_partial_block_what_loading_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = REFUSED["a last block that divides the rows evenly by chance"]
    written(tmp_path / "q", *form)
    with pytest.raises(UserError) as refused:
        load_model(tmp_path / "q")
    reason = str(refused.value).removeprefix(f"{tmp_path / 'q'}: ")
    assert "which do not divide it evenly" in reason
    assert inspect_model(tmp_path / "q")["loading_problem"] == reason
    assert main(["convert", str(tmp_path / "q"), str(tmp_path / "far")]) == 0
    assert reason in capsys.readouterr().err


def test_dequantising_that_the_caller_asks_for_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "q", *REFUSED["a last block of fewer rows"])
    # As on a machine with a GPU, where transformers keeps the weights in FP8.
    monkeypatch.setattr(
        "fcsd.model.quantised.methods._quantizer_here",
        lambda config: type("Quantizer", (), {"quantization_config": None})(),
    )
    given = FineGrainedFP8Config(dequantize=True)
    with user_error("which do not divide it evenly"):
        load_model(tmp_path / "q", quantization_config=given)


# ---- every method


def with_method(folder: Path, method: str) -> Path:
    """Write a tiny model in whose files a weight is packed, with the fields of a method."""
    tiny_model("qwen3_moe", vocab_size=512).bfloat16().save_pretrained(folder)
    tiny_tokenizer(512).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "self_attn" in name and "_proj" in name]:
        rows, columns = tensors.pop(name).shape
        module = name.removesuffix(".weight")
        tensors |= {
            f"{module}.qweight": torch.ones(columns // 8, rows, dtype=torch.int32),
            f"{module}.qzeros": torch.ones(1, rows // 8, dtype=torch.int32),
            f"{module}.scales": torch.ones(1, rows, dtype=torch.float16),
            f"{module}.g_idx": torch.zeros(columns, dtype=torch.int32),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings: dict[str, Any] = {
        "quant_method": method.removesuffix("_4bit").removesuffix("_8bit"),
        "bits": 4,
    }
    if method.startswith("bitsandbytes"):
        settings[f"load_in_{method.rpartition('_')[2]}"] = True
    change_json(folder / "config.json", {"quantization_config": settings})
    return folder


@pytest.mark.parametrize("method", few(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING), 10))
def test_inspect_convert_load_dequantize_and_training_agree_on_each_method(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = with_method(tmp_path / "q", method)
    facts, said = inspect_model(folder), read_checkpoint(folder).quantisation
    assert said is not None and facts["quantization"] == said.words
    table = report_table(facts)
    if facts["can_be_converted"]:
        convert_checkpoint(folder, tmp_path / "far", Connectivity("all"))
    else:
        with pytest.raises(UserError) as refused:
            convert_checkpoint(folder, tmp_path / "far", Connectivity("all"))
        assert str(refused.value) == facts["reason"]
    # None has such tensors and its package on this machine.
    with pytest.raises(UserError):
        fcsd.load(folder)
    if facts["loading_problem"] is not None:
        assert f"not on this machine: {facts['loading_problem']}" in table
    assert facts["training_problem"] is not None
    assert f"not possible: {facts['training_problem']}" in table
    with pytest.raises(UserError) as refused:
        fcsd.FCSDTrainer(
            str(folder),
            fcsd.FCSDConfig("run", layers="all", use_cpu=True),
            train_dataset=Dataset.from_dict({"text": ["one row of text"]}),
        )
    assert str(refused.value).endswith(facts["training_problem"])
    is_known = said.method in DEQUANTISED
    assert ("`fcsd dequantize` writes" in facts["training_problem"]) == is_known
    with pytest.raises(UserError) as refused:
        dequantize_checkpoint(folder, tmp_path / "plain")
    # Of a known method only these tensors are not.
    assert ("which fcsd cannot dequantise" in str(refused.value)) != is_known


def test_the_page_names_the_methods_that_dequantize_reads() -> None:
    page = Path(__file__).parents[3] / "docs" / "convert.md"
    table = page.read_text().partition("| weights | methods |")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if "`dequantize` refuses" not in row]
    assert {method for method in DEQUANTISED if f"`{method}`" in "".join(rows)} == {
        *DEQUANTISED
    }


# ---- MXFP4 is loaded in bfloat16, and could not be saved


def test_a_student_from_mxfp4_files_is_refused_however_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gpt_oss(tmp_path / "q", vocab_size=512, num_hidden_layers=2)
    tiny_tokenizer(512).save_pretrained(tmp_path / "q")
    rows = Dataset.from_dict({"text": ["one row of text"]})
    loaded, tokenizer = fcsd.load(tmp_path / "q", layers="all")
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    for model in (str(tmp_path / "q"), loaded, fcsd.convert(by_transformers, "all")):
        with user_error(
            r"weights are quantised by mxfp4 .*; `fcsd dequantize` writes them"
        ):
            fcsd.FCSDTrainer(
                model,
                fcsd.FCSDConfig("run", layers="all", use_cpu=True),
                train_dataset=rows,
                processing_class=tokenizer,
            )
    ids = torch.randint(3, 99, (24, 16))
    with user_error(r"quantised, so folded maps .*`fcsd dequantize`"):
        fcsd.calibrate(loaded, by_transformers, ids)


def test_a_student_from_dequantised_mxfp4_is_trained_saved_and_loaded_with_its_teacher_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_gpt_oss(tmp_path / "q", vocab_size=512, num_hidden_layers=2)
    tiny_tokenizer(512).save_pretrained(tmp_path / "q")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "plain")
    trainer = fcsd.FCSDTrainer(
        str(tmp_path / "plain"),
        fcsd.FCSDConfig(
            "run", layers="all", use_cpu=True, max_steps=1, max_length=16,
            per_device_train_batch_size=1, save_strategy="no", report_to=[],
        ),
        train_dataset=Dataset.from_dict({"text": ["one row of text"] * 8}),
        teacher=str(tmp_path / "q"),
    )  # fmt: skip
    assert math.isfinite(trainer.train().training_loss)
    trainer.save_model("saved")
    saved = load_model(tmp_path / "saved").state_dict()
    for name, tensor in trainer.plain_model.state_dict().items():
        assert torch.equal(saved[name], tensor.to(saved[name].dtype)), name
