"""Our verdicts against the real package evalplus 0.3.1, where it is installed: `make
test-extras` does that, beside the environment. On problems of our own in the form of
its data sets, and on real ones where these are."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fcsd.evaluation.code.problems import Problem, read_problems
from fcsd.evaluation.code.scorer import CodeScorer
from tests.evaluation.code.mutants import CHANGES, changed, edited
from tests.evaluation.rows import ASSERTION, mbpp_row

evaluation = pytest.importorskip(
    "evalplus.eval", reason="evalplus is not installed; `make test-extras` installs it"
)
pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

# Special oracles (2 set, 558, 581, 794 not none), numbers, tuples in lists, floats, a
# tuple, a list of floats.
PROBLEMS = (
    "2", "14", "63", "558", "581", "794", "HumanEval/2", "HumanEval/8", "HumanEval/21",
)  # fmt: skip
ENDLESS = (
    "while True: pass",
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
)


@pytest.fixture(scope="module")
def rows(shared_hub: Path) -> dict[str, tuple[Problem, dict[str, Any]]]:
    """task_id -> our problem, and the data set's row."""
    import datasets

    by_task = {}
    for name in ("mbppplus", "humanevalplus"):
        folder = shared_hub / "evalplus" / name
        table = datasets.load_dataset(
            "parquet", data_files=str(folder / "default/test.parquet"), split="train"
        )
        by_id = {str(row["task_id"]): row for row in table}
        by_task.update(
            {
                p.task_id: (p, by_id[p.task_id])
                for p in read_problems(folder)
                if p.task_id in PROBLEMS
            }
        )
    assert set(by_task) == set(PROBLEMS)
    return by_task


@pytest.fixture(scope="module")
def scorer() -> Iterator[CodeScorer]:
    with CodeScorer(num_workers=1, timeout_s=3.0) as s:
        yield s


def theirs(problem: Problem, row: dict[str, Any], code: str) -> tuple[bool, bool]:
    """(base, base and plus) as evalplus's own check says, on the row's inputs and right outputs."""
    kind = "humaneval" if "entry_point" in row else "mbpp"
    text = row["test"]
    if kind == "humaneval":
        text = textwrap.dedent(
            text[
                text.index("def check(candidate):\n") + len("def check(candidate):\n") :
            ]
        )
    setup, _, loop = text.rpartition("\nfor i, ")
    namespace: dict[str, Any] = {}
    exec(setup, namespace)
    (name,) = problem.names or ()
    atol = float(loop.rsplit(", ", 1)[1].rstrip(")\n "))
    inputs, right = namespace["inputs"], namespace["results"]
    split = int(problem.base_tests[-1].split(", ")[4])
    passed = []
    for part in (slice(0, split), slice(split, None)):
        some = inputs[part]
        status, _ = evaluation.untrusted_check(
            kind,
            code,
            some,
            name,
            right[part],
            atol,
            [0.3] * len(some),
            fast_check=True,
        )
        passed.append(status == evaluation.PASS)
    return passed[0], all(passed)


def ours(
    scorer: CodeScorer, problem: Problem, codes: list[str]
) -> list[tuple[bool, bool]]:
    ((*outcomes,),) = scorer.score_samples([problem], {problem.task_id: codes})
    return [(outcome.base == "passed", outcome.passed) for outcome in outcomes]


