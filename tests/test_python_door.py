"""The Python interface: `import fcsd` is light, its names are those that are listed,
and the docs and the example run.
"""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import fcsd
from tests.support import write_rows

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "python.md"


def test_importing_it_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import fcsd, sys; print(*{m.split('.')[0] for m in sys.modules} & {'torch',"
        " 'transformers', 'datasets'})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


def test_every_name_is_there_and_type_checkers_see_it() -> None:
    for name in fcsd.__all__:
        assert getattr(fcsd, name) is not None and name in dir(fcsd)
    tree = ast.parse(Path(fcsd.__file__).read_text())
    seen = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fcsd.")
        for alias in node.names
    }
    assert seen == set(fcsd.__all__)
    with pytest.raises(AttributeError, match="module 'fcsd' has no attribute 'train'"):
        _ = fcsd.train


def blocks() -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S
    )


def test_every_code_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    names: dict[str, object] = {"__name__": "page"}
    assert len(blocks()) >= 8
    for number, block in enumerate(blocks()):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), names)


def test_the_lines_of_the_readme_run_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fcsd.pipeline.tiny.models import tiny_tokenizer
    from tests.reference.tiny import tiny_model

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", readme, flags=re.M | re.S)
    (block,) = [each for each in blocks if "Trainer" in each]
    tiny = {
        "Qwen/Qwen3-30B-A3B": str(tmp_path / "tiny"), "max_steps=2000": "max_steps=2",
        "max_length=4096": "max_length=64", "batch_size_tokens=131072": "batch_size_tokens=256",
    }  # fmt: skip
    for real, small in tiny.items():
        assert real in block
        block = block.replace(real, small)
    tiny_model("qwen3_moe", num_hidden_layers=4, vocab_size=300).save_pretrained(
        tmp_path / "tiny"
    )
    tiny_tokenizer(300).save_pretrained(tmp_path / "tiny")
    turns = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2 it is"},
    ]
    write_rows(tmp_path / "chats.jsonl", [{"messages": turns}] * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "runs" / "mine" / "model" / "modeling_farskip.py").is_file()


def test_the_example_trains_saves_and_loads_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runpy.run_path(str(ROOT / "examples" / "distill_in_python.py"))
    said = capsys.readouterr().out
    match = re.search(
        r"held-out KL to the original: ([\d.]+) before, ([\d.]+) after 40 steps", said
    )
    assert match is not None and float(match[2]) < 0.6 * float(match[1])
    assert "saved and loaded again: FarSkipQwen3MoeForCausalLM in" in said
