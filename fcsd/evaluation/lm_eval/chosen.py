"""Make a suite of tasks that are named on the command line: rows of a suite, or
lm-eval's tasks with its own settings.

Not covered: code tasks that no suite has; lm-eval would run their programs unguarded.
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.strict import did_you_mean, validate
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.lm_eval.tasks import tasks_folder
from fcsd.model.preserve import quiet

_FEW = 40  # an error lists the tasks up to this number

_METRICS = ("acc_norm", "acc", "exact_match", "prompt_level_strict_acc")
_FILTERS = ("flexible-extract", "none")


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
    rows = {
        row.task: row.model_dump(mode="json", exclude_unset=True) for row in suite.tasks
    }
    tasks: list[dict[str, Any]] = []
    if include_path is not None:
        user_tasks = _index([include_path], defaults=False)
    else:
        user_tasks = {}
    # The user's definitions come first, then the suite's rows, then lm-eval's tasks.
    for name in names:
        if name in user_tasks:
            tasks.append(_row(name, user_tasks, include_path))
        elif name in rows:
            tasks.append(rows[name])
        else:
            tasks.append(_row(name, _lm_evals(name), None, [*rows, *user_tasks]))
    # tasks that the user named count
    if not any(row.get("headline", True) for row in tasks):
        tasks = [row | {"headline": True} for row in tasks]
    where = f"--tasks {','.join(names)}"
    selection = validate(
        SuiteConfig, {"name": f"{suite.name}-tasks", "tasks": tasks}, where
    )
    return selection.model_copy(
        update={"folder": suite.folder, "columns": suite.columns}
    )


def _lm_evals(name: str) -> dict[str, Any]:
    """Read the definitions of lm-eval's folder that the name begins with; all 14,000
    take 10 s.
    """
    folders = [
        path
        for path in tasks_folder().iterdir()
        if path.is_dir() and name.startswith(path.name)
    ]
    for folder in sorted(folders, key=lambda path: -len(path.name)):
        if name in (definitions := _index([folder], defaults=False)):
            return definitions
    return _every()


@cache
def _every() -> dict[str, Any]:
    return _index([], defaults=True)


def _index(folders: Sequence[Path | None], *, defaults: bool) -> dict[str, Any]:
    with quiet():
        from lm_eval.tasks import TaskManager

        paths = [str(folder) for folder in folders]
        return dict(
            TaskManager(include_path=paths, include_defaults=defaults).task_index
        )


def _row(
    name: str, index: dict[str, Any], root: Path | None, more_names: Sequence[str] = ()
) -> dict[str, Any]:
    """Build the row of one task or group from lm-eval's definition; for a group, from
    its first task's.
    """
    entry = index.get(name)
    if entry is None:
        suggestion = did_you_mean(name, [*index, *more_names])
        if (
            suggestion.startswith("; allowed") and len(index) > _FEW
        ):  # lm-eval has thousands
            suggestion = (
                "; `lm-eval ls tasks` lists them, --include-path adds a folder of"
                " your own"
            )
        raise UserError(f"task {name}: lm-eval has no such task{suggestion}")
    if entry.yaml_path is None:
        raise UserError(
            f"task {name}: is a tag in lm-eval, not a task or group; name its tasks:"
            f" {', '.join(sorted(entry.tags))}"
        )
    leaf = _leaf(name, index)
    config = dict(leaf.cfg or {})
    # lm-eval would run generated programs in this process, without a sandbox.
    if config.get("unsafe_code"):
        raise UserError(
            f"task {name}: runs generated code inside lm-eval; use a suite's row of"
            " kind: code"
        )
    if not isinstance(config.get("dataset_path"), str):
        raise UserError(
            f"task {name}: its definition ({leaf.yaml_path}) names no dataset_path"
        )
    metrics = [
        candidate["metric"]
        for candidate in config.get("metric_list") or []
        if isinstance(candidate["metric"], str)
    ]
    filters = [candidate["name"] for candidate in config.get("filter_list") or []] or [
        "none"
    ]
    choices = config.get("output_type") in ("multiple_choice", "loglikelihood")
    # lm-eval names no headline metric: the first of ours that the task computes counts.
    metric = next(
        (candidate for candidate in _METRICS if candidate in metrics),
        (metrics or ["acc"])[0],
    )
    rule = next(
        (candidate for candidate in _FILTERS if candidate in filters), filters[0]
    )
    # A group and its first task may lie in different folders, and both must be found.
    folders = [os.path.dirname(entry.yaml_path), os.path.dirname(leaf.yaml_path)]
    return {
        "task": name,
        "kind": "likelihood" if choices else "generation",
        "metric": f"{metric},{rule}",
        "num_fewshot": int(config.get("num_fewshot") or 0),
        "dataset": config["dataset_path"],
        "lm_eval_include": _include(os.path.commonpath(folders), root),
    }


def _leaf(name: str, index: dict[str, Any]) -> Any:
    """Return the first task of a group, of its first group and so on."""
    entry = index.get(name)
    members = (entry.cfg or {}).get("task") if entry is not None else None
    # lm-eval's index also has tags, which have no file, only the names of their tasks.
    if entry is not None and entry.yaml_path is None:
        return _leaf(sorted(entry.tags)[0], index)
    if not isinstance(members, list):
        return entry
    first = members[0]
    # A task that is defined inside its group has no separate entry.
    if isinstance(first, dict) and "dataset_path" in first:
        return entry
    return _leaf(
        (
            first
            if isinstance(first, str)
            else str(first.get("task") or first.get("group"))
        ),
        index,
    )


def _include(folder: str, root: Path | None) -> str:
    """Name the folder within lm-eval's tasks, so that a result names no place of this
    machine; else as a path.
    """
    if root is not None:
        return str(Path(folder).resolve())
    return os.path.relpath(folder, tasks_folder())
