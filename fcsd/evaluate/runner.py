"""Runs a suite on a model in memory, and keeps the result in a folder.

    result, samples = evaluate(model, tokenizer, load_suite("tiny"), data_root=Path("data"), batch_size=16)
    write_result(result, samples, folder)      # results.json, samples_<task>.jsonl

With a `TaskStore`, finished tasks are kept and not run again. On several ranks (`ranks=ranks_of(model)`) all of them
make these calls and return the same; the first one alone prints, keeps and writes.

Not covered: a model that some of the ranks do not hold.
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
from fcsd.errors import ScorerError, UserError
from fcsd.evaluate import likelihood
from fcsd.evaluate.batch import Batch, BatchSize, check_batch_size
from fcsd.evaluate.code import generate_completions, prompts
from fcsd.evaluate.fetch import fetched_revision
from fcsd.evaluate.problems import Problem, load_problems
from fcsd.evaluate.progress import Progress, Work
from fcsd.evaluate.question import end_of
from fcsd.evaluate.ranks import ALONE, Ranks, input_device
from fcsd.evaluate.scorer import CodeScorer, Outcome, pass_at_k
from fcsd.evaluate.scores import plain_mean, standard_error
from fcsd.evaluate.state import preserved
from fcsd.evaluate.store import TaskStore
from fcsd.evaluate.suites import Suite, SuiteTask, dataset_location, pass_k

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCHEMA_VERSION = 1
_ROW_KEYS = ("metric", "value", "stderr", "num_items", "num_fewshot", "kind", "headline")
_VERSIONS = ("lm-eval", "transformers", "torch", "datasets")

Samples = dict[str, list[dict[str, Any]]]
Judge = Callable[["PreTrainedModel", str], tuple[dict[str, Any], Samples]]


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    suite: Suite,
    *,
    data_root: Path | None,
    batch_size: BatchSize,
    limit: int | None = None,
    allow_weak_sandbox: bool = False,
    progress: bool = True,
    name: str = "model",
    store: TaskStore | None = None,
    ranks: Ranks = ALONE,
) -> tuple[dict[str, Any], Samples]:
    """Judge `model` on every task of `suite`: (result, samples), both JSON-able.

    All data, templates and the sandbox are checked before the model is asked anything. The model's training
    mode and settings, the tokenizer, and the random generators are as before afterwards.

    Args:
        data_root: folder that holds the data sets in hub layout; None: the Hub, or its cache.
        batch_size: sequences in one forward, or "auto" (`fcsd.evaluate.batch`).
        limit: only the first items of every task (of every member, for a group of tasks); recorded in the
            result.
        allow_weak_sandbox: run generated code even where it cannot be kept off the network and from
        writing files.
        store: where finished tasks are kept and found; the first rank's.
        ranks: those that share the work (`fcsd.evaluate.ranks`); by default this process does all of it.

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
        "store": store,
        "ranks": ranks,
    }
    with preserved(model, tokenizer), judging(tokenizer, suite, **options) as judge:
        result, samples = judge(model, name)
    return result | {"wall_s": ranks.from_first(lambda: time.monotonic() - start)}, samples


