"""Build, write and read the results of an evaluation: `results.json` and one file of
samples for each task, a JSON value a line.

`docs/results.md` has every key.

Finished tasks are kept (`TaskStore`): an interrupted evaluation continues with the next
task, and the same weights never get the same questions twice. The key of a task is a
hash over the weights, the configuration and tokenizer, the suite's row, the bytes of
the data, the limit and the versions; a path or a name never enters it. A server's
answers are kept one by one (`Journal`).
"""

import contextlib
import gzip
import hashlib
import importlib.metadata
import json
import math
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, field_validator

import fcsd
from fcsd.base.artifact import check_outputs, command_record
from fcsd.base.errors import UserError, one_line
from fcsd.base.files import (
    check_regular,
    checkpoint_files,
    content_fingerprint,
    file_fingerprint,
    parse_json,
    read_json,
    read_text,
    write_sealed,
)
from fcsd.base.stats import plain_mean, ratio, standard_error
from fcsd.base.strict import check_name, validate
from fcsd.base.writing import make_folder, write_text, writing
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.scorer import Outcome
from fcsd.evaluation.config import (
    KINDS,
    CodeTaskConfig,
    Kind,
    LMEvalTaskConfig,
    TaskConfig,
    pass_k,
)
from fcsd.evaluation.datasets import dataset_location, fetched_revision
from fcsd.evaluation.own_text.text import figures_of
from fcsd.evaluation.scores import Result, Row, Rows, Sample, floor_of
from fcsd.evaluation.suites import shipped_floor

SCHEMA_VERSION = 1
_SAVED = "saved result"  # in place of a stage, in the manifest
Samples = dict[str, list[Sample]]
_SAMPLE_KEYS: dict[str, Any] = {
    "doc_id": int | str,
    "doc_hash": str,
    "prompt_hash": str,
    "score": int | float,
}
_LONGEST = 2000  # characters of a prompt; the whole prompt is identified by its hash


class _Read(BaseModel, strict=True):
    """What a comparison reads of results.json, whose other keys may hold anything."""


class _Row(_Read):
    metric: str
    value: float
    stderr: float | None
    num_items: int
    num_fewshot: int
    kind: str
    headline: bool
    dataset: str

    @field_validator("kind")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in KINDS:
            raise ValueError(f"no kind of task; allowed: {', '.join(KINDS)}")
        return value


class _SuiteRow(_Read):
    task: str


class _Suite(_Read):
    tasks: list[_SuiteRow]


class _Settings(_Read):
    limit: float | None
    suite: _Suite = _Suite(tasks=[])
    versions: dict[str, Any] = {}


class _Result(_Read):
    tasks: dict[str, _Row]
    settings: _Settings
    sandbox: dict[str, Any] | None = None


def shown_question(requests: Sequence[tuple[str, str]]) -> Sample:
    """Return the end of the prompt, and the choices: {"prompt": …, "choices": […]}; {}
    for no request.

    requests: (context, continuation) of every request about one item; one request: no
    choices. Where contexts differ (WinoGrande), the prompt is what they share, and a
    choice is the rest of its context too.
    """
    if not requests:
        return {}
    contexts = [context for context, _ in requests]
    prompt = os.path.commonprefix(contexts)  # noqa: RUF071  by characters, as needed
    if prompt != max(contexts):  # they differ, and may do so in the middle of a word
        prompt = prompt[: max(prompt.rfind(space) for space in " \n") + 1]
    question: Sample = {"prompt": end_of(prompt)}
    if len(requests) > 1:
        question["choices"] = [
            context[len(prompt) :] + continuation for context, continuation in requests
        ]
    return question


def end_of(prompt: str) -> str:
    """Return the last 2,000 characters, which have the question; examples stand before
    it.
    """
    return prompt if len(prompt) <= _LONGEST else f"…{prompt[-_LONGEST:]}"


def items_of_filter(items: Sequence[Sample], name: str) -> list[Sample]:
    """Return the items of one filter, in the order of the data set: lm-eval logs an
    item once for each filter of its task.
    """
    chosen = (item for item in items if item["filter"] == name)
    return sorted(chosen, key=lambda item: int(item["doc_id"]))


