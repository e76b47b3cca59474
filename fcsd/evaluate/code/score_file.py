"""`fcsd score`: grade samples that are ready in a file, by our scorer or by EvalPlus itself.

A line is a JSON object in EvalPlus's form, {"task_id": …, "solution": a whole program} or {"task_id": …, "completion":
what follows the prompt}, one that `fcsd evaluate` wrote into samples_<task>.jsonl ({"doc_id": …, "completion": …} or
`completions`, from which the program is taken as there), or LiveCodeBench's {"question_id": …, "code_list": […]}.

Not covered: EvalPlus's folder of .py files.
"""

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fcsd
from fcsd.config.strict import did_you_mean
from fcsd.config.suite import CodeTaskConfig, load_suite
from fcsd.errors import ScorerError, UserError
from fcsd.evaluate.code.generate import extract_code
from fcsd.evaluate.code.problems import Problem, load_problems
from fcsd.evaluate.code.scorer import CodeScorer, Outcome, OutcomeClass, default_num_workers
from fcsd.evaluate.results import code_sample, task_result, whole_result, write_result
from fcsd.files import file_sha256
from fcsd.temporary import scratch_folder

_SUITE = "score "  # begins the name of the suite in a result
_EVALPLUS = {
    "evalplus/mbppplus": ("mbpp", "Mbpp/", "MBPP"),
    "evalplus/humanevalplus": ("humaneval", "", "HUMANEVAL"),
}


