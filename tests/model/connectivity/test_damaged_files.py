"""Files beside the weights that are damaged: transformers passes over some of them, and
other answers follow.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fcsd
from fcsd.cli.main import main
from fcsd.model.config import ModelConfig
from fcsd.model.connectivity import checkpoint as checkpoint_module
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.connectivity.export import convert_checkpoint
from fcsd.model.connectivity.load import load_model
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.load import find_model, load_tokenizer
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import change_json, few, user_error

DEEP = b"[" * 100_000
NO_OBJECT = {
    "cut": b'{"eos_token_id": 2', "empty": b"", "a list": b"[1]", "a text": b'"x"', "a number": b"3", "null": b"null",
    "UTF-16": json.dumps({"eos_token_id": 2}).encode("utf-16"), "nested": DEEP,
}  # fmt: skip
WRONG: dict[str, Any] = {
    "eos_token_id": "2", "pad_token_id": 2.5, "bos_token_id": {"id": 1}, "max_new_tokens": "ten", "temperature": True,
    "do_sample": "yes",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "model"
    model = tiny_model("qwen3_moe", vocab_size=512)
    model.generation_config.eos_token_id = [7, 8]
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    return folder


def damaged(whole: Path, tmp_path: Path, name: str, content: bytes) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def refused_by_all(folder: Path, output: Path, match: str) -> None:
    """Load, convert and evaluate, of which the last reads a config only with a server."""
    for attempt in (
        lambda: load_model(folder),
        lambda: load_model(folder, connectivity=Connectivity("all")),
        lambda: convert_checkpoint(folder, output, Connectivity("all")),
        lambda: find_model(ModelConfig(path=str(folder))).load_config(any_family=True),
    ):
        with user_error(match):
            attempt()
    assert not output.exists()


@pytest.mark.parametrize("kind", NO_OBJECT)
def test_damaged_generation_settings_are_an_error_and_not_taken_for_missing(
    whole: Path, tmp_path: Path, kind: str
) -> None:
    folder = damaged(whole, tmp_path, "generation_config.json", NO_OBJECT[kind])
    refused_by_all(folder, tmp_path / "out", r"generation_config\.json: .*fetch")


@pytest.mark.parametrize(
    "name",
    few(["tokenizer.model", "config.json", "tokenizer.json", "chat_template.jinja"], 2),
)
def test_a_pointer_of_git_lfs_is_not_taken_for_the_file(
    whole: Path, tmp_path: Path, name: str
) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\nsize 9\n"
    folder = damaged(whole, tmp_path, name, pointer)
    with user_error(rf"{name}: is a pointer of Git LFS, .*`git lfs pull`"):
        convert_checkpoint(folder, tmp_path / "out", Connectivity("all"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen3_moe", "llama4"])
def test_end_tokens_of_another_type_in_a_config_are_named(
    tmp_path: Path, family: str
) -> None:
    """Without generation settings, "12" would be the tokens 1 and 2."""
    folder = tmp_path / "model"
    tiny_model(family, vocab_size=512).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    change_json(folder / "config.json", {"eos_token_id": "12"})
    refused_by_all(
        folder, tmp_path / "out", r"/config\.json: eos_token_id must be .*; fetch"
    )


REFUSED = (
    {"early_stopping": "sometimes"}, {"suppress_tokens": 3}, {"watermarking_config": "x"},
    {"num_return_sequences": 2}, {"cache_implementation": ["static"]},
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(({name: WRONG[name]}, f"{name} must be .*; fetch") for name in WRONG),
        *((settings, "transformers refuses its") for settings in REFUSED),
    ],
)
def test_generation_settings_that_cannot_be_used_are_one_line(
    whole: Path, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    content = json.dumps(settings).encode()
    folder = damaged(whole, tmp_path, "generation_config.json", content)
    refused_by_all(folder, tmp_path / "out", rf"generation_config\.json: {said}")


@pytest.mark.parametrize(
    ("field", "match"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: 0, .* which layers are MoE"),
        ({"dtype": 3}, r"config\.json: dtype must be the name of a torch dtype .* got 3;"),
        ({"hidden_size": "32"}, r"config\.json: transformers refuses it: .*hidden_size"),
        ({"quantization_config": 3}, r"config\.json: transformers refuses it"),
    ],
)  # fmt: skip
def test_a_field_of_the_config_that_no_model_can_have_is_not_called_a_fault_of_the_tokenizer(
    whole: Path, tmp_path: Path, field: dict[str, Any], match: str
) -> None:
    config = json.loads((whole / "config.json").read_text())
    content = json.dumps(config | field).encode()
    folder = damaged(whole, tmp_path, "config.json", content)
    with user_error(match):
        fcsd.load(folder)
    with user_error(match):
        convert_checkpoint(folder, tmp_path / "out", Connectivity("all"))


def test_an_empty_quantisation_field_says_nothing(whole: Path, tmp_path: Path) -> None:
    config = json.loads((whole / "config.json").read_text())
    content = json.dumps(config | {"quantization_config": {}}).encode()
    folder = damaged(whole, tmp_path, "config.json", content)
    convert_checkpoint(folder, tmp_path / "out", Connectivity("all"))
    expected = load_model(whole).state_dict()
    for model in (fcsd.load(folder)[0], fcsd.load(tmp_path / "out")[0]):
        for name, tensor in model.state_dict().items():
            assert tensor.equal(expected[name])


@pytest.mark.parametrize("harm", ["a folder", "a link to itself"])
@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "tokenizer.model", "merges.txt", "tokenizer_config.json"],
)
def test_what_is_no_file_is_not_taken_for_missing(
    whole: Path, tmp_path: Path, name: str, harm: str
) -> None:
    folder = damaged(whole, tmp_path, name, b"{}")
    (folder / name).unlink()
    if harm == "a folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name)
    for attempt in (
        lambda: fcsd.load(folder),
        lambda: convert_checkpoint(folder, tmp_path / "out", Connectivity("all")),
    ):
        with user_error(rf"{name}: is a (folder|link to .* exist)"):
            attempt()


def test_a_byte_order_mark_and_a_folder_are_no_generation_settings(
    whole: Path, tmp_path: Path
) -> None:
    folder = damaged(whole, tmp_path, "generation_config.json", b'\xef\xbb\xbf{"eos_token_id": 2}')  # fmt: skip
    refused_by_all(folder, tmp_path / "out", "begins with a byte order mark")
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").mkdir()
    refused_by_all(folder, tmp_path / "out", "is a folder")


def test_generation_settings_may_be_missing_and_whole_ones_are_kept(
    whole: Path, tmp_path: Path
) -> None:
    convert_checkpoint(whole, tmp_path / "out", Connectivity("all"))
    assert load_model(tmp_path / "out").generation_config.eos_token_id == [7, 8]
    folder = damaged(whole, tmp_path, "generation_config.json", b"")
    (folder / "generation_config.json").unlink()
    load_model(folder)
    convert_checkpoint(folder, tmp_path / "without", Connectivity("all"))
    assert not (tmp_path / "without/generation_config.json").exists()


def test_the_commands_say_it_in_one_line(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(whole, tmp_path, "generation_config.json", b"{")
    for arguments in (
        ["convert", str(folder), str(tmp_path / "out"), "--layers", "all"],
        ["evaluate", str(folder), "--suite", "tiny", "--output", str(tmp_path / "e")],
    ):
        assert main(arguments) != 0
        said = capsys.readouterr().err.strip()
        assert "generation_config.json: not valid JSON" in said
        assert "Traceback" not in said


BESIDE = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json", "chat_template.json",
    "processor_config.json",
)  # fmt: skip


TEMPLATES = ("chat_template.jinja", "additional_chat_templates/rag.jinja")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        *((name, NO_OBJECT[kind], ".*fetch")
          for name in BESIDE for kind in ("cut", "empty", "a list", "null", "nested")),
        *((name, content, "(is empty|not a text file)")
          for name in TEMPLATES for content in (b"", b" \n", "{{ x }}".encode("utf-16"))),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_tokenizer_is_neither_loaded_nor_copied(
    whole: Path, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    folder = damaged(whole, tmp_path, name, content)
    with user_error(f"{name}: {said}"):
        load_tokenizer(folder)
    with user_error(f"{name}: {said}"):
        convert_checkpoint(folder, tmp_path / "out", Connectivity("all"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b'{"a": "b"}', b'{"a": [1]}', b"{}"])
def test_a_tokenizer_of_other_values_is_one_line(
    whole: Path, tmp_path: Path, content: bytes
) -> None:
    folder = damaged(whole, tmp_path, "tokenizer.json", content)
    with user_error("the tokenizer cannot be read: "):
        load_tokenizer(folder)


def test_a_checkpoint_is_read_once_until_one_of_its_files_changes(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    headers = []
    read = checkpoint_module.read_header
    monkeypatch.setattr(
        checkpoint_module,
        "read_header",
        lambda file: (headers.append(file.name), read(file))[1],
    )
    first = read_checkpoint(folder)
    first.config["eos_token_id"] = "changed by its caller"
    assert (
        read_checkpoint(folder).config["eos_token_id"] != first.config["eos_token_id"]
    )
    assert headers == ["model.safetensors"]
    change_json(folder / "config.json", {"rope_theta": 5.0})
    assert read_checkpoint(folder).config["rope_theta"] == 5.0
    (folder / "generation_config.json").write_bytes(b"")
    with user_error(r"generation_config\.json: not valid JSON"):
        read_checkpoint(folder)
