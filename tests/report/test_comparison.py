"""`fcsd compare`: results compared with each other, in a folder with figures, answers
and lm-eval's files.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.writing import write_json, write_text
from fcsd.cli.main import main
from fcsd.evaluation.lm_eval.write import write_lm_eval
from fcsd.evaluation.read import read_any_result
from fcsd.evaluation.results import write_result
from fcsd.evaluation.scores import by_member, compare
from fcsd.report.comparison import read_evaluated, training_of, written_lines
from fcsd.report.table import narrow_table, paired_table
from fcsd.report.verdict import quick_look, verdict_lines
from tests.evaluation.test_scores import result as scored
from tests.report.test_report import result
from tests.support import documented_keys, run_command

SUBJECTS = {"mmlu_law": ([1, 1, 0, 1], [1, 0, 0, 0]), "mmlu_art": ([0, 1], [1, 1])}


def with_a_group(model: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a result with a group of two members of 4 and 2 items."""
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
    whole["tasks"]["mmlu"] = whole["tasks"]["choice"] | {
        "value": mean,
        "num_items": 6,
        "num_fewshot": 5,
    }
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
    assert comparison["tasks"]["choice"]["delta"] == 0
    assert comparison["tasks"]["mmlu"]["delta"] == -1 / 6
    assert main(["compare", *map(str, folders)]) == 0
    text = capsys.readouterr().out
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]
    assert [row[0] for row in rows] == [
        "task", "-" * 8, "code", "choice", "mmlu", "mean",
    ]  # fmt: skip
    assert rows[4][4:10] == [
        # two choices an item
        "66.7 ± 21.1 (floor)",
        "50.0 ± 22.4 (floor)",
        "-16.7 ± 30.7",
        "-76.1 to +51.1",
        "1",
        "2",
    ]
    assert rows[4][-2:] == ["-", "at the floor, 50.0 by random answers"]
    likelihood, generation = (line for line in text.splitlines() if "fcsd, by" in line)
    assert "Within noise: choice; its interval does not exclude" in likelihood
    assert likelihood.endswith(
        "At the floor, where no loss can show: mmlu (original 66.7, model 50.0, random"
        " answers 50.0)."
    )
    assert generation.startswith("fcsd, by what it writes: the one task that counts")
    assert (
        "Within noise: code; its interval does not exclude a loss of up to 81.6"
        in generation
    )


def test_members_of_a_group_are_compared_each(folders: tuple[Path, Path]) -> None:
    both = read_evaluated(folders[0], [folders[1]])
    members = compare(both["original"], both["fcsd"])["tasks"]["mmlu"]["members"]
    law = members["mmlu_law"]
    assert (law["num_items"], law["delta"], law["gained"], law["lost"]) == (
        4, -0.5, 0, 2,
    )  # fmt: skip
    # differences 0, -1, 0, -1 about -1/2: variance 4 (1/4) / 3, over 4 items
    assert law["delta_stderr"] == pytest.approx((1 / 12) ** 0.5)
    assert (members["mmlu_art"]["delta"], members["mmlu_art"]["p_value"]) == (0.5, 1.0)
    assert (
        by_member([{"doc_id": "Mbpp/2"}], "code")
        == {}
        == by_member([{"doc_id": 3}], "likelihood")
    )