def lm_eval_sample(
    row: Mapping[str, Any],
    score: float,
    member: str | None,
    arguments: Sequence[Sequence[Any]],
) -> Sample:
    """Build an fcsd sample from one that lm-eval logged.

    member: the item's task within a group. arguments: of every request about the item.
    """
    doc_id = int(row["doc_id"])
    sample: Sample = {
        "doc_id": doc_id if member is None else f"{member}/{doc_id}",
        "doc_hash": row["doc_hash"],
        "prompt_hash": row["prompt_hash"],
        "score": score,
        "target": str(row.get("target", "")),
    }
    requests = [
        (str(context), str(continuations[0]) if continuations else "")
        for context, *continuations in arguments
    ]
    response = (row.get("resps") or [[""]])[0][0]
    # A likelihood task's response is (log-likelihood, whether it is the greedy answer).
    if isinstance(response, list | tuple):
        sample["loglikelihoods"] = [float(choice[0][0]) for choice in row["resps"]]
    else:
        sample["completion"] = str(response)
        requests = [(context, "") for context, _ in requests[:1]]
    return sample | shown_question(requests)


def generation_settings(
    settings: Mapping[str, Any], max_new_tokens: int | None = None
) -> Row:
    """Describe lm-eval's `generation_kwargs` in the words of a suite's row.

    max_new_tokens: where the task sets none; None: not known.
    """
    # lm-eval takes the first of these names (`normalize_gen_kwargs`).
    limits = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    for name in reversed(limits):
        max_new_tokens = settings.get(name) or max_new_tokens
    stop = settings.get("until") or []
    temperature = settings.get("temperature")
    # Greedy, unless it samples or has a temperature and does not say whether it does.
    sampled = settings.get("do_sample", bool(temperature))
    return {
        "max_new_tokens": max_new_tokens,
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "temperature": temperature if sampled else 0.0,
        "top_p": settings.get("top_p", 1.0) if sampled else 1.0,
    }


def code_samples(
    row: CodeTaskConfig,
    problems: Sequence[Problem],
    prompts: Sequence[str],
    completions: Mapping[str, Sequence[str]],
    outcomes: Sequence[Sequence[Outcome]],
) -> list[Sample]:
    """Build the sample of each problem. Its score is the estimate of pass@k, so 0 or 1
    for a single completion.
    """
    k, samples = pass_k(row), []
    for problem, prompt, of_problem in zip(problems, prompts, outcomes, strict=True):
        texts = list(completions[problem.task_id])
        classes: list[Any] = [outcome.outcome for outcome in of_problem]
        base_classes: list[Any] = [outcome.base for outcome in of_problem]
        # Another test makes another item, which is never compared with this one.
        content = [problem.prompt, *problem.base_tests, *problem.tests]
        sample: Sample = {
            "doc_id": problem.task_id,
            "doc_hash": text_hash(json.dumps(content)),
            "prompt_hash": text_hash(prompt),
            "score": pass_at_k(len(classes), classes.count("passed"), k),
            "target": problem.canonical,
            "prompt": end_of(prompt),
        }
        if problem.base_tests:
            passed = base_classes.count("passed")
            sample["base_score"] = pass_at_k(len(classes), passed, k)
        if len(of_problem) > 1:
            sample |= {"completions": texts, "outcomes": classes}
            sample["base_outcomes"] = base_classes
        else:
            if problem.base_tests:
                sample["base_outcome"] = base_classes[0]
            sample |= {"completion": texts[0], "outcome": classes[0]}
            sample["message"] = of_problem[0].message
        samples.append(sample)
    return samples


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Compute the chance that one of k programs drawn without replacement from the
    samples passes:

    The unbiased estimator of Chen et al. 2021 (Codex), equation 1; the mean over
    problems is pass@k.
    """
    if not 0 <= num_passed <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_passed} passed of {num_samples} samples")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def task_result(
    row: TaskConfig,
    samples: Sequence[Sample],
    num_items_total: int,
    data_root: Path | None,
) -> Row:
    """Build the entry of one task in the result."""
    facts = row.model_dump(exclude_none=True)
    if row.floor is None and isinstance(row, LMEvalTaskConfig):
        facts["floor"] = shipped_floor(row.task, row.metric)
    result: Row = {
        "metric": row.metric,
        **mean_of([sample["score"] for sample in samples]),
        "floor": floor_of(facts, samples),
        "num_items": len(samples),
        "num_items_total": num_items_total,
        "num_fewshot": row.num_fewshot,
        "kind": row.kind,
        "headline": row.headline,
        "chat_template": row.chat_template,
        # Of local data the revision that was fetched, which the suite cannot know.
        "dataset": dataset_location(row, data_root),
        "revision": (
            row.revision if data_root is None else fetched_revision(row, data_root)
        ),
    }
    return result | NUMBERS[row.kind](samples)


def lm_eval_numbers(samples: Sequence[Sample]) -> Row:
    """Count the prompts that were cut, and compute the task's other metrics."""
    numbers: Row = {"prompts_cut": sum(sample.get("cut", False) for sample in samples)}
    if metrics := _metrics_beside(samples):
        numbers["metrics"] = metrics
    return numbers


