"""Results where plain `lm_eval` left them, in the form of those of `fcsd evaluate`, so
that they can be compared.

Not covered: metrics that are not means over items; several answers an item (`repeats`).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.evaluation.lines import json_lines
from fcsd.evaluation.lm_eval.write import lm_eval_key
from fcsd.evaluation.results import (
    Samples,
    lm_eval_sample,
    mean_of,
    read_result,
    whole_result,
)

Result = dict[str, Any]
# not every one is there
_SECTIONS = ("group_subtasks", "configs", "n-samples", "n-shot", "higher_is_better")
_PREFERRED = (
    "acc_norm,none",
    "acc,none",
    "exact_match,flexible-extract",
    "exact_match,strict-match",
)
"""The metrics that stand for a task which has several, in this order, when nothing else
says which.
"""


def read_results(
    folder: Path, like: Mapping[str, Any] | None = None
) -> tuple[Result, Samples]:
    """Read the results in a folder of `fcsd evaluate`, or of plain lm-eval.

    like: a result with which this one will be compared; its metrics are chosen where
    lm-eval has several.

    Raises:
        UserError: as `read_result`; lm-eval's results of several models, without
            samples, damaged, or without a metric that is a mean over items.
    """
    files = sorted([*folder.glob("results_*.json"), *folder.glob("*/results_*.json")])
    # `read_result` says so
    unfinished = not files and (folder / "stage.json").is_file()
    if (folder / "results.json").is_file() or not folder.is_dir() or unfinished:
        return read_result(folder)
    if not files:
        raise UserError(
            f"{folder}: holds no result of `fcsd evaluate` (results.json) or of lm_eval"
            " (results_*.json)"
        )
    places = sorted({file.parent for file in files})
    if len(places) > 1:
        names = ", ".join(place.name for place in places)
        raise UserError(
            f"{folder}: holds results of several models ({names}); give the folder"
            " of one"
        )
    metrics = {
        task: row["metric"] for task, row in (like or {}).get("tasks", {}).items()
    }
    by_task: dict[str, tuple[dict[str, Any], Path]] = {}
    for file in files:  # by time: the newest result of a task counts
        whole = read_json(file, "evaluate again")
        if not isinstance(whole, dict) or not isinstance(whole.get("results"), dict):
            raise UserError(f"{file}: not a result of lm_eval")
        whole |= {section: whole.get(section) or {} for section in _SECTIONS}
        for task in _tasks(whole, metrics):
            by_task[task] = (whole, file)
    tasks, samples = {}, {}
    for task, (whole, file) in by_task.items():
        tasks[task], samples[task] = _task(task, whole, file, metrics.get(task))
    newest = by_task[next(reversed(by_task))][0]
    config = newest.get("config") or {}
    versions = {
        "lm-eval": newest.get("lm_eval_version"),
        "transformers": newest.get("transformers_version"),
    }
    limit = config.get("limit")
    settings = {
        "limit": int(limit) if limit and limit >= 1 else limit,
        "batch_size": config.get("batch_size"),
        "dtype": (
            str(config["model_dtype"]).removeprefix("torch.")
            if config.get("model_dtype")
            else None
        ),
        "device": config.get("device"),
        "fewshot_seed": config.get("fewshot_seed"),
        "decoding": "as lm_eval was told",
        "suite": {"tasks": [_suite_row(task, by_task[task][0]) for task in tasks]},
        "versions": {name: version for name, version in versions.items() if version},
    }
    model = str(newest.get("model_name") or folder.name)
    return whole_result("lm_eval", model, tasks, settings, sandbox=None), samples


def _tasks(whole: Mapping[str, Any], wanted: Mapping[str, str]) -> list[str]:
    """List tasks and groups that are no member of a group; a group without a score of
    its own is only a name.
    """
    groups = {
        name: members
        for name, members in whole["group_subtasks"].items()
        if name in wanted or any("," in key for key in whole["results"].get(name, {}))
    }
    names = set(whole["group_subtasks"]) - groups.keys()
    names |= {leaf for group in groups for leaf in _below(group, whole)}
    return [name for name in [*groups, *whole["results"]] if name not in names]


def _below(group: str, whole: Mapping[str, Any]) -> set[str]:
    """Collect everything that a group contains, itself left out."""
    members = {name for name in whole["group_subtasks"].get(group, []) if name != group}
    return members | {name for member in members for name in _below(member, whole)}


def _leaves(task: str, whole: Mapping[str, Any]) -> list[str]:
    members = [name for name in whole["group_subtasks"].get(task, []) if name != task]
    return [leaf for name in members for leaf in _leaves(name, whole)] or [task]


def _suite_row(task: str, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Describe how a generated answer was cut, in the words of a suite."""
    config = whole["configs"].get(_leaves(task, whole)[0]) or {}
    how = config.get("generation_kwargs") or {}
    return {
        "task": task,
        "dataset": str(config.get("dataset_path", "")),
        "max_new_tokens": how.get("max_gen_toks"),
        "stop": (
            [how["until"]] if isinstance(how.get("until"), str) else how.get("until")
        ),
    }


