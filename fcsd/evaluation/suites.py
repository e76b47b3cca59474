"""Read suites (`eval/suites/*.yaml`), and make others of their rows and of tasks that
are named on the command line.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import data_dir, file_state, read_yaml
from fcsd.base.strict import did_you_mean, validate
from fcsd.evaluation.config import KINDS, SuiteConfig, TaskBase
from fcsd.evaluation.lm_eval.definitions import (
    definitions_of,
    read_definitions,
    rows_of,
)


def suite_names() -> list[str]:
    """Return the suites that ship with fcsd."""
    return sorted(path.stem for path in (data_dir("eval") / "suites").glob("*.yaml"))


def is_suite_file(text: str) -> bool:
    """Tell the path of a suite file from the name of a shipped suite."""
    return "/" in text or text.endswith((".yaml", ".yml"))


def load_suite(name_or_path: str | Path) -> SuiteConfig:
    """Read a shipped suite by name, or a suite file by its path (a text with `/` or
    ending in .yaml).

    Raises:
        UserError: no such suite, invalid YAML, unknown key, or a key that does not
            belong to the task's kind.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or is_suite_file(text):
        path = Path(text)
    else:
        names = suite_names()
        if text not in names:
            raise UserError(
                f"suite {text!r}: no such suite{did_you_mean(text, names)} (or give the"
                " path of a .yaml file; --tasks names single tasks)"
            )
        path = data_dir("eval") / "suites" / f"{text}.yaml"
    return _read_suite(path, file_state(path) if path.is_file() else ())


@functools.cache
def _read_suite(path: Path, state: tuple[int, ...]) -> SuiteConfig:
    """Read a suite file, once in a process unless its `state` changes."""
    suite = validate(SuiteConfig, read_yaml(path), str(path))
    # A field of the record and no key of a file: only here is it known where a suite
    # lies.
    if "folder" in suite.model_fields_set:
        raise UserError(f"{path}: folder: unknown key")
    if suite.suites:
        suite = _with_suites(suite, path)
    return suite.model_copy(update={"folder": str(path.parent)})


def _with_suites(suite: SuiteConfig, path: Path) -> SuiteConfig:
    """Return a suite with the tasks of the shipped suites that it names before its own."""
    names = suite_names()
    for name in suite.suites:
        if name not in names:
            raise UserError(
                f"{path}: suites: {name!r}: no shipped suite{did_you_mean(name, names)}"
            )
    parts = [*map(load_suite, suite.suites), suite]
    content = {
        "name": suite.name,
        "description": suite.description,
        "tasks": [row for part in parts for row in part.tasks],
        "columns": {k: v for part in parts for k, v in part.columns.items()},
    }
    return validate(SuiteConfig, content, str(path))


def named_tasks(suite_name: str, tasks: Sequence[str]) -> SuiteConfig:
    """Return a suite with these of its tasks, in the order given; UserError where it
    has no such task.
    """
    suite = load_suite(suite_name)
    rows = {row.task: row for row in suite.tasks}
    for task in tasks:
        if task not in rows:
            raise UserError(
                f"task {task!r}: not in suite"
                f" {suite.name}{did_you_mean(task, list(rows))}"
            )
    # A task that is named on its own counts, whether or not it does in its suite.
    chosen = [_as_headline(rows[task]) for task in tasks]
    return suite.model_copy(update={"tasks": chosen})


def changed_suite(suite: SuiteConfig, **settings: Any) -> SuiteConfig:
    """Return the suite with settings that apply to all its tasks (None: unchanged);
    `thinking` applies to tasks that write their answers. With a template the stop
    strings of a base model's programs are left out; those of visible tests, as lm-eval
    grades, stay."""
    changes = {key: value for key, value in settings.items() if value is not None}
    if not changes:
        return suite
    if changes.get("thinking") and not any(
        KINDS[row.kind].writes for row in suite.tasks
    ):
        raise UserError(
            f"--thinking: no task of suite {suite.name} writes its answer; leave it out,"
            " or choose a suite with tasks that do"
        )
    rows = []
    for row in suite.tasks:
        # Only keys that were set, so that the rules of each kind see a row as in a
        # file.
        kept = row.model_dump(mode="json", exclude_unset=True)
        answers = changes.get("chat_template") and not row.chat_template
        if answers and row.kind == "code" and row.tests == "all":
            kept.pop("stop", None)
        row_changes = dict(changes)
        if not KINDS[row.kind].writes:
            row_changes.pop("thinking", None)
        rows.append(kept | row_changes)
    changed = validate(
        SuiteConfig, {"name": suite.name, "tasks": rows}, f"suite {suite.name}"
    )
    return suite.model_copy(update={"tasks": changed.tasks})


def chosen_suite(
    names: Sequence[str], suite: SuiteConfig, include_path: Path | None = None
) -> SuiteConfig:
    """Return the tasks with these names: the suite's row if it has one, otherwise
    lm-eval's definition.

    include_path: a folder with the user's task definitions, which precede lm-eval's and
    the suite's rows.
    """
    if include_path is not None and not include_path.is_dir():
        raise UserError(f"{include_path}: no such folder (include path)")
    rows = {row.task: row for row in suite.tasks}
    tasks: list[TaskBase | dict[str, Any]] = []
    user_tasks = {}
    if include_path is not None:
        user_tasks = read_definitions([include_path], defaults=False)
    # The user's definitions come first, then the suite's rows, then lm-eval's tasks.
    for name in names:
        if name in user_tasks:
            tasks += rows_of(name, user_tasks, include_path)
        elif name in rows:
            tasks.append(rows[name])
        else:
            tasks += rows_of(name, definitions_of(name), None, [*rows, *user_tasks])
    # Two names may stand for the same task: a group and one of its members.
    by_name = {
        row.task if isinstance(row, TaskBase) else row["task"]: row for row in tasks
    }
    tasks = list(by_name.values())
    # tasks that the user named count; those of lm-eval do anyway
    if all(isinstance(row, TaskBase) and not row.headline for row in tasks):
        tasks = [_as_headline(row) for row in tasks]
    where = f"--tasks {','.join(names)}"
    selection = validate(
        SuiteConfig, {"name": f"{suite.name}-tasks", "tasks": tasks}, where
    )
    return selection.model_copy(
        update={"folder": suite.folder, "columns": suite.columns}
    )


def _as_headline(row: Any) -> Any:
    """Return a row that counts in the mean, in which a divergence has no place."""
    distance = KINDS[row.kind].distance
    return row if distance else row.model_copy(update={"headline": True})


def shipped_floor(task: str, metric: str) -> float | None:
    """Return the score of random answers that a shipped suite has for a task of this
    name, which it also has where it is named without that suite; None: no suite does.
    """
    return _shipped_floors().get((task, metric))


@functools.cache
def _shipped_floors() -> dict[tuple[str, str], float]:
    files = [data_dir("eval") / "suites" / f"{name}.yaml" for name in suite_names()]
    # Read only: what ships with fcsd is valid.
    rows = [row for file in files for row in read_yaml(file).get("tasks", ())]
    return {
        (row["task"], row["metric"]): row["floor"] for row in rows if "floor" in row
    }