def _metrics_beside(samples: Sequence[Sample]) -> Row:
    """Return `value` and `stderr` of the task's other metrics: the mean over items, or
    over all parts of items (IFEval's instructions).
    """
    metrics = {}
    of_items = [sample.get("metrics", {}) for sample in samples]
    for name in of_items[0]:
        if all(name in of_item for of_item in of_items):
            values = [of_item[name] for of_item in of_items]
            parts = [value if isinstance(value, list) else [value] for value in values]
            mean = ratio([float(sum(part)) for part in parts], list(map(len, parts)))
            metrics[name] = mean._asdict()
    return metrics


def mean_of(scores: Sequence[float]) -> Row:
    """Return `value` and `stderr` of items with these scores."""
    return {"value": math.fsum(scores) / len(scores), "stderr": standard_error(scores)}


def code_numbers(samples: Sequence[Sample]) -> Row:
    """Count outcome classes over all programs; compute the base score, and pass@k for
    the usual k up to the samples.
    """
    by_problem = [sample.get("outcomes") or [sample["outcome"]] for sample in samples]
    outcomes = [name for of_problem in by_problem for name in of_problem]
    numbers: Row = {
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))}
    }
    if all("base_score" in sample for sample in samples):
        numbers["base"] = mean_of([sample["base_score"] for sample in samples])
    # pass@k needs k samples of every problem.
    count = min(map(len, by_problem))
    if count > 1:
        numbers["pass_at_k"] = {}
        for k in (1, 5, 10, 100):
            if k <= count:
                estimates = [
                    pass_at_k(len(of_problem), of_problem.count("passed"), k)
                    for of_problem in by_problem
                ]
                numbers["pass_at_k"][str(k)] = math.fsum(estimates) / len(estimates)
    return numbers


def own_text_numbers(samples: Sequence[Sample]) -> Row:
    """Compute the figures of own text beside its metric, means over prompts."""
    figures = [figures_of(sample) for sample in samples]
    return {
        "metrics": {
            name: mean_of([sample[name] for sample in figures]) for name in figures[0]
        }
    }


NUMBERS: dict[str, Callable[[Sequence[Sample]], Row]] = {
    "likelihood": lm_eval_numbers,
    "generation": lm_eval_numbers,
    "code": code_numbers,
    "own_text": own_text_numbers,
}
"""Kind of a task -> its numbers beside the score."""


def whole_result(
    suite: str,
    model: str,
    tasks: Rows,
    settings: Mapping[str, Any],
    sandbox: Mapping[str, Any] | None,
) -> Result:
    """Build the content of `results.json`, with the plain mean over the headline tasks.

    sandbox: the layers that generated code ran in; None for none.
    """
    counted = [
        (task["value"], task["stderr"]) for task in tasks.values() if task["headline"]
    ]
    # A suite of own text alone has no mean.
    mean, error = plain_mean(counted) if counted else (None, None)
    return {
        "schema_version": SCHEMA_VERSION,
        "suite": suite,
        "model": model,
        # false: a quick look at the first items, not a result
        "complete": not settings["limit"],
        "tasks": tasks,
        "mean": mean,
        "mean_stderr": error,
        "sandbox": sandbox,
        "settings": settings,
    }


