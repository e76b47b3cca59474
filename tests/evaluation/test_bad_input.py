"""Mistakes that a user makes with the command: one line that names the task and says
what to do, and status 2.
"""

import gzip
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.evaluation.stage import FINISHED_TASKS, PlannedEvaluation
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.evaluation.rows import rows_of, write_repository
from tests.reference.tiny import tiny_model
from tests.support import command_words, few, json_lines, start, write_rows

Files = dict[str, list[dict[str, Any]] | str | None]
PIQA = {
    "task": "piqa", "kind": "likelihood", "metric": "acc_norm,none", "dataset": "baber/piqa",
}  # fmt: skip
GSM8K = {
    "task": "gsm8k", "kind": "generation", "metric": "exact_match,strict-match", "num_fewshot": 2,
    "dataset": "openai/gsm8k",
}  # fmt: skip
SHORT = GSM8K | {"max_new_tokens": 8}
CODE = {
    "task": "mbpp_plus", "kind": "code", "dataset": "evalplus/mbppplus", "max_new_tokens": 4,
}  # fmt: skip
HELLASWAG = {
    "task": "hellaswag", "kind": "likelihood", "metric": "acc_norm,none", "dataset": "Rowan/hellaswag",
}  # fmt: skip
OWN = {
    "task": "own", "kind": "own_text", "dataset": "baber/piqa", "columns": {"prompt": "goal"},
}  # fmt: skip
SPLITS = {
    "baber/piqa": ("train", "validation"),
    "openai/gsm8k": ("train", "test"),
    "evalplus/mbppplus": ("test",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad") / "model"
    tiny_model(
        "qwen3_moe", vocab_size=512, max_position_embeddings=200, num_hidden_layers=1
    ).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for dataset, splits in SPLITS.items():
        rows = {split: rows_of(dataset, 3) for split in splits}
        write_repository(
            tmp_path / "root" / dataset,
            {"main" if "gsm8k" in dataset else "default": rows},
        )
    return tmp_path / "root"


def words(model: Path, root: Path, *tasks: dict[str, Any], **options: Any) -> list[str]:
    suite = root.parent / "suite.yaml"
    suite.write_text(yaml.safe_dump({"name": "mine", "tasks": list(tasks)}))
    given = {
        "suite": suite, "data-root": root, "output": root.parent / "out", "limit": 1,
    } | options  # fmt: skip
    return [
        "evaluate",
        str(model),
        *(part for key, value in given.items() for part in (f"--{key}", str(value))),
    ]


def error_of(
    arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 2
) -> str:
    """Return the one line that the command prints when it fails."""
    assert main(arguments) == status
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"fcsd {arguments[0]}: error: ")
    return line.partition("error: ")[2]


def changed(
    index: int | None, **values: Any
) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """Return values of one row, or of all; None takes the column away."""

    def change(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, row in enumerate(rows):
            if index in (None, number):
                row.update(values)
                for name in [name for name, value in values.items() if value is None]:
                    del row[name]
        return rows

    return change


PIQA_FILE, CODE_FILE = (
    "baber/piqa/default/validation.jsonl",
    "evalplus/mbppplus/default/test.jsonl",
)


@pytest.mark.parametrize(
    ("task", "file", "change", "message"),
    [
        (PIQA, PIQA_FILE, changed(None, sol2=None), "task piqa: {file}: no column 'sol2'; it needs goal, sol1"),
        (PIQA, PIQA_FILE, changed(1, sol2=None), "task piqa: {folder} (validation), row 1: sol2 must be text, got N"),
        (PIQA, PIQA_FILE, changed(1, label="one"), "task piqa: {file}, row 1: label must be one of 0, 1, got 'one'"),
        (PIQA, PIQA_FILE, changed(None, label="one"), "task piqa: {file}, row 0: label must be one of 0, 1, got"),
        (PIQA, PIQA_FILE, lambda rows: [], "task piqa: {file}: the file is empty"),
        (PIQA, PIQA_FILE, lambda rows: '{"goal": "x', "task piqa: {file}, line 1: not valid JSON (Unterminated"),
        (PIQA, PIQA_FILE, lambda rows: None, "task piqa: cannot be loaded with the data set {folder}: Unable to find"),
        (CODE, CODE_FILE, changed(1, test=5), "task mbpp_plus: {folder} (test), row 1: test must be text, got int"),
        (CODE, CODE_FILE, changed(None, code=None), "task mbpp_plus: {folder} (test): no column code; code tasks need"),
        (CODE, CODE_FILE, lambda rows: rows * 2, "task mbpp_plus: {folder} (test): task_id 1000 is given twice"),
    ],
)  # fmt: skip
def test_data_that_a_task_cannot_read_is_named_with_file_row_and_column(
    task: dict[str, Any], file: str, change: Any, message: str,
    model: Path, root: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = root / file
    rows = change(json_lines(path))
    if rows is None:
        path.unlink()
    else:
        path.write_text(
            rows
            if isinstance(rows, str)
            else "".join(json.dumps(row) + "\n" for row in rows)
        )
    expected = message.format(file=path, folder=path.parents[1])
    assert error_of(words(model, root, task), capsys).startswith(expected)


@pytest.mark.parametrize(("task", "file"), [(PIQA, PIQA_FILE), (CODE, CODE_FILE)])
def test_a_damaged_parquet_file_is_named_with_its_task(
    task: dict[str, Any],
    file: str,
    model: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = (root / file).with_suffix(".parquet")
    rows = json_lines(root / file)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (root / file).unlink()
    card = path.parents[1] / "README.md"
    card.write_text(card.read_text().replace(Path(file).name, path.name))
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + bytes(60) + whole[100:])  # its footer is whole
    line = error_of(words(model, root, task), capsys)
    assert line.startswith(f"task {task['task']}: {path}: is damaged (")
    assert line.endswith("; fetch it again")
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    line = error_of(words(model, root, task), capsys)
    assert line.startswith(f"task {task['task']}: {path}: is a pointer of Git LFS")


def test_a_wrong_column_of_one_subject_of_mmlu_is_named(
    model: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.evaluation.rows import mmlu_subjects

    good = {
        "test": rows_of("cais/mmlu", 2),
        "dev": rows_of("cais/mmlu", 2),
        "validation": rows_of("cais/mmlu", 1),
    }
    wrong = good | {
        "test": [row | {"choices": "abcd"} for row in rows_of("cais/mmlu", 2)]
    }
    subjects = {
        name: wrong if name == "abstract_algebra" else good for name in mmlu_subjects()
    }
    write_repository(root / "cais/mmlu", subjects)
    task = {
        "task": "mmlu", "kind": "likelihood", "metric": "acc,none", "dataset": "cais/mmlu",
    }  # fmt: skip
    said = error_of(words(model, root, task), capsys)
    assert said.startswith(
        f"task mmlu: {root}/cais/mmlu/abstract_algebra/test.jsonl, row 0: choices must"
        " be a list of 4 texts, got 'abcd'"
    )


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (PIQA | {"task": "piqua", "lm_eval_include": "piqa"}, "task piqua: not defined in .*; did you mean 'piqa'?"),
        (PIQA | {"metric": "acc_nrm,none"}, "metric 'acc_nrm,none' does not exist; allowed: acc,none, acc_norm,none"),
        (PIQA | {"split": "tset"}, "task piqa: cannot be loaded with .*: it has nothing named 'tset'"),
        (PIQA | {"dataset": "baber/none"}, "no such folder; the data root must hold the data set baber/none in"),
        (
            {"task": "ai2_arc", "kind": "likelihood", "metric": "acc,none", "dataset": "baber/piqa",
             "lm_eval_include": "arc"},
            "task ai2_arc: is a tag in lm-eval, not a task or group; .*: arc_challenge, arc_easy",
        ),
        (
            {"task": "humaneval_plus", "kind": "generation", "metric": "pass@1,create_test",
             "dataset": "evalplus/mbppplus", "lm_eval_include": "humaneval"},
            "task humaneval_plus: runs generated code inside lm-eval; use kind: code",
        ),
    ],
)  # fmt: skip
def test_a_row_that_does_not_fit_lm_eval_says_what_would(
    task: dict[str, Any],
    message: str,
    model: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    assert re.search(
        message.replace("?", r"\?"), error_of(words(model, root, task), capsys)
    )


def test_unknown_suites_and_places_that_cannot_be_used_are_refused(
    model: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for options, message in (
        ({"suite": "paper12"}, "suite 'paper12': no such suite; did you mean 'paper11'?"),
        ({"data-root": tmp_path / "none"}, f"{tmp_path}/none: no such folder (data root)"),
        ({"output": file}, f"{file}: is a file; stage 'evaluate' needs a separate folder"),
        ({"cache": file}, f"{file}: is a file; finished tasks need a folder"),
        ({"output": model}, f"{model}: is not empty and was not made by stage 'evaluate'"),
        ({"limit": 0}, "--limit: Input should be greater than 0, got 0"),
    ):  # fmt: skip
        assert error_of(words(model, root, PIQA, **options), capsys).startswith(message)


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(
    model: Path,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fcsd.parallel import place

    monkeypatch.setattr(
        place, "load_for_evaluation", lambda *_, **__: pytest.fail("weights were read")
    )
    bare = shutil.copytree(model, tmp_path / "bare")
    for path in bare.glob("*token*"):
        path.unlink()
    said = error_of(words(bare, root, PIQA), capsys)
    assert (
        said
        == f"{bare}: holds no tokenizer; copy tokenizer.json and tokenizer_config.json"
        " beside the weights"
    )


def test_an_empty_folder_an_adapter_and_a_folder_of_models_are_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty, adapter = tmp_path / "empty", tmp_path / "adapter"
    empty.mkdir()
    adapter.mkdir()
    # beside a tokenizer, as TRL saves them
    (adapter / "tokenizer.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "owner/name"}'
    )
    for folder, message in (
        (empty, ": is an empty folder; a checkpoint is a folder with config.json and"),
        (adapter, ": is a LoRA adapter of owner/name, not a checkpoint; merge it"),
        (
            tmp_path,
            ": is not a checkpoint (it has neither config.json nor a tokenizer);",
        ),
    ):
        for command in (["chat", str(folder)], words(folder, root, PIQA)):
            if folder is not tmp_path or command[0] == "chat":
                assert error_of(command, capsys).startswith(f"{folder}{message}")


def test_a_data_root_around_the_data_is_answered_with_the_folder_in_it(
    model: Path, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    around = tmp_path / "tiny-data"
    shutil.copytree(root, around / "data")
    said = error_of(words(model, around, PIQA), capsys)
    assert said.endswith(
        f"the data sets are in {around / 'data'}; give that folder as the data root"
    )


def test_canonical_solutions_that_fail_are_no_score_but_an_error_of_status_1(
    model: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / CODE_FILE
    wrong = {"code": "def mul0(a, b):\n    return 7\n"}
    write_rows(path, [row | wrong for row in json_lines(path)])
    said = error_of(words(model, root, CODE), capsys, status=1)
    assert said.startswith(
        "task mbpp_plus: 1 of 1 canonical solutions do not pass their own tests (1000:"
        " wrong"
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GSM8K | {"max_new_tokens": 200}, "gsm8k: max_new_tokens 200 leave no room for a prompt in .* 200"),
        (CODE | {"max_new_tokens": 199}, "mbpp_plus: a prompt of .* do not fit the model's 200"),
        (OWN | {"max_new_tokens": 199}, "own: baber/piqa, row .* do not fit the model's 200"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_positions_is_refused_before_the_weights_are_loaded(
    row: dict[str, Any],
    message: str,
    model: Path,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlannedEvaluation, "load", None)
    said = error_of(words(model, root, PIQA, row), capsys)
    assert re.match(f"task {message}", said.replace(str(root), ""))


def test_tasks_that_were_finished_before_a_mistake_are_kept_and_used(
    model: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer of 1,000 letters cannot be scored, which shows only when HellaSwag
    runs.
    """

    def endings(*texts: str) -> None:
        rows = rows_of("Rowan/hellaswag", 3)
        rows[0]["endings"] = [*texts, "waits.", "sings."]
        splits = {"train": rows, "validation": rows}
        write_repository(root / "Rowan/hellaswag", {"default": splits})

    endings("y" * 1000, "eats.")
    said = error_of(words(model, root, PIQA, HELLASWAG), capsys)
    assert said.startswith("task hellaswag: an answer of 1")
    assert "cannot be scored; the model has 200 positions" in said
    assert said.endswith("(the finished task is kept; run again to continue)")
    (kept,) = (root.parent / "out" / FINISHED_TASKS).iterdir()
    assert kept.name.startswith("piqa-")
    assert not (root.parent / "out/results.json").exists()
    content = read_json(kept)
    content["samples"][0]["score"] = 0.25
    del content["sha256"]
    content["sha256"] = hashlib.sha256(
        json.dumps(content, sort_keys=True).encode()
    ).hexdigest()
    kept.write_text(json.dumps(content))
    cache = {
        "cache": root.parent / "out" / FINISHED_TASKS,
        "output": root.parent / "other",
    }
    endings("flies.", "eats.")
    assert main(words(model, root, PIQA, HELLASWAG, **cache)) == 0
    # not run again
    assert (
        read_json(root.parent / "other/results.json")["tasks"]["piqa"]["value"] == 0.25
    )


@pytest.mark.parametrize("offline", few(["0", "1"], 1))
def test_a_hub_that_cannot_be_reached_is_an_error_with_the_task_and_the_way_without_it(
    offline: str, model: Path, root: Path
) -> None:
    """Where nobody listens, the Hub's client retries for half a minute (here without
    its pauses) and says so; offline it does not try.
    """
    row = PIQA | {"revision": "a" * 40}
    *arguments, _, _ = words(model, root, row, **{"data-root": root})
    place = arguments.index("--data-root")
    del arguments[place : place + 2]
    environment = {
        "HF_HUB_OFFLINE": offline,
        "HF_DATASETS_OFFLINE": offline,
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    hasty = (
        "import time; time.sleep = lambda _: None; from fcsd.cli.main import main;"
        " raise SystemExit(main())"
    )
    with start(
        "-c", hasty, *arguments, **environment, HF_HOME=str(root.parent / "home")
    ) as child:
        said = child.communicate(timeout=300)[1].strip().splitlines()
    assert child.returncode == 2 and ("Retrying" in "".join(said)) == (offline == "0")
    assert said[-1].startswith(
        "fcsd evaluate: error: task piqa: cannot be loaded with the data set"
        " baber/piqa: Couldn't"
    )
    assert (
        "(`fcsd evaluate --fetch ROOT --suite SUITE`) and give it as --data-root"
        in said[-1]
    )
    assert not any("Traceback" in line for line in said)


SOLUTIONS = [
    {"task_id": 1000 + i, "solution": f"def mul{i}(a, b):\n    return a * b + {i}\n"}
    for i in range(3)
]


def test_ready_samples_may_be_compressed_and_hold_any_text_and_replace_only_their_own_result(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    separators = SOLUTIONS[0] | {
        "solution": "# \u2028 \x85\n" + SOLUTIONS[0]["solution"]
    }
    text = "".join(
        json.dumps(each, ensure_ascii=False) + "\n"
        for each in [separators, *SOLUTIONS[1:]]
    )
    file = root.parent / "s.jsonl.gz"
    file.write_bytes(gzip.compress(text.encode()))
    out = root.parent / "scored"
    arguments = command_words(
        "evaluate --samples",
        file,
        "--tasks mbpp_plus --data-root",
        root,
        "--output",
        out,
    )
    for _ in range(2):
        assert main(arguments) == 0
    assert read_json(out / "results.json")["tasks"]["mbpp_plus"]["value"] == 1
    (root.parent / "evaluated").mkdir()
    (root.parent / "evaluated/results.json").write_text('{"suite": "paper11"}')
    said = error_of([*arguments[:-1], str(root.parent / "evaluated")], capsys)
    assert said.endswith(
        "holds something other than a result of `fcsd evaluate --samples`; choose another"
        " --output"
    )
    said = error_of([*arguments, "--timeout-s", "0"], capsys)
    assert said == "--timeout-s: must be above 0, got 0"


@pytest.mark.parametrize(
    ("task", "template", "reason"),
    [
        (PIQA, "{{ raise_exception('no system turns') }}", "no system turns"),
        (SHORT, "{{ messages[0].no.such }}", "has no attribute"),
        (CODE, "{{ 1 / 0 }}", "division by zero"),
        (PIQA, "{% for message in messages %}", "Unexpected end of template"),
        (CODE, "{{ ''.__class__.__mro__ }}", "unsafe"),
        (SHORT, "{{ 1 / 0 }}", "division by zero"),
    ],
    ids=["raises", "attribute", "code", "syntax", "unsafe", "arithmetic"],
)
def test_a_chat_template_that_refuses_a_prompt_is_one_line(
    model: Path,
    root: Path,
    tmp_path: Path,
    task: dict[str, Any],
    template: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chatty = shutil.copytree(model, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text(template)
    said = error_of(words(chatty, root, task | {"chat_template": True}), capsys)
    assert "chatty: its chat template refuses a prompt: " in said and reason in said
