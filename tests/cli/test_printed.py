"""What each command prints can be read in a terminal of 80 columns."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.text import fit
from fcsd.cli.main import main
from fcsd.evaluation.scores import compare
from fcsd.planning.layers.proposal import study_table
from fcsd.planning.layers.settings import read_study
from fcsd.report.table import models_table, narrow_table, paired_table, score_table
from tests.planning.cost.plans import lite
from tests.planning.layers.test_kinds import KINDS, without_kl, written
from tests.real_configs import CONFIGS, real_folder
from tests.report.test_comparison import scored
from tests.support import few
from tests.terminal import assert_readable, tables_of

Shown = Callable[..., str]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """Return what a command prints at 80 columns, which must be readable there, and
    have the tables and columns that a pipe gets.
    """

    def run(*words: object) -> str:
        texts = []
        for columns in ("80", ""):
            monkeypatch.setenv("COLUMNS", columns)
            assert main([str(word) for word in words]) == 0, capsys.readouterr().err
            texts.append(capsys.readouterr().out)
        assert_readable(texts[0])
        names: Sequence[list[str]]
        names = [[name for header, _ in tables_of(t) for name in header] for t in texts]
        assert {*names[0]} == {*names[1]}
        return texts[0]

    return run


def test_families(shown: Shown) -> None:
    assert "written by" in shown("families")


@pytest.mark.parametrize(
    "name", few(sorted(path.stem for path in CONFIGS.glob("*.json")), 8)
)
def test_the_facts_of_a_checkpoint(name: str, tmp_path: Path, shown: Shown) -> None:
    assert "conversion" in shown("inspect", real_folder(name, tmp_path / "m"))


@pytest.mark.parametrize(
    "words",
    few([
        "", "--nodes 2 --batch 24 --keep-activations --gpu h100", "--tp 2 --pp 2 --global-batch 16",
        "--phase prefill --tp 8 --batch 16", "--phase prefill --gpu mi300x --dtype fp8 --without-aiter",
        "--phase decode --batch 64", "--phase decode --dp 8 --batch 64 --all2all deepep_low_latency",
        "--sweep nodes=1,2,3", "--phase decode --sweep batch=8,16 --gpu mi300x",
    ], 6),
)  # fmt: skip
def test_a_plan(words: str, tmp_path: Path, shown: Shown) -> None:
    shown("plan", lite(tmp_path), "--length", "512", *words.split())


@pytest.mark.parametrize("kind", few(KINDS, 1))
def test_a_layer_study_and_its_readers(kind: str, tmp_path: Path, shown: Shown) -> None:
    study = written(tmp_path / "s", kind, calibrated=True, task=True)
    shown("plan", lite(tmp_path), "--length", "512", "--study", study)
    shown("plan-layers", study, "--max-loss", "0.1")
    machine = ("--model", tmp_path / "lite", "--gpu", "h200", "--length", "512")
    shown("plan-layers", study, *machine)
    shown("plan-layers", study, *machine, "--calibrated")
    if kind != "attention":
        shown("plan-layers", study, "--budget", "2", "--calibrated")
    assert_readable(fit(study_table(read_study(study)), 80))
    without_kl(study)
    shown("plan-layers", study, "--max-loss", "0.1")
    shown("plan-layers", study, *machine, "--calibrated")


def test_scores_and_comparisons() -> None:
    one = scored({"hellaswag": [0.0, 1.0] * 50, "mbpp_plus": [0.0] * 30 + [1.0] * 70})
    two = scored({"hellaswag": [1.0, 0.0] * 50, "mbpp_plus": [0.0] * 50 + [1.0] * 50})
    for table in (paired_table, narrow_table):
        assert_readable(fit(table(compare(one, two)), 80))
    row = {
        "kind": "generation", "metric": "exact_match,strict-match", "num_fewshot": 5, "num_items": 200,
        "num_items_total": 1319, "value": 0.5, "stderr": 0.1, "answers_at_limit": 17,
    }  # fmt: skip
    tasks = {"hellaswag": row, "gsm8k_with_thoughts": row}
    whole = {"tasks": tasks, "mean": 0.5, "mean_stderr": 0.1, "settings": {"limit": 9}}
    assert_readable(fit(score_table(whole), 80))
    rows = {
        f"{name}-of-eight": {"layers": "26 of 30", "training": "48 steps, " * 5, "result": whole}
        for name in ("original", "converted", "calibrated", "fcsd")
    }  # fmt: skip
    assert_readable(fit(models_table(rows, 80), 80))
    assert_readable(fit(models_table(rows), 80))


def test_json_is_the_same_at_any_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[Any] = []
    for columns in ("20", "80", ""):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(["families", "--json"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert json.loads(printed[0])["families"]