def text_hash(text: str) -> str:
    """Hash a text with SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def evaluation_versions() -> dict[str, str]:
    """Collect the versions of the packages that scores depend on."""
    packages = ("lm-eval", "transformers", "torch", "datasets")
    return {"fcsd": fcsd.__version__} | {
        name: importlib.metadata.version(name) for name in packages
    }


def write_result(result: Result, samples: Samples, folder: Path) -> None:
    """Write `samples_<task>.jsonl` and, last, `results.json`; each appears whole or not
    at all.
    """
    make_folder(folder)
    for task, items in samples.items():
        lines = [json.dumps(item, allow_nan=False) + "\n" for item in items]
        write_text(folder / f"samples_{task}.jsonl", "".join(lines))
    # Not `write_json`: a path may hold halves of characters, which JSON can escape and
    # UTF-8 cannot hold.
    write_text(
        folder / "results.json", json.dumps(result, indent=2, allow_nan=False) + "\n"
    )


def save_result(result: Result, samples: Samples, folder: Path) -> None:
    """Write a result (`write_result`) and, where no stage does so at its end, the
    manifest with the hashes of its files; the manifest of another command, as beside
    a converted checkpoint, stays.
    """
    write_result(result, samples, folder)
    manifest = folder / "manifest.json"
    record: Any = None
    with contextlib.suppress(UserError):
        record = read_json(manifest, keys=()) if manifest.is_file() else None
    is_foreign = isinstance(record, dict) and record.get("stage") != _SAVED
    if is_foreign or (folder / "stage.json").is_file():
        return
    files = ["results.json", *(f"samples_{task}.jsonl" for task in samples)]
    hashes = {name: file_fingerprint(folder / name) for name in files}
    write_sealed(manifest, command_record(_SAVED, outputs=hashes))


def read_result(folder: Path) -> tuple[Result, Samples]:
    """Read what `write_result` wrote into a folder: (result, samples).

    Raises:
        UserError: as `read_numbers`; samples that are damaged or of another result.
    """
    result = read_numbers(folder)
    return result, {
        task: read_samples(folder, task, row) for task, row in result["tasks"].items()
    }


def read_numbers(folder: Path) -> Result:
    """Read the result in a folder without its samples.

    Raises:
        UserError: no result there, a damaged file, or a version of the format that this
            fcsd does not know.
    """
    path = folder / "results.json"
    if folder.is_file():
        raise UserError(f"{folder}: is a file; give the folder that it lies in")
    if not path.is_file():
        reason = "this is not a folder that `fcsd evaluate` wrote"
        if (folder / "stage.json").is_file():
            reason = "the evaluation is not finished; run it again, and it continues"
        raise UserError(f"{folder}: no results.json; {reason}")
    check_outputs(folder, "results.json")
    result = read_json(path, "evaluate again")
    if not isinstance(result, dict) or not isinstance(result.get("tasks"), dict):
        raise UserError(f"{path}: not a result of `fcsd evaluate`")
    if result.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema_version is {result.get('schema_version')}, this fcsd reads"
            f" {SCHEMA_VERSION}; evaluate again"
        )
    try:
        validate(_Result, result, str(path))
    except UserError as error:
        raise UserError(f"{error}; evaluate again") from None
    for task in result["tasks"]:
        try:
            check_name(task)  # the name becomes part of a file name
        except ValueError as error:
            raise UserError(f"{path}: tasks: {error}; evaluate again") from None
    return result


def _is_sample(value: Any, kind: Kind) -> bool:
    if not isinstance(value, dict):
        return False
    if kind.distance:
        try:
            figures_of(value)
        except (KeyError, TypeError, AttributeError, ZeroDivisionError):
            return False
    lists = [value.get(key, []) for key in ("choices", "loglikelihoods", "completions")]
    return (
        all(isinstance(value.get(key), types) for key, types in _SAMPLE_KEYS.items())
        and all(isinstance(items, list) for items in lists)
        and all(isinstance(number, int | float) for number in lists[1])
    )


def read_samples(folder: Path, task: str, row: Row) -> list[Sample]:
    """Read the samples of one task; `row` is its entry in results.json. Raises as
    `read_result`.
    """
    file = folder / f"samples_{task}.jsonl"
    if not file.is_file():
        raise UserError(
            f"{file}: no such file, though results.json has the task {task}; evaluate"
            " again"
        )
    check_outputs(folder, file.name)
    samples = []
    for where, sample in json_lines(file, advice="; evaluate again"):
        if not _is_sample(sample, KINDS[row["kind"]]):
            raise UserError(
                f"{where}: not a sample ({', '.join(_SAMPLE_KEYS)}); evaluate again"
            )
        samples.append(sample)
    if len(samples) != row["num_items"]:
        raise UserError(
            f"{file}: {len(samples)} samples, but results.json says {row['num_items']};"
            " evaluate again"
        )
    # Samples of another evaluation have the right number, but hardly the same mean.
    mean = math.fsum(sample["score"] for sample in samples) / max(1, len(samples))
    if not math.isclose(mean, row["value"], rel_tol=1e-9, abs_tol=1e-9):
        raise UserError(
            f"{file}: its samples average {mean:.6g}, but results.json says"
            f" {row['value']:.6g}: they come from different evaluations; evaluate again"
        )
    return samples


Line = tuple[str, Any]
"""Where a line of a file is, for errors, and its value."""

Lines = Sequence[Line]


def json_lines(
    path: Path, description: str = "valid JSON", advice: str = ""
) -> list[Line]:
    """Read the values of a .jsonl or .jsonl.gz file, each with where it is; blank lines
    are skipped.

    description: what each line should be, for the message. advice: ends the message.
    """
    check_regular(path)
    try:
        data = path.read_bytes()
        # Not `splitlines`: a text in a line of JSON may hold line separators of
        # Unicode.
        texts = (
            (gzip.decompress(data) if path.suffix == ".gz" else data)
            .decode("utf-8")
            .split("\n")
        )
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: is not a .jsonl or .jsonl.gz file of UTF-8 text ({error}){advice}"
        ) from None
    values: list[Line] = []
    for number, text in enumerate(texts, start=1):
        where = f"{path}, line {number}"
        try:
            values += [(where, parse_json(text))] if text.strip() else []
        except ValueError as error:
            raise UserError(
                f"{where}: not {description} ({one_line(error)}){advice}"
            ) from None
    return values


def texts_of(
    line: Mapping[str, Any], where: str, keys: Sequence[str], missing: str
) -> tuple[str, list[str]]:
    """Return the first of these keys that a line has, and its texts, at least one.

    keys: "completions" holds a list of texts, the others one. missing: the error for a
    line without any of them.
    """
    key = next((key for key in keys if key in line), None)
    if key is None:
        raise UserError(f"{where}: {missing}")
    texts = line[key] if key == "completions" else [line[key]]
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) for text in texts)
    ):
        raise UserError(
            f"{where}: {key}: text is needed, got {type(line[key]).__name__}"
        )
    return key, texts


def with_hashes_of_lines(sample: Sample, lines: Lines, task: str) -> Sample:
    """Return the graded sample with the `prompt_hash` of its lines, where they have one.

    Raises:
        UserError: the `doc_hash` of one belongs to another document; they have several
            prompts.
    """
    prompts = set()
    for where, line in lines:
        for key in ("doc_hash", "prompt_hash"):
            if not isinstance(line.get(key, ""), str):
                raise UserError(f"{where}: {key}: text is needed, got {line[key]!r}")
        # A line that records its document's hash shows whether the data set is the same.
        if line.get("doc_hash", sample["doc_hash"]) != sample["doc_hash"]:
            raise UserError(
                f"{where}: doc_hash belongs to another document than {task}'s"
                f" {sample['doc_id']}: the data set differs"
            )
        if "prompt_hash" in line:
            prompts.add(line["prompt_hash"])
        if len(prompts) > 1:
            raise UserError(
                f"{where}: prompt_hash is not that of the lines before for {task}'s"
                f" {sample['doc_id']}; grade answers to one prompt at a time"
            )
    prompt = next(iter(prompts), None)
    return sample if prompt is None else sample | {"prompt_hash": prompt}


_KEPT_VERSION = 5


def configuration_fingerprint(folder: Path) -> str:
    """Compute the SHA-256 of the files beside the weights that change a model's
    answers.
    """
    return content_fingerprint(checkpoint_files(folder, code=True))


class TaskStore:
    """A folder with one file per finished task, created with the first;
    UserError where it is a file.

    identity: name -> fingerprint of everything that all tasks depend on (weights,
    connectivity, versions, limit). data: task -> fingerprint of its data.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], data: Mapping[str, str]
    ):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: is a file; finished tasks need a folder")
        self.folder, self.identity, self.data = folder, dict(identity), dict(data)

    def _key(self, row: TaskConfig) -> Row:
        return {
            "schema_version": _KEPT_VERSION,
            **self.identity,
            # Whether a task counts in the mean, what random answers get, and its data
            # set's name change no answer.
            "row": row.model_dump(
                mode="json", exclude={"headline", "floor", "dataset", "revision"}
            ),
            "data": self.data[row.task],
        }

    def _path(self, row: TaskConfig) -> Path:
        key = content_fingerprint(self._key(row))
        return self.folder / f"{row.task}-{key[:24]}.json"

    def get(self, row: TaskConfig) -> tuple[list[Sample], Row] | None:
        """Return (samples, facts) of a finished task; None when it is not there, or
        damaged, which a line says.
        """
        path = self._path(row)
        if path.exists() and not path.is_file():
            read_text(path, "the file of a finished task", "remove it")
        try:
            record = parse_json(path.read_bytes())
            samples, facts = list(record["samples"]), dict(record["facts"])
            if record["sha256"] == self._content(row, samples, facts)["sha256"]:
                return samples, facts
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if path.exists():
            print(
                f"evaluate: {path}: is damaged; fcsd evaluates {row.task} again",
                file=sys.stderr,
            )
        return None

    def _content(self, row: TaskConfig, samples: list[Sample], facts: Row) -> Row:
        content = {"key": self._key(row), "facts": facts, "samples": samples}
        return {"sha256": content_fingerprint(content), **content}

    def put(self, row: TaskConfig, samples: list[Sample], facts: Row) -> None:
        """Keep a finished task; the file appears whole or not at all.

        facts: a result's facts about the task, beside its samples.
        """
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        content = self._content(row, samples, facts)
        write_text(self._path(row), json.dumps(content, allow_nan=False) + "\n")
        # The journal of single answers, which the samples hold now.
        self._path(row).with_suffix(".jsonl").unlink(missing_ok=True)

    def journal(self, row: TaskConfig) -> "Journal":
        """Return the answers of a task that is not finished; `put` removes them."""
        return Journal(self._path(row).with_suffix(".jsonl"))


