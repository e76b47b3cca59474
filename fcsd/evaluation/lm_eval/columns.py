"""The columns of the benchmarks' data sets, which the suites describe: a row that does
not fit is reported before any model runs.

Not covered: tasks whose columns no suite describes; the content of texts.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError, errors_begin
from fcsd.evaluation.config import Column, SuiteConfig
from fcsd.evaluation.results import json_lines
from fcsd.evaluation.suites import load_suite, suite_names

# (what is allowed, in words; whether a value is allowed)
Check = tuple[str, Callable[[Any], bool]]


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


_KINDS: dict[str, Check] = {
    "text": ("text", lambda value: isinstance(value, str)),
    "text with _": (
        "text with a gap (_)",
        lambda value: isinstance(value, str) and "_" in value,
    ),
    "4 texts": (
        "a list of 4 texts",
        lambda value: _are_texts(value) and len(value) == 4,
    ),
    "labelled": ("{text: [texts], label: [texts]} of one length", _labelled),
}


def columns_of(task: str, suite: SuiteConfig) -> Mapping[str, Column]:
    """Return a task's columns as its suite describes them, or a suite that ships with
    fcsd; {} if none does.
    """
    return suite.columns.get(task) or _shipped().get(task, {})


@cache
def _shipped() -> dict[str, dict[str, Column]]:
    return {
        task: columns
        for name in suite_names()
        for task, columns in load_suite(name).columns.items()
    }


def check_rows(
    task: str,
    columns: Mapping[str, Column],
    rows: Iterable[Mapping[str, Any]],
    where: str,
) -> None:
    """Refuse the first row that does not fit the task's columns."""
    checks = {
        column: _KINDS[kind] if isinstance(kind, str) else _one_of(*kind)
        for column, kind in columns.items()
    }
    for index, row in enumerate(rows):
        for column, (allowed, check) in checks.items():
            if column not in row:
                raise UserError(
                    f"task {task}: {where}: no column {column!r}; it needs"
                    f" {', '.join(columns)} (found {', '.join(row)})"
                )
            if not check(row[column]):
                raise UserError(
                    f"task {task}: {where}, row {index}: {column} must be {allowed},"
                    f" got {_shown(row[column])}"
                )
        # With a key that is none of the labels, no answer could be right.
        labels = row["choices"]["label"] if "answerKey" in columns else None
        if labels is not None and row["answerKey"].strip() not in labels:
            raise UserError(
                f"task {task}: {where}, row {index}: answerKey {row['answerKey']!r} is"
                f" none of the labels {', '.join(labels)}"
            )


def check_files(
    task: str,
    columns: Mapping[str, Column],
    location: str,
    name: str | None,
    split: str,
) -> None:
    """Run `check_rows` on the files of a local folder directly, if `datasets` cannot
    read them as one table.

    name: the configuration. A folder without such files passes.
    """
    for file in _files_of(location, name, split):
        with errors_begin(f"task {task}: "):
            rows = _rows_of(file)
        if rows is not None:
            check_rows(task, columns, rows, str(file))


def _files_of(location: str, name: str | None, split: str) -> list[Path]:
    """Return the files of a split in a local folder; none where there are none."""
    import datasets

    if not Path(location).is_dir():
        return []
    try:
        builder = datasets.load_dataset_builder(location, name)
        return [Path(file) for file in builder.config.data_files[split]]
    # many kinds; the caller shows the error that `datasets` raised for the task
    except Exception:
        return []


def _rows_of(file: Path) -> list[dict[str, Any]] | None:
    """Return the rows of a file; None for another format."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(file).to_pylist()
        return rows
    if file.suffix not in (".jsonl", ".json"):
        return None
    rows = [row for _, row in json_lines(file)]
    if not rows:
        raise UserError(f"{file}: the file is empty")
    return rows


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
