"""The problems of a code task, and the tests that decide each: rows of MBPP+
or HumanEval+.

A `test` in EvalPlus's form is graded as EvalPlus does
(`fcsd.evaluation.code.evalplus`); any other `test` is a program that decides by itself.

Not covered: EvalPlus's own files; problems in other languages.
"""

import ast
import re
import symtable
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fcsd.base.errors import UserError
from fcsd.base.files import check_is_file
from fcsd.data.local import fresh_cache
from fcsd.evaluation.code.evalplus import Grading, gradings
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.datasets import (
    damaged_file,
    dataset_location,
    first_line,
    hub_advice,
)
from fcsd.model.preserve import quiet

_MBPP = ("task_id", "prompt", "code", "test_imports", "test_list", "test")
_HUMANEVAL = ("task_id", "prompt", "canonical_solution", "entry_point", "test")
Tests = Literal["all", "visible"]


@dataclass(frozen=True)
class Problem:
    """One problem and its tests.

    Attributes:
        task_id: the row's id, as text.
        prompt: the instruction, or the head of the function.
        canonical: a correct program, standing alone; "" where the data set has none.
        tests: programs that raise unless the solution is right, run in this order in
            one namespace.
        visible_tests: assertions that a prompt may show (`test_list`).
        prefix: the text before every completion (the prompt, where it is the head of
            the function).
        base_tests: as `tests`, for the original benchmark's inputs; run before, and
            `tests` only if they pass. Empty: there is no such part.
        names: the functions of the program that the tests may call; None: all but those
            named like Python's own.
        block: which block of a completion has its program: the longest that Python can
            parse, as EvalPlus says; or the first in fences, as lm-eval does.
        entry_point: keep only the parts of the longest block that this function needs;
            None: all of it.
    """

    task_id: str
    prompt: str
    canonical: str
    tests: tuple[str, ...]
    visible_tests: tuple[str, ...] = ()
    prefix: str = field(default="", repr=False)
    base_tests: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    block: Literal["longest", "first"] = "longest"
    entry_point: str | None = None

    def program(self, code: str) -> str:
        """Assemble the program to run for the extracted `code`."""
        return self.prefix + code

    def text(self, template: str) -> str:
        """Write the prompt as the model is shown it; `{prompt}`, `{test}` and `{tests}`
        are replaced.
        """
        parts = {
            "{prompt}": self.prompt,
            "{test}": self.visible_tests[0] if self.visible_tests else "",
            "{tests}": "\n".join(self.visible_tests),
        }
        return re.sub(r"\{(?:prompt|tests?)\}", lambda match: parts[match[0]], template)


def load_problems(task: CodeTaskConfig, data_root: Path | None = None) -> list[Problem]:
    """Load the problems of a code task, in the order of the data set.

    Raises:
        UserError: nothing there, unknown split, a missing or wrongly typed column, no
            rows, or an id given twice.
    """
    location = dataset_location(task, data_root)
    try:
        return read_problems(
            location, task.split, task.dataset_name, task.revision, tests=task.tests
        )
    except UserError as error:
        advice = "" if Path(location).exists() else hub_advice(task, data_root)
        raise UserError(f"task {task.task}: {error}{advice}") from error


def read_problems(
    path: str | Path,
    split: str = "test",
    name: str | None = None,
    revision: str | None = None,
    *,
    tests: Tests = "all",
) -> list[Problem]:
    """Read problems from a folder in hub layout (parquet or jsonl), a .jsonl or
    .parquet file, or a hub id.

    tests: "visible" decides by the first three assertions of `test_list` alone, which
    the prompt shows too.
    """
    rows = _load_rows(str(path), split, name, revision)
    where = f"{path} ({split})"
    if not len(rows):
        raise UserError(f"{where}: the data set is empty")
    columns: tuple[str, ...]
    # The columns tell the benchmark: only HumanEval+ has `entry_point`.
    kind, columns, check, make = "MBPP+", _MBPP, _check_mbpp, _mbpp
    if "entry_point" in rows.column_names:
        kind, columns = "HumanEval+", _HUMANEVAL
        check, make = _check_humaneval, _humaneval
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise UserError(
            f"{where}: no column {', '.join(missing)}; code tasks need the {kind} schema:"
            f" {', '.join(columns)} (found {', '.join(rows.column_names) or 'none'})"
        )
    rows = list(rows)
    for index, row in enumerate(rows):
        check(row, f"{where}, row {index}", tests)
    # Visible tests run as they are; of the others, those in EvalPlus's form are graded
    # by our oracle, base inputs separately.
    graded = gradings(rows) if tests == "all" else [None] * len(rows)
    problems = [
        make(row, grades, tests) for row, grades in zip(rows, graded, strict=True)
    ]
    task_id, count = Counter(problem.task_id for problem in problems).most_common(1)[0]
    if count > 1:
        raise UserError(f"{where}: task_id {task_id} is given twice")
    return problems


