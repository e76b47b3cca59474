"""`fcsd evaluate --samples`: grade samples that are ready in a file, of code tasks and of those
whose answers lm-eval grades.

A line is a JSON object; `task` names its task where --tasks does not
(docs/evaluate.md). Both accept files of `fcsd evaluate`. Not covered: tasks that
are scored by likelihood.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.base.errors import UserError
from fcsd.base.files import check_is_file, file_sha256, read_json
from fcsd.base.writing import check_folder_place, is_empty
from fcsd.evaluation.code.problems import load_problems
from fcsd.evaluation.code.programs import programs_of
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.config import (
    CodeTaskConfig,
    LMEvalTaskConfig,
    SampleFile,
    SuiteConfig,
    TaskConfig,
    pass_k,
)
from fcsd.evaluation.results import (
    Line,
    Lines,
    code_samples,
    evaluation_versions,
    json_lines,
    save_result,
    task_result,
    whole_result,
    with_hashes_of_lines,
)
from fcsd.evaluation.scores import Result, Row, Sample
from fcsd.evaluation.suites import chosen_suite, load_suite

_NOT_IN_A_FILE = {
    "likelihood": "scored by likelihood",
    "own_text": "measured on what the model itself writes",
}
_SUITE = "score "  # begins the name of the suite in a result


class Graded(NamedTuple):
    """The samples of a task, and the layers of the sandbox.

    num_asked: how many items the row asks for. num_items: how many its task has.
    """

    samples: list[Sample]
    num_asked: int
    num_items: int
    layers: Row | None = None


def score_file(sample_file: SampleFile) -> Result:
    """Grade a file of samples, and return the result in the form of `fcsd evaluate`.

    Raises:
        UserError: an invalid file, line, column or problem, or a scorer that cannot
            run.
    """
    if sample_file.timeout_s is not None and sample_file.timeout_s <= 0:
        raise UserError(f"--timeout-s: must be above 0, got {sample_file.timeout_s:g}")
    check_is_file(sample_file.samples)  # before a data set is fetched
    if sample_file.output is not None:
        _refuse_foreign(sample_file.output)
    rows, suite = _rows(sample_file)
    graded: dict[str, Graded] = {}
    tasks: dict[str, Row] = {}
    for row, lines in rows:
        of_task = graded[row.task] = _GRADED[row.kind](sample_file, suite, row, lines)
        tasks[row.task] = task_result(
            row, of_task.samples, of_task.num_items, sample_file.data_root
        )
    samples_by_task = {task: of_task.samples for task, of_task in graded.items()}
    # Graded with --partial, the result is a quick look, as with a limit.
    count = sum(map(len, samples_by_task.values()))
    total = sum(of_task.num_asked for of_task in graded.values())
    settings = {
        "limit": count if count < total else None,
        "scorer": "fcsd",
        "samples_sha256": file_sha256(sample_file.samples),
        "rows": [row.model_dump(mode="json") for row, _ in rows],
        "versions": evaluation_versions(),
    }
    # All code tasks ran in this machine's sandbox, so the facts of any of them apply.
    layers = next(
        (of_task.layers for of_task in reversed(graded.values()) if of_task.layers),
        None,
    )
    result = whole_result(
        f"{_SUITE}{' '.join(tasks)}", str(sample_file.samples), tasks, settings, layers
    )
    if sample_file.output is not None:
        save_result(result, samples_by_task, sample_file.output)
    return result


def _rows(
    sample_file: SampleFile,
) -> tuple[list[tuple[TaskConfig, Lines]], SuiteConfig]:
    """Return the rows to grade, each with its lines, and the suite of the rows."""
    samples = sample_file.samples
    dataset = sample_file.dataset
    suite = load_suite(sample_file.suite)
    limit = (
        {} if sample_file.timeout_s is None else {"timeout_s": sample_file.timeout_s}
    )
    if (
        dataset is not None
        and dataset not in {row.task for row in suite.tasks}
        and Path(dataset).exists()
    ):
        dataset = str(Path(dataset).resolve())
    if dataset is not None and "/" in dataset:  # a path, or a hub id
        code_row = CodeTaskConfig(task=Path(dataset).stem, kind="code", dataset=dataset)
        return [(code_row.model_copy(update=limit), _lines(samples))], suite
    by_task: dict[str, list[Line]] = {}
    for where, line in _lines(samples):
        name = line.get("task") if dataset is None else dataset
        if not isinstance(name, str):
            raise UserError(
                f"{where}: names no task; add a key 'task', or give --tasks TASK for"
                " the whole file"
            )
        by_task.setdefault(name, []).append((where, line))
    chosen = chosen_suite(list(by_task), suite, sample_file.include_path)
    for row in chosen.tasks:
        if row.kind in _NOT_IN_A_FILE:
            raise UserError(
                f"task {row.task}: is {_NOT_IN_A_FILE[row.kind]}, which a file of"
                " answers does not hold"
            )
    rows: list[tuple[TaskConfig, Lines]] = []
    for row in chosen.tasks:
        lines = by_task[row.task]
        if row.kind == "code":  # of others, a line may name a member of a group
            lines = [
                (where, line)
                for where, line in lines
                if line.get("task", row.task) == row.task
            ]
            row = row.model_copy(update=limit)
        rows.append((row, lines))
    return rows, chosen


def _lines(path: Path) -> Lines:
    lines = json_lines(path)
    for where, line in lines:
        if not isinstance(line, dict):
            raise UserError(
                f"{where}: a JSON object is needed, got {type(line).__name__}"
            )
    if not lines:
        raise UserError(
            f"{path}: holds no samples; a line is {{'task_id': …, 'solution': …}}"
        )
    return lines


def _refuse_foreign(output: Path) -> None:
    """Refuse a folder unless it is empty or holds an earlier result of this command:
    nothing else may be replaced.
    """
    if not output.exists():
        return check_folder_place(output)
    try:
        earlier = read_json(output / "results.json")["suite"]
    except (UserError, KeyError, TypeError):
        # A file that cannot be read as a result is something else.
        earlier = ""
    if not output.is_dir() or (
        not is_empty(output) and not str(earlier).startswith(_SUITE)
    ):
        raise UserError(
            f"{output}: holds something other than a result of `fcsd evaluate"
            " --samples`; choose another --output"
        )


def _code(
    sample_file: SampleFile, suite: SuiteConfig, row: CodeTaskConfig, lines: Lines
) -> Graded:
    problems = load_problems(row, sample_file.data_root)
    thinking = sample_file.thinking or bool(row.thinking)
    programs, lines_of = programs_of(
        lines, problems, thinking=thinking, chat=row.chat_template
    )
    asked = problems[: row.limit]
    graded = [problem for problem in asked if problem.task_id in programs]
    programs = {problem.task_id: programs[problem.task_id] for problem in graded}
    if not graded:
        raise UserError(f"{sample_file.samples}: holds no sample of task {row.task}")
    missing = [problem.task_id for problem in asked if problem.task_id not in programs]
    if missing and not sample_file.partial:
        raise UserError(
            f"{sample_file.samples}: {len(missing)} of {len(asked)} problems have no"
            f" sample (the first is {missing[0]}); add them, or grade the others of"
            f" task {row.task} alone with --partial"
        )
    for problem in graded:
        if (number := len(programs[problem.task_id])) < pass_k(row):
            raise UserError(
                f"{sample_file.samples}: {problem.task_id} has {number} samples, but"
                f" {row.metric} of task {row.task} needs {pass_k(row)} of every problem;"
                " add samples, or grade by pass@1"
            )
    weak, limit = sample_file.allow_weak_sandbox, row.timeout_s
    with CodeScorer(allow_weak_sandbox=weak, progress=True) as pool:
        pool.self_check(graded, timeout_s=limit)
        outcomes = pool.score_samples(graded, programs, timeout_s=limit)
        layers = pool.layers
    prompts = [problem.plain_text(row.prompt_template) for problem in graded]
    samples = [
        with_hashes_of_lines(sample, lines_of[sample["doc_id"]], row.task)
        for sample in code_samples(row, graded, prompts, programs, outcomes)
    ]
    return Graded(samples, len(asked), len(problems), layers)


def _answers(
    sample_file: SampleFile, suite: SuiteConfig, row: LMEvalTaskConfig, lines: Lines
) -> Graded:
    from fcsd.evaluation.lm_eval.grade import grade_answers
    from fcsd.evaluation.lm_eval.tasks import load_task, num_items

    # Neither the form of the prompts nor the tokenizer is known here: prompts are
    # hashed as plain text.
    plain = row.model_copy(
        update={"chat_template": False, "system_prompt": None, "thinking": None}
    )
    tasks = load_task(plain, suite, sample_file.data_root, None)
    thinking = sample_file.thinking or bool(row.thinking)
    graded = grade_answers(
        sample_file.samples,
        plain,
        tasks,
        lines,
        partial=sample_file.partial,
        thinking=thinking,
    )
    return Graded(graded, num_items(tasks, row.limit), num_items(tasks, None))


_GRADED: dict[str, Callable[[SampleFile, SuiteConfig, Any, Lines], Graded]] = {
    "generation": _answers,
    "code": _code,
}
"""Kind of a task -> how its lines are graded."""
