"""HumanEval+ and MBPP+ as EvalPlus grades them, from the editions on the Hub
(`evalplus/humanevalplus` v0.1.10, `evalplus/mbppplus` v0.2.0).

A row's `test` program there lists inputs and right outputs, the original benchmark's
inputs first, and compares in its own words, which differ from EvalPlus's: Mbpp/737, 787
and 794 compare nothing, HumanEval/32 fails every program, and an empty list of right
outputs equals anything. Here the inputs and right outputs are taken from the row and
graded by `fcsd.evaluation.code.oracle`, in two programs: base (the original inputs),
and plus (the inputs that EvalPlus added).

Not covered: EvalPlus's own file format with `base_input` and `plus_input`; EvalPerf;
the mini editions.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ORACLE = (Path(__file__).parent / "oracle.py").read_text(encoding="utf-8")

# EvalPlus's special oracles, by the requested function
# (evalplus/eval/_special_oracle.py).
_RULES = {
    # the order of the output, and repetitions in it, do not count
    "similar_elements": "set",
    "find_char_long": "set",
    "common_in_nested_lists": "set",
    "extract_singly": "set",
    "larg_nnum": "set",
    "intersection_array": "set",
    "find_dissimilar": "set",
    "Diff": "set",
    # any output but None means yes
    "check_str": "not_none",
    "text_match_three": "not_none",
    "text_starta_endb": "not_none",
    # two readings of the task are right
    "surface_Area": "pyramid",
    "digit_distance_nums": "digit_distance",
}

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

# The number of first inputs that come from the original benchmark, without repetitions,
# in these editions: found by comparing them with `base_input` of EvalPlus's files. For
# MBPP+ it is the number of visible tests, except in five problems.
_HUMANEVAL_BASE = (
    7, 4, 3, 6, 3, 3, 3, 4, 5, 4, 5, 3, 3, 4, 3, 3, 5, 5, 4, 5, 5, 5, 3, 3, 5, 8, 3, 3, 3, 2,
    4, 12, 99, 7, 1, 2, 8, 3, 100, 10, 9, 5, 3, 9, 12, 3, 4, 5, 7, 7, 100, 7, 6, 105, 7, 5, 12, 8, 4, 5,
    5, 12, 5, 7, 7, 5, 8, 7, 8, 25, 9, 9, 6, 8, 9, 4, 10, 9, 7, 4, 8, 6, 16, 5, 5, 4, 7, 6, 7, 8,
    6, 6, 10, 5, 9, 7, 10, 8, 7, 5, 5, 6, 8, 12, 4, 5, 4, 8, 8, 5, 7, 7, 9, 3, 12, 5, 7, 7, 13, 12,
    11, 7, 5, 4, 16, 8, 13, 8, 8, 10, 10, 7, 14, 12, 10, 5, 11, 8, 8, 4, 5, 26, 11, 7, 12, 6, 7, 4, 7, 7,
    10, 7, 4, 9, 6, 8, 14, 11, 10, 6, 3, 8, 4, 4,
)  # fmt: skip
_MBPP_BASE = {3: 5, 162: 4, 223: 3, 780: 4, 799: 6}


def num_base_inputs(task_id: str | int, num_visible: int) -> int | None:
    """Count the base inputs of a problem with `num_visible` visible tests; None when it
    is not known.
    """
    number = re.fullmatch(r"HumanEval/(\d+)", str(task_id))
    if number is not None:
        if int(number[1]) < len(_HUMANEVAL_BASE):
            return _HUMANEVAL_BASE[int(number[1])]
        return None
    if isinstance(task_id, int):
        return _MBPP_BASE.get(task_id, num_visible)
    return num_visible or None


@dataclass(frozen=True)
class Grading:
    """The two programs of one problem, each complete; `base` is () where the number of
    base inputs is not known.
    """

    entry_point: str
    base: tuple[str, ...]
    plus: tuple[str, ...]


def gradings(rows: Iterable[Mapping[str, Any]]) -> list[Grading | None]:
    """Return the grading of each row of MBPP+ or HumanEval+ (`grading`)."""
    graded = []
    for row in rows:
        # Only MBPP+ has visible tests.
        entry_point = row.get("entry_point")
        num_visible = len(row["test_list"]) if entry_point is None else 0
        num_base = num_base_inputs(row["task_id"], num_visible)
        graded.append(grading(row["test"], num_base, entry_point))
    return graded


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
        rule = _RULES.get(tail["name"], "equal")
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
