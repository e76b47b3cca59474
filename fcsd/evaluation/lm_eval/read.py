"""Read results of plain `lm_eval` and convert them to the format of `fcsd evaluate`, so
that they can be compared.

Not covered: metrics that are not means over items; several answers an item (`repeats`).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.evaluation.config import lm_eval_key
from fcsd.evaluation.lm_eval.definitions import preferred_key
from fcsd.evaluation.results import (
    Samples,
    generation_settings,
    items_of_filter,
    json_lines,
    lm_eval_sample,
    mean_of,
    whole_result,
)
from fcsd.evaluation.scores import Result, Row, Sample
from fcsd.evaluation.suites import shipped_floor

_Report = dict[str, Any]  # lm-eval's results_TIME.json
# Sections that a results file may lack.
_SECTIONS = ("group_subtasks", "configs", "n-samples", "n-shot", "higher_is_better")
_DAMAGED = (LookupError, TypeError, ValueError, AttributeError)


def read_lm_eval(
    folder: Path, files: Sequence[Path], like: Result | None = None
) -> tuple[Result, Samples]:
    """Read the results of one model in `files`, which lie in `folder`.

    like: a result with which this one will be compared; its metrics are chosen where
    lm-eval has several.

    Raises:
        UserError: results of several models, without samples, damaged, or without a
            metric that is a mean over items.
    """
    files = sorted(files)
    model_folders = sorted({file.parent for file in files})
    if len(model_folders) > 1:
        names = ", ".join(model_folder.name for model_folder in model_folders)
        raise UserError(
            f"{folder}: holds results of several models ({names}); give the folder"
            " of one"
        )
    metrics = {
        task: row["metric"] for task, row in (like or {}).get("tasks", {}).items()
    }
    try:
        return _converted(folder.name, files, metrics)
    except _DAMAGED as error:
        raise UserError(
            f"{folder}: results are not as lm_eval writes them ({error!r}); evaluate"
            " again"
        ) from None


def _converted(
    name: str, files: list[Path], metrics: Mapping[str, str]
) -> tuple[Result, Samples]:
    by_task: dict[str, tuple[_Report, Path]] = {}
    for file in files:  # by time: the newest result of a task counts
        report = read_json(file, "evaluate again")
        if not isinstance(report, dict) or not isinstance(report.get("results"), dict):
            raise UserError(f"{file}: not a result of lm_eval")
        report |= {section: report.get(section) or {} for section in _SECTIONS}
        for task in _tasks(report, metrics):
            by_task[task] = (report, file)
    tasks, samples = {}, {}
    for task, (report, file) in by_task.items():
        tasks[task], samples[task] = _task(task, report, file, metrics.get(task))
    newest = by_task[list(by_task)[-1]][0]
    config = newest.get("config") or {}
    versions = {
        "lm-eval": newest.get("lm_eval_version"),
        "transformers": newest.get("transformers_version"),
    }
    # A choice of items (`--samples`) is as little a result as their first ones.
    counts = [(row["num_items"], row["num_items_total"]) for row in tasks.values()]
    chosen = min((count for count, total in counts if count < total), default=None)
    limit = config.get("limit") or chosen
    settings = {
        # lm-eval reads a limit below 1 as a share of the items.
        "limit": int(limit) if limit and limit >= 1 else limit,
        "batch_size": config.get("batch_size"),
        "dtype": str(config.get("model_dtype") or "").removeprefix("torch.") or None,
        "device": config.get("device"),
        "fewshot_seed": config.get("fewshot_seed"),
        "decoding": "as lm_eval was told",
        "suite": {"tasks": [_suite_row(task, by_task[task][0]) for task in tasks]},
        "versions": {name: version for name, version in versions.items() if version},
    }
    model = str(newest.get("model_name") or name)
    return whole_result("lm_eval", model, tasks, settings, sandbox=None), samples


def _tasks(report: _Report, metrics: Mapping[str, str]) -> list[str]:
    """List tasks and groups that are no member of a group; a group without a score of
    its own is only a name.
    """
    # A group without a score of its own (a mere heading) is replaced by its members.
    groups = {
        name: members
        for name, members in report["group_subtasks"].items()
        if name in metrics or any("," in key for key in report["results"].get(name, {}))
    }
    names = set(report["group_subtasks"]) - groups.keys()
    names |= {leaf for group in groups for leaf in _below(group, report)}
    return [name for name in [*groups, *report["results"]] if name not in names]


def _below(group: str, report: _Report) -> set[str]:
    """Collect everything that a group contains, without the group."""
    members = {
        name for name in report["group_subtasks"].get(group, []) if name != group
    }
    return members | {name for member in members for name in _below(member, report)}


def _leaves(task: str, report: _Report) -> list[str]:
    members = [name for name in report["group_subtasks"].get(task, []) if name != task]
    return [leaf for name in members for leaf in _leaves(name, report)] or [task]


def _suite_row(task: str, report: _Report) -> Row:
    """Describe how answers were generated, in the words of a suite."""
    config = report["configs"].get(_leaves(task, report)[0]) or {}
    row = {"task": task, "dataset": str(config.get("dataset_path", ""))}
    # Likelihoods have none, nor have files of an earlier fcsd.
    settings = config.get("generation_kwargs")
    generates = config.get("output_type") == "generate_until"
    return row | (generation_settings(settings) if settings and generates else {})


def _task(
    task: str, report: _Report, file: Path, requested_metric: str | None
) -> tuple[Row, list[Sample]]:
    leaves = _leaves(task, report)
    try:
        items = {leaf: _read_samples(leaf, file) for leaf in leaves}
        metric = _metric(task, report["results"], items, file, requested_metric)
        name, rule = lm_eval_key(metric)
        samples = []
        for leaf, rows in items.items():
            member = None if leaf == task else leaf
            samples += [
                lm_eval_sample(row, float(row[name]), member, _requests(row))
                for row in items_of_filter(rows, rule)
            ]
    except _DAMAGED as error:
        raise UserError(
            f"{file}: task {task}: result or samples are not as lm_eval writes them"
            f" ({error!r}); evaluate again"
        ) from None
    config = report["configs"].get(leaves[0]) or {}
    generates = config.get("output_type") == "generate_until"
    # lm-eval records one template per run, fcsd one per task.
    chat_template = (config.get("metadata") or {}).get("chat_template")
    if chat_template is None:
        chat_template = report.get("chat_template")
    # `n-samples` has the size of a task before a limit; without it the task counts as
    # complete.
    sizes: list[Any] = [
        (report["n-samples"].get(leaf) or {}).get("original") for leaf in leaves
    ]
    total = sum(sizes) if None not in sizes else len(samples)
    higher_is_better = (report["higher_is_better"].get(leaves[0]) or {}).get(name)
    floor = shipped_floor(task, metric)
    return {
        # A metric of fcsd's code tasks (`pass@1`) has no filter, and keeps its name.
        "metric": metric if "," in (requested_metric or metric) else requested_metric,
        **mean_of([sample["score"] for sample in samples]),
        **({} if floor is None else {"floor": floor}),
        "num_items": len(samples),
        "num_items_total": total,
        "num_fewshot": int(report["n-shot"].get(leaves[0]) or 0),
        "kind": "generation" if generates else "likelihood",
        "headline": True,
        "higher_is_better": higher_is_better is not False,
        "chat_template": bool(chat_template),
        "dataset": str(config.get("dataset_path", "")),
        "revision": None,
    }, samples


def _read_samples(task: str, file: Path) -> list[Sample]:
    # lm-eval gives samples and results of one run the same time in their names.
    path = file.with_name(
        f"samples_{task}_{file.name.removeprefix('results_').removesuffix('.json')}.jsonl"
    )
    if not path.is_file():
        raise UserError(
            f"{path}: no such file; models are compared item by item, so run lm_eval"
            " with --log_samples"
        )
    if path.stat().st_size == 0:
        raise UserError(f"{path}: has no samples; evaluate again")
    description, rows = "a sample of lm_eval", []
    for where, row in json_lines(path, description, "; evaluate again"):
        try:
            int(row["doc_id"])
            "".join(row[key] for key in ("doc_hash", "prompt_hash", "filter"))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{where}: not {description} ({error!r}); evaluate again"
            ) from None
        rows.append(row)
    return rows


def _metric(
    task: str,
    results: _Report,
    items: Mapping[str, list[Sample]],
    file: Path,
    requested_metric: str | None,
) -> str:
    """Choose the `metric,filter` of a task: the requested one, or the first preferred
    one that is a mean over items.
    """
    # Models are compared item by item, so the value reported for a task, and for every
    # member of a group, must be the mean of the item scores.
    means = [
        key
        for key in results[next(iter(items))]
        if all(_is_mean(key, results[leaf], rows) for leaf, rows in items.items())
    ]
    if requested_metric is not None:
        key = ",".join(lm_eval_key(requested_metric))
        if key not in means:
            raise UserError(
                f"{file}: task {task} has no metric {requested_metric}; it has"
                f" {', '.join(means) or 'none'}"
            )
        return key
    if not means:
        raise UserError(
            f"{file}: task {task} has no metric that is a mean over items, so it cannot"
            " be compared"
        )
    return preferred_key(means)


def _is_mean(key: str, values: Row, rows: Sequence[Sample]) -> bool:
    name, comma, rule = key.partition(",")
    if not comma or name.endswith("_stderr") or key not in values:
        return False
    scores = [row.get(name) for row in rows if row["filter"] == rule]
    numbers = [float(score) for score in scores if isinstance(score, int | float)]
    return (
        bool(scores)
        and len(numbers) == len(scores)
        and math.isclose(
            math.fsum(numbers) / len(numbers), values[key], rel_tol=1e-6, abs_tol=1e-9
        )
    )


def _requests(row: Sample) -> list[list[Any]]:
    return [
        list(arguments.values())
        for arguments in (row.get("arguments") or {}).values()
        if isinstance(arguments, dict)
    ]