# Floats, tuples in lists, a number, and two of EvalPlus's special oracles, which go by
# the function's name (a set; not None): name -> program, inputs, right outputs. The
# first three inputs are the base.
OWN: dict[str, tuple[str, list[Any], list[Any]]] = {
    "halves": (
        "def halves(xs):\n    return [x / 2 for x in xs]\n",
        [[[1, 2]], [[3.0]], [[]], [[5, 7, 9]], [[0.1]]],
        [[0.5, 1.0], [1.5], [], [2.5, 3.5, 4.5], [0.05]],
    ),
    "pairs": (
        "def pairs(n):\n    return [(i, i + 1) for i in range(n)]\n",
        [[1], [2], [0], [3], [4]],
        [[(0, 1)], [(0, 1), (1, 2)], [], [(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3), (3, 4)]],
    ),
    "area": ("def area(a, b):\n    return a * b\n", [[2, 3], [1.5, 2], [0, 4], [7, 7]], [6, 3.0, 0, 49]),
    "find_dissimilar": (
        "def find_dissimilar(a, b):\n    return tuple(set(a) ^ set(b))\n",
        [[(1, 2), (2, 3)], [(1,), (1,)], [(4, 5), ()], [(1, 2, 3), (3, 4)]],
        [(1, 3), (), (4, 5), (1, 2, 4)],
    ),
    "check_str": (
        "import re\ndef check_str(s):\n    return re.match('[aeiou]', s)\n",
        [["ann"], ["bob"], ["eve"], [""]],
        [True, False, True, False],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def own(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Problem, dict[str, Any]]]:
    problems = {}
    for number, (name, (code, inputs, right)) in enumerate(OWN.items(), start=5000):
        row = mbpp_row(0) | {
            "task_id": number,
            "code": code,
            "test_list": ["assert True"] * 3,
        }
        row["test"] = (
            f"{ASSERTION}\ninputs = {inputs}\nresults = {right}\nfor i, (inp, exp) in"
            f" enumerate(zip(inputs, results)):\n    assertion({name}(*inp), exp, 0)\n"
        )
        file = tmp_path_factory.mktemp(name) / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        (problem,) = read_problems(file)
        problems[name] = (problem, row)
    return problems


@pytest.mark.parametrize("name", OWN)
def test_nearly_right_programs_for_our_own_problems_are_graded_as_evalplus_grades_them(
    scorer: CodeScorer, own: dict[str, tuple[Problem, dict[str, Any]]], name: str
) -> None:
    compared(scorer, *own[name])


@pytest.mark.real_data
@pytest.mark.parametrize("task_id", PROBLEMS)
def test_nearly_right_programs_are_graded_as_evalplus_grades_them(
    scorer: CodeScorer, rows: dict[str, tuple[Problem, dict[str, Any]]], task_id: str
) -> None:
    compared(scorer, *rows[task_id])


def compared(scorer: CodeScorer, problem: Problem, row: dict[str, Any]) -> None:
    """Compare both verdicts on the correct program, and on variants of it that are
    nearly right.
    """
    (name,) = problem.names or ()
    codes = [changed(problem.canonical, name, change) for change in CHANGES]
    codes += list(edited(problem.canonical))[:6]
    labels = [*CHANGES, *[f"edit {n}" for n in range(len(codes) - len(CHANGES))]]
    expected = [theirs(problem, row, code) for code in codes]
    actual = ours(scorer, problem, codes)
    differ = {
        label: (a, b)
        for label, a, b in zip(labels, actual, expected, strict=True)
        if a != b and label != "array"
    }
    assert differ == {}
    assert expected[0] == (True, True) and len(set(expected)) >= 2


@pytest.mark.real_data
def test_programs_that_do_not_end_are_graded_alike(
    scorer: CodeScorer, rows: dict[str, tuple[Problem, dict[str, Any]]]
) -> None:
    problem, row = rows["HumanEval/2"]
    codes = [
        f"def truncate_number(x):\n{textwrap.indent(body, '    ')}\n"
        for body in ENDLESS
    ]
    assert (
        [theirs(problem, row, code) for code in codes]
        == ours(scorer, problem, codes)
        == [(False, False)] * 2
    )


@pytest.mark.real_data
def test_where_the_two_differ(
    scorer: CodeScorer, rows: dict[str, tuple[Problem, dict[str, Any]]]
) -> None:
    """Checks the documented differences, so that a later version of the package that
    changes them is noticed.
    """
    problem, row = rows["14"]  # the volume of a prism
    everything = (
        "class E:\n    def __eq__(self, other): return True\ndef find_Volume(*a):"
        " return E()\n"
    )
    assert theirs(problem, row, everything) == (True, True)
    assert ours(scorer, problem, [everything]) == [(False, False)]
