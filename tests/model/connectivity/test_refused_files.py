"""A damaged file of a checkpoint is named in one line, by every command alike; nothing
waits for a pipe.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fcsd.cli.main import main
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import few


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of several shards with every file that transformers reads."""
    folder = tmp_path_factory.mktemp("whole") / "model"
    model = tiny_model("qwen2_moe", num_hidden_layers=2, vocab_size=300, num_experts=4)
    model.save_pretrained(folder, max_shard_size="100KB")
    tiny_tokenizer(300).save_pretrained(folder)
    for name in FILES:
        if not (folder / name).exists() and name != SHARD:
            (folder / name).write_text("{}")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


SHARD = "model-00001"
FILES = [
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json",
    "added_tokens.json", "processor_config.json", "preprocessor_config.json", "model.safetensors.index.json", SHARD,
]  # fmt: skip


def text(content: str) -> Callable[[Path], object]:
    """Return a harm: other JSON, in a shard as its header."""

    def harm(file: Path) -> None:
        data = content.encode()
        is_shard = file.suffix == ".safetensors"
        file.write_bytes(len(data).to_bytes(8, "little") * is_shard + data)

    return harm


def encoded(mark: bytes, encoding: str) -> Callable[[Path], object]:
    def harm(file: Path) -> None:
        file.write_bytes(mark + file.read_text("latin-1").encode(encoding))

    return harm


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


HARMS: dict[str, Callable[[Path], object]] = {
    "lists nested deep": text("[" * 100_000 + "]" * 100_000),
    "objects nested deep": text('{"a":' * 100_000 + "1" + "}" * 100_000),
    "nested as deep as json reads": text('{"a":' * 900 + "1" + "}" * 900),
    "a list": text("[1]"),
    "a text": text('"x"'),
    "a number": text("3"),
    "null": text("null"),
    "nothing": text(""),
    "half": text('{"a": '),
    "UTF-8 with a mark": encoded(b"\xef\xbb\xbf", "latin-1"),
    "UTF-16": encoded(b"", "utf-16"),
    "bytes": lambda file: file.write_bytes(b"\xff\xfe\x00\x01" * 9),
    "a pipe": pipe,
    "a folder": folder,
}


@pytest.mark.parametrize("name", few(FILES, 5))
def test_every_command_names_the_damaged_file(
    whole: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "1 + 1 is 2, and so it is read"}\n' * 9)
    commands = [
        ["inspect", str(model)],
        ["convert", str(model), str(out)],
        ["layers", str(model), "--text", str(rows), "--output", str(out)],
    ]
    wrong = []
    for kind, harm in HARMS.items():
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(whole, model)
        (file,) = model.glob(f"{name}*")
        harm(file)
        # Without the weights `inspect` sees no damage in a shard.
        for words in commands[1:] if name == SHARD else commands:
            capsys.readouterr()
            status = main(words)
            said = capsys.readouterr().err.strip()
            if status != 2 or str(file) not in said or said.count("\n"):
                wrong.append(f"{kind}, {words[0]}: {status}, {said[-300:]}")
            # A stage that has left only its settings begins again.
            assert {path.name for path in out.glob("*")} <= {"stage.json"}
            shutil.rmtree(out, ignore_errors=True)
    assert not wrong, "\n".join(wrong)
