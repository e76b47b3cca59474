"""Programs in answers of chat models, in the forms that these use, written by hand
after EvalPlus's rules.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from fcsd.data.thoughts import answer_in
from fcsd.evaluation.code.problems import Problem, read_problems
from fcsd.evaluation.code.sanitise import longest_block, program_in, sanitised
from tests.evaluation.rows import humaneval_row, mbpp_row, write_repository

MEAN = """\
import math

def total(xs):
    return math.fsum(xs)

def mean(xs):
    return total(xs) / len(xs)
"""
KEPT = MEAN.replace("\n\n", "\n").rstrip()  # its statements one below another
WRONG = "def mean(xs):\n    return 0\n"
DOCUMENTED = (
    'def mean(xs):\n    """\n    ```python\n    mean([1, 3])\n    ```\n    """\n   '
    " return sum(xs) / len(xs)"
)

# Each has a right program, which EvalPlus takes, too.
FORMS = {
    "the program alone": MEAN,
    "a fence": f"Sure!\n\n```python\n{MEAN}```\nThis adds them up.",
    "a fence without a language": f"```\n{MEAN}```",
    "a fence that is never closed": f"Here it is:\n```python\n{MEAN}",
    "an example call first": f"It is called so:\n```python\nprint(mean([1, 2]))\n```\nand reads\n```python\n{MEAN}```",
    "an installation first": f"```bash\npip install numpy\n```\n\n```python\n{MEAN}```",
    "a corrected second version": f"```python\n{WRONG}```\nThat is wrong. Better:\n```python\n{MEAN}```",
    "prose without a fence": f"The mean is the sum over the count.\n\n{MEAN}\nThis works, doesn't it?",
    "tildes": f"Here:\n~~~python\n{MEAN}~~~\n",
    "four backticks": f"````python\n{MEAN}````",
    "a fence behind text": f"The code is: ```python\n{MEAN}```",
    "a fence behind the last line": f"```python\n{MEAN.rstrip()}\n``` That is all.",
    "tags": f"[PYTHON]\n{MEAN}[/PYTHON]",
    "a heading and a list": f"### Solution\n\n1. Add up.\n2. Divide.\n\n```py\n{MEAN}```\n\n- O(n) time",
    "its tests behind it": f"```python\n{MEAN}\nassert mean([1]) == 2\n\nif __name__ == '__main__':\n    input()\n```",
    "its output behind it": f"```python\n{MEAN}```\nOutput:\n```\n2.0\n```",
    "a transcript first": f">>> mean([1, 3])\n2.0\n\n```python\n{MEAN}```",
    "line ends of Windows": f"Sure:\n```python\n{MEAN}```\n".replace("\n", "\r\n"),
    "names that nothing needs": f"```python\n{MEAN}\ndef unused(x):\n    return exit()\n\nlog = print\n```",
    "words of other alphabets": f"Gewiß, gerne – “so”:\n```python\n{MEAN}```\n完成。",
    "a broken line behind it": f"{MEAN}\ndef median(xs:\n    return",
}  # fmt: skip


def mean_of(program: str) -> Any:
    """Return the program's mean of 1, 2 and 6."""
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    return namespace["mean"]([1, 2, 6])


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_right_program_is_taken_from_every_form_of_answer(
    form: str, thinking: bool
) -> None:
    text = (
        f"<think>\nPerhaps\n```python\n{WRONG * 9}```\n</think>\n\n{FORMS[form]}"
        if thinking
        else FORMS[form]
    )
    answer = answer_in(text) if thinking else text
    problem = Problem("1", "Average.", "", (), entry_point="mean")
    program = program_in(problem, answer, chat=True)
    assert program == KEPT and mean_of(program) == 3


def test_fences_inside_a_docstring_are_text() -> None:
    assert sanitised(f"```python\n{DOCUMENTED}\n```", "mean") == DOCUMENTED
    assert mean_of(DOCUMENTED) == 3


def test_a_function_in_one_line_between_fences_is_taken() -> None:
    """EvalPlus, whose blocks have two lines or more, takes the first line of this answer."""
    line = "def mean(xs): return sum(xs) / len(xs)"
    assert sanitised(f"Sure:\n```python\n{line}\n```\n", "mean") == line


