"""The problems of a code task, and the tests that decide each: rows of MBPP+ or
HumanEval+, graded as EvalPlus does, from the editions on the Hub
(`evalplus/humanevalplus` v0.1.10, `evalplus/mbppplus` v0.2.0).

A row's `test` program there lists inputs and right outputs, the original benchmark's
inputs first, and compares in its own words, which differ from EvalPlus's: Mbpp/737, 787
and 794 compare nothing, HumanEval/32 fails every program, and an empty list of right
outputs equals anything. Here the inputs and right outputs are taken from the row and
graded by `fcsd.evaluation.code.oracle`, in two programs: base (the original inputs),
and plus (the inputs that EvalPlus added). Any other `test` is a program that decides by
itself.

Not covered: EvalPlus's own files, with `base_input` and `plus_input`; EvalPerf; the
mini editions; problems in other languages.
"""

import ast
import functools
import re
import symtable
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fcsd.base.errors import UserError
from fcsd.base.files import check_is_file, data_dir, read_yaml
from fcsd.data.local import fresh_cache
from fcsd.evaluation.config import CodeTaskConfig
from fcsd.evaluation.datasets import (
    damaged_file,
    dataset_location,
    first_line,
    reading,
)
from fcsd.model.preserve import quiet

_ORACLE = (Path(__file__).parent / "oracle.py").read_text(encoding="utf-8")

_HEAD = r"\n{0}for i, (?:\(inp, exp\)|inp) in enumerate\([^\n]*\):\n{0}    "

_MBPP_TAIL = re.compile(
    _HEAD.format("")
    + r"assertion\((?P<name>\w+)\(\*inp\), (?P<right>exp|ref_func\(\*inp\)),"
    r" (?P<atol>[\d.e-]+)\)\s*"
)

_HUMANEVAL_TAIL = re.compile(
    _HEAD.format("    ")
    + r"(?:assertion\(candidate\(\*inp\), (?P<right>exp|ref_func\(\*inp\)),"
    r" (?P<atol>[\d.e-]+)\)"
    r"|assert _poly\(\*candidate\(\*inp\), inp\) <= (?P<root>[\d.e-]+))\s*"
)

_CHECK = "def check(candidate):\n"


@functools.cache
def _editions() -> Any:
    """Read what EvalPlus's editions on the Hub do not say."""
    return read_yaml(data_dir("eval") / "evalplus.yaml")


def num_base_inputs(task_id: str | int, num_visible: int) -> int | None:
    """Count the base inputs of a problem with `num_visible` visible tests; None when it
    is not known.
    """
    if number := re.fullmatch(r"HumanEval/(\d+)", str(task_id)):
        counts = dict(enumerate(_editions()["humaneval_base"]))
        return counts.get(int(number[1]))
    if isinstance(task_id, int):
        return _editions()["mbpp_base"].get(task_id, num_visible)
    return num_visible or None


@dataclass(frozen=True)
class Grading:
    """The two programs of one problem, each complete; `base` is () where the number of
    base inputs is not known.
    """

    entry_point: str
    base: tuple[str, ...]
    plus: tuple[str, ...]


def grading(
    test: str, num_base: int | None, entry_point: str | None = None
) -> Grading | None:
    """Parse a row's `test` in EvalPlus's form into its grading; None when the test is
    of another form.

    num_base: of the first inputs, the original benchmark's; None: not known.
    entry_point: the function's name, which a HumanEval+ row says and the test of an
    MBPP+ row itself.
    """
    if entry_point is None:
        # The loop over the inputs comes last; what precedes it defines inputs and
        # results.
        loop_start = test.rfind("\nfor i, ")
        tail = _MBPP_TAIL.fullmatch(test, loop_start) if loop_start >= 0 else None
        if tail is None or "\ninputs = " not in test:
            return None
        setup = test[:loop_start]
        name = tail["name"]
        rule = _editions()["special_oracles"].get(tail["name"], "equal")
        tolerance, right = tail["atol"], tail["right"]
    else:
        loop_start, check = test.rfind("\n    for i, "), test.find(_CHECK)
        tail = None
        if 0 <= check < loop_start:
            tail = _HUMANEVAL_TAIL.fullmatch(test, loop_start)
        if tail is None or "\n    inputs = " not in test[check:loop_start]:
            return None
        # HumanEval+ defines its inputs within `check`, indented by four spaces.
        inside = re.sub(
            r"^    ", "", test[check + len(_CHECK) : loop_start], flags=re.MULTILINE
        )
        setup = test[:check] + inside
        name = entry_point
        rule = "root" if tail["root"] else "equal"
        tolerance, right = tail["root"] or tail["atol"], tail["right"] or "exp"
    expected = "results" if right == "exp" else "ref_func"

    def part(first: int, last: int | None) -> tuple[str, ...]:
        call = (
            f"fcsd_grade({name}, inputs, {expected}, {first}, {last}, {tolerance},"
            f" {rule!r})"
        )
        return (f"{setup}\n", _ORACLE, f"{call}\n")

    # Without their number, base inputs cannot be recognised: all count as plus.
    if not num_base:
        return Grading(name, (), part(0, None))
    return Grading(name, part(0, num_base), part(num_base, None))


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

    def plain_text(self, template: str) -> str:
        """Write the prompt of a model without a chat template, which ends with a line
        break.
        """
        return self.text(template).strip() + "\n"


def load_problems(task: CodeTaskConfig, data_root: Path | None = None) -> list[Problem]:
    """Load the problems of a code task, in the order of the data set.

    Raises:
        UserError: nothing there, unknown split, a missing or wrongly typed column, no
            rows, or an id given twice.
    """
    location = dataset_location(task, data_root)
    with reading(task, data_root, location):
        return read_problems(
            location, task.split, task.dataset_name, task.revision, tests=task.tests
        )


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
    problems = [make(row, tests) for row in rows]
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


def _mbpp(row: dict[str, Any], tests: Tests) -> Problem:
    visible_tests: Sequence[str] = row["test_list"]
    deciding_tests: tuple[str, ...] = (row["test"],)
    base: tuple[str, ...] = ()
    names, graded = _defined(row["code"]), None
    if tests == "visible":
        visible_tests = visible_tests[:3]
        # An assertion may use a module that the solution imports (Mbpp/596: sys).
        deciding_tests = (_imports(row["code"]), "\n".join(visible_tests) + "\n")
    elif graded := grading(
        row["test"], num_base_inputs(row["task_id"], len(visible_tests))
    ):
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


def _humaneval(row: dict[str, Any], tests: Tests) -> Problem:
    # The prompt is the head of a function, which the canonical solution continues.
    head = row["prompt"].strip() + "\n"
    entry_point = row["entry_point"]
    graded = grading(row["test"], num_base_inputs(row["task_id"], 0), entry_point)
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
