"""Make rows of a suite from the definitions of lm-eval's tasks, or of the user's, with
their own settings.

A group whose tasks have the same settings is one row; a tag, a pattern (`mmlu_*`) and
any other group become one row for each of their tasks.

Not covered: code tasks; lm-eval would run their programs unguarded.
"""

import contextlib
import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.strict import did_you_mean, refuse
from fcsd.evaluation.lm_eval.packages import tasks_folder
from fcsd.model.preserve import quiet

METRICS = ("acc_norm", "acc", "exact_match", "prompt_level_strict_acc")

FILTERS = ("flexible-extract", "none", "strict-match")
"""Those that are preferred, in this order, where nothing else chooses."""

_FEW = 40  # an error lists the tasks up to this number

# Of tasks that list no metrics, lm-eval's own (`DEFAULT_METRIC_REGISTRY`) that are means.
_DEFAULTS = {
    "multiple_choice": ("acc", "acc_norm"),
    "loglikelihood": ("acc",),
    "generate_until": ("exact_match",),
}

# Keys by which a group may change one of its tasks and a row of a suite can, too.
_CHANGES = {"task", "task_alias", "alias", "group_alias", "tag", "num_fewshot"}


def definitions_of(name: str) -> dict[str, Any]:
    """Read the definitions of lm-eval's folder that the name begins with; all 14,000
    take 10 s.
    """
    folders = [
        path
        for path in tasks_folder().iterdir()
        if path.is_dir() and name.startswith(path.name)
    ]
    for folder in sorted(folders, key=lambda path: -len(path.name)):
        if name in (definitions := read_definitions([folder], defaults=False)):
            # The members of a group may lie in other folders.
            with contextlib.suppress(UserError):
                list(_leaves(name, name, definitions))
                return definitions
    return _every()


@cache
def _every() -> dict[str, Any]:
    return read_definitions([], defaults=True)


def read_definitions(
    folders: Sequence[Path | None], *, defaults: bool
) -> dict[str, Any]:
    """Index the tasks that are defined in these folders, and, if `defaults`, in
    lm-eval's own.
    """
    with quiet():
        from lm_eval.tasks import TaskManager

        paths = [str(folder) for folder in folders]
        return dict(
            TaskManager(include_path=paths, include_defaults=defaults).task_index
        )