@pytest.mark.parametrize(
    ("block", "kept"),
    [
        (f"{WRONG}\n{MEAN}", f"import math\n{WRONG}"),  # the first definition counts
        (f"def mean(xs):\n    pass\n\n{MEAN}", KEPT),  # of those that return something
        # decorated ones never
        ("@cache\ndef total(xs):\n    return sum(xs)\n" + WRONG, WRONG),
        ("from __future__ import annotations\nimport os\n" + WRONG, "import os\n" + WRONG),
        ("try:\n    import numpy\nexcept ImportError:\n    pass\n" + WRONG, WRONG),
        ("a = b = 3\nc, d = e\ng: int = 4\nh += 1\ndef mean(a, b, c, d, e, g, h): return 0\n",
         "a = b = 3\nc, d = e\ng: int = 4\ndef mean(a, b, c, d, e, g, h): return 0"),
        ("class A:\n    def mean(self): return B\nclass B: pass\nclass C: pass\nmean = A().mean\n",
         "class A:\n    def mean(self): return B\nclass B: pass\nmean = A().mean"),
        ("x = 'é'; y = 'ü'; mean = y\n", "y = 'ü'\nmean = y"),
        # Nothing would remain.
        ("def mean(xs):\n    yield 1\n\nprint(mean)", "def mean(xs):\n    yield 1\n\nprint(mean)"),
    ],
)  # fmt: skip
def test_imports_and_what_the_function_needs_remain_of_a_block(
    block: str, kept: str
) -> None:
    assert sanitised(f"So:\n```python\n{block}\n```", "mean") == kept.strip()


def test_the_block_with_most_lines_that_are_not_blank_is_taken_and_of_equal_ones_the_first():
    assert (
        longest_block("a = 1\nb = 2\n\n\n\nno code\nc = 1\nd = 2\ne = 3")
        == "c = 1\nd = 2\ne = 3"
    )
    assert longest_block("a = 1\nb = 2\nno code\nc = 1\nd = 2") == "a = 1\nb = 2"
    assert (
        longest_block("x = '''\nno code\ny = (\n'''\nz = 1\n)")
        == "x = '''\nno code\ny = (\n'''\nz = 1"
    )
    assert longest_block("if a:\n    b\nelse:\nc") == "if a:\n    b"
    assert longest_block("no code\nnone here") == "no code" and longest_block("") == ""


@pytest.mark.parametrize(
    "text",
    [
        "a = 1\0\n", "-" * 9999 + "1\n", "a.b" * 999 + "\n", "(" * 250 + "\n", "x = (\n", "@x\n", "\ud800\n", "'''\n",
    ],
)  # fmt: skip
def test_no_answer_breaks_or_stalls_the_search_for_its_program(text: str) -> None:
    """A program is found even before text that Python cannot parse, or parses only
    after a long time.
    """
    assert sanitised(MEAN + "\n" + text * 401, "mean") == KEPT
    assert sanitised("don't: say so\n" * 2000 + MEAN, "mean") == KEPT


@pytest.mark.filterwarnings("error")
def test_an_escape_that_python_warns_of_is_no_error() -> None:
    program = "import re\ndef mean(xs):\n    return re.sub('\\d', '', xs)"
    assert sanitised(f"```python\n{program}\n```", "mean") == program


def test_a_base_models_completion_continues_from_the_head_of_the_function(
    tmp_path: Path,
) -> None:
    row = humaneval_row(0) | {
        "prompt": 'import math\n\n\ndef add0(a, b):\n    """Add."""\n'
    }
    write_repository(tmp_path, {"default": {"test": [row]}})
    (problem,) = read_problems(tmp_path)
    head = row["prompt"].replace("\n\n\n", "\n")
    body = "    return math.fsum([a, b])"
    assert program_in(problem, body) == head + body
    assert program_in(problem, f"{body}\n\nThis adds the two") == head + body
    # Python refuses a tab after the head's spaces.
    assert program_in(problem, body.replace("    ", "\t")) == head + body
    answer = f"Sure:\n```python\ndef add0(a, b):\n{body}\n```"
    assert program_in(problem, answer) == f"{problem.prefix}def add0(a, b):\n{body}\n"
    # as EvalPlus, without the head
    assert program_in(problem, answer, chat=True) == f"def add0(a, b):\n{body}"


def test_rows_of_another_test_keep_their_whole_block(tmp_path: Path) -> None:
    """No rule says which of the names of such a row is wanted; lm-eval's task keeps
    lm-eval's rule.
    """
    row = mbpp_row(0)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row | {"test": "assert mul0(2, 3) == 6"}) + "\n")
    (own,) = read_problems(file)
    program = f"{row['code']}\nCACHE.clear()\n".strip()
    assert program_in(own, f"Sure: ```python\n{program}\n```") == program
    file.write_text(json.dumps(row) + "\n")
    (evalplus,), (lm_eval,) = read_problems(file), read_problems(file, tests="visible")
    text = f"```\n{row['code'].strip()}\n```\n"
    assert program_in(evalplus, f"No:\n```\n1\n```\n{text}") == row["code"].strip()
    assert program_in(lm_eval, f"No:\n```\n1\n```\n{text}") == "1\n"
