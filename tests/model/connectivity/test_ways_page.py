"""The code in docs/scale.md runs as written."""

import importlib
import importlib.util
import re
import warnings

import pytest
import torch

from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import ROOT, few

TEXT = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
CODE = dict(
    re.findall(
        r"^## ([^\n]+)\n(?:(?!^## )[^\n]*\n)*?```python\n(.*?)```",
        TEXT,
        flags=re.M | re.S,
    )
)
SLOW = ("Compile and export",)
"""Sections of which every step is a test of `test_ways_compile`."""
RANKS = ("FSDP2", "Tensor and expert parallelism", "DeepSpeed ZeRO-3", "Pipelines")
NEEDS = {"LoRA": "peft", "DeepSpeed ZeRO-3": "deepspeed", "int8 weights": "torchao"}


def run(rank, code, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries' deprecations
        if "deepspeed" in code:
            import deepspeed

            # An import statement would give torch itself, which deepspeed.comm has
            # under this name.
            importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
            deepspeed.init_distributed("gloo")
        input_ids = torch.randint(
            3, 99, (2, 9), generator=torch.Generator().manual_seed(rank)
        )
        exec(code, {"path": path, "input_ids": input_ids})


@pytest.mark.parametrize(
    "section", few(sorted(CODE, key=SLOW.__contains__), len(CODE) - len(SLOW))
)
def test_a_section_runs(section, tmp_path, monkeypatch):
    if (package := NEEDS.get(section)) and importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    torch.compiler.reset()
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    if section in RANKS:
        run_ranks(run, 2, CODE[section], str(tmp_path))
    else:
        run(0, CODE[section], str(tmp_path))


def test_every_section_with_code_is_listed():
    assert len(CODE) == TEXT.count("```python") >= 9
    assert set(RANKS) | set(NEEDS) <= set(CODE)
