"""EvalPlus's judgement: the oracle by hand, the parts of a row's test, pass@k against counting."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy
import pytest

from fcsd.evaluation.code.oracle import fcsd_grade
from fcsd.evaluation.code.problems import grading, num_base_inputs, read_problems
from fcsd.evaluation.code.sanitise import program_in
from fcsd.evaluation.code.scorer import CodeScorer
from fcsd.evaluation.results import pass_at_k
from tests.evaluation.rows import humaneval_row, mbpp_row, write_repository


def passes(
    out: Any, right: Any, tolerance: float = 0, rule: str = "equal", argument: Any = 0
) -> bool:
    try:
        fcsd_grade(lambda _: out, [[argument]], [right], 0, None, tolerance, rule)
    except (AssertionError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    ("out", "right", "expected"),
    [
        (3, 3, True),
        (3, 4, False),
        (1.0 + 1e-7, 1.0, True),  # floats are compared to 1e-6 …
        (1.0 + 1e-5, 1.0, False),
        (1, 1.0, True),
        ([1.0, 2.0 + 1e-7], [1.0, 2.0], True),
        ((1.0, 2.0 + 1e-7), [1.0, 2.0], False),  # … in the same kind of container
        ([1.0], [1.0, 1.0], False),  # numpy would stretch it
        ([1], [], False),  # the data set's own test accepts anything for an empty list
        (None, [], False),
        (None, 1.0, False),
        ("a", "a", True),
        (numpy.array([1]), [1], True),  # an array of one element has a truth value …
        (numpy.array([1, 2]), [1, 2], False),  # … one of several has none
        (numpy.float64(1.0), 1.0, True),
        (numpy.float64(1.0 + 1e-7), 1.0, False),  # close, but of another type
        (True, True, True),
    ],
)
def test_outputs_are_compared_as_evalplus_does(
    out: Any, right: Any, expected: bool
) -> None:
    assert passes(out, right) is expected


def test_the_special_oracles() -> None:
    assert passes([2, 1, 1], (1, 2), rule="set") and not passes([1], (1, 2), rule="set")
    assert not passes(None, (1, 2), rule="set")
    assert passes(object(), True, rule="not_none")
    assert passes(None, False, rule="not_none")
    assert not passes(None, True, rule="not_none")
    assert not passes(True, False, rule="not_none")
    root = [-6.0, 5.0, -1.0]  # -(x - 2) (x - 3)
    assert passes(2.0, 3.0, 1e-4, "root", root)
    assert passes(3.00001, 2.0, 1e-4, "root", root)
    assert not passes(2.5, 2.5, 1e-4, "root", root)
    assert not passes(None, 2.0, 1e-4, "root", root)

    def two(out: Any, right: Any, rule: str, arguments: list[Any]) -> bool:
        try:
            fcsd_grade(lambda *_: out, [arguments], [right], 0, None, 0, rule)
        except (AssertionError, TypeError):
            return False
        return True

    # Mbpp/581: base 3, height 4: 33 with the slant height, 9 + 2 * 3 * sqrt(1.5**2 +
    # 4**2) = 34.6 with the other.
    assert two(33, 33, "pyramid", [3, 4])
    assert two(35, 33, "pyramid", [3, 4])
    assert not two(34, 33, "pyramid", [3, 4])
    # Mbpp/558: 1 and 256 are 7 apart when 1 is read as 001 (2 + 5 + 5 = 12).
    assert two(12, 7, "digit_distance", [1, 256])
    assert not two(11, 7, "digit_distance", [1, 256])


def test_a_reference_function_may_stand_for_the_list_of_right_outputs() -> None:
    fcsd_grade(lambda x: x + 1, [[1], [2]], lambda x: x + 1, 0, None, 0, "equal")
    with pytest.raises(AssertionError, match="input 1: not equal"):
        fcsd_grade(lambda x: 2, [[1], [2]], lambda x: x + 1, 0, None, 0, "equal")


def test_base_and_plus_are_the_first_inputs_and_the_others() -> None:
    grades = grading(mbpp_row(0)["test"], 3)
    assert grades is not None and grades.entry_point == "mul0"
    for part, inputs in (
        (grades.base, [(1, 2), (3, 3), (0, 3)]),
        (grades.plus, [(-1, 5)]),
    ):
        seen: list[tuple[int, int]] = []

        def solution(a: int, b: int, seen: list[tuple[int, int]] = seen) -> int:
            seen.append((a, b))
            return a * b

        namespace: dict[str, Any] = {"mul0": solution}
        for text in part:
            exec(text, namespace)
        assert seen == inputs


def test_a_test_of_another_form_decides_by_itself() -> None:
    assert grading("assert f(1) == 2", 1) is None
    assert (
        grading("inputs = []\nfor i, inp in enumerate(inputs):\n    print(inp)\n", 1)
        is None
    )
    assert grading("def check(candidate):\n    assert candidate(1)\n", 1, "f") is None


def test_the_number_of_base_inputs() -> None:
    assert num_base_inputs("HumanEval/0", 0) == 7
    assert num_base_inputs("HumanEval/163", 0) == 4
    assert num_base_inputs("HumanEval/164", 0) is None
    assert num_base_inputs(2, 3) == 3
    assert num_base_inputs(3, 4) == 5
    assert num_base_inputs("x", 0) is None


def test_base_and_plus_are_scored_apart_and_plus_only_where_base_passes(
    tmp_path: Path,
) -> None:
    rows = [mbpp_row(i) for i in range(5)]
    write_repository(tmp_path, {"default": {"test": rows}})
    problems = read_problems(tmp_path)
    programs = [
        "def mul0(a, b): return a * b",
        # right for the visible inputs only
        "def mul1(a, b): return a * b + 1 if a >= 0 else 0",
        "def mul2(a, b): return a * b + 2 if a != 3 else 0",
        "def mul3(a, b): return None",
        "def mul4(a, b): return undefined",
    ]
    given = {
        problem.task_id: program
        for problem, program in zip(problems, programs, strict=True)
    }
    with CodeScorer(num_workers=1) as scorer:
        scorer.self_check(problems)
        outcomes = scorer.score(problems, given)
        visible = scorer.score(read_problems(tmp_path, tests="visible"), given)
    assert [(o.base, o.outcome) for o in outcomes] == [
        ("passed", "passed"), ("passed", "wrong"), ("wrong", "wrong"), ("wrong", "wrong"), ("error", "error"),
    ]  # fmt: skip
    assert [(o.base, o.outcome) for o in visible] == [
        (None, "passed"), (None, "passed"), (None, "wrong"), (None, "wrong"), (None, "error"),
    ]  # fmt: skip


def test_a_function_head_stands_before_its_completion_and_may_be_written_again(
    tmp_path: Path,
) -> None:
    write_repository(tmp_path, {"default": {"test": [humaneval_row(0)]}})
    (problem,) = read_problems(tmp_path)
    texts = [
        "    return a + b\n",
        "```python\ndef add0(a, b):\n    return a + b\n```",
        "    return a - b\n",
        "return a + b\n",
    ]
    with CodeScorer(num_workers=1) as scorer:
        scorer.self_check([problem])
        programs = [program_in(problem, text) for text in texts]
        ((*outcomes,),) = scorer.score_samples([problem], {"HumanEval/0": programs})
    assert [o.outcome for o in outcomes] == ["passed", "passed", "wrong", "error"]


@pytest.mark.parametrize(
    ("samples", "passed", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4), (7, 3, 5)]
)
def test_pass_at_k_is_the_share_of_draws_with_a_passing_program(
    samples: int, passed: int, k: int
) -> None:
    draws = list(itertools.combinations(range(samples), k))
    share = sum(any(one < passed for one in draw) for draw in draws) / len(draws)
    assert pass_at_k(samples, passed, k) == pytest.approx(share)
    assert math.isclose(pass_at_k(samples, passed, 1), passed / samples)
