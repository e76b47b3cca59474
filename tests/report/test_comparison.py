"""`fcsd compare`: results set against each other, in a folder with figures, answers and lm-eval's files."""

import json
from pathlib import Path
from typing import Any

import pytest

from fcsd.cli import main
from fcsd.evaluate.lm_eval_files import write_lm_eval
from fcsd.evaluate.lm_eval_results import read_results
from fcsd.evaluate.runner import write_result
from fcsd.evaluate.scores import by_member, compare
from fcsd.report.comparison import read_evaluated
from tests.report.test_report import result

SUBJECTS = {"mmlu_law": ([1, 1, 0, 1], [1, 0, 0, 0]), "mmlu_art": ([0, 1], [1, 1])}


def with_a_group(model: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A result with a group of two members of 4 and 2 items."""
    whole, samples = result("original" if model == 0 else "fcsd")
    rows = [
        {
            "doc_id": f"{subject}/{i}", "doc_hash": f"{subject}{i}", "prompt_hash": "p", "score": float(score),
            "target": "0", "prompt": f"which {i}?", "choices": [" a", " b"], "loglikelihoods": [-1.5, -2.0 - score],
        }
        for subject, scores in SUBJECTS.items()
        for i, score in enumerate(scores[model])
    ]  # fmt: skip
    mean = sum(row["score"] for row in rows) / 6
    whole["tasks"]["mmlu"] = whole["tasks"]["choice"] | {"value": mean, "num_items": 6, "num_fewshot": 5}
    return whole, samples | {"mmlu": rows}


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for model, name in enumerate(("original", "fcsd")):
        write_result(*with_a_group(model), tmp_path / "results" / name)
    return tmp_path / "results" / "original", tmp_path / "results" / "fcsd"


def error_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["compare", *map(str, words)]) == 2
    return capsys.readouterr().err.strip()


def test_compare_prints_every_task_and_the_mean_or_json(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *map(str, folders), "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out).values()
    assert comparison["tasks"]["choice"]["delta"] == 0 and comparison["tasks"]["mmlu"]["delta"] == -1 / 6
    assert main(["compare", *map(str, folders)]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    assert [row[0] for row in rows] == ["task", "-" * 8, "code", "choice", "mmlu", "mean"]
    assert rows[4][4:10] == ["66.7 ± 21.1", "50.0 ± 22.4", "-16.7 ± 30.7", "-60.7 to +35.7", "1", "2"]
    assert "Within noise: code, choice, mmlu; their intervals do not exclude losses of up to 60.7" in text


def test_members_of_a_group_are_compared_each(folders: tuple[Path, Path]) -> None:
    both = read_evaluated(folders[0], [folders[1]])
    members = compare(both["original"], both["fcsd"])["tasks"]["mmlu"]["members"]
    law = members["mmlu_law"]
    assert (law["num_items"], law["delta"], law["gained"], law["lost"]) == (4, -0.5, 0, 2)
    # differences 0, -1, 0, -1 about -1/2: variance 4 (1/4) / 3, over 4 items
    assert law["delta_stderr"] == pytest.approx((1 / 12) ** 0.5)
    assert (members["mmlu_art"]["delta"], members["mmlu_art"]["p_value"]) == (0.5, 1.0)
    assert by_member([{"doc_id": "Mbpp/2"}], "code") == {} == by_member([{"doc_id": 3}], "likelihood")


def test_a_comparison_is_a_folder_with_table_figures_answers_and_lm_evals_files(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "comparison"
    for _ in range(2):  # again replaces it
        assert main(["compare", *map(str, folders), "--output", str(out)]) == 0
    whole = json.loads((out / "comparison.json").read_text())
    assert whole["schema_version"] == 1 and whole["original"] == "original"
    text = (out / "comparison.md").read_text()
    assert "| mmlu " in text and "mmlu 5-shot" in text
    for figure in ("deltas.png", "mmlu_members.png"):
        assert f"({figure})" in text and (out / figure).read_bytes().startswith(b"\x89PNG")
    assert (out / "items.html").is_file()
    assert len(list((out / "lm_eval" / "fcsd").glob("samples_mmlu_*.jsonl"))) == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years")
    assert "exists and is no comparison" in error_of(capsys, *folders, "--output", other)
    assert (other / "thesis.txt").read_text() == "years"


def test_results_that_do_not_match_are_refused_with_what_differs(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def changed(name: str, change: Any) -> Path:
        whole, samples = with_a_group(1)
        change(whole, samples)
        write_result(whole, samples, tmp_path / name)
        return tmp_path / name

    shots = changed("shots", lambda whole, _: whole["tasks"]["mmlu"].update(num_fewshot=0))
    prompts = changed("prompts", lambda _, samples: samples["mmlu"][0].update(prompt_hash="q"))
    items = changed("items", lambda _, samples: samples["mmlu"][0].update(doc_hash="other revision"))
    metric = changed("metric", lambda whole, _: whole["tasks"]["choice"].update(metric="acc_norm,none"))
    assert "mmlu: num_fewshot is 5 against 0" in error_of(capsys, folders[0], shots)
    assert "the prompts differ in 1 of 6 items" in error_of(capsys, folders[0], prompts)
    assert "the items differ" in error_of(capsys, folders[0], items)
    assert "choice: metric is acc,none against acc_norm,none" in error_of(capsys, folders[0], metric)
    assert "is given twice" in error_of(capsys, folders[0], folders[0])
    assert "holds no result" in error_of(capsys, folders[0], tmp_path)
    assert "results.json" in error_of(capsys, folders[0], tmp_path / "nothing")


def test_results_written_for_lm_eval_are_named_and_read_by_its_own_tools(tmp_path: Path) -> None:
    from datasets import load_dataset
    from lm_eval.utils import (
        get_file_datetime,
        get_file_task_name,
        get_results_filenames,
        get_sample_results_filenames,
        make_table,
    )

    whole, samples = with_a_group(0)
    place = write_lm_eval(whole, samples, tmp_path)
    names = [str(file) for file in place.iterdir()]
    (results,) = get_results_filenames(names)
    tasks = {get_file_task_name(Path(name).name): name for name in get_sample_results_filenames(names)}
    assert set(tasks) == {"code", "choice", "mmlu_law", "mmlu_art"}
    assert len({get_file_datetime(Path(name).name.replace(".json", ".jsonl")) for name in names}) <= 2
    loaded = json.loads(Path(results).read_text())
    table = make_table(loaded)
    assert "mmlu_law" in table and "pass@1" in table and "0.75" in table
    assert "mmlu" in make_table(loaded, "groups")
    rows = load_dataset(
        "json", data_files=tasks["mmlu_law"], split="train", cache_dir=str(tmp_path / "cache")
    )
    assert rows["acc"] == [1.0, 1.0, 0.0, 1.0] and rows[0]["arguments"]["gen_args_1"]["arg_1"] == " b"


def test_what_was_written_for_lm_eval_is_read_back_the_same(tmp_path: Path) -> None:
    whole, samples = with_a_group(1)
    place = write_lm_eval(whole, samples, tmp_path)
    back, rows = read_results(place, like=whole)
    assert {task: row["value"] for task, row in back["tasks"].items()} == {
        task: row["value"] for task, row in whole["tasks"].items()
    }
    kept = ("doc_id", "doc_hash", "prompt_hash", "score", "target", "prompt", "choices", "loglikelihoods")
    assert [{key: row[key] for key in kept} for row in rows["mmlu"]] == samples["mmlu"]
    compare({"result": whole, "samples": samples}, {"result": back, "samples": rows})


def test_lm_eval_results_that_cannot_be_compared_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, samples = with_a_group(0)
    place = write_lm_eval(whole, samples, tmp_path / "one")
    write_lm_eval(whole | {"model": "b"}, samples, tmp_path / "one")
    assert "holds results of several models (b, original)" in error_of(capsys, tmp_path / "one", place)
    other = write_lm_eval(whole, samples, tmp_path / "two")
    file = next(other.glob("samples_choice_*"))
    file.write_text(file.read_text() + "{}\n")
    assert "line 5: not a sample of lm_eval" in error_of(capsys, place, other)
    file.unlink()
    assert "run lm_eval with --log_samples" in error_of(capsys, place, other)
    third = write_lm_eval(whole, samples, tmp_path / "three")
    results = next(third.glob("results_*"))
    results.write_text(results.read_text().replace('"acc,none": 0.5', '"acc,none": 0.25'))
    assert "no metric" in error_of(capsys, place, third)
