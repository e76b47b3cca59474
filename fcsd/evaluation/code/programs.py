"""Read the programs in the lines of a file.

A line is in EvalPlus's form (`solution`, a whole program, or `completion`, what follows
the prompt), or one that `fcsd evaluate` wrote into samples_<task>.jsonl, from which the
program is taken as there. Not covered: EvalPlus's folder of .py files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.thoughts import answer_in
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.sanitise import program_in
from fcsd.evaluation.results import Line, Lines, texts_of
from fcsd.evaluation.scores import Sample


def programs_of(
    lines: Lines,
    problems: Sequence[Problem],
    *,
    thinking: bool = False,
    chat: bool = False,
) -> tuple[dict[str, list[str]], dict[str, list[Line]]]:
    """Collect the lines of a file by problem: task_id -> its programs, and task_id ->
    its lines. Ids may be EvalPlus's (`Mbpp/2`) or the Hub's (`2`).

    thinking: completions begin with thoughts, which are cut off (`fcsd.data.thoughts`).
    chat: completions that `fcsd evaluate` wrote are answers to questions.
    """
    by_id = {problem.task_id: problem for problem in problems}
    programs: dict[str, list[str]] = {}
    lines_of: dict[str, list[Line]] = {}
    for where, sample in lines:
        problem = by_id.get(_task_id(sample, by_id, where))
        if problem is None:
            name = sample.get("task_id", sample.get("doc_id"))
            raise UserError(
                f"{where}: {name!r} is not a problem of this data set (it has"
                f" {_ids(by_id)})"
            )
        # Several lines for one problem are several samples.
        programs.setdefault(problem.task_id, []).extend(
            _programs(sample, problem, where, thinking, chat)
        )
        lines_of.setdefault(problem.task_id, []).append((where, sample))
    return programs, lines_of


def _task_id(sample: Sample, by_id: Mapping[str, Any], where: str) -> str:
    key = "task_id" if "task_id" in sample else "doc_id"
    if not isinstance(sample.get(key), str | int) or isinstance(sample.get(key), bool):
        raise UserError(
            f"{where}: task_id: text or a number is needed, got {sample.get(key)!r}"
        )
    text = str(sample[key])
    return text if text in by_id else text.removeprefix("Mbpp/")


def _programs(
    sample: Sample, problem: Problem, where: str, thinking: bool, chat: bool
) -> list[str]:
    keys = ("solution", "completions", "completion")
    missing = (
        "no 'solution' (a whole program) and no 'completion' (what follows the prompt)"
    )
    key, texts = texts_of(sample, where, keys, missing)
    if key == "solution":
        return texts
    if thinking:
        texts = [answer_in(text) for text in texts]
    # `fcsd evaluate` keeps the model's text, from which the program is extracted here.
    if "doc_id" in sample:
        return [program_in(problem, text, chat=chat) for text in texts]
    return [problem.program(text) for text in texts]


def _ids(by_id: Mapping[str, Any]) -> str:
    names = list(by_id)
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, … {names[-1]}"
