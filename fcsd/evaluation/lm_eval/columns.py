"""The columns of the benchmarks' data sets, as lm-eval 0.4.13 reads them: a row that does not fit is named before any
model is asked.

Not covered: tasks that are not listed; what a text says.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.evaluation.lines import json_lines

Check = tuple[str, Callable[[Any], bool]]  # what is allowed, in words, and whether a value is


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _one_of(*values: Any) -> Check:
    # True == 1, but a label is no truth value.
    return (
        f"one of {', '.join(map(repr, values))}",
        lambda value: value in values and not isinstance(value, bool),
    )


def _labelled(value: Any) -> bool:
    if not isinstance(value, dict) or not {"text", "label"} <= value.keys():
        return False
    texts, labels = value["text"], value["label"]
    return _are_texts(texts) and _are_texts(labels) and 0 < len(texts) == len(labels)


_TEXT: Check = ("text", lambda value: isinstance(value, str))
_FOUR_TEXTS: Check = ("a list of 4 texts", lambda value: _are_texts(value) and len(value) == 4)
_LABELLED: Check = ("{text: [texts], label: [texts]} of one length", _labelled)
_BINARY = _one_of(0, 1)
_ARC = {"question": _TEXT, "choices": _LABELLED, "answerKey": _TEXT}

COLUMNS: dict[str, dict[str, Check]] = {
    "piqa": {"goal": _TEXT, "sol1": _TEXT, "sol2": _TEXT, "label": _BINARY},
    "arc_easy": _ARC,
    "arc_challenge": _ARC,
    "hellaswag": {
        "activity_label": _TEXT, "ctx_a": _TEXT, "ctx_b": _TEXT, "endings": _FOUR_TEXTS,
        "label": _one_of("0", "1", "2", "3"),
    },
    "commonsense_qa": {"question": _TEXT, "choices": _LABELLED, "answerKey": _one_of(*"ABCDE")},
    "winogrande": {"sentence": _TEXT, "option1": _TEXT, "option2": _TEXT, "answer": _one_of("1", "2")},
    "openbookqa": {"question_stem": _TEXT, "choices": _LABELLED, "answerKey": _TEXT},
    "gsm8k": {"question": _TEXT, "answer": _TEXT},
    "mmlu": {"question": _TEXT, "choices": _FOUR_TEXTS, "answer": _one_of(0, 1, 2, 3)},
    "boolq": {"question": _TEXT, "passage": _TEXT, "label": _BINARY},
    "rte": {"sentence1": _TEXT, "sentence2": _TEXT, "label": _BINARY},
    "sciq": {
        "question": _TEXT, "support": _TEXT, "correct_answer": _TEXT,
        "distractor1": _TEXT, "distractor2": _TEXT, "distractor3": _TEXT,
    },
}  # fmt: skip


def check_rows(task: str, rows: Iterable[Mapping[str, Any]], where: str) -> None:
    """Refuse the first row that the task cannot read; tasks that are not listed are not checked.

    Raises:
        UserError: names task, place, row and column, what is allowed and what is there.
    """
    for index, row in enumerate(rows):
        for column, (allowed, check) in COLUMNS.get(task, {}).items():
            if column not in row:
                raise UserError(
                    f"task {task}: {where}: no column {column!r}; it needs {', '.join(COLUMNS[task])}"
                    f" (found {', '.join(row)})"
                )
            if not check(row[column]):
                raise UserError(
                    f"task {task}: {where}, row {index}: {column} must be {allowed}, got {_shown(row[column])}"
                )
        if "answerKey" in row and task in COLUMNS and row["answerKey"].strip() not in row["choices"]["label"]:
            labels = ", ".join(row["choices"]["label"])
            raise UserError(
                f"task {task}: {where}, row {index}: answerKey {row['answerKey']!r} is none of the labels {labels}"
            )


def check_files(task: str, location: str, name: str | None, split: str) -> None:
    """Run `check_rows` on the files of a local folder themselves, for what `datasets` cannot read as one table.

    name: the configuration. Nothing is said of a folder whose files are not found so.
    """
    import datasets
    import pyarrow.parquet

    if not Path(location).is_dir():
        return
    try:
        files = [
            Path(file) for file in datasets.load_dataset_builder(location, name).config.data_files[split]
        ]
    except Exception:  # of many kinds; the caller shows the one that `datasets` gave for the task
        return
    for file in files:
        if file.suffix == ".parquet":
            check_rows(task, pyarrow.parquet.read_table(file).to_pylist(), str(file))
        elif file.suffix in (".jsonl", ".json"):
            try:
                rows = [row for _, row in json_lines(file)]
            except UserError as error:
                raise UserError(f"task {task}: {error}") from None
            if not rows:
                raise UserError(f"task {task}: {file}: the file is empty")
            check_rows(task, rows, str(file))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
