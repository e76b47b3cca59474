import re
from pathlib import Path

import pytest

from fcsd.base.errors import UserError
from fcsd.base.strict import validate
from fcsd.evaluation.code.problems import load_problems
from fcsd.evaluation.config import CodeTaskConfig, TaskConfig
from fcsd.evaluation.datasets import dataset_location
from fcsd.evaluation.suites import load_suite, suite_names
from tests.support import ROOT, user_error

CODE = {"task": "c", "kind": "code", "metric": "pass@1", "dataset": "owner/problems"}


def write(path: Path, tasks: str) -> Path:
    path.write_text(f"name: mine\ntasks:\n{tasks}\n")
    return path


@pytest.mark.parametrize("name", suite_names())
def test_every_shipped_suite_can_be_loaded_and_is_named_like_its_file(
    name: str,
) -> None:
    assert load_suite(name).name == name


def test_the_tiny_suite_ships() -> None:
    assert "tiny" in suite_names()


def test_an_unknown_suite_lists_what_exists() -> None:
    with user_error(
        r"suite 'tinny': no such suite; did you mean 'tiny'\? \(or give the path"
    ):
        load_suite("tinny")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{task: a, dataset: x/y, kind: likelihood, metric: 'acc,none', num_fewshots: 5}",
         "did you mean 'num_fewshot'"),
        ("{task: a, dataset: x/y, kind: likelihood, metric: acc}", "metric is lm-eval's key 'metric,filter'"),
        ("{task: a, dataset: x/y, kind: likelihood, metric: 'acc,none', stop: [x]}",
         "stop: no meaning for kind 'likelihood'"),
        (("{task: a, dataset: x/y, kind: generation, metric: 'em,none', timeout_s: 4}"), "timeout_s: no meaning"),
        ("{task: a, kind: code, dataset: null}", "tasks.0.dataset"),
        ("{task: a, kind: code, dataset: x/y, stop: ['']}", "tasks.0.stop.0: String should have at least 1 character"),
        ("{task: a, kind: code, dataset: x/y, num_fewshot: 3}",
         "tasks.0.num_fewshot: has no meaning for kind 'code', whose shots are part of prompt_template, got 3"),
        ("{task: a, kind: code, dataset: x/y, metric: acc}", "metric of a code task is 'pass@k'"),
        ("{task: a, kind: code, dataset: x/y, metric: pass@10}", "pass@10 needs num_samples of 10 or more"),
        ("{task: a, kind: code, dataset: x/y, num_samples: 2}", "set a temperature above 0"),
        ("{task: a, kind: code, dataset: x/y, prompt_template: hi}", "must contain {prompt}"),
        ("{task: a, dataset: x/y, kind: chat, metric: 'acc,none'}", "tasks.0.kind: Input should be 'likelihood',"),
        ("{task: a, dataset: x/y}", "tasks.0.kind: is required: 'likelihood', 'generation', 'code' or 'own_text'"),
        ("{task: a, dataset: x/y, kind: likelihood}", "tasks.0.metric: is required for kind 'likelihood'"),
        ("piqa", "tasks.0: a mapping of keys to values is needed, got 'piqa'"),
        (("{task: a, dataset: x/y, kind: likelihood, metric: 'acc,none', num_fewshot: -1}"), "num_fewshot"),
        ("{task: a, dataset: x/y, kind: likelihood, metric: 'acc,none', num_fewshot: '5'}",
         "num_fewshot: Input should"),
        ("{task: a, kind: code, dataset: x/y, headline: 'yes'}",
         "headline: Input should be a valid boolean, got 'yes'"),
        ("{task: a, kind: code, dataset: x/y, max_new_tokens: 5.0}", "max_new_tokens: Input should be a valid integer"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_row_is_named_with_its_place(
    tmp_path: Path, row: str, message: str
) -> None:
    path = write(tmp_path / "s.yaml", f"  - {row}")
    with pytest.raises(UserError) as caught:
        load_suite(path)
    assert str(caught.value).startswith(f"{path}: tasks.0")
    assert message in str(caught.value)


def test_two_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    row = "  - {task: a, dataset: x/y, kind: likelihood, metric: 'acc,none'}\n"
    with user_error("a is listed twice"):
        load_suite(write(tmp_path / "s.yaml", row + row))


def test_a_code_row_records_its_defaults() -> None:
    row = CodeTaskConfig.model_validate(CODE)
    assert (row.split, row.max_new_tokens, row.timeout_s, row.prompt_template) == (
        "test", 768, 10.0, "{prompt}",
    )  # fmt: skip


def test_a_data_set_is_looked_for_below_the_data_root_and_is_a_hub_id_without(
    tmp_path: Path,
) -> None:
    row = CodeTaskConfig.model_validate(CODE)
    assert dataset_location(row, None) == "owner/problems"
    with user_error(r"task c: .*problems: no such folder; the data root must hold"):
        dataset_location(row, tmp_path)
    (tmp_path / "owner" / "problems").mkdir(parents=True)
    assert dataset_location(row, tmp_path) == str(
        (tmp_path / "owner" / "problems").resolve()
    )


@pytest.mark.parametrize(
    "name", ["rows.jsonl", "a/b/rows.parquet", "./rows.json", "mine/rows", "a/b/rows"]
)
def test_what_the_data_root_does_not_have_is_read_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    row = CodeTaskConfig.model_validate(CODE | {"dataset": name})
    with user_error(r"task c: .*no such f"):
        dataset_location(row, Path("../root"))
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch() if path.suffix else path.mkdir()
    for root in (None, Path("../root")):
        assert Path(dataset_location(row, root)).resolve() == path.resolve()
    # The data root comes first.
    other = tmp_path / "root" / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.touch() if path.suffix else other.mkdir()
    assert dataset_location(row, Path("../root")) == str(other)


def test_a_missing_file_is_named_with_the_places_that_were_looked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    row = CodeTaskConfig.model_validate(CODE | {"dataset": "runs/x.jsonl"})
    with pytest.raises(UserError) as caught:
        dataset_location(row, tmp_path)
    assert str(caught.value) == (
        "task c: runs/x.jsonl: no such file or folder, neither in the current folder"
        f" nor below {tmp_path} (data root)"
    )
    for name in ("runs/x.jsonl", "./x", "../x", "a/b/c"):
        row = CodeTaskConfig.model_validate(CODE | {"dataset": name})
        with pytest.raises(UserError) as caught:
            dataset_location(row, None)
        assert str(caught.value) == f"task c: {name}: no such file or folder"
    for name, place in (
        ("~/x.jsonl", tmp_path / "x.jsonl"),
        ("/none/x.jsonl", "/none/x.jsonl"),
    ):
        row = CodeTaskConfig.model_validate(CODE | {"dataset": name})
        with pytest.raises(UserError) as caught:
            load_problems(row)
        # The Hub cannot help with a file.
        assert str(caught.value) == f"task c: {place}: no such file"
    # No data root is needed for a file, but one that is given has to be there.
    (tmp_path / "x").touch()
    row = CodeTaskConfig.model_validate(CODE | {"dataset": "~/x"})
    assert dataset_location(row, tmp_path / "none") == str(tmp_path / "x")
    with user_error(r"none: no such folder \(data root\)"):
        dataset_location(CodeTaskConfig.model_validate(CODE), tmp_path / "none")


def test_a_row_of_its_own_is_refused_in_the_same_words() -> None:
    with user_error(
        r"row: num_samples: no meaning for kind 'likelihood', only for code \(and 1"
        r" more: metric: is req"
    ):
        validate(
            TaskConfig,
            {"task": "a", "kind": "likelihood", "dataset": "d", "num_samples": 3},
            "row",
        )
    # as rows were printed before they were unions
    row = validate(TaskConfig, CODE | {"num_fewshot": 0}, "row")
    assert row == CodeTaskConfig.model_validate(CODE)


@pytest.mark.parametrize(
    ("columns", "place"),
    [
        ("[question]", "columns: each"),
        ("{tiny_choice: [question]}", "columns: tiny_choice: each"),
        ("{tiny_choice: {question: txt}}", "columns: tiny_choice: question: each"),
        ("{tiny_choice: {question: [a, 1.5]}}", "columns: tiny_choice: question: each"),
        ("{tiny_choice: {question: }}", "columns: tiny_choice: question: each"),
    ],
)
def test_columns_of_another_form_are_refused_with_an_example(
    columns: str, place: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    shipped = (ROOT / "eval/suites/tiny.yaml").read_text()
    path.write_text(f"{shipped}\ncolumns: {columns}\n")
    with pytest.raises(UserError) as caught:
        load_suite(str(path))
    text = str(caught.value)
    assert place in text and "and 1 more" not in text
    (example,) = re.findall(r"as in `(.*?)`", text)
    # The example itself is accepted for a suite that has its task.
    task = "{task: piqa, kind: likelihood, metric: 'acc,none', dataset: baber/piqa}"
    path.write_text(f"name: mine\ntasks: [{task}]\n{example}\n")
    assert load_suite(str(path)).columns["piqa"]["label"] == [0, 1]


def test_columns_of_a_task_that_the_suite_does_not_have_get_a_suggestion(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    shipped = (ROOT / "eval/suites/tiny.yaml").read_text()
    path.write_text(f"{shipped}\ncolumns: {{tiny_choise: {{question: text}}}}\n")
    with user_error(r"tiny_choise is not .*did you mean 'tiny_choi"):
        load_suite(str(path))
