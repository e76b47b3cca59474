"""Contest problems in LiveCodeBench's form: programs that read standard input and
print, or methods of `Solution`.

    columns     question_id, question_content, starter_code, public_test_cases, private_test_cases; metadata
    test cases  a JSON list of {"input": …, "output": …, "testtype": "stdin" | "functional"}

A functional test's input has the arguments as JSON, one a line, its output the value as
JSON; the method's name is `func_name` of `metadata`, else that of the starter code.
Each test has a process, and the time limit, of its own.

Not covered: the compressed pickles in which LiveCodeBench ships private tests: a pickle
can run code when it is loaded (docs/evaluate.md says how to write them as JSON once);
its prompts word by word.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError

COLUMNS = (
    "question_id",
    "question_content",
    "starter_code",
    "public_test_cases",
    "private_test_cases",
)
_PROGRAM = (Path(__file__).parent / "contest_program.py").read_text(encoding="utf-8")
_ORACLE = (Path(__file__).parent / "contest_oracle.py").read_text(encoding="utf-8")
CALLED = ("fcsd_run", "fcsd_call")  # what the tests call in the program's process
_PRINTS = (
    "Write a Python program that reads from standard input and prints the answer to"
    " standard output."
)
_COMPLETES = "Complete this code in Python."

# Runs where a data set has no right programs that would show that the scorer works.
PROBE_CODE = "a, b = map(int, open(0).read().split())\nprint(a + b)\n"
PROBE_TESTS = (_ORACLE, "fcsd_printed(fcsd_run('2\\n40\\n'), '42\\n')")


def whole_program(code: str) -> str:
    """Build what is run for a contest's program: the text that answers the tests, and
    the program as data in it.
    """
    return f"{_PROGRAM}\nfcsd_source = {code!r}\n"


def prompt_and_tests(
    row: Mapping[str, Any], where: str, *, private: bool
) -> tuple[str, tuple[str, ...]]:
    """Read a row: the question as the model is shown it, and the tests, each to be run
    after the first of them.

    private: the hidden tests decide, too. A row that is not in this form is refused.
    """
    require_text(row, ("question_content", "starter_code"), where)
    columns = ("public_test_cases", "private_test_cases")[: 1 + private]
    cases = [
        case for column in columns for case in _cases(row[column], f"{where}: {column}")
    ]
    if not cases:
        raise UserError(f"{where}: has no tests, so that every program would pass")
    kinds = {case["testtype"] for case in cases}
    if len(kinds) > 1:
        raise UserError(f"{where}: testtype: stdin and functional in one problem")
    question, starter = row["question_content"].strip(), row["starter_code"].strip()
    ask = f"{_COMPLETES}\n\n```python\n{starter}\n```" if starter else _PRINTS
    if kinds == {"functional"}:
        name = _function_name(row.get("metadata"), starter, where)
        tests = [
            f"fcsd_returned(fcsd_call({name!r}, {case['input']!r}), {case['output']!r})"
            for case in cases
        ]
    else:
        tests = [
            f"fcsd_printed(fcsd_run({case['input']!r}), {case['output']!r})"
            for case in cases
        ]
    return f"{question}\n\n{ask}\n", (_ORACLE, *tests)


def require_text(row: Mapping[str, Any], columns: Sequence[str], where: str) -> None:
    """Refuse a row whose `columns` are not all text."""
    for column in columns:
        if not isinstance(row[column], str):
            raise UserError(
                f"{where}: {column} must be text, got {type(row[column]).__name__}"
            )


def _cases(value: Any, where: str) -> list[dict[str, str]]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise UserError(
                f"{where}: is no JSON; LiveCodeBench's compressed pickles are not"
                " loaded, since a pickle can run code: write them as JSON once"
                " (docs/evaluate.md)"
            ) from None
    cases = value or []
    good = isinstance(cases, list) and all(
        isinstance(case, dict)
        and all(isinstance(case.get(key), str) for key in ("input", "output"))
        and case.get("testtype") in ("stdin", "functional")
        for case in cases
    )
    if not good:
        raise UserError(
            f"{where}: must be a list of {{input, output, testtype}}, all text, with"
            " testtype stdin or functional"
        )
    return list(cases)


def _function_name(metadata: Any, starter: str, where: str) -> str:
    """Find the function to call: `func_name` of the metadata, else the first method of
    the starter code.
    """
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:
            metadata = None
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    definition = re.search(r"\bdef\s+(\w+)\s*\(", starter)
    if not isinstance(named, str) and definition is None:
        raise UserError(
            f"{where}: neither metadata has a func_name nor starter_code a function to"
            " call"
        )
    return named if isinstance(named, str) else str(definition[1])  # type: ignore[index]
