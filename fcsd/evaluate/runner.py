"""Runs a suite on a model in memory, and keeps the result in a folder.

    result, samples = evaluate(model, tokenizer, load_suite("tiny"), data_root=Path("data"), batch_size=16)
    write_result(result, samples, folder)      # results.json, samples_<task>.jsonl

Not covered: several ranks; continuing an evaluation that was stopped between tasks.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fcsd
from fcsd.errors import UserError
from fcsd.evaluate import likelihood
from fcsd.evaluate.code import Problem, generate_completions, load_problems, prompts
from fcsd.evaluate.scorer import CodeScorer
from fcsd.evaluate.scores import plain_mean, standard_error
from fcsd.evaluate.state import preserved
from fcsd.evaluate.suites import Suite, SuiteTask, dataset_location

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCHEMA_VERSION = 1
_VERSIONS = ("lm-eval", "transformers", "torch", "datasets")

Samples = dict[str, list[dict[str, Any]]]
Judge = Callable[["PreTrainedModel", str], tuple[dict[str, Any], Samples]]


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    suite: Suite,
    *,
    data_root: Path | None,
    batch_size: int,
    limit: int | None = None,
    allow_weak_sandbox: bool = False,
    progress: bool = True,
    name: str = "model",
) -> tuple[dict[str, Any], Samples]:
    """Judge `model` on every task of `suite`: (result, samples), both JSON-able.

    All data, templates and the sandbox are checked before the model is asked anything. The model's training
    mode and settings, the tokenizer, and the random generators are as before afterwards.

    Args:
        data_root: folder that holds the data sets in hub layout; None: the Hub, or its cache.
        limit: only the first items of every task (of every member, for a group of tasks); recorded in the
            result.
        allow_weak_sandbox: run generated code even where it cannot be kept off the network and from
        writing files.

    Raises:
        UserError: a task, data set, metric or chat template that does not exist; a sandbox that is too weak.
        ScorerError: the scorer of the code tasks failed; never a score of 0.
    """
    start = time.monotonic()
    options: dict[str, Any] = {
        "data_root": data_root,
        "batch_size": batch_size,
        "limit": limit,
        "allow_weak_sandbox": allow_weak_sandbox,
        "progress": progress,
    }
    with preserved(model, tokenizer), judging(tokenizer, suite, **options) as judge:
        result, samples = judge(model, name)
    return result | {"wall_s": time.monotonic() - start}, samples


@contextlib.contextmanager
def judging(
    tokenizer: "PreTrainedTokenizerBase",
    suite: Suite,
    *,
    data_root: Path | None,
    batch_size: int,
    limit: int | None = None,
    allow_weak_sandbox: bool = False,
    progress: bool = True,
) -> Iterator[Judge]:
    """`evaluate` for one model after another, as a function of model and name; data and sandbox are prepared once.

    Raises: as `evaluate`.
    """
    for text, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{text}: must be at least 1, got {value}")
    if data_root is not None and not data_root.is_dir():
        raise UserError(f"{data_root}: no such folder (data root)")
    layers: dict[str, Any] | None = None
    with contextlib.ExitStack() as stack:
        prepared: dict[str, Any] = {}
        for row in suite.tasks:
            if row.kind == "code":
                problems = load_problems(row, data_root)[:limit]
                prompts(tokenizer, problems[:1], row)
                prepared[row.task] = problems
            else:
                prepared[row.task] = likelihood.load_task(row, suite, data_root, tokenizer)
        scorers: dict[str, CodeScorer] = {}
        for row in suite.tasks:
            if row.kind == "code":
                scorer = CodeScorer(timeout_s=row.timeout_s or 10.0, allow_weak_sandbox=allow_weak_sandbox)
                scorers[row.task] = stack.enter_context(scorer)
                scorer.self_check(prepared[row.task], progress=progress)
                layers = scorer.layers

        def judge(model: "PreTrainedModel", name: str) -> tuple[dict[str, Any], Samples]:
            start = time.monotonic()
            samples: Samples = {}
            with preserved(model, tokenizer):
                model.eval()
                wrapper = None
                for row in suite.tasks:
                    if row.kind == "code":
                        samples[row.task] = _run_code(
                            model, tokenizer, row, prepared[row.task], scorers[row.task], batch_size, progress
                        )
                        continue
                    if wrapper is None:
                        wrapper = likelihood.language_model(
                            model, tokenizer, batch_size=batch_size, progress=progress
                        )
                    samples[row.task] = likelihood.run_task(wrapper, row, prepared[row.task], limit)
            settings = {"limit": limit, "batch_size": batch_size, "data_root": data_root}
            result = _result(model, tokenizer, suite, samples, settings, name)
            return result | {"sandbox": layers, "wall_s": time.monotonic() - start}, samples

        yield judge


def _result(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    suite: Suite,
    samples: Samples,
    settings: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    data_root = settings["data_root"]
    tasks = {row.task: _task_result(row, samples[row.task], data_root) for row in suite.tasks}
    mean, error = plain_mean([(task["value"], task["stderr"]) for task in tasks.values() if task["headline"]])
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": suite.name,
        "model": name,
        "tasks": tasks,
        "mean": mean,
        "mean_stderr": error,
        "settings": {
            **settings,
            "data_root": None if data_root is None else str(data_root),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "chat_template_sha256": _chat_template_hash(tokenizer, suite),
            "fewshot_seed": likelihood.FEWSHOT_SEED,
            "decoding": "greedy",
            "suite": suite.model_dump(mode="json", exclude={"folder"}),
            "versions": {"python": platform.python_version(), **_versions()},
        },
    }


def _run_code(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    row: SuiteTask,
    problems: Sequence[Problem],
    scorer: CodeScorer,
    batch_size: int,
    progress: bool,
) -> list[dict[str, Any]]:
    """Generate and score; one sample a problem."""
    completions = generate_completions(
        model, tokenizer, problems, task=row, batch_size=batch_size, progress=progress
    )
    outcomes = scorer.score(problems, completions, progress=progress)
    return [
        {
            "doc_id": problem.task_id,
            "doc_hash": _hash(json.dumps([problem.prompt, *problem.tests])),
            "prompt_hash": _hash(prompt),
            "score": float(outcome.passed),
            "target": problem.canonical,
            "completion": completions[problem.task_id],
            "outcome": outcome.outcome,
            "message": outcome.message,
        }
        for problem, prompt, outcome in zip(
            problems, prompts(tokenizer, problems, row), outcomes, strict=True
        )
    ]


def _task_result(
    row: SuiteTask, samples: Sequence[Mapping[str, Any]], data_root: Path | None
) -> dict[str, Any]:
    scores = [sample["score"] for sample in samples]
    result: dict[str, Any] = {
        "metric": row.metric,
        "value": math.fsum(scores) / len(scores),
        "stderr": standard_error(scores),
        "num_items": len(scores),
        "num_fewshot": row.num_fewshot,
        "kind": row.kind,
        "headline": row.headline,
        "chat_template": row.chat_template,
        "dataset": dataset_location(row, data_root),
        "revision": row.revision if data_root is None else None,
    }
    if row.kind == "code":
        names = [sample["outcome"] for sample in samples]
        result["outcomes"] = {name: names.count(name) for name in sorted(set(names))}
    return result


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _chat_template_hash(tokenizer: Any, suite: Suite) -> str | None:
    if not any(row.chat_template for row in suite.tasks):
        return None
    return _hash(json.dumps(tokenizer.chat_template, sort_keys=True))


def _versions() -> dict[str, str]:
    return {"fcsd": fcsd.__version__} | {name: importlib.metadata.version(name) for name in _VERSIONS}


def write_result(
    result: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]], folder: Path
) -> None:
    """Write `samples_<task>.jsonl` and, last, `results.json`; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, items in samples.items():
        with _replacing(folder / f"samples_{task}.jsonl") as file:
            for item in items:
                file.write(json.dumps(item, allow_nan=False) + "\n")
    with _replacing(folder / "results.json") as file:
        json.dump(result, file, indent=2, allow_nan=False)
        file.write("\n")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """A text file that takes its final name when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_result(folder: Path) -> tuple[dict[str, Any], Samples]:
    """What `write_result` wrote: (result, samples).

    Raises:
        UserError: no result there, a damaged file, or a version of the format that this fcsd does not know.
    """
    path = folder / "results.json"
    if not path.is_file():
        raise UserError(f"{folder}: no results.json; this is not a folder that `fcsd evaluate` wrote")
    result = _parse(path, path.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or not isinstance(result.get("tasks"), dict):
        raise UserError(f"{path}: not a result of `fcsd evaluate`")
    if result.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version is {result.get('schema_version')}, this fcsd reads {SCHEMA_VERSION};"
            " evaluate again"
        )
    samples: Samples = {}
    for task, row in result["tasks"].items():
        file = folder / f"samples_{task}.jsonl"
        if not file.is_file():
            raise UserError(f"{file}: no such file, though results.json has the task {task}; evaluate again")
        lines = file.read_text(encoding="utf-8").splitlines()
        samples[task] = [_parse(file, line, number) for number, line in enumerate(lines, start=1)]
        if len(samples[task]) != row["num_items"]:
            raise UserError(
                f"{file}: {len(samples[task])} samples, but results.json says {row['num_items']};"
                " evaluate again"
            )
    return result, samples


def _parse(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = f"{path}, line {line}" if line else str(path)
        raise UserError(f"{where}: not valid JSON ({error}); evaluate again") from None