def test_a_comparison_is_a_folder_with_table_figures_answers_and_lm_evals_files(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "comparison"
    for _ in range(2):  # again replaces it
        assert main(["compare", *map(str, folders), "--output", str(out)]) == 0
    whole = json.loads((out / "comparison.json").read_text())
    assert whole["schema_version"] == 1 and whole["original"] == "original"
    text = (out / "comparison.md").read_text()
    assert "| mmlu " in text and re.search(
        r"\| mmlu +\| accuracy +\| likelihood of given answers +\| 5 +\| plain text ",
        text,
    )
    for figure in ("deltas.png", "mmlu_members.png"):
        assert f"({figure})" in text
        assert (out / figure).read_bytes().startswith(b"\x89PNG")
    assert (out / "items.html").is_file()
    assert len(list((out / "lm_eval" / "fcsd").glob("samples_mmlu_*.jsonl"))) == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years")
    assert "exists and holds no comparison" in error_of(
        capsys, *folders, "--output", other
    )
    assert (other / "thesis.txt").read_text() == "years"


def test_folders_that_cannot_be_compared_are_refused_with_what_differs(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, samples = with_a_group(1)
    whole["tasks"]["mmlu"]["num_fewshot"] = 0
    write_result(whole, samples, tmp_path / "shots")
    for other, message in (
        (tmp_path / "shots", "mmlu: num_fewshot is 5 against 0"),
        (folders[0], "is given twice"),
        (tmp_path, "holds no result"),
        (tmp_path / "nothing", "results.json"),
    ):
        assert message in error_of(capsys, folders[0], other)


def test_results_written_for_lm_eval_are_named_and_read_by_its_own_tools(
    tmp_path: Path,
) -> None:
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
    tasks = {
        get_file_task_name(Path(name).name): name
        for name in get_sample_results_filenames(names)
    }
    assert set(tasks) == {"code", "choice", "mmlu_law", "mmlu_art"}
    assert (
        len(
            {
                get_file_datetime(Path(name).name.replace(".json", ".jsonl"))
                for name in names
            }
        )
        <= 2
    )
    loaded = json.loads(Path(results).read_text())
    table = make_table(loaded)
    assert "mmlu_law" in table and "pass@1" in table and "0.75" in table
    assert "mmlu" in make_table(loaded, "groups")
    rows = load_dataset(
        "json",
        data_files=tasks["mmlu_law"],
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert rows["acc"] == [1.0, 1.0, 0.0, 1.0]
    assert rows[0]["arguments"]["gen_args_1"]["arg_1"] == " b"


def test_what_was_written_for_lm_eval_is_read_back_the_same(tmp_path: Path) -> None:
    whole, samples = with_a_group(1)
    place = write_lm_eval(whole, samples, tmp_path)
    back, rows = read_any_result(place, like=whole)
    assert {task: row["value"] for task, row in back["tasks"].items()} == {
        task: row["value"] for task, row in whole["tasks"].items()
    }
    kept = (
        "doc_id", "doc_hash", "prompt_hash", "score", "target", "prompt", "choices", "loglikelihoods",
    )  # fmt: skip
    assert [{key: row[key] for key in kept} for row in rows["mmlu"]] == samples["mmlu"]
    compare({"result": whole, "samples": samples}, {"result": back, "samples": rows})


def test_lm_eval_results_that_cannot_be_compared_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, samples = with_a_group(0)
    place = write_lm_eval(whole, samples, tmp_path / "one")
    write_lm_eval(whole | {"model": "b"}, samples, tmp_path / "one")
    assert "holds results of several models (b, original)" in error_of(
        capsys, tmp_path / "one", place
    )
    other = write_lm_eval(whole, samples, tmp_path / "two")
    file = next(other.glob("samples_choice_*"))
    file.write_text(file.read_text() + "{}\n")
    assert "line 5: not a sample of lm_eval" in error_of(capsys, place, other)
    file.unlink()
    assert "run lm_eval with --log_samples" in error_of(capsys, place, other)
    third = write_lm_eval(whole, samples, tmp_path / "three")
    results = next(third.glob("results_*"))
    results.write_text(
        results.read_text().replace('"acc,none": 0.5', '"acc,none": 0.25')
    )
    assert "no metric" in error_of(capsys, place, third)
    whole_text = next(other.glob("results_*")).read_text()
    for key, value in (("results", {}), ("configs", "x"), ("group_subtasks", [1])):
        results.write_text(json.dumps(json.loads(whole_text) | {key: value}))
        assert "not as lm_eval writes" in error_of(capsys, place, third)
    fourth = write_lm_eval(whole, samples, tmp_path / "four")
    file = next(fourth.glob("samples_mmlu_art_*"))  # of another evaluation
    file.write_text(file.read_text().replace('"acc": 0.0', '"acc": 1.0'))
    assert "task mmlu has no metric" in error_of(capsys, place, fourth)


def test_lm_eval_results_that_were_sampled_otherwise_or_of_chosen_items_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--gen_kwargs` and `--samples` of lm_eval, as its files record them."""
    whole, samples = with_a_group(0)
    greedy = write_lm_eval(whole, samples, tmp_path / "greedy")

    def changed(name: str, code: dict[str, Any], original: int = 4) -> Path:
        place = write_lm_eval(whole, samples, tmp_path / name)
        for folder, settings in ((place, code), (greedy, {})):
            (file,) = folder.glob("results_*")
            report = json.loads(file.read_text())
            report["configs"]["code"]["generation_kwargs"] = {
                "until": ["\n"], "do_sample": False, "temperature": 0, **settings,
            }  # fmt: skip
            report["n-samples"]["code"]["original"] = original
            write_json(file, report)
        return place

    same = changed("same", {"until": "\n", "temperature": 0.7})
    assert main(["compare", str(greedy), str(same)]) == 0  # greedy takes no temperature
    assert "quick look" not in capsys.readouterr().out
    drawn = changed("drawn", {"do_sample": True, "temperature": 0.7})
    longer = changed("longer", {"max_tokens": 9})
    shorter = changed("shorter", {"max_new_tokens": 8})
    assert "code: temperature is 0.0 against 0.7" in error_of(capsys, greedy, drawn)
    assert "code: max_new_tokens is 9 against 8" in error_of(capsys, longer, shorter)
    some = changed("some", {}, original=378)
    assert main(["compare", str(greedy), str(some), "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out).values()
    assert comparison["complete"] is False and comparison["limit"] == 4


def test_an_answer_with_every_character_comes_back_from_lm_evals_files(
    tmp_path: Path,
) -> None:
    """Unicode line ends are inside a line there; half characters cannot be written in
    UTF-8.
    """
    whole, samples = with_a_group(0)
    whole["tasks"]["one"] = whole["tasks"]["choice"] | {"num_items": 1, "value": 1.0}
    samples["one"] = samples["choice"][:1]
    text = "a\u2028b\u0085c\x0bd\x1ce\r\nf\x00 \U0001f600"
    samples["code"] = [
        sample | {"completion": text, "outcome": "wrong"} for sample in samples["code"]
    ]
    samples["choice"][0]["target"] = "\ud800"
    back, rows = read_any_result(write_lm_eval(whole, samples, tmp_path), like=whole)
    assert [row["completion"] for row in rows["code"]] == [text] * 4
    (results,) = tmp_path.glob("*/results_*")
    assert (
        json.loads(results.read_text())["results"]["one"]["acc_stderr,none"] == "N/A"
    ), "as lm-eval of one item"
    assert rows["choice"][0]["target"] == "?"
    assert back["tasks"].keys() == whole["tasks"].keys()


def json_with(old: str, new: str) -> Any:
    """Return the function that changes the first `old` of a text."""
    return lambda text: text.replace(old, new, 1)


def test_results_that_are_damaged_or_unfinished_are_refused_with_their_place(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "other"

    def changed(file: str, change: Any) -> str:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folders[1], place)
        text = change((place / file).read_text())
        (place / file).unlink()
        if text:
            (place / file).write_text(text)
        return error_of(capsys, folders[0], place)

    samples = "samples_mmlu.jsonl"
    assert "samples_mmlu.jsonl: no such file" in changed(samples, lambda _: "")
    assert "5 samples, but results.json says 6" in changed(
        samples, lambda text: text[text.index("\n") + 1 :]
    )
    assert "line 1: not valid JSON" in changed(samples, lambda text: text[3:])
    assert "line 1: not a sample" in changed(
        samples, lambda text: text.replace("doc_hash", "hash", 1)
    )
    mixed = changed(
        samples, lambda text: text.replace('"score": 0.0', '"score": 1.0', 1)
    )
    assert (
        "average 0.666667, but results.json says 0.5: they come from different evaluations"
        in mixed
    )
    assert "results.json: not valid JSON" in changed(
        "results.json", lambda text: text[:300]
    )
    assert "schema_version is 7, this fcsd reads 1" in changed(
        "results.json",
        lambda text: text.replace('"schema_version": 1', '"schema_version": 7'),
    )
    for old, new, told in (
        ('"metric"', '"m"', "tasks.code.metric: Field required; evaluate again"),
        ('"value": ', '"value": "x", "v": ', "tasks.code.value: Input should be a"),
        ('"limit": null', '"limit": "x"', "settings.limit: Input should be a"),
        ('"dataset"', '"d"', "tasks.code.dataset: Field required"),
    ):
        assert told in changed("results.json", json_with(old, new))
    for old, new in (
        ('"score": 1.0', '"score": "1"'),
        ('"score": 1.0', '"score": null'),
        ('"doc_hash": ', '"doc_hash": 1, "hash": '),
        ('"loglikelihoods": [-1.5', '"loglikelihoods": [null'),
        ('"choices": ', '"choices": 2, "more": '),
    ):
        assert "line 1: not a sample (doc_id, doc_hash" in changed(
            samples, json_with(old, new)
        )
    changed("results.json", lambda _: "")
    (place / "stage.json").write_text("{}")
    assert "the evaluation is not finished; run it again" in error_of(
        capsys, folders[0], place
    )
    assert "is a file; give the folder" in error_of(capsys, folders[0], place / samples)


def test_many_results_of_any_time_are_set_against_the_first(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One result is older and in another precision, one comes from lm-eval; each has
    its table and verdict, and differences are reported.
    """
    whole, samples = with_a_group(1)
    settings = whole["settings"] | {"dtype": "bfloat16", "versions": {"fcsd": "0.0.1"}}
    write_result(whole | {"settings": settings}, samples, tmp_path / "old" / "fcsd")
    foreign = write_lm_eval(whole | {"model": "plain"}, samples, tmp_path)
    words = ["compare", *map(str, (*folders, tmp_path / "old" / "fcsd", foreign))]
    assert main([*words, "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    for name in ("results/fcsd", "old/fcsd", f"{tmp_path.name}/plain"):
        assert f"{name} (model) against results/original (original)" in text
    said = "float32 (results/original), float32 (results/fcsd), bfloat16 (old/fcsd)"
    page = (tmp_path / "out" / "comparison.md").read_text()
    assert said in text and page.count("| mean ") == 3
    assert "| bfloat16 (old/fcsd)" in page or "; bfloat16 (old/fcsd)" in page
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(comparison["comparisons"]) == [
        "results/fcsd",
        "old/fcsd",
        f"{tmp_path.name}/plain",
    ]
    assert comparison["settings_that_differ"]["dtype"]["old/fcsd"] == "bfloat16"
    assert len(list((tmp_path / "out" / "lm_eval").iterdir())) == 4, (
        "each in its own folder"
    )
    samples["mmlu"][0]["prompt_hash"] = "q"
    write_result(whole, samples, tmp_path / "old" / "fcsd")
    assert "results/original against old/fcsd: mmlu: the prompts differ" in error_of(
        capsys, *words[1:]
    )


def test_tasks_that_not_all_results_have_are_left_out_on_request(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, samples = with_a_group(1)
    del whole["tasks"]["code"], samples["code"]
    write_result(whole, samples, tmp_path / "less")
    assert "(code in one only)" in error_of(capsys, folders[0], tmp_path / "less")
    out = tmp_path / "out"
    assert (
        run_command(
            "compare",
            folders[0],
            tmp_path / "less",
            "--tasks mmlu,choice --output",
            out,
        )
        == 0
    )
    (comparison,) = json.loads((out / "comparison.json").read_text())[
        "comparisons"
    ].values()
    assert list(comparison["tasks"]) == ["choice", "mmlu"]
    assert comparison["mean"]["num_tasks"] == 2


def test_a_quick_look_is_marked_in_everything_that_is_written(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, folder in enumerate(folders):
        whole, samples = with_a_group(model)
        whole["settings"]["limit"] = 4
        whole["tasks"]["code"]["num_items_total"] = 378
        write_result(whole | {"complete": False}, samples, folder)
    out, mark = (
        tmp_path / "out",
        "Only the first 4 items of every task: a quick look, not a result.",
    )
    assert main(["compare", *map(str, folders), "--output", str(out)]) == 0
    assert capsys.readouterr().out.count(mark) == 1
    page = (out / "comparison.md").read_text()
    assert f"**{mark}**" in page and page.count(mark) == 3, (
        "at the top and under both figures"
    )
    whole = json.loads((out / "comparison.json").read_text())
    assert whole["complete"] is False and whole["comparisons"]["fcsd"]["limit"] == 4
    assert mark in (out / "items.html").read_text()
    (results,) = (out / "lm_eval" / "fcsd").glob("results_*")
    exported = json.loads(results.read_text())
    assert exported["config"]["limit"] == 4
    assert exported["n-samples"]["code"] == {"original": 378, "effective": 4}
    assert main(["compare", *map(str, folders), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fcsd"]["complete"] is False
    assert (
        quick_look(0.05)
        == "Only the first 5 % of the items of every task: a quick look, not a result."
    )


def test_the_curve_of_the_training_that_left_the_model_stands_beside(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found by the evaluated weights, in a run and wherever an evaluation of its
    model is; never for other weights.
    """
    training = tmp_path / "run" / "distill"
    (training / "model").mkdir(parents=True)
    stopping = {
        "task": {"metric": "pass@1", "kind": "code", "dataset": "a/b", "split": "test"}
    }
    settings = {"early_stopping": stopping, "train": {"batch_size_tokens": 64}}
    manifest = {"settings": settings, "outputs": {"model": "weights"}}
    write_json(training / "manifest.json", manifest)
    write_text(
        training / "history.jsonl",
        '{"step": 1, "loss": 2.0, "kl": 2.0}\n{"step": 2, "loss": 1.0, "kl": 1.0}\n',
    )
    points = [{"step": step, "score": step / 4, "stderr": None} for step in (0, 2)]
    write_json(training / "scores.json", {"metric": "pass@1", "points": points})
    whole, samples = with_a_group(1)
    for place, weights, drawn in (
        (tmp_path / "run" / "evaluate" / "fcsd", "weights", True),
        (tmp_path / "other", "other weights", False),
    ):
        write_result(whole | {"model": str(training / "model")}, samples, place)
        write_json(place / "manifest.json", {"inputs": {"model": weights}})
        out = tmp_path / f"out-{place.name}"
        assert main(["compare", str(folders[0]), str(place), "--output", str(out)]) == 0
        page = (out / "comparison.md").read_text()
        for figure in ("loss.png", "pass_at_1.png"):
            assert (out / figure).is_file() == drawn
            assert (f"({figure})" in page) == drawn
    anywhere = tmp_path / "anywhere"
    anywhere.mkdir()
    write_json(anywhere / "manifest.json", {"inputs": {"model": "weights"}})
    assert training_of(anywhere, {"model": str(training / "model")}) == training
    assert training_of(anywhere, {"model": "owner/name"}) is None


def test_the_verdict_says_what_was_lost_and_what_noise_may_hide() -> None:
    def evaluated(scores: dict[str, list[float]]) -> dict[str, Any]:
        rows = {
            task: {
                "metric": "acc,none",
                "num_fewshot": 0,
                "kind": "likelihood",
                "headline": task != "extra",
            }
            for task in scores
        }
        samples = {
            task: [
                {"doc_id": i, "doc_hash": "d", "prompt_hash": "p", "score": score}
                for i, score in enumerate(values)
            ]
            for task, values in scores.items()
        }
        return {
            "result": {"tasks": rows, "settings": {"limit": None}},
            "samples": samples,
        }

    a = evaluated({"hard": [1.0] * 100, "even": [1.0, 0.0] * 50, "extra": [0.0] * 10})
    b = evaluated(
        {
            "hard": [0.0] * 20 + [1.0] * 80,
            "even": [0.0, 1.0] * 2 + [1.0, 0.0] * 48,
            "extra": [0.0] * 10,
        }
    )
    text, unseen = verdict_lines("fcsd", compare(a, b))
    assert text.startswith(
        "**fcsd**, by likelihood of given answers: the mean over 2 tasks changed by"
        " -10.0 points (95 % interval -14."
    )
    assert unseen.startswith(
        "**fcsd**, by what it writes: not measured. Choice tasks alone have not seen"
        " the model write"
    )
    assert (
        "): a loss beyond noise. Lost beyond noise: hard -20.0 (p <0.001). Within"
        " noise: even, extra;" in text
    )
    # `extra`: 0 of 10 changed, so an item each way of 12: 2.18 * sqrt(2) / 12
    assert text.endswith("losses of up to 25.7 points (extra).")
    assert "Gained" not in text
    same = compare(a, a)
    assert (
        verdict_lines("x", same)[0]
        == "**x**, by likelihood of given answers: all 210 items have the original's"
        " score."
    )
    little = [
        {task: [share] * 5 + [1.0] * 45 for task in "xyz"} for share in (1.0, 0.0)
    ]
    text = verdict_lines("x", compare(*map(evaluated, little)))[0]
    assert (
        "a loss beyond noise. Lost beyond noise: no single task shows it, but together they do."
        in text
    )
    one = paired_table(compare(evaluated({"x": [1.0]}), evaluated({"x": [0.0]})))
    assert "| 100.0 ± – | 0.0 ± – | -100.0 ± – |" in one, (
        "one item has no standard error"
    )
    table = paired_table(same)
    assert "| extra (not in the mean) |" in table and "| mean " in table
    # Cells say why a change whose interval excludes 0 counts as noise.
    corrected = "within noise, after correction for several tasks"
    by_p = "within noise, because p is not below 0.05"
    one_task = compare(evaluated({"x": [1.0] * 4}), evaluated({"x": [0.0] * 4}))
    for word, interval, p_value, cell in (
        ("within noise", [-0.5, -0.1], 0.04, corrected),
        ("within noise", [0.1, 0.5], 0.04, corrected),
        ("within noise", [-0.5, -0.1], 0.06, by_p),
        ("within noise", [-0.5, 0.1], 0.06, "within noise"),
        ("lost", [-0.5, -0.1], 0.04, "lost"),
    ):
        one_task["tasks"]["x"] |= {
            "verdict": word,
            "interval": interval,
            "p_value": p_value,
        }
        for line in paired_table(one_task).splitlines()[2:4]:  # the task, the mean
            assert line.rstrip("| ").rpartition("| ")[2].strip() == cell


def test_a_single_task_is_not_called_noise_by_a_correction_for_several() -> None:
    """3 of 100 items gained and 11 lost: McNemar's exact p is 0.057, and the interval
    -15.5 to -0.2 excludes 0.
    """
    a = scored({"x": [0.0] * 3 + [1.0] * 97})
    b = scored({"x": [1.0] * 3 + [0.0] * 11 + [1.0] * 86})
    comparison = compare(a, b)
    assert comparison["tasks"]["x"]["interval"][1] < 0
    for text in (
        paired_table(comparison),
        narrow_table(comparison),
        verdict_lines("fcsd", comparison)[0],
    ):
        assert "within noise, because p is not below 0.05" in text
        assert "correction" not in text


def test_a_long_prompt_is_shown_from_a_whole_word_on() -> None:
    def shown(prompt: str) -> str:
        tasks = {"own": {"kind": "own_text"}}
        samples = {"own": [{"prompt": prompt, "greedy": "A `reply`.\nMore."}]}
        evaluated: Any = {"m": {"result": {"tasks": tasks}, "samples": samples}}
        prompt_line, replies = written_lines(evaluated)
        assert replies == "- m: `A 'reply'.`"
        return prompt_line.removeprefix("own, first prompt, greedy: ")

    assert shown("one\n two") == "`one two`"
    assert shown("word " * 60 + "end") == f"`… {'word ' * 39}end`"
    assert shown("x" * 300) == f"`… {'x' * 200}`"


def test_every_key_of_the_comparison_is_documented(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    assert main(["compare", *map(str, folders), "--output", str(tmp_path / "out")]) == 0
    whole = json.loads((tmp_path / "out" / "comparison.json").read_text())
    (comparison,) = whole["comparisons"].values()
    group, mean = (
        comparison["tasks"]["mmlu"],
        {key.removesuffix("_stderr") for key in comparison["mean"]},
    )
    used = {*whole, *comparison, *group, *group["members"]["mmlu_law"], *mean}
    assert used - documented_keys("comparison.json") == set()
