"""What a checkpoint brings that is unusual is read as it is meant, or refused in one
line.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import fcsd
from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.writing import write_json
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd.model.inspect import inspect_model
from fcsd.model.load import find_model, load_tokenizer
from fcsd.model.quantised.dequantise import dequantize_checkpoint
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.model.quantised.test_dequantize import LAYOUTS, write
from tests.reference.tiny import tiny_model
from tests.support import change_json, edited_json, user_error

TOKENIZER_CLASS = """
from transformers import PreTrainedTokenizer
class TikTokenTokenizer(PreTrainedTokenizer):
    def __init__(self, *args, **kwargs):
        {statement}
"""
OWN_CODE = {
    "an import that has moved": (
        "from transformers.models.gpt2.tokenization_gpt2 import bytes_to_utf16\n",
        "cannot import name 'bytes_to_utf16'",
    ),
    "a package that is missing": ("import no_such_package\n", "no_such_package"),
    "an attribute that has gone": (
        TOKENIZER_CLASS.format(statement="raise AttributeError('no such attribute')"),
        "no such attribute",
    ),
    "a failed assertion": (TOKENIZER_CLASS.format(statement="assert False"), "Assertion"),
    "a class that is not there": ("x = 1\n", "TikTokenTokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("fault", OWN_CODE)
def test_a_tokenizer_whose_own_code_fails_is_refused_in_one_line(
    fault: str, tmp_path: Path
) -> None:
    """As Kimi-K2's, which imports what transformers 5 has moved."""
    code, words = OWN_CODE[fault]
    (tmp_path / "tokenization_kimi.py").write_text(code)
    (tmp_path / "tiktoken.model").write_bytes(b"aGk= 0\n")
    auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "TikTokenTokenizer", "auto_map": auto_map})
    )
    with user_error(f"the tokenizer cannot be read: .*{words}"):
        load_tokenizer(tmp_path, trust_remote_code=True)
    with user_error(r"the tokenizer cannot be read: .*; the checkpoint brings code"):
        load_tokenizer(tmp_path)


# ---- an index without metadata


@pytest.mark.parametrize("metadata", [None, "text", [1]])
def test_an_index_without_metadata_is_refused_before_transformers_fails_with_it(
    metadata: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    tiny_model("qwen3_moe", vocab_size=512).save_pretrained(
        folder, max_shard_size="60KB"
    )
    tiny_tokenizer(512).save_pretrained(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index.pop("metadata")
    file.write_text(json.dumps(index | ({"metadata": metadata} if metadata else {})))
    reason = f"{file}: has no object metadata, which transformers needs; add"
    facts = inspect_model(folder)
    assert not facts["can_be_converted"] and facts["reason"].startswith(reason)
    for act in (
        lambda: fcsd.load(folder),
        lambda: convert_checkpoint(folder, tmp_path / "far", Connectivity("all")),
    ):
        with pytest.raises(UserError) as refused:
            act()
        assert str(refused.value) == facts["reason"]
    # What the message says to do is enough.
    file.write_text(json.dumps(index | {"metadata": {}}))
    fcsd.load(folder)


# ---- numbers that JSON does not have


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A checkpoint whose config holds an infinite number as transformers 4 wrote it."""
    folder = tmp_path / "endless"
    tiny_model("granitemoehybrid", vocab_size=512).save_pretrained(folder)
    tiny_tokenizer(512).save_pretrained(folder)
    with edited_json(folder / "config.json") as config:
        assert config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
        config["time_step_limit"] = [0.0, math.inf]
    assert "Infinity]" in (folder / "config.json").read_text()
    return folder


def strict_json(file: Path) -> Any:
    def refuse(word: str) -> Any:
        raise AssertionError(f"{file}: {word} is no JSON")

    return json.loads(file.read_text(), parse_constant=refuse)


def test_both_spellings_of_an_infinite_number_are_one_checkpoint(endless: Path) -> None:
    model = find_model(ModelConfig(path=str(endless)))
    identity = model.fingerprints("model")
    write_json(endless / "identity.json", identity)  # which is strict
    config = read_json(endless / "config.json")
    config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    (endless / "config.json").write_text(json.dumps(config))
    assert model.fingerprints("model") == identity
    config["time_step_limit"] = [0.0, {"__float__": "-Infinity"}]
    (endless / "config.json").write_text(json.dumps(config))
    assert model.fingerprints("model") != identity


def test_a_config_with_an_infinite_number_is_converted_calibrated_and_loaded(
    endless: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": f"{n} and {n * n % 97} are words of row {n % 13}"}) + "\n"
            for n in range(60)
        )
    )  # fmt: skip
    assert main(["convert", str(endless), str(tmp_path / "far"), "--layers", "3"]) == 0
    words = ["--layers", "3", "--text", str(text), "--max-length", "64"]
    assert main(["calibrate", str(endless), str(tmp_path / "new"), *words]) == 0
    for name in ("far", "new"):
        for file in (tmp_path / name).glob("*.json"):
            strict_json(file)
        config = load_model(tmp_path / name).config
        assert tuple(config.time_step_limit) == (0.0, math.inf)


def test_a_dequantised_copy_of_a_config_with_an_infinite_number_is_json(
    tmp_path: Path,
) -> None:
    write(tmp_path / "q", *LAYOUTS["block fp8"])
    change_json(
        tmp_path / "q" / "config.json", {"bound": [-math.inf, {"of": math.inf}]}
    )
    dequantize_checkpoint(tmp_path / "q", tmp_path / "plain")
    strict_json(tmp_path / "plain" / "config.json")
    assert load_model(tmp_path / "plain").config.bound == [-math.inf, {"of": math.inf}]


def test_left_over_fields_and_an_infinite_number_are_read_together(
    endless: Path,
) -> None:
    change_json(
        endless / "config.json", {"quantization_config": {"quant_method": "fp8"}}
    )
    assert tuple(load_model(endless).config.time_step_limit) == (0.0, math.inf)