class Journal:
    """Answers by question, each written on arrival; if a line is cut off or damaged,
    the question is repeated.

    path: None keeps them for this process only.
    """

    def __init__(self, path: Path | None = None):
        self.path = path
        self._known: dict[str, Any] = {}
        lines: list[bytes] = []
        if path is not None and path.is_file():
            lines = path.read_bytes().splitlines()
        for line in lines:
            try:
                key, answer, checksum = parse_json(line)
            except (ValueError, TypeError):
                continue
            if checksum == self._checksum(key, answer):
                self._known[key] = answer

    def __len__(self) -> int:
        return len(self._known)

    def _checksum(self, key: str, answer: Any) -> str:
        # The name of the file identifies what has answered: a model, and its settings.
        name = "" if self.path is None else self.path.name
        return content_fingerprint([name, key, answer])

    def get(self, question: Any) -> Any:
        """Return the answer to a question, which is JSON-able; None when there is none."""
        return self._known.get(content_fingerprint(question))

    def put(self, question: Any, answer: Any) -> None:
        """Keep an answer, which is JSON-able and not None."""
        key = content_fingerprint(question)
        self._known[key] = answer
        if self.path is not None:
            with writing(self.path.parent):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # A line begins with a break: the one before may have been cut off. One
                # write, as others may append.
                descriptor = os.open(
                    self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
                )
                try:
                    record = [key, answer, self._checksum(key, answer)]
                    os.write(
                        descriptor,
                        f"\n{json.dumps(record, allow_nan=False)}\n".encode(),
                    )
                finally:
                    os.close(descriptor)
