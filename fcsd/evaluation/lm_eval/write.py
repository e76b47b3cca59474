"""Write results as lm-eval's own files (0.4.13), for its tools and for programs that
read its results.

Not covered: `doc` of the samples is empty, because results of fcsd hold prompts and no
documents; of a task's metrics only the one that the suite names is there.
"""

import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fcsd.base.stats import pooled_standard_error, standard_error
from fcsd.base.writing import inside, write_json, write_text
from fcsd.evaluation.config import KINDS, lm_eval_key
from fcsd.evaluation.results import Samples, text_hash
from fcsd.evaluation.scores import Result, Row, Sample, by_member

_Report = dict[str, Any]  # lm-eval's results_TIME.json, or a part of it


def write_lm_eval(result: Result, samples: Samples, folder: Path) -> Path:
    """Write one evaluation below `folder`/<model>, as lm-eval names it; returns that
    folder.
    """
    from lm_eval.utils import sanitize_model_name

    name = _plain(str(result["model"]))
    model_folder = folder / sanitize_model_name(name)
    model_folder.mkdir(parents=True, exist_ok=True)
    time = datetime.now().isoformat().replace(":", "-")
    settings = result["settings"]
    versions = settings.get("versions", {})
    chat = [bool(row.get("chat_template")) for row in result["tasks"].values()]
    report: _Report = {
        "results": {}, "groups": {}, "group_subtasks": {}, "configs": {}, "versions": {}, "n-shot": {},
        "higher_is_better": {}, "n-samples": {},
        "config": {
            "model": "fcsd", "model_args": {"pretrained": name}, "limit": settings["limit"],
            "model_dtype": f"torch.{settings['dtype']}" if settings.get("dtype") else None,
            "batch_size": settings.get("batch_size"), "batch_sizes": [], "device": settings.get("device"),
            "bootstrap_iters": 0, "gen_kwargs": {}, "fewshot_seed": settings.get("fewshot_seed"),
        },
        "git_hash": None, "date": datetime.now().timestamp(), "transformers_version": versions.get("transformers"),
        "lm_eval_version": versions.get("lm-eval"), "task_hashes": {}, "model_source": "fcsd", "model_name": name,
        "model_name_sanitized": model_folder.name, "system_instruction": None, "system_instruction_sha": None,
        # lm-eval's are of a whole run, ours of a task, whose `metadata` has it
        "fewshot_as_multiturn": all(chat), "chat_template": None,
        "chat_template_sha": settings.get("chat_template_sha256") if all(chat) else None,
        "total_evaluation_time_seconds": str(result.get("wall_s", 0.0)),
    }  # fmt: skip
    suite = {row["task"]: row for row in settings.get("suite", {}).get("tasks", [])}
    for task, row in result["tasks"].items():
        if KINDS[row["kind"]].distance:  # which lm-eval does not know
            continue
        # lm-eval has one file of samples for each member of a group, and a score for
        # the group.
        members = by_member(samples[task], row["kind"])
        total = row.get("num_items_total")
        if members:
            total = None
            _add_group(report, task, row, members)
        for part, items in (members or {task: samples[task]}).items():
            _add_task(report, part, row, items, total)
            if KINDS[row["kind"]].writes and task in suite:
                report["configs"][part]["generation_kwargs"] = _generation_kwargs(
                    suite[task]
                )
            rows = [_lm_eval_sample(item, row) for item in items]
            # lm-eval also hashes a task from the hashes of its samples.
            hashes = ("doc_hash", "prompt_hash", "target_hash")
            report["task_hashes"][part] = text_hash(
                "".join(line[name] for line in rows for name in hashes)
            )
            lines = [
                json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n"
                for line in rows
            ]
            write_text(
                inside(model_folder, f"samples_{part}_{time}.jsonl"),
                _plain("".join(lines)),
            )
    if not report["groups"]:  # as lm-eval has it
        del report["groups"]
    write_json(model_folder / f"results_{time}.json", report)
    return model_folder


