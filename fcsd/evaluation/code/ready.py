"""Read programs that are ready in a file, and grade them by EvalPlus itself where that
is asked for.

A line is in EvalPlus's form (`solution`, a whole program, or `completion`, what follows
the prompt), or one that `fcsd evaluate` wrote into samples_<task>.jsonl, from which the
program is taken as there. Not covered: EvalPlus's folder of .py files.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fcsd.base.errors import ScorerError, UserError
from fcsd.base.temporary import scratch_folder
from fcsd.data.thoughts import answer_in
from fcsd.evaluation.code.generate import program_in
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.scorer import Outcome, OutcomeClass, default_num_workers
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.lines import texts_of

_EVALPLUS = {
    "evalplus/mbppplus": ("mbpp", "Mbpp/", "MBPP"),
    "evalplus/humanevalplus": ("humaneval", "", "HUMANEVAL"),
}


def programs_of(
    lines: Sequence[tuple[str, Mapping[str, Any]]],
    problems: Sequence[Problem],
    *,
    thinking: bool = False,
    chat: bool = False,
) -> dict[str, list[str]]:
    """Collect task_id -> programs of the lines of a file; ids may be EvalPlus's
    (`Mbpp/2`) or the Hub's (`2`).

    thinking: completions begin with thoughts, which are cut off (`fcsd.data.thoughts`).
    chat: completions that `fcsd evaluate` wrote are answers to questions.
    """
    by_id = {problem.task_id: problem for problem in problems}
    programs: dict[str, list[str]] = {}
    for where, sample in lines:
        problem = by_id.get(_task_id(sample, by_id, where))
        if problem is None:
            name = sample.get("task_id", sample.get("doc_id"))
            raise UserError(
                f"{where}: {name!r} is not a problem of this data set (it has"
                f" {_ids(by_id)})"
            )
        # Several lines about one problem are several samples of it.
        programs.setdefault(problem.task_id, []).extend(
            _programs(sample, problem, where, thinking, chat)
        )
    return programs


def _task_id(sample: Mapping[str, Any], by_id: Mapping[str, Any], where: str) -> str:
    key = "task_id" if "task_id" in sample else "doc_id"
    if not isinstance(sample.get(key), str | int) or isinstance(sample.get(key), bool):
        raise UserError(
            f"{where}: task_id: text or a number is needed, got {sample.get(key)!r}"
        )
    text = str(sample[key])
    return text if text in by_id else text.removeprefix("Mbpp/")


def _programs(
    sample: Mapping[str, Any], problem: Problem, where: str, thinking: bool, chat: bool
) -> list[str]:
    keys = {
        "solution": False,
        "completions": True,
        "completion": False,
    }
    missing = (
        "no 'solution' (a whole program) and no 'completion' (what follows the prompt)"
    )
    key, texts = texts_of(sample, where, keys, missing)
    if key == "solution":
        return texts
    if thinking:
        texts = [answer_in(text) for text in texts]
    # `fcsd evaluate` keeps what a model wrote, from which the program is taken here.
    if "doc_id" in sample:
        return [program_in(problem, text, chat=chat) for text in texts]
    return [problem.program(text) for text in texts]


def _ids(by_id: Mapping[str, Any]) -> str:
    names = list(by_id)
    if len(names) < 4:
        return ", ".join(names)
    return f"{names[0]}, {names[1]}, … {names[-1]}"


def evalplus_outcomes(
    row: CodeTaskConfig,
    problems: Sequence[Problem],
    programs: Mapping[str, Sequence[str]],
    data: Path | None,
    allow_unsandboxed: bool,
) -> list[list[Outcome]]:
    """Grade the programs by the package evalplus (0.3.1); UserError or ScorerError
    where that cannot be or fails.
    """
    if row.dataset not in _EVALPLUS or row.tests == "visible":
        raise UserError(
            f"--scorer evalplus: grades mbpp_plus and humaneval_plus, not {row.task}"
        )
    if importlib.util.find_spec("evalplus") is None:
        raise UserError(
            "--scorer evalplus: the package is not installed; pip install"
            " 'fcsd[evalplus]'"
        )
    if not allow_unsandboxed:
        raise UserError(
            "--scorer evalplus: EvalPlus runs programs without our sandbox, with the"
            " network and your files in reach; accept that with --allow-weak-sandbox,"
            " in a container"
        )
    kind, prefix, variable = _EVALPLUS[row.dataset]
    environment = dict(os.environ)
    # evalplus 0.3.1 compares it with a number and fails
    environment.pop("EVALPLUS_TIMEOUT_PER_TASK", None)
    if data is not None:
        environment[f"{variable}_OVERRIDE_PATH"] = str(data.resolve())
    with scratch_folder("fcsd-evalplus") as folder:
        # A new folder each time: EvalPlus silently reuses results that lie beside the
        # samples.
        file = folder / "samples.jsonl"
        lines = [
            {"task_id": f"{prefix}{problem.task_id}", "solution": text}
            for problem in problems
            for text in programs[problem.task_id]
        ]
        file.write_text(
            "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
        )
        command = [
            sys.executable, "-m", "evalplus.evaluate", "--dataset", kind, "--samples", str(file),
            "--parallel", str(default_num_workers()),
        ]  # fmt: skip
        finished = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        results = file.with_name("samples_eval_results.json")
        if finished.returncode != 0 or not results.is_file():
            last = next(
                (
                    line
                    for line in reversed(finished.stdout.splitlines())
                    if line.strip()
                ),
                "no output",
            )
            raise ScorerError(
                f"EvalPlus failed with status {finished.returncode}: {last.strip()}"
            )
        verdicts = json.loads(results.read_text(encoding="utf-8"))["eval"]
    outcomes = []
    for problem in problems:
        entries = verdicts[f"{prefix}{problem.task_id}"]
        outcomes.append([_verdict(problem.task_id, statuses) for statuses in entries])
    return outcomes


def _verdict(task_id: str, statuses: Mapping[str, Any]) -> Outcome:
    """Translate EvalPlus's statuses; its "fail" is a wrong output or an exception
    alike.
    """
    words: dict[str, OutcomeClass] = {
        "pass": "passed",
        "fail": "wrong",
        "timeout": "timeout",
    }
    base, plus = words[statuses["base_status"]], words[statuses["plus_status"]]
    outcome = Outcome(task_id, plus if base == "passed" else base, 0.0)
    return replace(outcome, base=base)
