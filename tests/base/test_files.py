"""Stages compare their inputs and outputs by fingerprints of everything that affects a
result.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from fcsd.base import weights
from fcsd.base.artifact import Stage, check_outputs, model_outputs, read_manifest
from fcsd.base.files import (
    checkpoint_files,
    read_editable,
    read_json,
    read_sealed,
    sealed,
    write_sealed,
)
from fcsd.base.weights import weights_fingerprint
from fcsd.base.writing import write_json
from fcsd.model.config import ModelConfig
from fcsd.model.load import ModelFolder
from fcsd.training.history import read_history, read_scores
from tests.support import user_error

CONFIG = {
    "model_type": "qwen3_moe", "num_experts_per_tok": 2, "torch_dtype": "bfloat16", "transformers_version": "4.57.0",
    "_name_or_path": "/somewhere", "rope_scaling": None, "text_config": {"hidden_size": 8, "dtype": "torch.float16"},
}  # fmt: skip


def flip(file: Path, old: bytes, new: bytes) -> None:
    """Change bytes of a file but not its size, as a faulty disk does."""
    data = file.read_bytes()
    assert old in data and len(old) == len(new)
    file.write_bytes(data.replace(old, new, 1))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    import numpy as np

    folder = tmp_path / "original"
    folder.mkdir()
    save_file({"a": np.arange(4, dtype=np.float32)}, folder / "model.safetensors")
    write_json(folder / "config.json", CONFIG)
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": 1, "transformers_version": "4.57.0"},
    )
    write_json(folder / "tokenizer.json", {"model": {"merges": ["a b"]}})
    write_json(
        folder / "tokenizer_config.json",
        {"chat_template": "{{ x }}", "name_or_path": "/somewhere"},
    )
    return folder


def known(folder: Path) -> dict[str, Any]:
    return ModelFolder(ModelConfig(path=str(folder)), folder).fingerprints("original")


def test_a_copy_and_what_another_transformers_writes_of_itself_are_the_same_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    before = known(checkpoint)
    other = tmp_path / "moved" / "elsewhere"
    shutil.copytree(checkpoint, other)
    assert known(other) == before
    config = CONFIG | {
        "dtype": "torch.bfloat16", "transformers_version": "5.23.1", "_name_or_path": "owner/name", "use_cache": False,
    }  # fmt: skip
    del config["torch_dtype"]
    write_json(other / "config.json", config)
    write_json(
        other / "generation_config.json",
        {"transformers_version": "5.23.1", "eos_token_id": 1},
    )
    write_json(
        other / "tokenizer_config.json",
        {"name_or_path": "owner/name", "chat_template": "{{ x }}"},
    )
    write_json(other / "model.safetensors.index.json", {})
    (other / "README.md").write_text("# Other words")
    assert known(other) == before


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("config.json", CONFIG | {"num_experts_per_tok": 1}, r"original/config\.json\.num_experts_per_tok: 2 -> 1"),
        ("config.json", CONFIG | {"torch_dtype": "float32"}, r'config\.json\.dtype: "bfloat16" -> "float32"'),
        ("config.json", CONFIG | {"text_config": {"hidden_size": 9}}, r"json\.text_config\.hidden_size: 8 -> 9"),
        ("generation_config.json", {"eos_token_id": 2}, r"generation_config\.json\.eos_token_id: 1 -> 2"),
        ("tokenizer.json", {"model": {"merges": ["b a"]}}, r"original/tokenizer\.json: "),
        ("tokenizer_config.json", {"chat_template": "{{ y }}"}, r"original/tokenizer_config\.json: "),
        ("chat_template.jinja", {"x": 1}, r"original/chat_template\.jinja: null -> "),
        ("additional_chat_templates/tool_use.jinja", {}, r"original/additional_chat_templates/tool_use\.jinja: "),
        ("special_tokens_map.json", {"eos_token": "b"}, r"original/special_tokens_map\.json: "),
        ("spiece.model", {}, r"original/spiece\.model: "),
    ],
)  # fmt: skip
@pytest.mark.parametrize("finished", [False, True])
def test_a_stage_is_refused_when_a_file_that_it_read_has_changed_and_the_file_is_named(
    checkpoint: Path,
    tmp_path: Path,
    file: str,
    content: dict[str, Any],
    said: str,
    finished: bool,
) -> None:
    stage = Stage(tmp_path / "s", "distill", {}, known(checkpoint))
    stage.start()
    (stage.folder / "history.jsonl").touch()
    if finished:
        stage.finish({})
    assert stage.state() == ("finished" if finished else "unfinished")
    (checkpoint / file).parent.mkdir(exist_ok=True)
    write_json(checkpoint / file, content)
    with user_error(f"was made with other settings .*{said}.*remove this folder"):
        Stage(stage.folder, "distill", {}, known(checkpoint)).state()


def test_code_counts_where_it_is_run(checkpoint: Path) -> None:
    (checkpoint / "modeling_x.py").write_text("x = 1")
    assert "modeling_x.py" not in checkpoint_files(checkpoint)
    before = checkpoint_files(checkpoint, code=True)
    (checkpoint / "modeling_x.py").write_text("x = 2")
    assert checkpoint_files(checkpoint, code=True) != before


def test_a_folder_that_noted_less_of_what_it_read_is_refused_with_what_it_did_not_note(
    checkpoint: Path, tmp_path: Path
) -> None:
    stage = Stage(tmp_path / "s", "convert", {}, known(checkpoint))
    stage.start()
    record = read_json(stage.folder / "stage.json")
    record |= {
        "schema_version": 4,
        "inputs": {"original": record["inputs"]["original"]},
    }
    write_json(stage.folder / "manifest.json", record)
    message = r"made by another fcsd \(schema_version 4, .*did not record original/config\.json.*remove this folder"
    with user_error(message):
        stage.state()


def test_hard_links_are_read_once(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    header = weights.safetensors_header
    monkeypatch.setattr(
        weights, "safetensors_header", lambda path: read.append(path) or header(path)
    )
    (tmp_path / "links").mkdir()
    os.link(checkpoint / "model.safetensors", tmp_path / "links" / "model.safetensors")
    assert weights_fingerprint(checkpoint) == weights_fingerprint(tmp_path / "links")
    assert len(read) == 1


@pytest.fixture
def finished(checkpoint: Path, tmp_path: Path) -> Path:
    """Return the folder of a finished training."""
    stage = Stage(tmp_path / "distill", "distill", {}, {"original": "abc"})
    stage.start()
    shutil.copytree(checkpoint, stage.folder / "model")
    (stage.folder / "history.jsonl").write_text('{"loss": 1.25, "step": 1}\n')
    write_json(stage.folder / "scores.json", {"points": [0.25]})
    model = stage.folder / "model"
    stage.finish({"last_loss": 1.25}, model_outputs(model))
    return stage.folder


def test_what_a_stage_left_is_the_same_in_another_folder(
    finished: Path, tmp_path: Path
) -> None:
    check_outputs(finished)
    shutil.copytree(finished, tmp_path / "moved")
    check_outputs(tmp_path / "moved")
    assert read_history(tmp_path / "moved") == [{"loss": 1.25, "step": 1}]
    known(tmp_path / "moved" / "model")


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("model/model.safetensors", b"\0\0\x80?", b"\0\0\0@", "model: "),
        ("model/config.json", b'_tok": 2', b'_tok": 1', r"model/config\.json\.num_experts_per_tok: 2 -> 1"),
        ("model/tokenizer.json", b"a b", b"b a", r"model/tokenizer\.json: "),
        ("history.jsonl", b"1.25", b"1.15", r"history\.jsonl: "),
        ("scores.json", b"0.25", b"0.75", r"scores\.json: "),
    ],
)  # fmt: skip
def test_a_result_that_is_not_what_a_stage_left_is_named_with_what_to_do(
    finished: Path, file: str, old: bytes, new: bytes, said: str
) -> None:
    flip(finished / file, old, new)
    message = rf"distill: differs from what the stage wrote \({said}.*was damaged or changed.*remove the folder"
    with user_error(message):
        check_outputs(finished)
    readers = {"history.jsonl": read_history, "scores.json": read_scores}
    with user_error(message):
        readers[file](finished) if file in readers else known(finished / "model")


def test_a_field_without_effect_is_known_by_the_hash_of_its_file(
    finished: Path,
) -> None:
    flip(finished / "model" / "generation_config.json", b"4.57.0", b"4.57.1")
    with user_error(r"model/generation_config\.json\.sha256: "):
        check_outputs(finished)
    # An earlier fcsd recorded only the fields.
    record = read_json(finished / "manifest.json")
    for name in ("config.json", "generation_config.json"):
        del record["outputs"][f"model/{name}"]["sha256"]
    del record["sha256"]
    write_json(finished / "manifest.json", record)
    check_outputs(finished)
    flip(finished / "model" / "generation_config.json", b'_id": 1', b'_id": 2')
    with user_error(r"eos_token_id: 1 -> 2\): the folder was damaged"):
        check_outputs(finished)


def test_a_checkpoint_that_a_command_left_is_what_it_wrote(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    record = {"stage": "calibrate", "outputs": model_outputs(checkpoint)}
    write_sealed(path, record)
    known(checkpoint)
    flip(checkpoint / "model.safetensors", b"\0\0\x80?", b"\0\0\0@")
    message = (
        r"original: is not what `fcsd calibrate` wrote \(model: .*damaged or changed"
        rf" since; write the checkpoint again, or remove {path} if the change is yours"
    )
    with user_error(message):
        known(checkpoint)
    write_json(path, sealed(record) | {"outputs": {}})
    with user_error(r"is damaged: .*; write the checkpoint again"):
        known(checkpoint)
    # The file of another tool, and the record of a conversion, say nothing about
    # weights.
    for other in ([1], {"sha256": "x", "model": 2}, sealed({"stage": "convert"})):
        write_json(path, other)
        known(checkpoint)


def test_a_result_that_is_gone_is_missed(finished: Path) -> None:
    (finished / "scores.json").unlink()
    with user_error(r'scores\.json: ".* -> null'):
        read_scores(finished)
    shutil.rmtree(finished / "model")
    with user_error("no such folder, although the stage wrote it"):
        check_outputs(finished)


def test_a_digit_of_a_manifest_does_not_change_unseen(finished: Path) -> None:
    flip(finished / "manifest.json", b'"last_loss": 1.25', b'"last_loss": 1.15')
    for read in (
        read_manifest,
        Stage(finished, "distill", {}, {"original": "abc"}).state,
    ):
        with user_error(r"manifest\.json: is damaged.*remove the folder"):
            read(finished) if read is read_manifest else read()  # type: ignore[call-arg]


def test_a_sealed_file_is_what_was_written_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    write_sealed(file, {"loss": 1.5, "losses": [2, 1.5], "ä": None})
    assert read_sealed(file, "do this") == {"loss": 1.5, "losses": [2, 1.5], "ä": None}
    write_json(file, json.loads(file.read_text()) | {"loss": 1.25, "step": 1})
    with user_error(r"result\.json: is damaged: .*; do this"):
        read_sealed(file, "do this")
    write_json(file, {"loss": 1.5})
    with user_error("lacks the hash that fcsd writes into it; do this"):
        read_sealed(file, "do this")


def test_a_file_that_users_edit_may_lack_its_hash_and_not_contradict_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "links.json"
    write_sealed(file, {"ports": [1.5]})
    assert read_editable(file, "fcsd x", ["ports"]) == {"ports": [1.5]}
    flip(file, b"1.5", b"2.5")
    with user_error(
        r"is damaged: .*`fcsd x` writes it again; if you edited it, remove its line"
    ):
        read_editable(file, "fcsd x", ["ports"])
    write_json(file, {"ports": [2.5]})
    assert read_editable(file, "fcsd x", ["ports"]) == {"ports": [2.5]}