def rows_of(
    name: str, index: dict[str, Any], root: Path | None, more_names: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Build the rows of one name: of a task, a group, a tag or a pattern."""
    if any(mark in name for mark in "*?[") and name not in index:
        found = sorted(
            other
            for other in fnmatch.filter(index, name)
            if index[other].yaml_path is not None and not _members(index[other])
        )
        if not found:
            raise UserError(f"task {name}: no task of lm-eval has such a name")
        return [row for other in found for row in rows_of(other, index, root)]
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
        # A tag, which tasks of other folders may have, too.
        index = index if root is not None else _every()
        return [
            row
            for other in sorted(index[name].tags)
            for row in rows_of(other, index, root)
        ]
    leaves = list(_leaves(name, name, index))
    made = [_settings(name, *leaf) for leaf in leaves]
    if all(settings == made[0] for settings in made):
        # A group and its tasks may lie in different folders, and all must be found.
        files = {entry.yaml_path} | {
            index[leaf].yaml_path for leaf, _ in leaves if leaf in index
        }
        folder = os.path.commonpath([os.path.dirname(file) for file in files])
        include = _include(folder, root)
        return [{"task": name, **made[0], "lm_eval_include": include}]
    rows = []
    for member in _members(entry):
        changes = {} if isinstance(member, str) else dict(member)
        other = member if isinstance(member, str) else str(member.get("task"))
        # Shots come from the training split unless the task says otherwise.
        settings = (index[other].cfg or {}) if other in index else {}
        if changes.get("fewshot_split") == settings.get("training_split"):
            changes.pop("fewshot_split", None)
        if set(changes) - _CHANGES or other not in index:
            raise UserError(
                f"task {name}: is a group that defines or changes tasks in its own file"
                f" ({entry.yaml_path}), and not all in the same way; name the tasks of"
                " another definition, or give your own with --include-path"
            )
        shots = {key: value for key, value in changes.items() if key == "num_fewshot"}
        rows += [row | shots for row in rows_of(other, index, root)]
    return rows


def _members(entry: Any) -> list[Any]:
    """Return the members of a group, as its file has them; [] for a task."""
    members = (entry.cfg or {}).get("task")
    return members if isinstance(members, list) else []


def _leaves(
    name: str, member: Any, index: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and definition of the tasks that a member of a group stands for, with
    the group's changes.

    name: of the group, for errors.
    """
    changes = {} if isinstance(member, str) else dict(member)
    other = member if isinstance(member, str) else changes.get("task", changes.get("group"))  # fmt: skip
    if isinstance(other, list):  # a group inside a group's file
        for inner in other:
            yield from _leaves(name, inner, index)
        return
    entry = index.get(str(other))
    if entry is None and "dataset_path" not in changes:
        raise UserError(f"task {name}: lm-eval does not define its member {other}")
    if entry is not None and entry.yaml_path is None:
        for inner in sorted(entry.tags):
            yield from _leaves(name, inner, index)
        return
    if entry is not None and (inner_members := _members(entry)):
        for inner in inner_members:
            for leaf, config in _leaves(name, inner, index):
                yield leaf, config | changes
        return
    yield str(other), (dict(entry.cfg or {}) if entry is not None else {}) | changes


def _settings(name: str, leaf: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Build the keys of a row from the definition of a task, `leaf`, of `name`."""
    # lm-eval would run generated programs in this process, without a sandbox.
    refuse(
        (
            config.get("unsafe_code"),
            f"task {name}: runs generated code inside lm-eval; use a suite's row of"
            " kind: code",
        ),
        (
            not isinstance(config.get("dataset_path"), str),
            f"task {name}: the definition of {leaf} names no dataset_path, so fcsd"
            " cannot tell which data it is graded on",
        ),
    )
    output = config.get("output_type") or "generate_until"  # lm-eval's default
    if output not in _DEFAULTS:
        raise UserError(
            f"task {name}: is scored by the perplexity of whole texts ({output});"
            " fcsd compares scores of items: choose a task with choices or answers"
        )
    filters = [candidate["name"] for candidate in config.get("filter_list") or []] or [
        "none"
    ]
    return {
        "kind": "generation" if output == "generate_until" else "likelihood",
        "metric": f"{_metric(name, config, output)},{preferred(filters, FILTERS)}",
        "num_fewshot": int(config.get("num_fewshot") or 0),
        "dataset": config["dataset_path"],
    }


def _metric(name: str, config: Mapping[str, Any], output: str) -> str:
    """Choose the metric that counts. lm-eval names none: it is the first of ours that
    the task computes, else the first that is a mean.
    """
    from lm_eval.api.registry import METRIC_AGGREGATION_REGISTRY

    listed = config.get("metric_list")
    if not listed:
        return preferred(_DEFAULTS[output], METRICS)
    metrics: dict[str, str] = {}
    for candidate in listed:
        # A metric that is a function stands in the index with its file.
        metric = str(candidate["metric"])
        metric = metric.rpartition(".")[2] if "/" in metric else metric
        how = candidate.get("aggregation")
        if how is None:
            # Of a metric that it does not know, the registry raises KeyError.
            with contextlib.suppress(KeyError):
                how = METRIC_AGGREGATION_REGISTRY.get(metric).__name__
        metrics[metric] = str(how or "mean")
    # A function of the task may be a mean; what it is turns out when it is evaluated.
    means = [metric for metric, how in metrics.items() if how == "mean" or "/" in how]
    if not means:
        raise UserError(
            f"task {name}: none of its metrics ({', '.join(metrics)}) is a mean over"
            " items, by which fcsd compares models"
        )
    return preferred(means, METRICS)


def _include(folder: str, root: Path | None) -> str:
    """Name the folder within lm-eval's tasks, so that a result names no place of this
    machine; else as a path.
    """
    if root is not None:
        return str(Path(folder).resolve())
    return os.path.relpath(folder, tasks_folder())


def preferred(names: Sequence[str], order: Sequence[str]) -> str:
    """Return the first of `order` that is among the names, else the first name."""
    return next((name for name in order if name in names), names[0])


def preferred_key(keys: Sequence[str]) -> str:
    """Return the preferred of these keys, by its metric first, else the first key."""
    return preferred(keys, [f"{m},{f}" for m in METRICS for f in FILTERS])