@contextlib.contextmanager
def judging(
    tokenizer: "PreTrainedTokenizerBase",
    suite: Suite,
    *,
    data_root: Path | None,
    batch_size: BatchSize,
    limit: int | None = None,
    allow_weak_sandbox: bool = False,
    progress: bool = True,
    store: TaskStore | None = None,
    ranks: Ranks = ALONE,
    any_direction: bool = False,
) -> Iterator[Judge]:
    """`evaluate` for one model after another, as a function of model and name; data and sandbox are prepared once.

    any_direction: take metrics of which less is better, too; for scores that are not compared between models.

    Raises: as `evaluate`.
    """
    check_batch_size(batch_size, ranks)
    if limit is not None and limit < 1:
        raise UserError(f"limit: must be at least 1, got {limit}")
    if data_root is not None and not data_root.is_dir():
        raise UserError(f"{data_root}: no such folder (data root)")
    kept = ranks.from_first(
        lambda: {row.task: found for row in suite.tasks if store is not None and (found := store.get(row))}
    )
    missing = [row for row in suite.tasks if row.task not in kept]
    with contextlib.ExitStack() as stack:
        prepared: dict[str, Any] = {}
        facts: dict[str, dict[str, Any]] = {task: found for task, (_, found) in kept.items()}
        for row in missing:
            if row.kind == "code":
                problems = load_problems(row, data_root)
                prompts(tokenizer, problems[:1], row)
                prepared[row.task], total, higher_is_better = problems[:limit], len(problems), True
            else:
                prepared[row.task] = likelihood.load_task(row, suite, data_root, tokenizer)
                total = likelihood.num_items(prepared[row.task], None)
                higher_is_better = likelihood.higher_is_better(prepared[row.task], row)
            if not (higher_is_better or any_direction):
                raise UserError(
                    f"task {row.task}: lower is better in {row.metric}; models are compared by metrics of which more is"
                    " better, so choose one of those, or leave the task out"
                )
            facts[row.task] = {"num_items_total": total, "higher_is_better": higher_is_better}
        scorer: CodeScorer | None = None

        def checked() -> dict[str, Any] | None:
            """Start the sandbox, of which one is enough for all ranks; its layers."""
            nonlocal scorer
            for row in missing:
                if row.kind == "code":
                    if scorer is None:
                        scorer = stack.enter_context(CodeScorer(allow_weak_sandbox=allow_weak_sandbox))
                    try:
                        scorer.self_check(prepared[row.task], timeout_s=row.timeout_s, progress=progress)
                    except ScorerError as error:
                        raise ScorerError(f"task {row.task}: {error}") from error
            return scorer.layers if scorer is not None else None

        layers = ranks.from_first(checked)
        for row in missing:
            if row.kind == "code":
                facts[row.task]["sandbox"] = layers
        work = {
            row.task: _code_work(row, prepared[row.task])
            if row.kind == "code"
            else likelihood.work(row, prepared[row.task], limit)
            for row in missing
        }

        def judge(model: "PreTrainedModel", name: str) -> tuple[dict[str, Any], Samples]:
            start = time.monotonic()
            samples = {task: found for task, (found, _) in kept.items()}
            batch = Batch(batch_size, model)
            steps = Progress(work, len(kept))
            with preserved(model, tokenizer):
                model.eval()
                wrapper = None
                for row in missing:
                    if progress and ranks.first:
                        steps.start(row.task)
                    try:
                        if row.kind == "code":
                            samples[row.task] = _run_code(
                                model, tokenizer, row, prepared[row.task], scorer, batch, ranks, progress
                            )
                        else:
                            wrapper = wrapper or likelihood.language_model(
                                model, tokenizer, batch, progress=progress, ranks=ranks
                            )
                            samples[row.task] = likelihood.run_task(wrapper, row, prepared[row.task], limit)
                    except (UserError, ScorerError) as error:
                        if store is None or not samples:
                            raise
                        kept_text = (
                            "the finished task is kept"
                            if len(samples) == 1
                            else f"the {len(samples)} finished tasks are kept"
                        )
                        kind = UserError if isinstance(error, UserError) else ScorerError
                        raise kind(f"{error} ({kept_text}; run again to go on)") from error
                    if store is not None and ranks.first:
                        store.put(row, samples[row.task], facts[row.task])
            settings = {"limit": limit, "batch_size": batch_size, "data_root": data_root}
            ordered = {row.task: samples[row.task] for row in suite.tasks}
            result = _result(model, tokenizer, suite, ordered, facts, settings, name)
            seconds = ranks.from_first(lambda: time.monotonic() - start)
            return result | {"wall_s": seconds}, ordered

        yield judge