def _task(
    task: str, whole: Mapping[str, Any], file: Path, wanted: str | None
) -> tuple[Result, list[dict[str, Any]]]:
    leaves = _leaves(task, whole)
    try:
        items = {leaf: _read_samples(leaf, file) for leaf in leaves}
        metric = _metric(task, whole["results"], items, file, wanted)
        name, rule = lm_eval_key(metric)
        samples = []
        for leaf, rows in items.items():
            chosen = sorted(
                (row for row in rows if row["filter"] == rule),
                key=lambda row: int(row["doc_id"]),
            )
            member = None if leaf == task else leaf
            samples += [
                lm_eval_sample(row, float(row[name]), member, _requests(row))
                for row in chosen
            ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: task {task}: result or samples are not as lm_eval writes them"
            f" ({error!r}); evaluate again"
        ) from None
    config = whole["configs"].get(leaves[0]) or {}
    # of a task, where fcsd wrote the files
    own = (config.get("metadata") or {}).get("chat_template")
    sizes = [(whole["n-samples"].get(leaf) or {}).get("original") for leaf in leaves]
    higher = (whole["higher_is_better"].get(leaves[0]) or {}).get(name)
    return {
        "metric": metric if "," in str(wanted or metric) else str(wanted),
        **mean_of([sample["score"] for sample in samples]),
        "num_items": len(samples),
        "num_items_total": (
            sum(sizes) if all(isinstance(size, int) for size in sizes) else len(samples)
        ),
        "num_fewshot": int(whole["n-shot"].get(leaves[0]) or 0),
        "kind": (
            "generation"
            if config.get("output_type") == "generate_until"
            else "likelihood"
        ),
        "headline": True,
        "higher_is_better": higher is not False,
        "chat_template": bool(whole.get("chat_template")) if own is None else bool(own),
        "dataset": str(config.get("dataset_path", "")),
        "revision": None,
    }, samples


def _read_samples(task: str, file: Path) -> list[dict[str, Any]]:
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
    what, rows = "a sample of lm_eval", []
    for where, row in json_lines(path, what, "; evaluate again"):
        try:
            int(row["doc_id"]), row["doc_hash"], row["prompt_hash"], row["filter"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{where}: not {what} ({error!r}); evaluate again"
            ) from None
        rows.append(row)
    return rows


def _metric(
    task: str,
    results: Mapping[str, Any],
    items: Mapping[str, list[dict[str, Any]]],
    file: Path,
    wanted: str | None,
) -> str:
    """Choose the `metric,filter` of a task: that which is asked for, or the first
    preferred one that is a mean over items."""
    leaf, rows = next(iter(items.items()))
    means = []
    for key, value in results[leaf].items():
        name, comma, rule = key.partition(",")
        if not comma or name.endswith("_stderr"):
            continue
        scores = [row.get(name) for row in rows if row["filter"] == rule]
        numbers = [float(score) for score in scores if isinstance(score, int | float)]
        if scores and len(numbers) == len(scores) and math.isclose(
            math.fsum(numbers) / len(numbers), value, rel_tol=1e-6, abs_tol=1e-9
        ):  # fmt: skip
            means.append(key)
    if wanted is not None:
        if ",".join(lm_eval_key(wanted)) not in means:
            raise UserError(
                f"{file}: task {task} has no metric {wanted}; it has"
                f" {', '.join(means) or 'none'}"
            )
        return ",".join(lm_eval_key(wanted))
    if not means:
        raise UserError(
            f"{file}: task {task} has no metric that is a mean over items, so it cannot"
            " be compared"
        )
    return next((key for key in _PREFERRED if key in means), means[0])


def _requests(row: Mapping[str, Any]) -> list[list[Any]]:
    return [
        list(each.values())
        for each in (row.get("arguments") or {}).values()
        if isinstance(each, dict)
    ]
