"""List evaluation results in the Hub's formats: `model-index`, `.eval_results`."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import EvalResult, EvalResultEntry

from fcsd.base.text import metric_words
from fcsd.report.publish.facts import hub_id

RESULTS = ".eval_results"


# Data set -> id of the task in its `eval.yaml`, by which the Hub finds a result of a Benchmark. The one of our suites'
# data sets that https://huggingface.co/docs/hub/eval-results names as a Benchmark.
_BENCHMARK_TASKS = {"openai/gsm8k": "gsm8k"}


def _tasks(result: Mapping[str, Any] | None) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Yield (task, measured row, suite row) of every task on a data set of the Hub; nothing of a quick look."""
    if result is None or result["settings"]["limit"]:
        return []
    # The suite's data set id, not the folder it was read from.
    suite = {row["task"]: row for row in result["settings"].get("suite", {}).get("tasks", [])}
    return [
        (task, row, suite[task])
        for task, row in result["tasks"].items()
        if task in suite and hub_id(str(suite[task]["dataset"]))
    ]


def model_index(result: Mapping[str, Any] | None) -> list[EvalResult] | None:
    found = [
        EvalResult(
            task_type="text-generation",
            dataset_type=suite["dataset"],
            dataset_name=task,
            dataset_config=suite.get("dataset_name"),
            dataset_split=suite.get("split"),
            dataset_revision=row.get("revision"),
            dataset_args={"num_few_shot": row["num_fewshot"]},
            metric_type=row["metric"].partition(",")[0],
            metric_name=f"{metric_words(row['metric'])}, per cent",
            metric_value=round(100 * row["value"], 2),
        )
        for task, row, suite in _tasks(result)
    ]
    return found or None


def result_entries(result: Mapping[str, Any] | None) -> dict[str, EvalResultEntry]:
    """Return task -> entry of `.eval_results/TASK.yaml`: per cent, with the setting in the notes."""
    versions = (result or {}).get("settings", {}).get("versions", {})
    entries = {}
    for task, row, suite in _tasks(result):
        error = "–" if row["stderr"] is None else f"{100 * row['stderr']:.2f}"
        entries[task] = EvalResultEntry(
            dataset_id=suite["dataset"],
            task_id=_BENCHMARK_TASKS.get(suite["dataset"]) or suite.get("dataset_name") or "default",
            dataset_revision=row.get("revision"),
            value=round(100 * row["value"], 2),
            notes=(
                f"{task}: {row['metric']} in per cent ± {error}, {row['num_fewshot']}-shot,"
                f" n = {row['num_items']}"
                + (", chat template" if row.get("chat_template") else "")
                + "".join(f", {name} {versions[name]}" for name in ("fcsd", "lm-eval") if name in versions)
            ),
        )
    return entries