def _load_rows(path: str, split: str, name: str | None, revision: str | None) -> Any:
    import datasets

    local = Path(path)
    options: dict[str, Any] = {"path": path, "name": name, "revision": revision}
    if local.suffix in (".jsonl", ".json", ".parquet"):
        check_is_file(local)
        if not local.stat().st_size:
            raise UserError(f"{path}: the file is empty")
        # A single file has no layout that names its split.
        builder = "parquet" if local.suffix == ".parquet" else "json"
        options = {"path": builder, "data_files": {split: path}}
    elif local.is_absolute() and not local.is_dir():
        raise UserError(f"{path}: no such folder")
    try:
        with quiet(), fresh_cache(local):
            return datasets.load_dataset(**options, split=split)
    except Exception as error:
        # datasets names the file at fault in few of its errors.
        message = (
            damaged_file(path)
            or f"{path}: cannot read split {split!r} of this data set: {first_line(error)}"
        )
        raise UserError(message) from error


def _check_mbpp(row: dict[str, Any], where: str, tests: Tests) -> None:
    _require_text(row, ("prompt", "code", "test"), where)
    for column in ("test_imports", "test_list"):
        if not isinstance(row[column], list) or not all(
            isinstance(item, str) for item in row[column]
        ):
            raise UserError(f"{where}: {column} must be a list of texts")
    if tests == "visible" and not row["test_list"]:
        raise UserError(f"{where}: test_list is empty, so every program would pass")


def _mbpp(row: dict[str, Any], graded: Grading | None, tests: Tests) -> Problem:
    visible_tests: Sequence[str] = (
        row["test_list"][:3] if tests == "visible" else row["test_list"]
    )
    deciding_tests: tuple[str, ...] = (row["test"],)
    base: tuple[str, ...] = ()
    names = _defined(row["code"])
    if tests == "visible":
        # An assertion may use a module that the solution imports (Mbpp/596: sys).
        deciding_tests = (_imports(row["code"]), "\n".join(visible_tests) + "\n")
    elif graded is not None:
        deciding_tests, base, names = graded.plus, graded.base, (graded.entry_point,)
    imports = tuple(text for text in ("\n".join(row["test_imports"]),) if text)
    return Problem(
        task_id=str(row["task_id"]),
        prompt=row["prompt"],
        canonical=row["code"],
        tests=imports + deciding_tests,
        visible_tests=tuple(visible_tests),
        base_tests=imports + base if base else (),
        names=names,
        block="first" if tests == "visible" else "longest",
        entry_point=graded.entry_point if graded is not None else None,
    )


def _check_humaneval(row: dict[str, Any], where: str, tests: Tests) -> None:
    _require_text(row, ("prompt", "canonical_solution", "entry_point", "test"), where)
    if tests == "visible":
        raise UserError(
            f"{where}: a HumanEval+ row has no visible tests; leave tests: visible out"
        )


def _humaneval(row: dict[str, Any], graded: Grading | None, tests: Tests) -> Problem:
    # The prompt is the head of a function, which the canonical solution continues.
    head = row["prompt"].strip() + "\n"
    entry_point = row["entry_point"]
    return Problem(
        task_id=str(row["task_id"]),
        prompt=row["prompt"],
        canonical=head + row["canonical_solution"],
        # HumanEval's tests define `check` and leave the call to whoever runs them.
        tests=graded.plus if graded else (row["test"], f"check({entry_point})"),
        prefix=head,
        base_tests=graded.base if graded else (),
        names=(entry_point,),
        entry_point=entry_point,
    )


# Runs where a data set has no correct programs that would show that the scorer works.
PROBE = Problem(
    "probe", "", "def double(x):\n    return 2 * x\n", ("assert double(21) == 42\n",)
)


def _require_text(row: dict[str, Any], columns: Sequence[str], where: str) -> None:
    for column in columns:
        if not isinstance(row[column], str):
            raise UserError(
                f"{where}: {column} must be text, got {type(row[column]).__name__}"
            )
    if not isinstance(row["task_id"], int | str):
        raise UserError(
            f"{where}: task_id must be a number or text, got {type(row['task_id']).__name__}"
        )
    if not row["test"].strip():
        raise UserError(f"{where}: test is empty, so every program would pass")


def _imports(code: str) -> str:
    try:
        statements = ast.parse(code).body
    except SyntaxError:
        return ""
    return "".join(
        ast.unparse(statement) + "\n"
        for statement in statements
        if isinstance(statement, ast.Import | ast.ImportFrom)
    )


def _defined(code: str) -> tuple[str, ...] | None:
    """Collect the names that a correct program defines: tests can only use these."""
    try:
        table = symtable.symtable(code, "<canonical>", "exec")
    except SyntaxError:
        # the canonical solution is run before any score is given, and will fail
        return None
    # Only names that the module's own statements bind, not those that it only uses.
    symbols = [
        symbol
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    ]
    if "import *" in code:
        return None
    return tuple(sorted(symbol.get_name() for symbol in symbols))
