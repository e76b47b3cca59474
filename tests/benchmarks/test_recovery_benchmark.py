"""The recovery benchmark: its arithmetic by hand, and one tiny round of it, which is never run again."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.recovery import __main__ as benchmark
from benchmarks.recovery.corpus import write_corpus
from benchmarks.recovery.report import baseline, summary, tokens_to_reach
from fcsd.base.errors import UserError
from fcsd.base.strict import read_yaml
from fcsd.recipe.load_recipe import load_recipe
from fcsd.recipe.recipe import Recipe

TEXT = "\n".join(f"Line {n} of the text says {n * n % 97}, and {n % 7} more." for n in range(9_000))
CODE = "\n".join(f"def function_{n}(x):\n    return x + {n * n % 89}" for n in range(9_000))
QUICK = [
    "pretrain.config.num_hidden_layers=2", "pretrain.config.hidden_size=32", "pretrain.train.max_steps=2",
    "pretrain.train.warmup_steps=1", "train.max_steps=4", "train.warmup_steps=1", "early_stopping.every_steps=2",
    "data.heldout_examples=4",
]  # fmt: skip


def test_tokens_to_a_kl_are_interpolated_in_the_logarithm() -> None:
    curve = [[0, 1.0], [100, 0.1], [200, 0.01], [300, 0.02]]
    assert tokens_to_reach(curve, 0.1) == 100
    assert tokens_to_reach(curve, math.sqrt(0.1 * 0.01)) == pytest.approx(150)
    assert tokens_to_reach(curve, 2.0) == 0 and tokens_to_reach(curve, 0.005) is None


def result(method: str, seed: int, last: float, budget: int = 200) -> dict[str, Any]:
    return {"method": method, "seed": seed, "curve": [[0, 1.0], [budget, last]], "budget_tokens": budget}


def test_the_baseline_is_the_best_plain_method_of_those_with_all_seeds() -> None:
    results = [result("kl a", 0, 0.2), result("kl a", 1, 0.2), result("kl b", 0, 0.1), result("x", 0, 0.01)]
    assert baseline(results) == "kl a"
    rows = summary([*results, result("kl b", 1, 0.1)])
    assert [row["method"] for row in rows] == ["x", "kl b", "kl a"]
    assert rows[0]["share"] == {0: pytest.approx(0.5)} and rows[1]["share"] == {0: 1.0, 1: 1.0}
    assert rows[1]["is_baseline"] and rows[2]["share"] == {0: None, 1: None}


def test_every_method_makes_a_recipe_of_both_models() -> None:
    methods = read_yaml(benchmark.HERE / "methods.yaml")
    for model in benchmark.MODELS:
        recipe = load_recipe(benchmark.HERE / f"{model}.yaml")
        whole = Recipe.model_validate(recipe.dump() | {"variants": methods})
        for name in methods:
            assert whole.variant(name).early_stopping.metric == "heldout_kl"


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, content in {"a.txt": TEXT, "b.py": CODE}.items():
        (tmp_path / name).write_text(content)
    return [str(tmp_path / name) for name in ("a.txt", "b.py")]


def test_a_finished_run_is_not_run_again_and_other_settings_are_refused(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = [
        str(out),
        "--models",
        "shared",
        "--seeds",
        "0",
        "--methods",
        "kl 1e-3",
        "rel l2 10",
        "--text",
        *texts,
    ]
    options = [word for text in QUICK for word in ("--set", text)]
    assert benchmark.main([*command, *options]) == 0
    printed = capsys.readouterr().out
    assert "**kl 1e-3** (baseline)" in printed and (out / "recovery.png").stat().st_size > 1000
    found = json.loads((out / "results" / "shared" / "seed-0" / "rel l2 10.json").read_text())
    assert [point[0] for point in found["curve"]] == [0, 1024, 2048]
    assert not (out / "shared" / "seed-0" / "variants" / "method").exists()
    monkeypatch.setattr("fcsd.pipeline.distill.distill", lambda *_: pytest.fail("run again"))
    assert benchmark.main([*command, *options]) == 0
    assert benchmark.main([*command, *options, "--set", "train.learning_rate=1"]) == 1
    assert "of other settings than asked for" in capsys.readouterr().err


def test_splits_have_text_and_code_of_different_documents(tmp_path: Path, texts: list[str]) -> None:
    write_corpus(tmp_path / "corpus", [Path(path) for path in texts])
    splits = {
        name: [
            json.loads(line)["text"]
            for line in (tmp_path / "corpus" / f"{name}.jsonl").read_text().splitlines()
        ]
        for name in ("train", "distill", "heldout")
    }
    for pieces in splits.values():
        code = sum(len(piece) for piece in pieces if "def function" in piece)
        assert 0.4 < code / sum(map(len, pieces)) < 0.6
    assert not set(splits["train"]) & set(splits["heldout"])
    assert not set(splits["distill"]) & set(splits["heldout"])


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match=r"too little text for the split 'train'.*--text"):
        write_corpus(tmp_path / "corpus", [tmp_path / "a.txt"])


def test_a_method_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([str(tmp_path), "--methods", "l3"]) == 1
    assert "--methods l3: no such method; there are: kl 1e-3;" in capsys.readouterr().err
