"""Own text in the layer study, in a plan of its layers, and from Python."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import fcsd
from fcsd.cli.main import main
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.results import read_result
from fcsd.evaluation.suites import chosen_suite
from fcsd.planning.layers.points import loss_text
from tests.evaluation.own_text.test_compared import evaluate, place
from tests.support import user_error

__all__ = ["place"]  # a fixture


@pytest.fixture(scope="module")
def study(place: Path) -> Path:
    words = [
        "layers", place / "original", "--output", place / "study", "--suite", place / "suite.yaml",
        "--task", "own_texts", "--data-root", place / "data",
    ]  # fmt: skip
    assert main([str(word) for word in words]) == 0
    return place / "study"


@pytest.mark.breadth
def test_a_layer_study_finds_what_evaluate_finds(place: Path, study: Path) -> None:
    content = json.loads((study / "layers.json").read_text())
    (metric,) = content["metrics"]
    assert metric == {"name": "own_texts", "unit": "nats per token", "better": "lower"}
    assert loss_text(metric) == "own_texts added"
    values = {
        (point["side"], point["num_layers"]): point["values"]["own_texts"]
        for point in content["points"]
    }
    assert values["none", 0]["value"] == pytest.approx(0, abs=1e-6)
    for name, key in (("last", ("last", 1)), ("all", ("last", 3))):
        row = read_result(place / "results" / name)[0]["tasks"]["own_texts"]
        assert values[key]["value"] == pytest.approx(row["value"], rel=1e-3)
        assert values[key]["stderr"] == pytest.approx(row["stderr"], rel=1e-3)
    assert (study / "layers.png").is_file()


def test_layers_are_planned_by_the_divergence_that_they_add(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-layers", str(study), "--budget", "1", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    content = json.loads((study / "layers.json").read_text())
    single = {
        point["layers"][0]: point["values"]["own_texts"]["value"]
        for point in content["points"]
        if point["side"] == "single"
        or (point["side"], point["num_layers"]) in (("first", 1), ("last", 1))
    }
    cheapest = min(single, key=lambda layer: single[layer])
    chosen = [row["layer"] for row in plan["sensitivities"] if row["rewired"]]
    assert chosen == [cheapest]


def test_a_calibration_tells_what_its_model_writes(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"text": f"{n} times {n % 9} and some more " * 4} for n in range(60)]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "calibrate", place / "original", tmp_path / "out", "--layers", "last:1", "--text", text, "--tokens", "2048",
        "--max-length", "128",
    ]  # fmt: skip
    tasks = ["--task", "own_texts", "--suite", place / "suite.yaml"]
    tasks += ["--data-root", place / "data"]
    assert main([str(word) for word in [*words, "--suite", "x.yaml"]]) == 2
    assert "--suite has no meaning without --task" in capsys.readouterr().err
    assert main([str(word) for word in words + tasks]) == 0
    told = capsys.readouterr().err
    assert evaluate(place, str(tmp_path / "out"), tmp_path / "result") == 0
    row = read_result(tmp_path / "result")[0]["tasks"]["own_texts"]
    assert f"| {row['value']:.3f} ± {row['stderr']:.3f} nats |" in told


def test_python_measures_models_in_memory_as_the_command_does(place: Path) -> None:
    model, tokenizer = fcsd.load(place / "last")
    original, _ = fcsd.load(place / "original")
    options: dict[str, Any] = {
        "suite": place / "suite.yaml", "data_root": place / "data", "tokenizer": tokenizer, "progress": False,
    }  # fmt: skip
    found = fcsd.evaluate_model(model, original=original, **options)
    by_path = fcsd.evaluate_model(model, original=place / "original", **options)
    expected = read_result(place / "results/last")[0]["tasks"]
    for task, row in expected.items():
        for result in (found, by_path):
            assert result["tasks"][task]["value"] == pytest.approx(row["value"])
            assert result["tasks"][task]["metrics"] == row["metrics"]
    itself = fcsd.evaluate_model(original, original=original, **options)
    assert {row["value"] for row in itself["tasks"].values()} == {0.0}
    compared = fcsd.compare(itself, found)
    assert compared["tasks"]["own_texts"]["verdict"] == "distance"
    with user_error(r"own_texts: compares .*in Python: original="):
        fcsd.evaluate_model(model, **options)
    assert fcsd.evaluate_model(original, **options)["tasks"] == itself["tasks"]
    with user_error("original: is named as the original, but is converted itself"):
        fcsd.evaluate_model(model, original=model, **options)
    with user_error("original: an int; a model in memory"):
        fcsd.evaluate_model(model, original=3, **options)


def test_a_task_of_own_text_is_named_on_its_own(place: Path, tmp_path: Path) -> None:
    """It has no place in a mean of scores, whoever names it."""
    named = ("--tasks", "own_texts", "--original", place / "original")
    assert evaluate(place, "last", tmp_path / "out", *named) == 0
    expected = read_result(place / "results/last")[0]["tasks"]["own_texts"]
    found = read_result(tmp_path / "out")[0]
    model, tokenizer = fcsd.load(place / "last")
    by_python = fcsd.evaluate_model(
        model, place / "suite.yaml", tasks=["own_texts"], original=place / "original",
        tokenizer=tokenizer, data_root=place / "data", progress=False,
    )  # fmt: skip
    for result in (found, by_python):
        assert result["tasks"].keys() == {"own_texts"} and result["mean"] is None
        row = result["tasks"]["own_texts"]
        assert row["headline"] is False
        assert row["value"] == pytest.approx(expected["value"])


def test_beside_own_text_a_named_task_that_is_no_headline_counts() -> None:
    rows: list[dict[str, Any]] = [
        {"task": "own", "kind": "own_text", "dataset": "o/d"},
        {"task": "a", "kind": "likelihood", "metric": "acc,none", "dataset": "o/d"},
        {"task": "b", "kind": "likelihood", "metric": "acc,none", "dataset": "o/d"},
    ]
    rows[2]["headline"] = False
    suite = SuiteConfig(name="s", tasks=rows)
    chosen = chosen_suite(["own", "b"], suite)
    assert [(row.task, row.headline) for row in chosen.tasks] == [
        ("own", False),
        ("b", True),
    ]


def test_a_file_of_prompts_needs_no_place_below_the_data_root(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Evaluation, layer study and Python read it from the current folder, and measure
    what they measure below the data root; another content is another result.
    """
    monkeypatch.chdir(tmp_path)
    prompts, suite = Path("heldout.jsonl"), Path("mine.yaml")
    prompts.write_text((place / "data/o/chats/train.jsonl").read_text())
    row = {"task": "own_chats", "kind": "own_text", "dataset": str(prompts)}
    row |= {"chat_template": True, "max_new_tokens": 10, "seed": 1}
    suite.write_text(yaml.safe_dump({"name": "mine", "tasks": [row]}))
    expected = read_result(place / "results/last")[0]["tasks"]["own_chats"]

    def evaluated(name: str) -> dict[str, Any]:
        words = [
            "evaluate", place / "last", "--original", place / "original", "--suite", suite, "--data-root",
            place / "data", "--cache", "cache", "--output", name,
        ]  # fmt: skip
        assert main([str(word) for word in words]) == 0
        row: dict[str, Any] = read_result(Path(name))[0]["tasks"]["own_chats"]
        return row

    found = evaluated("first")
    assert (found["value"], found["metrics"]) == (
        expected["value"],
        expected["metrics"],
    )
    model, tokenizer = fcsd.load(place / "last")
    options: dict[str, Any] = {"original": place / "original", "progress": False}
    options |= {"suite": suite, "data_root": place / "data", "tokenizer": tokenizer}
    result = fcsd.evaluate_model(model, **options)["tasks"]["own_chats"]
    assert result["value"] == pytest.approx(expected["value"])
    study = [
        "layers", place / "original", "--output", "study", "--suite", suite, "--task", "own_chats", "--data-root",
        place / "data", "--sides", "last",
    ]  # fmt: skip
    assert main([str(word) for word in study]) == 0
    (point,) = (
        point
        for point in json.loads(Path("study/layers.json").read_text())["points"]
        if (point["side"], point["num_layers"]) == ("last", 1)
    )
    assert point["values"]["own_chats"]["value"] == pytest.approx(
        expected["value"], rel=1e-3
    )

    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[1:]))
    assert evaluated("second")["num_items"] == expected["num_items"] - 1
    prompts.unlink()
    capsys.readouterr()
    with user_error(r"own_chats: heldout\.jsonl: no such file or folder, neither"):
        fcsd.evaluate_model(model, **options)
    study[3] = "other"
    assert main([str(word) for word in study]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "task own_chats: heldout.jsonl: no such file or folder, neither" in said
