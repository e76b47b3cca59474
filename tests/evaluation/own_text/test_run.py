"""Own text in a recipe, which knows its original: evaluated, reported and published."""

import json
from typing import Any

import pytest
import yaml

from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.evaluation.own_text import measure
from fcsd.evaluation.results import read_result
from tests.pipeline.test_scoring import own_row
from tests.support import Bench, few


def test_a_run_measures_and_reports_what_each_of_its_models_writes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = bench.folder / "suite.yaml"
    rows = [bench.choice["task"], own_row(bench)]
    suite.write_text(yaml.safe_dump({"name": "mine", "tasks": rows}))
    train = {
        "max_steps": 2, "batch_size_tokens": 64, "per_device_train_batch_size": 1, "learning_rate": 1e-3,
        "warmup_steps": 1, "logging_steps": 1, "save_steps": 2,
    }  # fmt: skip
    path = bench.recipe(
        "run", train=train, evaluation={"suite": str(suite), "batch_size": 4}
    )
    texts, written = [], measure.write

    def noted(backend: Any, *arguments: Any, **options: Any) -> Any:
        texts.append(type(backend).__name__)
        return written(backend, *arguments, **options)

    monkeypatch.setattr(measure, "write", noted)
    assert main(["run", str(path)]) == 0
    # The original's samples are made once: two texts of each of three models.
    assert len(texts) == 2 * 3
    folder = bench.folder / "run"
    report = read_json(folder / "report/report.json")
    values = {
        name: model["result"]["tasks"]["own"]["value"]
        for name, model in report["models"].items()
    }
    assert values["original"] == 0 < min(values["converted"], values["fcsd"])
    # A mean of scores has no nats in it.
    for model in report["models"].values():
        result = model["result"]
        assert result["mean"] == result["tasks"]["tiny_choice"]["value"]
    row = report["comparisons"]["fcsd"]["tasks"]["own"]
    assert row["verdict"] == "distance" and row["converted"] == values["fcsd"]
    # Whether the training helped: the trained model against the one that it began with.
    trained = report["trained"]["fcsd"]
    (own,) = trained["tasks"].values()
    assert trained["start"] == "converted"
    assert own["delta"] == pytest.approx(values["fcsd"] - values["converted"])
    page = (folder / "report/report.md").read_text()
    began = "against `converted`, with which its training began: own "
    assert f"- **fcsd**, along its own samples, {began}{own['delta']:+.3f} ±" in page
    assert f"{values['fcsd']:.3f}" in page and "own.png" in page
    assert "own_text_kl: KL(model || original) in nats a token" in page
    assert (folder / "report/own.png").is_file()
    # At the end of what is printed, and on the page: one line of each model.
    told = capsys.readouterr().out
    assert f"fcsd, along its own samples, {began}" in " ".join(told.split())
    assert f"{values['fcsd']:.3f} ±" in told
    for text in (told, page):
        shown = text[text.index("own, first prompt, greedy: `") :].splitlines()
        assert shown[0].endswith("`<bos><user> 0 - 1<assistant>`")
        for name, line in zip(report["models"], shown[2:], strict=False):
            (first, *_) = read_result(folder / "evaluate" / name)[1]["own"]
            words = first["greedy"].strip().splitlines()[:1] or ["(nothing)"]
            assert line.startswith(f"- {name}: ")
            assert words[0].replace("`", "'")[:200] in line
    card = (folder / "publish/README.md").read_text()
    assert f"{values['fcsd']:.3f}" in card and "distance from the original" in card
    front = yaml.safe_load(card.split("---")[1])
    assert "own" not in json.dumps(front.get("model-index", []))
    items = (folder / "report/items.html").read_text()
    assert "distance" in items


def test_prompts_that_cannot_be_asked_are_refused_before_a_stage_begins(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = bench.folder / "suite.yaml"
    row = own_row(bench) | {"chat_template": False}
    suite.write_text(yaml.safe_dump({"name": "mine", "tasks": [row]}))
    path = bench.recipe("refused", evaluation={"suite": str(suite)})
    assert main(["run", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "row 1: is a conversation, which needs chat_template: true" in said
    assert not (bench.folder / "refused/convert").exists()


@pytest.mark.parametrize(
    "dataset", few(["nobody/prompts", "runs/none/prompts.jsonl"], 1)
)
def test_a_recipe_is_rehearsed_with_own_text(bench: Bench, dataset: str) -> None:
    suite = bench.folder / "suite.yaml"
    row = own_row(bench) | {"dataset": dataset}
    suite.write_text(yaml.safe_dump({"name": "mine", "tasks": [row]}))
    name = f"rehearsed-{len(dataset)}"
    path = bench.recipe(name, evaluation={"suite": str(suite)})
    folder = bench.folder / f"{name}-small"
    assert main(["run", str(path), "--rehearse", str(folder)]) == 0
    prompts = min(folder.rglob("prompts*/*.jsonl"), default=None)
    prompts = prompts or min(folder.rglob("prompts.jsonl"))
    assert "messages" in json.loads(prompts.read_text().splitlines()[0])
    report = min(folder.rglob("report/report.json"))
    rows = read_json(report)["comparisons"]["fcsd"]["tasks"]
    assert rows["own"]["verdict"] == "distance"