def _result(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    suite: Suite,
    samples: Samples,
    facts: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    data_root = settings["data_root"]
    tasks = {
        row.task: task_result(row, samples[row.task], facts[row.task]["num_items_total"], data_root)
        | {"higher_is_better": facts[row.task]["higher_is_better"]}
        for row in suite.tasks
    }
    # A task that was finished before may have run in another sandbox: the first one counts.
    sandboxes = [found["sandbox"] for found in facts.values() if "sandbox" in found]
    mean, error = plain_mean([(task["value"], task["stderr"]) for task in tasks.values() if task["headline"]])
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": suite.name,
        "model": name,
        "complete": settings["limit"] is None,  # false: a quick look at the first items, not a result
        "tasks": tasks,
        "mean": mean,
        "mean_stderr": error,
        "sandbox": sandboxes[0] if sandboxes else None,
        "settings": {
            **settings,
            "data_root": None if data_root is None else str(data_root),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": input_device(model).type,
            "chat_template_sha256": _chat_template_hash(tokenizer, suite),
            "fewshot_seed": likelihood.FEWSHOT_SEED,
            "decoding": "greedy, but where a row has a temperature",
            "suite": suite.model_dump(mode="json", exclude={"folder"}),
            "versions": {"python": platform.python_version(), **_versions()},
        },
    }


def _code_work(row: SuiteTask, problems: Sequence[Problem]) -> Work:
    tokens = len(problems) * (row.num_samples or 1) * (row.max_new_tokens or 0)
    return Work(len(problems), "tokens", tokens)


def _run_code(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    row: SuiteTask,
    problems: Sequence[Problem],
    scorer: CodeScorer | None,
    batch: Batch,
    ranks: Ranks,
    progress: bool,
) -> list[dict[str, Any]]:
    """Generate on all ranks, and score on the first, which has the scorer; one sample a problem."""
    completions = generate_completions(
        model, tokenizer, problems, task=row, batch_size=batch, progress=progress, ranks=ranks
    )

    def scored() -> list[dict[str, Any]]:
        assert scorer is not None
        options: dict[str, Any] = {"timeout_s": row.timeout_s, "progress": progress}
        try:
            outcomes = scorer.score_samples(problems, completions, **options)
        except ScorerError:  # once more: it begins with new servers, and what was generated is worth hours
            outcomes = scorer.score_samples(problems, completions, **options)
        texts = prompts(tokenizer, problems, row)
        return [
            code_sample(row, problem, prompt, completions[problem.task_id], found)
            for problem, prompt, found in zip(problems, texts, outcomes, strict=True)
        ]

    return ranks.from_first(scored)