def _plain(text: str) -> str:
    """Replace halves of characters, which models do produce and UTF-8 cannot hold, by
    question marks.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def _add_scores(
    report: _Report, name: str, row: Row, items: Sequence[Sample], error: float | None
) -> _Report:
    """Add the fields that tasks and groups share; return the scores, of which a group
    has more. error: the standard error.
    """
    metric, rule = lm_eval_key(row["metric"])
    scores = [item["score"] for item in items]
    report["results"][name] = result = {
        "name": name,
        "alias": name,
        "sample_len": len(scores),
        f"{metric},{rule}": math.fsum(scores) / len(scores),
        # As lm-eval writes an error that is not known.
        f"{metric}_stderr,{rule}": "N/A" if error is None else error,
    }
    report["n-shot"][name] = row["num_fewshot"]
    report["versions"][name] = "fcsd"
    report["higher_is_better"][name] = {metric: row.get("higher_is_better", True)}
    return result


def _add_group(
    report: _Report, name: str, row: Row, members: Mapping[str, Sequence[Sample]]
) -> None:
    """Add a group: it has a score and no configuration, so that whoever reads `configs`
    finds samples for each.
    """
    items = [item for part in members.values() for item in part]
    error = pooled_standard_error(
        [[item["score"] for item in part] for part in members.values()]
    )
    report["groups"][name] = result = _add_scores(report, name, row, items, error)
    result["sample_count"] = {",".join(lm_eval_key(row["metric"])): len(items)}
    report["group_subtasks"][name] = list(members)


def _add_task(
    report: _Report, name: str, row: Row, items: Sequence[Sample], total: int | None
) -> None:
    error = standard_error([item["score"] for item in items])
    _add_scores(report, name, row, items, error)
    metric, rule = lm_eval_key(row["metric"])
    generates = KINDS[row["kind"]].writes
    higher_is_better = row.get("higher_is_better", True)
    report["configs"][name] = {
        "task": name,
        "dataset_path": row["dataset"],
        "num_fewshot": row["num_fewshot"],
        "output_type": "generate_until" if generates else "multiple_choice",
        "metric_list": [
            {
                "metric": metric,
                "aggregation": "mean",
                "higher_is_better": higher_is_better,
            }
        ],
        **({} if rule == "none" else {"filter_list": [{"name": rule}]}),
        "repeats": 1,
        # lm-eval leaves `metadata` to the task; `fcsd.evaluation.lm_eval.read` finds
        # these.
        "metadata": {
            "kind": row["kind"],
            "revision": row.get("revision"),
            "chat_template": bool(row.get("chat_template")),
        },
    }
    report["n-samples"][name] = {
        "original": total or len(items),
        "effective": len(items),
    }


def _generation_kwargs(row: Row) -> _Report:
    """Return lm-eval's words for a suite's row, of which `generation_settings` makes the
    row again; null is left out.
    """
    temperature = row.get("temperature")
    settings = {
        "max_gen_toks": row.get("max_new_tokens"),
        "until": row.get("stop"),
        "do_sample": None if temperature is None else temperature > 0,
        "temperature": temperature,
        "top_p": row.get("top_p"),
    }
    return {name: value for name, value in settings.items() if value is not None}


def _lm_eval_sample(sample: Sample, row: Row) -> _Report:
    metric, rule = lm_eval_key(row["metric"])
    prompt = sample.get("prompt", "")
    if "loglikelihoods" in sample:
        choices = sample.get("choices") or [""] * len(sample["loglikelihoods"])
        arguments = [[prompt, choice] for choice in choices]
        # lm-eval logs a second value, whether the answer is greedy, which results of
        # fcsd do not hold.
        responses: list[Any] = [
            [[str(value), ""]] for value in sample["loglikelihoods"]
        ]
        filtered = [first[0] for first in responses]
    else:
        arguments = [[prompt, ""]]
        texts = sample.get("completions") or [sample.get("completion", "")]
        responses, filtered = [list(texts)], list(texts)
    doc_id = str(sample["doc_id"])
    number = doc_id.rpartition("/")[2]
    return {
        "doc_id": int(number) if number.isdigit() else doc_id,
        "doc": {},
        "target": str(sample.get("target", "")),
        "arguments": {
            f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(pair)}
            for i, pair in enumerate(arguments)
        },
        "resps": responses,
        "filtered_resps": filtered,
        "filter": rule,
        "metrics": [metric],
        "doc_hash": sample["doc_hash"],
        "prompt_hash": sample["prompt_hash"],
        "target_hash": text_hash(str(sample.get("target", ""))),
        metric: sample["score"],
    }
