"""`fcsd score`: grade samples that are ready in a file, of code tasks and of those whose answers lm-eval grades.

A line is a JSON object; `task` names its task where --dataset does not. For lm-eval's tasks {"doc_id": …, "completion":
…} (`fcsd.evaluate.lm_eval.ready`), for code `fcsd.evaluate.code.ready`. What `fcsd evaluate` wrote is read for both.

Not covered: tasks that are scored by likelihood.
"""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.config.suite import CodeTaskConfig, LMEvalTaskConfig, SuiteConfig, TaskConfig, load_suite
from fcsd.errors import UserError
from fcsd.evaluate.code.problems import load_problems
from fcsd.evaluate.code.ready import evalplus_outcomes, programs_of
from fcsd.evaluate.code.scorer import CodeScorer
from fcsd.evaluate.lm_eval.chosen import chosen_suite
from fcsd.evaluate.results import code_sample, evaluation_versions, task_result, whole_result, write_result
from fcsd.files import check_folder_place, file_sha256

_SUITE = "score "  # begins the name of the suite in a result
Lines = Sequence[tuple[str, Mapping[str, Any]]]


def score_file(
    samples: Path,
    dataset: str | None,
    *,
    data_root: Path | None,
    output: Path | None = None,
    suite: SuiteConfig | None = None,
    include_path: Path | None = None,
    scorer: str = "fcsd",
    evalplus_data: Path | None = None,
    partial: bool = False,
    thinking: bool = False,
    timeout_s: float | None = None,
    allow_weak_sandbox: bool = False,
) -> dict[str, Any]:
    """Grade a file of samples: the result, in the form of `fcsd evaluate`, which is also written to `output`.

    Args:
        dataset: a task of the suite or of lm-eval, or the path of a code data set; None: every line names its task.
        suite: whose rows say how a task is graded; None: paper11.
        include_path: a folder of task definitions in lm-eval's format.
        scorer: "fcsd", or "evalplus": the package, in a process of its own, without our sandbox.
        evalplus_data: EvalPlus's own .jsonl or .jsonl.gz file; None: what the package finds or downloads.
        partial: grade the problems that have samples, and leave the others out.
        thinking: cut off what comes before `</think>`; as where the task's row says so.

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
    rows, suite = _rows(dataset, samples, suite or load_suite("paper11"), include_path)
    if timeout_s is not None:
        limit = {"timeout_s": timeout_s}
        rows = [(row.model_copy(update=limit) if row.kind == "code" else row, lines) for row, lines in rows]
    if scorer == "evalplus" and any(row.kind != "code" for row, _ in rows):
        raise UserError(f"--scorer evalplus: grades mbpp_plus and humaneval_plus, not {rows[0][0].task}")
    kept: dict[str, list[dict[str, Any]]] = {}
    totals: dict[str, int] = {}
    layers: dict[str, Any] | None = None
    for row, lines in rows:
        if row.kind == "code":
            found = _code(
                samples, row, lines, data_root, scorer, evalplus_data, allow_weak_sandbox, partial, thinking
            )
            kept[row.task], totals[row.task], layers = *found[:2], found[2] or layers
        else:
            kept[row.task], totals[row.task] = _answers(
                samples, row, suite, lines, data_root, partial, thinking or bool(row.thinking)
            )
    tasks = {row.task: task_result(row, kept[row.task], totals[row.task], data_root) for row, _ in rows}
    graded = sum(map(len, kept.values()))
    settings = {
        "limit": graded if graded < sum(totals.values()) else None,
        "scorer": scorer,
        "samples_sha256": file_sha256(samples),
        "rows": [row.model_dump(mode="json") for row, _ in rows],
        "versions": evaluation_versions(),
    }
    result = whole_result(f"{_SUITE}{' '.join(tasks)}", str(samples), tasks, settings, layers)
    if output is not None:
        write_result(result, kept, output)
    return result


def _rows(
    dataset: str | None, samples: Path, suite: SuiteConfig, include_path: Path | None
) -> tuple[list[tuple[TaskConfig, Lines]], SuiteConfig]:
    """Return the rows to grade, each with its lines, and the suite of which they are."""
    if dataset is not None and dataset not in {row.task for row in suite.tasks} and Path(dataset).exists():
        dataset = str(Path(dataset).resolve())
    if dataset is not None and "/" in dataset:  # a path, or a hub id
        own = CodeTaskConfig(task=Path(dataset).stem, kind="code", dataset=dataset)
        return [(own, _lines(samples))], suite
    by_task: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for where, line in _lines(samples):
        name = line.get("task") if dataset is None else dataset
        if not isinstance(name, str):
            raise UserError(f"{where}: names no task; add a key 'task', or give --dataset for the whole file")
        by_task.setdefault(name, []).append((where, line))
    chosen = chosen_suite(list(by_task), suite, include_path)
    for row in chosen.tasks:
        if row.kind == "likelihood":
            raise UserError(
                f"task {row.task}: is scored by likelihood, which a file of answers does not tell"
            )
    rows: list[tuple[TaskConfig, Lines]] = []
    for row in chosen.tasks:
        lines = by_task[row.task]
        if row.kind == "code":  # of others, a line may name a member of a group
            lines = [(where, line) for where, line in lines if line.get("task", row.task) == row.task]
        rows.append((row, lines))
    return rows, chosen


def _lines(path: Path) -> Lines:
    """Read the lines of a .jsonl or .jsonl.gz file, each with where it is."""
    try:
        data = path.read_bytes()
        # Not `splitlines`: a text in a line of JSON may hold line separators of Unicode.
        texts = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").split("\n")
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no .jsonl or .jsonl.gz file of UTF-8 text ({error})") from None
    lines = []
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        if not isinstance(line, dict):
            raise UserError(f"{where}: a JSON object is needed, got {type(line).__name__}")
        lines.append((where, line))
    if not lines:
        raise UserError(f"{path}: holds no samples; a line is {{'task_id': …, 'solution': …}}")
    return lines


def _refuse_foreign(output: Path) -> None:
    """Refuse a folder that is no earlier result of this command: a result may replace such a one, and nothing else."""
    if not output.exists():
        return check_folder_place(output)
    try:
        earlier = json.loads((output / "results.json").read_text(encoding="utf-8"))["suite"]
    except (OSError, ValueError, KeyError, TypeError):
        earlier = ""
    if not output.is_dir() or (any(output.iterdir()) and not str(earlier).startswith(_SUITE)):
        raise UserError(
            f"{output}: holds something else than a result of `fcsd score`; choose another --output"
        )


def _code(
    file: Path,
    row: CodeTaskConfig,
    lines: Lines,
    data_root: Path | None,
    scorer: str,
    evalplus_data: Path | None,
    allow_weak_sandbox: bool,
    partial: bool,
    thinking: bool,
) -> tuple[list[dict[str, Any]], int, dict[str, Any] | None]:
    """Grade programs: the samples, how many problems there are, and the layers of the sandbox."""
    problems = load_problems(row, data_root)
    programs = programs_of(lines, problems, thinking=thinking or bool(row.thinking))
    if not programs:
        raise UserError(f"{file}: holds no sample of task {row.task}")
    missing = [problem.task_id for problem in problems if problem.task_id not in programs]
    if missing and not partial:
        raise UserError(
            f"{file}: {len(missing)} of {len(problems)} problems have no sample (the first is {missing[0]});"
            f" add them, or grade the others of task {row.task} alone with --partial"
        )
    graded = [problem for problem in problems if problem.task_id in programs]
    layers: dict[str, Any] | None = None
    if scorer == "evalplus":
        if missing:
            raise UserError(f"task {row.task}: EvalPlus grades whole benchmarks only; leave --partial out")
        outcomes = evalplus_outcomes(row, graded, programs, evalplus_data, allow_weak_sandbox)
    else:
        with CodeScorer(allow_weak_sandbox=allow_weak_sandbox) as pool:
            pool.self_check(graded, timeout_s=row.timeout_s, progress=True)
            outcomes = pool.score_samples(
                graded, programs, timeout_s=row.timeout_s, whole_programs=True, progress=True
            )
            layers = pool.layers
    kept = [
        code_sample(row, problem, problem.prompt, programs[problem.task_id], found)
        for problem, found in zip(graded, outcomes, strict=True)
    ]
    return kept, len(problems), layers


def _answers(
    file: Path,
    row: LMEvalTaskConfig,
    suite: SuiteConfig,
    lines: Lines,
    data_root: Path | None,
    partial: bool,
    thinking: bool,
) -> tuple[list[dict[str, Any]], int]:
    """Grade answers by lm-eval: the samples, and how many documents there are."""
    from fcsd.evaluate.lm_eval.ready import grade_answers
    from fcsd.evaluate.lm_eval.tasks import load_task, num_items

    # How the model was asked is not known here, and no tokenizer is: prompts are hashed as plain text.
    plain = row.model_copy(update={"chat_template": False, "system_prompt": None, "thinking": None})
    tasks = load_task(plain, suite, data_root, None)
    return grade_answers(file, plain, tasks, lines, partial=partial, thinking=thinking), num_items(
        tasks, None
    )