def code_sample(
    row: SuiteTask, problem: Problem, prompt: str, completions: Sequence[str], outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    """What is kept of one problem: its score is the estimate of pass@k, so 0 or 1 for one completion."""
    sample: dict[str, Any] = {
        "doc_id": problem.task_id,
        "doc_hash": text_hash(json.dumps([problem.prompt, *problem.base_tests, *problem.tests])),
        "prompt_hash": text_hash(prompt),
        "score": _pass_at_k(outcomes, pass_k(row)),
        "target": problem.canonical,
        "prompt": end_of(prompt),
    }
    if problem.base_tests:
        sample["base_score"] = _pass_at_k(outcomes, pass_k(row), base=True)
    if len(outcomes) > 1:
        return sample | {
            "completions": list(completions),
            "outcomes": [outcome.outcome for outcome in outcomes],
            "base_outcomes": [outcome.base for outcome in outcomes],
        }
    (outcome,) = outcomes
    base = {"base_outcome": outcome.base} if problem.base_tests else {}
    return sample | {
        "completion": completions[0],
        "outcome": outcome.outcome,
        **base,
        "message": outcome.message,
    }


def _pass_at_k(outcomes: Sequence[Outcome], k: int, *, base: bool = False) -> float:
    passed = sum((outcome.base if base else outcome.outcome) == "passed" for outcome in outcomes)
    return pass_at_k(len(outcomes), passed, k)


def task_result(
    row: SuiteTask, samples: Sequence[Mapping[str, Any]], num_items_total: int, data_root: Path | None
) -> dict[str, Any]:
    """What the result says about one task."""
    scores = [sample["score"] for sample in samples]
    result: dict[str, Any] = {
        "metric": row.metric,
        "value": math.fsum(scores) / len(scores),
        "stderr": standard_error(scores),
        "num_items": len(scores),
        "num_items_total": num_items_total,
        "num_fewshot": row.num_fewshot,
        "kind": row.kind,
        "headline": row.headline,
        "chat_template": row.chat_template,
        "dataset": dataset_location(row, data_root),
        "revision": row.revision if data_root is None else fetched_revision(row, data_root),
    }
    if row.kind == "code":
        result |= code_numbers(samples)
    else:
        result["prompts_cut"] = sum(sample.get("cut", False) for sample in samples)
    return result


def code_numbers(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Outcome classes over all programs, the base score, and pass@k for the usual k up to the number of samples."""
    outcomes = [name for sample in samples for name in sample.get("outcomes") or [sample["outcome"]]]
    numbers: dict[str, Any] = {"outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))}}
    if all("base_score" in sample for sample in samples):
        base = [sample["base_score"] for sample in samples]
        numbers["base"] = {"value": math.fsum(base) / len(base), "stderr": standard_error(base)}
    count = min(len(sample.get("outcomes") or [0]) for sample in samples)
    if count > 1:
        passed = [[name == "passed" for name in sample["outcomes"]] for sample in samples]
        numbers["pass_at_k"] = {
            str(k): math.fsum(pass_at_k(len(each), sum(each), k) for each in passed) / len(passed)
            for k in (1, 5, 10, 100)
            if k <= count
        }
    return numbers


def text_hash(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _chat_template_hash(tokenizer: Any, suite: Suite) -> str | None:
    if not any(row.chat_template for row in suite.tasks):
        return None
    return text_hash(json.dumps(tokenizer.chat_template, sort_keys=True))


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
    if folder.is_file():
        raise UserError(f"{folder}: is a file; give the folder that it lies in")
    if not path.is_file():
        unfinished = (folder / "stage.json").is_file()
        why = (
            "the evaluation is not finished; run it again, and it goes on"
            if unfinished
            else "this is not a folder that `fcsd evaluate` wrote"
        )
        raise UserError(f"{folder}: no results.json; {why}")
    result = _parse(path, path.read_text(encoding="utf-8"))
    if not isinstance(result, dict) or not isinstance(result.get("tasks"), dict):
        raise UserError(f"{path}: not a result of `fcsd evaluate`")
    if result.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version is {result.get('schema_version')}, this fcsd reads {SCHEMA_VERSION};"
            " evaluate again"
        )
    if "limit" not in (result.get("settings") or {}):
        raise UserError(f"{path}: lacks settings.limit; evaluate again")
    samples: Samples = {}
    for task, row in result["tasks"].items():
        if missing := [key for key in _ROW_KEYS if key not in row]:
            raise UserError(f"{path}: task {task} lacks {', '.join(missing)}; evaluate again")
        file = folder / f"samples_{task}.jsonl"
        if not file.is_file():
            raise UserError(f"{file}: no such file, though results.json has the task {task}; evaluate again")
        lines = file.read_text(encoding="utf-8").splitlines()
        samples[task] = [_sample(file, line, number) for number, line in enumerate(lines, start=1)]
        if len(samples[task]) != row["num_items"]:
            raise UserError(
                f"{file}: {len(samples[task])} samples, but results.json says {row['num_items']};"
                " evaluate again"
            )
        mean = math.fsum(sample["score"] for sample in samples[task]) / max(1, len(samples[task]))
        if not math.isclose(mean, row["value"], rel_tol=1e-9, abs_tol=1e-9):
            raise UserError(
                f"{file}: its samples average {mean:.6g}, but results.json says {row['value']:.6g}: they are not of one"
                " evaluation; evaluate again"
            )
    return result, samples


def _sample(file: Path, line: str, number: int) -> dict[str, Any]:
    sample = _parse(file, line, number)
    if not isinstance(sample, dict) or not {"doc_id", "doc_hash", "prompt_hash", "score"} <= sample.keys():
        raise UserError(
            f"{file}, line {number}: not a sample (doc_id, doc_hash, prompt_hash, score); evaluate again"
        )
    return sample


def _parse(path: Path, text: str, line: int | None = None) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        where = f"{path}, line {line}" if line else str(path)
        raise UserError(f"{where}: not valid JSON ({error}); evaluate again") from None