def score_file(
    samples: Path,
    dataset: str,
    *,
    data_root: Path | None,
    output: Path | None = None,
    scorer: str = "fcsd",
    evalplus_data: Path | None = None,
    partial: bool = False,
    timeout_s: float | None = None,
    allow_weak_sandbox: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Grade a file of samples: the result, in the form of `fcsd evaluate`, which is also written to `output`.

    Args:
        dataset: a code task of the suite paper11 (`mbpp_plus`, `humaneval_plus`, …), or the path of a data set.
        scorer: "fcsd", or "evalplus": the package, in a process of its own, without our sandbox.
        evalplus_data: EvalPlus's own .jsonl or .jsonl.gz file; None: what the package finds or downloads.
        partial: grade the problems that have samples, and leave the others out.

    Raises:
        UserError: an empty file, a line or column that is missing or of the wrong type, an unknown problem, problems
            without a sample, or a scorer that cannot run.
    """
    if timeout_s is not None and timeout_s <= 0:
        raise UserError(f"--timeout-s: must be above 0, got {timeout_s:g}")
    if not samples.is_file():  # before a data set is fetched
        raise UserError(f"{samples}: no such file")
    if output is not None:
        _refuse_foreign(output)
    row = _row(dataset, timeout_s)
    problems = load_problems(row, data_root)
    programs = read_samples(samples, problems)
    missing = [problem.task_id for problem in problems if problem.task_id not in programs]
    if missing and not partial:
        raise UserError(
            f"{samples}: {len(missing)} of {len(problems)} problems have no sample (the first is {missing[0]});"
            " add them, or grade the others alone with --partial"
        )
    graded = [problem for problem in problems if problem.task_id in programs]
    layers: dict[str, Any] | None = None
    if scorer == "evalplus":
        if missing:
            raise UserError(f"{samples}: EvalPlus grades whole benchmarks only; leave --partial out")
        outcomes = evalplus_outcomes(row, graded, programs, evalplus_data, allow_weak_sandbox)
    else:
        with CodeScorer(allow_weak_sandbox=allow_weak_sandbox) as pool:
            pool.self_check(graded, timeout_s=row.timeout_s, progress=progress)
            outcomes = pool.score_samples(
                graded, programs, timeout_s=row.timeout_s, whole_programs=True, progress=progress
            )
            layers = pool.layers
    kept = [
        code_sample(row, problem, problem.prompt, programs[problem.task_id], found)
        for problem, found in zip(graded, outcomes, strict=True)
    ]
    task = task_result(row, kept, len(problems), data_root)
    settings = {
        "limit": len(graded) if missing else None,
        "scorer": scorer,
        "samples_sha256": file_sha256(samples),
        "row": row.model_dump(mode="json"),
        "versions": {"fcsd": fcsd.__version__},
    }
    result = whole_result(f"{_SUITE}{row.task}", str(samples), {row.task: task}, settings, layers)
    if output is not None:
        write_result(result, {row.task: kept}, output)
    return result


def _row(dataset: str, timeout_s: float | None) -> CodeTaskConfig:
    known = {row.task: row for row in load_suite("paper11").tasks if row.kind == "code"}
    row = known.get(dataset)
    if row is None:
        if "/" not in dataset and not Path(dataset).exists():
            raise UserError(
                f"--dataset {dataset!r}: no such code task{did_you_mean(dataset, list(known))}"
                " (or give the path of a data set)"
            )
        place = Path(dataset)
        location = str(place.resolve() if place.exists() else place)
        row = CodeTaskConfig(task=place.stem, kind="code", dataset=location)
    return row if timeout_s is None else row.model_copy(update={"timeout_s": timeout_s})


def read_samples(path: Path, problems: Sequence[Problem]) -> dict[str, list[str]]:
    """Read task_id -> programs of a .jsonl or .jsonl.gz file; ids may be EvalPlus's (`Mbpp/2`) or the Hub's (`2`).

    Raises:
        UserError: names file, line and key.
    """
    by_id = {problem.task_id: problem for problem in problems}
    found: dict[str, list[str]] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            sample = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        if not isinstance(sample, dict):
            raise UserError(f"{where}: a JSON object is needed, got {type(sample).__name__}")
        problem = by_id.get(_task_id(sample, by_id, where))
        if problem is None:
            name = sample.get("task_id", sample.get("doc_id"))
            raise UserError(f"{where}: {name!r} is not a problem of this data set (it has {_ids(by_id)})")
        found.setdefault(problem.task_id, []).extend(_programs(sample, problem, where))
    if not found:
        raise UserError(f"{path}: holds no samples; a line is {{'task_id': …, 'solution': …}}")
    return found


def _lines(path: Path) -> list[str]:
    try:
        data = path.read_bytes()
        # Not `splitlines`: a text in a line of JSON may hold line separators of Unicode.
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no .jsonl or .jsonl.gz file of UTF-8 text ({error})") from None


def _refuse_foreign(output: Path) -> None:
    """Refuse a folder that is no earlier result of this command: a result may replace such a one, and nothing else."""
    if not output.exists():
        return
    try:
        earlier = json.loads((output / "results.json").read_text(encoding="utf-8"))["suite"]
    except (OSError, ValueError, KeyError, TypeError):
        earlier = ""
    if not output.is_dir() or (any(output.iterdir()) and not str(earlier).startswith(_SUITE)):
        raise UserError(
            f"{output}: holds something else than a result of `fcsd score`; choose another --output"
        )


def _task_id(sample: Mapping[str, Any], known: Mapping[str, Any], where: str) -> str:
    key = next((key for key in ("task_id", "question_id") if key in sample), "doc_id")
    if not isinstance(sample.get(key), str | int) or isinstance(sample.get(key), bool):
        raise UserError(f"{where}: task_id: text or a number is needed, got {sample.get(key)!r}")
    text = str(sample[key])
    return text if text in known else text.removeprefix("Mbpp/")


def _programs(sample: Mapping[str, Any], problem: Problem, where: str) -> list[str]:
    key = next((key for key in ("solution", "code_list", "completions", "completion") if key in sample), None)
    if key is None:
        raise UserError(
            f"{where}: no 'solution' (a whole program) and no 'completion' (what follows the prompt)"
        )
    texts = sample[key] if key in ("completions", "code_list") else [sample[key]]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: {key}: text is needed, got {type(sample[key]).__name__}")
    if key in ("solution", "code_list"):
        return texts
    if problem.contest:  # an answer to a question, never what follows the head of a function
        return [extract_code(text, last=True) for text in texts]
    own = "doc_id" in sample  # of `fcsd evaluate`: as the model wrote it
    return [problem.program(extract_code(text) if own else text) for text in texts]


def _ids(known: Mapping[str, Any]) -> str:
    names = list(known)
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]}, … {names[-1]}"


def evalplus_outcomes(
    row: CodeTaskConfig,
    problems: Sequence[Problem],
    programs: Mapping[str, Sequence[str]],
    data: Path | None,
    allow_unsandboxed: bool,
) -> list[list[Outcome]]:
    """Grade the programs by the package evalplus (0.3.1).

    Raises:
        UserError: the package is missing, the benchmark is not its own, or running without a sandbox was not accepted.
        ScorerError: EvalPlus failed.
    """
    if row.dataset not in _EVALPLUS or row.tests == "visible":
        raise UserError(f"--scorer evalplus: grades mbpp_plus and humaneval_plus, not {row.task}")
    if importlib.util.find_spec("evalplus") is None:
        raise UserError("--scorer evalplus: the package is not installed; pip install 'fcsd[evalplus]'")
    if not allow_unsandboxed:
        raise UserError(
            "--scorer evalplus: EvalPlus runs programs without our sandbox, with the network and your files in reach;"
            " accept that with --allow-weak-sandbox, in a container"
        )
    kind, prefix, variable = _EVALPLUS[row.dataset]
    environment = dict(os.environ)
    environment.pop("EVALPLUS_TIMEOUT_PER_TASK", None)  # evalplus 0.3.1 compares it with a number and fails
    if data is not None:
        environment[f"{variable}_OVERRIDE_PATH"] = str(data.resolve())
    with scratch_folder("fcsd-evalplus") as folder:
        # A new folder each time: EvalPlus silently reuses results that lie beside the samples.
        file = folder / "samples.jsonl"
        lines = [
            {"task_id": f"{prefix}{problem.task_id}", "solution": text}
            for problem in problems
            for text in programs[problem.task_id]
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        command = [
            sys.executable, "-m", "evalplus.evaluate", "--dataset", kind, "--samples", str(file),
            "--parallel", str(default_num_workers()),
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        left = file.with_name("samples_eval_results.json")
        if done.returncode != 0 or not left.is_file():
            last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
            raise ScorerError(f"EvalPlus failed with status {done.returncode}: {last.strip()}")
        found = json.loads(left.read_text(encoding="utf-8"))["eval"]
    return [
        [_verdict(problem.task_id, each) for each in found[f"{prefix}{problem.task_id}"]]
        for problem in problems
    ]


def _verdict(task_id: str, found: Mapping[str, Any]) -> Outcome:
    """Translate EvalPlus's statuses; its "fail" is a wrong output or an exception alike."""
    words: dict[str, OutcomeClass] = {"pass": "passed", "fail": "wrong", "timeout": "timeout"}
    base, plus = words[found["base_status"]], words[found["plus_status"]]
    whole = Outcome(task_id, plus if base == "passed" else base, 0.0)
    return replace(whole, base=base)
