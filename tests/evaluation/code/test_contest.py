"""Contest problems in LiveCodeBench's form: programs that read and print, and methods,
in the real sandbox.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.errors import UserError
from fcsd.evaluation.code.contest_oracle import fcsd_printed, fcsd_returned
from fcsd.evaluation.code.problems import Problem, read_problems
from fcsd.evaluation.code.scorer import CodeScorer, Outcome
from fcsd.evaluation.config import Scoring, SuiteConfig
from fcsd.evaluation.ready import score_file
from fcsd.evaluation.results import read_result
from fcsd.evaluation.scores import compare
from fcsd.pipeline.tiny.models import tiny_tokenizer
from tests.reference.tiny import tiny_model
from tests.support import evaluate

SUM = {
    "question_title": "Sum",
    "question_content": "Print the sum of N numbers.",
    "platform": "atcoder",
    "question_id": "abc001_a",
    "starter_code": "",
    "public_test_cases": json.dumps(
        [{"input": "2\n1 2\n", "output": "3\n", "testtype": "stdin"}]
    ),
    "private_test_cases": json.dumps(
        [
            {"input": "1\n5", "output": "5", "testtype": "stdin"},
            {"input": "3\n-1 0 1\n", "output": "0\n", "testtype": "stdin"},
        ]
    ),
    "metadata": "{}",
}
PAIRS = {
    "question_title": "Pairs",
    "question_content": "Return the numbers of nums that are above low, largest first.",
    "platform": "leetcode",
    "question_id": "2999",
    "starter_code": (
        "class Solution:\n    def above(self, nums: List[int], low: int) ->"
        " List[int]:\n        "
    ),
    "public_test_cases": json.dumps(
        [{"input": "[1, 5, 3]\n2", "output": "[5, 3]", "testtype": "functional"}]
    ),
    "private_test_cases": json.dumps(
        [{"input": "[]\n0", "output": "[]", "testtype": "functional"}]
    ),
    "metadata": json.dumps({"func_name": "above"}),
}


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("contest") / "lcb.jsonl", SUM, PAIRS)


@pytest.fixture(scope="module")
def problems(data: Path) -> list[Problem]:
    return read_problems(data)


@pytest.fixture(scope="module")
def scorer() -> Iterator[CodeScorer]:
    with CodeScorer(num_workers=1, timeout_s=0.8, memory_bytes=1 << 30) as s:
        yield s


def run(scorer: CodeScorer, problem: Problem, *codes: str) -> list[Outcome]:
    ((*outcomes,),) = scorer.score_samples([problem], {problem.task_id: list(codes)})
    return outcomes


# LiveCodeBench's rules, applied by hand: (printed, right output, the same).
BY_HAND = [
    ("3\n", "3", True),  # the whole is stripped …
    ("\n\n3  \n\n", "3\n", True),
    (" 1 2 \n 3", "1 2\n3 ", True),  # … and so is each line
    ("1  2", "1 2", True),  # as numbers, though not as text
    ("a  b", "a b", False),
    ("1\n\n2", "1\n2", False),  # an empty line between counts
    ("1\n2", "1 2", False),
    ("1.50", "1.5", True),
    ("1e2", "100", True),
    ("+7 -0", "7 0", True),
    ("0.1", "0.10000000000000001", False),  # decimals, not floats
    ("50000000000000000", "50000000000000001", False),
    ("Yes", "YES", False),
    ("1 x", "1.0 x", False),  # a word in the line: text alone counts
    ("1 2 3", "1 2", False),
    ("nan", "NaN", False),
    ("sNaN", "0", False),
    ("", "", True),
    ("", "0", False),
]


@pytest.mark.parametrize(("printed", "right", "same"), BY_HAND)
def test_printed_lines_are_compared_by_livecodebench_rules(
    printed: str, right: str, same: bool
) -> None:
    if same:
        fcsd_printed(printed, right)
    else:
        with pytest.raises(AssertionError, match=r"line|lines for"):
            fcsd_printed(printed, right)


@pytest.mark.parametrize(
    ("out", "right", "same"),
    [((1, 2), "[1, 2]", True), ([(1, 2)], "[[1, 2]]", False), (True, "true", True), (1, "1.0", True),
     (0.1 + 0.2, "0.3", False), (None, "null", True), ("3", "3", False)],
)  # fmt: skip
def test_returned_values_are_compared_as_python_values(
    out: Any, right: str, same: bool
) -> None:
    if same:
        fcsd_returned(out, right)
    else:
        with pytest.raises(AssertionError):
            fcsd_returned(out, right)


RIGHT = "n = int(input())\nprint(sum(map(int, input().split())))\n"
IN_OTHER_WAYS = [
    RIGHT,
    "import sys\nprint(sum(map(int, sys.stdin.read().split()[1:])))",
    "print(sum(map(int, open(0).read().split()[1:])))",
    "import os\nos.write(1, b'%d\\n' % sum(map(int, os.read(0, 1000).split()[1:])))",
    (
        "import sys\nnext(sys.stdin)\nfor line in sys.stdin:\n   "
        " sys.stdout.write(str(sum(map(int, line.split()))))"
    ),
    (
        "if __name__ == '__main__':\n    input()\n    print(float(sum(map(int,"
        " input().split()))))"
    ),
    (
        "import threading\ndef main():\n    input()\n    print(sum(map(int,"
        " input().split())))\nthreading.Thread(target=main).start()"
    ),
    "import atexit, sys, io\nsys.stdout = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\n" + RIGHT,
    # never closed
    "f = open(1, 'w')\ninput()\nf.write(str(sum(map(int, input().split()))))",
    RIGHT + "exit()",
    # LiveCodeBench imports for every program; a deep recursion is as deep as there.
    (
        "n = int(input())\nprint(reduce(add, map(int, input().split())))\n"
        "def deep(n): return n and deep(n - 1)\ndeep(20000)"
    ),
    (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Row:\n    values: list[int]\n"
        "input()\nprint(sum(Row(list(map(int, input().split()))).values))"
    ),
    "Here it is.\n```python\nprint('a sketch')\n```\nBetter:\n```python\n"
    + RIGHT
    + "```\nDone.",
]


def test_right_programs_pass_however_they_read_and_print(
    scorer: CodeScorer, problems: list[Problem]
) -> None:
    outcomes = run(scorer, problems[0], *IN_OTHER_WAYS)
    assert [outcome for outcome in outcomes if not outcome.passed] == []


@pytest.mark.parametrize(
    ("code", "outcome", "message"),
    [
        (
            "input()\nprint(input().split()[0])",
            "wrong",
            "test 1 of 3: AssertionError: line 1: '1' for '3'",
        ),
        ("print(3)", "wrong", "test 2 of 3: AssertionError: line 1: '3' for '5'"),
        ("print(3)\nprint(3)", "wrong", "test 1 of 3: AssertionError: 2 lines for 1"),
        ("", "wrong", "line 1: '' for '3'"),
        ("while True: pass", "timeout", "test 1 of 3: time limit"),
        ("import time\ntime.sleep(100)", "timeout", "test 1 of 3: time limit"),
        # though it has printed the right thing
        (RIGHT + "1 / 0", "error", "ZeroDivisionError"),
        (RIGHT + "import os\nos._exit(0)", "error", "ended itself"),
        ("print(sum", "error", "SyntaxError"),
        (RIGHT + "input()", "error", "test 1 of 3: EOFError: EOF when reading a line"),
        (
            "while True: print('x' * 1000000)",
            "error",
            "OSError: printed more than 16 MiB",
        ),
        (
            "import os\nwhile True: os.write(1, b'x' * 1000000)",
            "error",
            "printed more than 16 MiB",
        ),
        ("print('x' * (20 << 20))", "error", "printed more than 16 MiB"),
        ("print('x' * (3 << 30))", "memory", "MemoryError"),
        ("fcsd_printed = lambda *a: None\nprint(0)", "wrong", "line 1: '0' for '3'"),
    ],
)
def test_other_programs_fail_and_say_how(
    scorer: CodeScorer, problems: list[Problem], code: str, outcome: str, message: str
) -> None:
    (result,) = run(scorer, problems[0], code)
    assert result.outcome == outcome and message in result.message, result
    assert run(scorer, problems[0], RIGHT)[0].passed


def test_each_test_has_a_time_limit_and_a_process_of_its_own(
    scorer: CodeScorer, tmp_path: Path
) -> None:
    """Three tests of half the limit each, in a program that remembers nothing of the
    test before.
    """
    (problem,) = read_problems(write(tmp_path / "x.jsonl", SUM))
    slow = (
        "import time, builtins\nassert not hasattr(builtins, 'seen')\nbuiltins.seen"
        " = 1\n"
    )
    slow += "while time.process_time() < 0.4: pass\n"
    (outcome,) = run(scorer, problem, slow + RIGHT)
    assert outcome.passed and outcome.seconds > 1.0


def test_a_method_is_called_with_json_arguments(
    scorer: CodeScorer, problems: list[Problem]
) -> None:
    head = (
        "class Solution:\n    def above(self, nums: List[int], low: int) ->"
        " List[int]:\n        "
    )
    right, other, broken, slow = run(
        scorer,
        problems[1],
        head + "return tuple(sorted((n for n in nums if n > low), reverse=True))",
        head + "return [n for n in nums if n > low][::-1] + [0]",
        head + "return nums[99]",
        head + "\n        while True: pass",
    )
    assert right.passed and other.outcome == "wrong" and slow.outcome == "timeout"
    assert "test 1 of 2: AssertionError: [3, 5, 0] for [5, 3]" in other.message
    assert broken.outcome == "error" and "IndexError" in broken.message
    assert run(scorer, problems[1], "def above(nums, low): return sorted(nums)[:0:-1]")[
        0
    ].passed
    assert (
        run(scorer, problems[1], "def below(nums, low): return []")[0].outcome
        == "error"
    )


def test_the_question_says_how_to_answer(problems: list[Problem], data: Path) -> None:
    assert (
        problems[0].prompt.startswith(SUM["question_content"])
        and "standard input" in problems[0].prompt
    )
    assert f"```python\n{PAIRS['starter_code'].strip()}\n```" in problems[1].prompt
    assert [len(problem.tests) for problem in problems] == [4, 3]
    assert [len(problem.tests) for problem in read_problems(data, tests="visible")] == [
        2,
        2,
    ]
    shown = PAIRS | {"metadata": ""}  # the name is then that of the starter code
    (named,) = read_problems(write(data.with_name("named.jsonl"), shown))
    assert named.tests == problems[1].tests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"private_test_cases": "eJxrYJmqxA=="}, r"row 0: private_test_cases: is no JSON; LiveCodeBench's compressed"
         r" pickles are not loaded, since a pickle can run code: write them as JSON once"),
        ({"private_test_cases": "[{}]"}, "must be a list of {input, output, testtype}"),
        ({"public_test_cases": "[]", "private_test_cases": ""}, "has no tests, so that every program would pass"),
        ({"private_test_cases": PAIRS["private_test_cases"]}, "stdin and functional in one problem"),
        ({"question_content": 5}, "question_content must be text, got int"),
        (PAIRS | {"metadata": "{}", "starter_code": ""}, "neither metadata has a func_name nor starter_code"),
    ],
)  # fmt: skip
def test_a_bad_row_is_refused_with_its_place(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_problems(write(tmp_path / "x.jsonl", SUM | change))
    with pytest.raises(
        UserError,
        match="no column starter_code; code tasks need the LiveCodeBench schema",
    ):
        read_problems(
            write(
                tmp_path / "y.jsonl",
                {k: v for k, v in SUM.items() if k != "starter_code"},
            )
        )


def test_ready_samples_give_pass_at_k_and_can_be_compared(
    data: Path, tmp_path: Path
) -> None:
    above = (
        "class Solution:\n    def above(self, nums, low):\n        return"
        " sorted(nums)[:0:-1]"
    )

    def graded(name: str, *samples: dict[str, Any]) -> dict[str, Any]:
        file = write(tmp_path / f"{name}.jsonl", *samples)
        score_file(
            Scoring(
                samples=file,
                dataset=str(data),
                data_root=None,
                output=tmp_path / name,
                timeout_s=2.0,
            )
        )
        result, kept = read_result(tmp_path / name)
        return {"result": result, "samples": kept}

    # LiveCodeBench's own form, and a chat's answers.
    one = graded(
        "one",
        {"question_id": "abc001_a", "code_list": [RIGHT, "print(3)"]},
        {"question_id": "2999", "code_list": [above, above]},
    )
    task = one["result"]["tasks"]["lcb"]
    assert task["pass_at_k"] == {"1": pytest.approx(0.75)} and task[
        "value"
    ] == pytest.approx(0.75)
    assert one["samples"]["lcb"][0]["completions"] == [RIGHT, "print(3)"]
    two = graded(
        "two",
        {"task_id": "abc001_a", "completion": f"So:\n```python\n{RIGHT}```"},
        {"task_id": "2999", "completion": "I cannot."},
    )
    assert two["result"]["tasks"]["lcb"]["outcomes"] == {"error": 1, "passed": 1}
    row = compare(one, two)["tasks"]["lcb"]
    assert (row["original"], row["converted"]) == (
        pytest.approx(0.75),
        pytest.approx(0.5),
    )


def code_row(data: Path, stop: Sequence[str] | None) -> dict[str, Any]:
    row = {"task": "lcb", "kind": "code", "dataset": str(data), "max_new_tokens": 4}
    return row | ({} if stop is None else {"stop": stop})


def test_a_suite_asks_a_model_and_grades_its_programs(data: Path) -> None:
    model, tokenizer = (
        tiny_model("qwen3_moe", vocab_size=512, max_position_embeddings=512),
        tiny_tokenizer(),
    )
    options: dict[str, Any] = {"data_root": None, "batch_size": 2, "progress": False}
    suite = SuiteConfig.model_validate({"name": "own", "tasks": [code_row(data, [])]})
    result, samples = evaluate(model, tokenizer, suite, **options)
    assert result["tasks"]["lcb"]["num_items"] == 2 and result["sandbox"]["network_off"]
    assert (
        samples["lcb"][0]["prompt"].startswith("Print the sum")
        and samples["lcb"][0]["score"] == 0.0
    )
    suite = SuiteConfig.model_validate({"name": "own", "tasks": [code_row(data, None)]})
    with pytest.raises(
        UserError,
        match=r"task lcb: stop .* would cut programs that print; set stop: \[\]",
    ):
        evaluate(model, tokenizer, suite, **options)
