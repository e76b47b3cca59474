"""Finished tasks are kept, identified by what they were measured on; also progress and
the batch size.
"""

import io
import json
import os
import re
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fcsd.base.errors import ScorerError, UserError
from fcsd.base.files import read_json
from fcsd.base.strict import validate
from fcsd.base.text import Progress, Work, duration
from fcsd.cli.main import main
from fcsd.evaluation.backend import BatchSizer
from fcsd.evaluation.config import EvaluationConfig, SuiteConfig, TaskConfig
from fcsd.evaluation.datasets import test_set_fingerprints as fingerprints_of
from fcsd.evaluation.lm_eval import tasks as likelihood
from fcsd.evaluation.results import Journal, TaskStore
from fcsd.evaluation.stage import FINISHED_TASKS, PlannedEvaluation, run_evaluation
from fcsd.evaluation.suites import load_suite
from fcsd.model.config import ModelConfig
from fcsd.model.load import find_model
from fcsd.parallel.launch import ALONE, Ranks, join_launch
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.rows import rows_of, write_repository
from tests.reference.tiny import tiny_model
from tests.support import assert_killed, few, start, user_error

ROWS: list[dict[str, Any]] = [
    {"task": "piqa", "kind": "likelihood", "metric": "acc_norm,none", "dataset": "baber/piqa"},
    {"task": "sciq", "kind": "likelihood", "metric": "acc,none", "dataset": "allenai/sciq"},
    {"task": "gsm8k", "kind": "generation", "metric": "exact_match,strict-match", "dataset": "openai/gsm8k",
     "max_new_tokens": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint `model`, data in `root`, and `suite.yaml`."""
    root = tmp_path_factory.mktemp("resume")
    model = tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=1024, num_hidden_layers=1
    )
    model.save_pretrained(root / "model")
    tiny_tokenizer().save_pretrained(root / "model")
    for name, config, graded in (
        ("baber/piqa", "default", "validation"),
        ("allenai/sciq", "default", "test"),
        ("openai/gsm8k", "main", "test"),
    ):
        rows = {split: rows_of(name, 3) for split in {"train", "validation", graded}}
        write_repository(root / "root" / name, {config: rows})
    (root / "suite.yaml").write_text(yaml.safe_dump({"name": "s", "tasks": ROWS}))
    return root


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The tasks that a model ran, in order; `gsm8k` fails once while the list holds
    "fail".
    """
    seen: list[str] = []
    run = likelihood.run_task

    def spy(wrapper: Any, row: TaskConfig, *rest: Any) -> Any:
        if row.task == "gsm8k" and "fail" in seen:
            seen.remove("fail")
            raise KeyboardInterrupt
        seen.append(row.task)
        return run(wrapper, row, *rest)

    monkeypatch.setattr(likelihood, "run_task", spy)
    yield seen


def judge(place: Path, output: Path, **changes: Any) -> Any:
    config = ModelConfig(path=str(changes.pop("model", place / "model")))
    model = find_model(config)
    settings = {"data_root": str(place / "root"), "batch_size": 4} | changes
    suite = load_suite(place / "suite.yaml")
    run_evaluation(
        PlannedEvaluation("model", model, suite, EvaluationConfig(**settings)),
        output,
        join_launch(),
    )
    return {
        task: row["value"]
        for task, row in read_json(output / "results.json")["tasks"].items()
    }


def test_an_evaluation_that_was_stopped_continues_with_the_next_task(
    place: Path, tmp_path: Path, asked: list[str]
) -> None:
    whole = judge(place, tmp_path / "whole")
    asked[:] = ["fail"]
    with pytest.raises(KeyboardInterrupt):
        judge(place, tmp_path / "cut")
    assert asked == ["piqa", "sciq"]
    assert len(list((tmp_path / "cut" / FINISHED_TASKS).iterdir())) == 2
    assert not (tmp_path / "cut" / "results.json").exists()
    asked.clear()
    assert judge(place, tmp_path / "cut", batch_size=2) == whole and asked == ["gsm8k"]
    assert not (tmp_path / "cut" / FINISHED_TASKS).exists()
    assert len(list((tmp_path / "cut" / "lm_eval").glob("*/results_*.json"))) == 1, (
        "beside, for lm-eval's tools"
    )
    for name in ("piqa", "sciq", "gsm8k"):
        one, other = (
            (tmp_path / x / f"samples_{name}.jsonl").read_text()
            for x in ("whole", "cut")
        )
        assert [s["doc_hash"] for s in map(json.loads, one.splitlines())] == [
            s["doc_hash"] for s in map(json.loads, other.splitlines())
        ]
    asked.clear()
    # as a kill leaves it behind the manifest
    (tmp_path / "cut" / FINISHED_TASKS).mkdir()
    judge(place, tmp_path / "cut")
    assert asked == [] and not (tmp_path / "cut" / FINISHED_TASKS).exists()


def test_a_killed_evaluation_continues_and_finds_what_an_uninterrupted_one_finds(
    place: Path, tmp_path: Path
) -> None:
    """The command runs in its own process, which gets a SIGKILL when it reaches its
    third task.
    """
    out, run = tmp_path / "out", likelihood.run_task

    def dies(wrapper: Any, row: TaskConfig, *rest: Any) -> Any:
        return (
            os.kill(os.getpid(), signal.SIGKILL)
            if row.task == "gsm8k"
            else run(wrapper, row, *rest)
        )

    def killed() -> int:
        likelihood.run_task = dies
        words = (
            f"evaluate {place / 'model'} --suite {place / 'suite.yaml'} --data-root"
            f" {place / 'root'}".split()
        )
        return main([*words, "--output", str(out), "--batch-size", "4"])

    assert_killed(killed, tmp_path / "said")
    kept = sorted(
        path.name.partition("-")[0] for path in (out / FINISHED_TASKS).iterdir()
    )
    assert kept == ["piqa", "sciq"] and not (out / "results.json").exists()
    judge(place, out)
    judge(place, tmp_path / "whole")
    for name in ("piqa", "sciq", "gsm8k"):
        assert (out / f"samples_{name}.jsonl").read_text() == (
            tmp_path / f"whole/samples_{name}.jsonl"
        ).read_text()
    one, other = (
        read_json(folder / "results.json") for folder in (out, tmp_path / "whole")
    )
    for result in (one, other):
        result.pop("wall_s")
    assert one == other


def test_a_result_whose_file_is_gone_is_the_same_again_once_that_task_is_done(
    place: Path, tmp_path: Path, asked: list[str]
) -> None:
    judge(place, tmp_path)
    before = read_json(tmp_path / "results.json")
    assert before["tasks"]["gsm8k"]["answers_at_limit"] == 3
    (tmp_path / "samples_piqa.jsonl").unlink()
    asked.clear()
    judge(place, tmp_path)
    again = read_json(tmp_path / "results.json")
    assert asked == ["piqa"]
    assert again | {"wall_s": 0} == before | {"wall_s": 0}


@pytest.mark.parametrize("kind", [UserError, ScorerError])
def test_an_error_in_a_later_task_keeps_the_finished_ones_and_says_so(
    kind: type[Exception], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = likelihood.run_task

    def fails(wrapper: Any, row: TaskConfig, *rest: Any) -> Any:
        if row.task == "gsm8k":
            raise kind("task gsm8k: something is wrong")
        return run(wrapper, row, *rest)

    monkeypatch.setattr(likelihood, "run_task", fails)
    with pytest.raises(
        kind,
        match=(
            r"something is wrong \(the 2 finished tasks are kept; run again to"
            r" continue\)"
        ),
    ):
        judge(place, tmp_path / "out")
    assert len(list((tmp_path / "out" / FINISHED_TASKS).iterdir())) == 2


def test_a_shared_cache_is_by_weights_and_never_by_path(
    place: Path, tmp_path: Path, asked: list[str]
) -> None:
    import shutil

    cache = tmp_path / "cache"
    first = judge(place, tmp_path / "a", cache=str(cache))
    asked.clear()
    shutil.copytree(place / "model", tmp_path / "moved")
    assert (
        judge(place, tmp_path / "b", cache=str(cache), model=tmp_path / "moved")
        == first
        and asked == []
    )
    # Other weights at the same path, other items, another tokenizer: run again.
    other = tiny_model(
        "qwen3_moe",
        vocab_size=512,
        max_position_embeddings=1024,
        num_hidden_layers=1,
        seed=1,
    )
    other.save_pretrained(tmp_path / "moved")
    judge(place, tmp_path / "c", cache=str(cache), model=tmp_path / "moved")
    assert asked == ["piqa", "sciq", "gsm8k"]
    asked.clear()
    judge(place, tmp_path / "d", cache=str(cache), limit=2)
    assert asked == ["piqa", "sciq", "gsm8k"]
    asked.clear()
    shutil.copytree(place / "model", tmp_path / "template")
    (tmp_path / "template" / "chat_template.jinja").write_text(
        "{{ messages[0]['content'] }}"
    )
    judge(place, tmp_path / "e", cache=str(cache), model=tmp_path / "template")
    assert asked == ["piqa", "sciq", "gsm8k"]


def test_a_damaged_or_foreign_file_of_the_store_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = validate(TaskConfig, ROWS[0], "row")
    store = TaskStore(tmp_path, {"model": "1"}, {"piqa": "d"})
    assert store.get(row) is None
    store.put(row, [{"score": 1.0}], {"num_items_total": 9})
    assert store.get(row) == ([{"score": 1.0}], {"num_items_total": 9})
    assert TaskStore(tmp_path, {"model": "2"}, {"piqa": "d"}).get(row) is None
    assert TaskStore(tmp_path, {"model": "1"}, {"piqa": "e"}).get(row) is None
    assert store.get(row.model_copy(update={"num_fewshot": 1})) is None
    assert store.get(row.model_copy(update={"headline": False})) is not None
    assert not capsys.readouterr().err
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(whole.replace('"score": 1.0', '"score": 0.0'))
    assert store.get(row) is None, "a flipped byte is no answer"
    assert f"{file}: is damaged; fcsd evaluates piqa again" in capsys.readouterr().err
    for harm in (whole[:-9], "[" * 100_000, "[1]", '"x"', "null", ""):
        file.write_text(harm)
        assert store.get(row) is None
        assert f"{file}: is damaged" in capsys.readouterr().err
        file.with_suffix(".jsonl").write_text(harm)
        assert not len(store.journal(row))


@pytest.mark.parametrize("kind", ["a named pipe", "a folder"])
def test_what_is_no_file_where_a_finished_task_should_be_is_refused_with_its_name(
    tmp_path: Path, kind: str
) -> None:
    row = validate(TaskConfig, ROWS[0], "row")
    store = TaskStore(tmp_path, {"model": "1"}, {"piqa": "d"})
    file = store._path(row)
    os.mkfifo(file) if kind == "a named pipe" else file.mkdir()
    with user_error(f"{file}: is {kind}, .* needed; remove it"):
        store.get(row)


@pytest.mark.parametrize("damage", few(["cut", "gone", "byte", "digit"], 2))
def test_a_finished_task_whose_samples_are_damaged_is_evaluated_again_alone(
    place: Path,
    tmp_path: Path,
    asked: list[str],
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = judge(place, tmp_path / "out")
    file = tmp_path / "out" / "samples_sciq.jsonl"
    text = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "digit":  # no score is another one
        file.write_bytes(
            text.replace(b'"loglikelihoods": [-', b'"loglikelihoods": [-9', 1)
        )
        assert file.read_bytes() != text
    else:
        file.write_bytes(
            text[: len(text) // 2]
            + (b"\xff" + text[len(text) // 2 + 1 :]) * (damage == "byte")
        )
    asked.clear()
    assert judge(place, tmp_path / "out") == whole
    assert asked == ["sciq"] and file.read_bytes() == text
    assert "samples_sciq.jsonl" in capsys.readouterr().err


def test_a_result_with_another_digit_is_evaluated_again(
    place: Path, tmp_path: Path, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = judge(place, tmp_path / "out")
    file = tmp_path / "out" / "results.json"
    text = file.read_text()
    file.write_text(
        re.sub(r'"num_items_total": \d', '"num_items_total": 9', text, count=1)
    )
    assert file.read_text() != text
    asked.clear()
    assert judge(place, tmp_path / "out") == whole
    assert sorted(asked) == sorted(row["task"] for row in ROWS)
    assert "results.json" in capsys.readouterr().err
    assert read_json(file)["tasks"] == json.loads(text)["tasks"]


def test_an_answer_of_a_server_with_another_digit_is_asked_for_again(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "a.jsonl")
    journal.put(["question"], [-1.25])
    journal.put(["other"], [-2.5])
    assert [Journal(journal.path).get([name]) for name in ("question", "other")] == [
        [-1.25],
        [-2.5],
    ]
    assert journal.path is not None
    journal.path.write_text(journal.path.read_text().replace("-1.25", "-1.75"))
    assert [Journal(journal.path).get([name]) for name in ("question", "other")] == [
        None,
        [-2.5],
    ]


def test_the_answers_of_another_model_or_task_are_not_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "piqa-0.jsonl")
    journal.put(["question"], [-1.25])
    shutil.copy(tmp_path / "piqa-0.jsonl", tmp_path / "piqa-1.jsonl")
    assert Journal(tmp_path / "piqa-1.jsonl").get(["question"]) is None
    assert Journal(tmp_path / "piqa-0.jsonl").get(["question"]) == [-1.25]


def test_a_definition_beside_the_suite_is_part_of_what_a_task_is(
    tmp_path: Path,
) -> None:
    suite = SuiteConfig.model_validate(
        {"name": "s", "tasks": [ROWS[0] | {"lm_eval_include": "mine"}]}
    )
    suite = suite.model_copy(update={"folder": str(tmp_path)})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "piqa.yaml").write_text("task: piqa\ndoc_to_text: a\n")
    before = fingerprints_of(suite, None)
    assert [*before] == ["task piqa", "task piqa, its definition"]
    for file in ("piqa.yaml", "utils.py"):
        (tmp_path / "mine" / file).write_text("x")
        now = fingerprints_of(suite, None)
        assert now != before and now["task piqa"] == before["task piqa"]
        before = now


def test_the_files_that_a_definition_names_are_part_of_what_a_task_is(
    tmp_path: Path,
) -> None:
    """lm-eval's way to use local data: a format in place of a data set, and its files."""
    row = {
        "task": "mine",
        "kind": "likelihood",
        "metric": "acc,none",
        "dataset": "json",
    }
    suite = SuiteConfig.model_validate({"name": "s", "tasks": [row]})
    suite = suite.model_copy(update={"folder": str(tmp_path)})
    data = tmp_path / "items.jsonl"
    data.write_text('{"q": "a"}\n')
    (tmp_path / "mine").mkdir()
    definition = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "*.jsonl")}},
        "output_type": "multiple_choice",
    }
    (tmp_path / "mine" / "mine.yaml").write_text(yaml.safe_dump(definition))
    # A data root is for data sets: these files are where the definition says.
    before = fingerprints_of(suite, tmp_path / "mine")
    assert before == fingerprints_of(suite, None)
    data.write_text('{"q": "b"}\n')
    now = fingerprints_of(suite, None)
    assert now["task mine"] != before["task mine"]
    assert now["task mine, its definition"] == before["task mine, its definition"]


def test_the_time_left_is_that_of_the_work_to_come_at_the_pace_of_its_kind() -> None:
    now, out = [0.0], io.StringIO()
    tasks = {
        "a": Work(100, "characters", 1000),
        "b": Work(50, "characters", 500),
        "c": Work(10, "tokens", 10),
        "d": Work(10, "characters", 1000),  # fewer items, and longer ones
    }
    steps = Progress(tasks, kept=1, stream=out, clock=lambda: now[0])
    for task, seconds in (("a", 200), ("b", 100), ("c", 3600), ("d", 0)):
        steps.start(task)
        now[0] += seconds
    assert out.getvalue().splitlines() == [
        "[2/5] a: 100 items",
        "[3/5] b: 50 items; 3 min so far, about 5 min + 1 task left",
        "[4/5] c: 10 items; 5 min so far, about 3 min + 1 task left",
        "[5/5] d: 10 items; 1 h 05 min so far, about 3 min left",
    ]
    assert [duration(s) for s in (0, 59.4, 60, 3599, 7500)] == [
        "0 s", "59 s", "1 min", "1 h 00 min", "2 h 05 min",
    ]  # fmt: skip


class _Model:
    device = torch.device("meta")


def test_an_automatic_batch_size_is_halved_until_it_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # slow with everything that the tests have loaded
    monkeypatch.setattr("gc.collect", lambda: None)
    asked: list[int] = []

    def work(size: int) -> int:
        asked.append(size)
        if size > 20:
            raise torch.OutOfMemoryError
        return size

    def run(batch: BatchSizer, work: Callable[[int], int]) -> int:
        while True:
            with batch.room() as size:
                return work(size)

    batch = BatchSizer("auto", _Model())  # type: ignore[arg-type]
    assert run(batch, work) == 16 and asked == [128, 64, 32, 16]
    assert run(batch, work) == 16 and len(asked) == 5  # remembered
    batch.begin(1000, ALONE)
    # another task, with prompts of its own
    assert run(batch, work) == 16 and asked[5:] == [128, 64, 32, 16]
    batch.begin(11, ALONE)
    assert run(batch, work) == 11
    batch.begin(11, Ranks(0, 4))
    assert run(batch, work) == 3  # some for every rank
    with user_error("out of memory with batch_size 32: lower it, or use 'auto'"):
        run(BatchSizer(32, _Model()), work)  # type: ignore[arg-type]

    def never(size: int) -> int:
        raise torch.OutOfMemoryError

    with user_error("out of memory with batch_size 1: the model leaves no room"):
        run(batch, never)


def test_a_pass_that_ran_out_of_memory_holds_none_when_the_next_begins() -> None:
    batch = BatchSizer("auto", _Model())  # type: ignore[arg-type]
    held: list[weakref.ref[torch.Tensor]] = []

    def full() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError

    with batch.room():
        full()
    with batch.room() as size:
        assert size == 64 and held[0]() is None


def test_a_log_has_one_line_a_task_and_no_bars(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"evaluate {place / 'model'} --suite {place / 'suite.yaml'} --data-root"
        f" {place / 'root'}".split()
    )
    assert main([*words, "--output", str(tmp_path / "out"), "--limit", "2"]) == 0
    lines = capsys.readouterr().err.strip().splitlines()
    each = ["[1/3] piqa: 2 items", "[2/3] sciq: 2 items", "[3/3] gsm8k: 2 items"]
    assert [line.partition(";")[0] for line in lines] == each


@pytest.mark.parametrize(("disabled", "drawn"), [("", True), ("1", False)])
def test_a_bar_is_drawn_unless_tqdms_variable_switches_all_off(
    disabled: str, drawn: bool
) -> None:
    code = (
        "from fcsd.base.text import progress_bar; print([*progress_bar('ab',"
        " desc='rows', shown=True)])"
    )
    with start("-c", code, TQDM_DISABLE=disabled) as child:
        values, bar = child.communicate(timeout=60)
    assert values == "['a', 'b']\n" and ("rows: 100%" in bar) == drawn
