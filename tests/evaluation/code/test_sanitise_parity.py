"""Programs taken out of 1,000 answers, against the sanitiser of the package evalplus
0.3.1 itself, where it is installed: `make test-extras` does that, beside the
environment."""

import ast
import itertools
import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from fcsd.data.thoughts import answer_in
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.sanitise import program_in
from tests.evaluation.code.test_sanitise import DOCUMENTED, FORMS

sanitizer = pytest.importorskip(
    "evalplus.sanitize",
    reason="evalplus is not installed; `make test-extras` installs it",
)
pytestmark = pytest.mark.extras

# name -> a right program, one that is wrong, and what decides.
PROGRAMS = {
    "mean": (
        "import math\n\ndef total(xs):\n    return math.fsum(xs)\n\ndef mean(xs):\n    return total(xs) / len(xs)",
        "def mean(xs):\n    return sum(xs)",
        "assert mean([1, 2, 6]) == 3",
    ),
    "words": (
        "from typing import List\nimport re\n\nWORD = re.compile(r'\\w+')\n\n"
        "def words(text: str) -> List[str]:\n    return WORD.findall(text)",
        "def words(text):\n    parts = text.split()\n    return parts",
        "assert words('a, b') == ['a', 'b']",
    ),
    "fib": (
        "memo = {}\n\ndef fib(n):\n    if n < 2:\n        return n\n    if n not in memo:\n"
        "        memo[n] = fib(n - 1) + fib(n - 2)\n    return memo[n]",
        "def fib(n):\n    return n * n",
        "assert [fib(n) for n in (0, 1, 10)] == [0, 1, 55]",
    ),
    "area": (
        "class Box:\n    def __init__(self, a, b):\n        self.a, self.b = a, b\n\n"
        "    def size(self):\n        return self.a * self.b\n\ndef area(a, b):\n    return Box(a, b).size()",
        "def area(a, b):\n    return a + b",
        "assert area(3, 4) == 12",
    ),
    "evens": (
        "def evens(xs):\n    result = []\n    for x in xs:\n        if x % 2 == 0:\n            result.append(x)\n"
        "    return result",
        "def evens(xs):\n    return xs",
        "assert evens([1, 2, 4]) == [2, 4]",
    ),
    "quoted": (
        'def quoted(s):\n    """Quote.\n\n    ```python\n    quoted("a")\n    ```\n    """\n    return f"<{s!r}>"',
        "def quoted(s):\n    return s",
        "assert quoted('é') == \"<'é'>\"",
    ),
}  # fmt: skip

# of the function's name, the right and the wrong program, and the test
Form = Callable[[str, str, str, str], str]


def fenced(code: str, mark: str = "```", language: str = "python") -> str:
    return f"{mark}{language}\n{code}\n{mark}"


GENERATED: dict[str, Form] = {
    "alone": lambda name, right, wrong, test: right,
    "fence": lambda name, right, wrong, test: (f"Sure!\n{fenced(right)}\nIt is `{name}`."),
    "no language": lambda name, right, wrong, test: fenced(right, language=""),
    "never closed": lambda name, right, wrong, test: f"Here:\n```python\n{right}",
    "cut off": lambda name, right, wrong, test: f"```python\n{right}\n\ndef other(a, b",
    "cut off inside": lambda name, right, wrong, test: (f"```python\n{right[: -len(right) // 4]}"),
    "example first": lambda name, right, wrong, test: (
        f"{fenced(f'print({name}([1]))')}\ngives it, with\n{fenced(right)}"
    ),
    "transcript": lambda name, right, wrong, test: (f">>> {name}(1)\n2\n\n{fenced(right)}"),
    "second version": lambda name, right, wrong, test: (f"{fenced(wrong)}\nWait, wrong. So:\n{fenced(right)}"),
    "first version": lambda name, right, wrong, test: (f"{fenced(right)}\nor wrong\n{fenced(wrong)}"),
    "both in one": lambda name, right, wrong, test: fenced(f"{wrong}\n\n# better\n{right}"),
    "right and wrong": lambda name, right, wrong, test: fenced(f"{right}\n\n{wrong}"),
    "pip": lambda name, right, wrong, test: (f"```bash\npip install numpy\n```\n{fenced(right)}"),
    "prose": lambda name, right, wrong, test: (f"I'd write it so.\n\n{right}\n\nThat's all there is."),
    "prose close by": lambda name, right, wrong, test: f"This is it:\n{right}\nDone",
    "tildes": lambda name, right, wrong, test: fenced(right, "~~~"),
    "four": lambda name, right, wrong, test: fenced(right, "````"),
    "behind text": lambda name, right, wrong, test: (f"The code: {fenced(right)} as asked"),
    "tags": lambda name, right, wrong, test: f"<answer>\n{right}\n</answer>",
    "list": lambda name, right, wrong, test: (f"1. Look.\n2. Go:\n{fenced(right)}\n- O(1)"),
    "indented": lambda name, right, wrong, test: (f"1. So:\n{textwrap.indent(fenced(right), '   ')}"),
    "tests": lambda name, right, wrong, test: fenced(f"{right}\n\n{test}\nprint({name})"),
    "main": lambda name, right, wrong, test: fenced(f"{right}\n\nif __name__ == '__main__':\n    main()"),
    "tests apart": lambda name, right, wrong, test: (f"{fenced(right)}\nTest:\n{fenced(test)}"),
    "output": lambda name, right, wrong, test: (f"{fenced(right)}\nOutput:\n```\n1\n2\n3\n```"),
    "future": lambda name, right, wrong, test: fenced(f"from __future__ import annotations\n{right}"),
    "cached": lambda name, right, wrong, test: fenced(
        "import functools\n"
        + right.replace(f"def {name}", f"@functools.cache\ndef {name}")
    ),
    "tried import": lambda name, right, wrong, test: fenced(
        f"try:\n    import numpy\nexcept ImportError:\n    numpy = None\n\n{right}"
    ),
    "windows": lambda name, right, wrong, test: f"So:\n{fenced(right)}\n".replace("\n", "\r\n"),
    "tabs": lambda name, right, wrong, test: fenced(right.replace("    ", "\t")),
    "input": lambda name, right, wrong, test: fenced(f"{right}\n\nx = input()\nprint({name}(x))"),
    "diff": lambda name, right, wrong, test: fenced(textwrap.indent(right, "+"), language="diff"),
    "refused": lambda name, right, wrong, test: f"I cannot write {name}.",
    "wrong": lambda name, right, wrong, test: f"Sure:\n{fenced(wrong)}",
    "nothing": lambda name, right, wrong, test: "",
}  # fmt: skip
# Where the two differ: EvalPlus's blocks have two lines or more.
ONE_LINE = "a function in one line, alone between fences"
BEFORE = (
    "", "Let me think. ", "Okay\n\n", "The user's question is simple:\n", "# Answer\n\n", "x\n\n",
)  # fmt: skip
BEHIND = (
    "", "\n", "\nHope that helps!", "\n\nLet me know", "\n\n**Note**: it's O(n).", "\n<|im_end|>",
)  # fmt: skip


def answers() -> list[tuple[str, str, str]]:
    """Return 1,000 answers: the name of each, its program's name, and its text; in half
    of them, thoughts come first.
    """
    draw = random.Random(7)
    made = []
    for number, (form, name) in zip(
        range(999),
        itertools.cycle(itertools.product(GENERATED, PROGRAMS)),
        strict=False,
    ):
        text = (
            draw.choice(BEFORE)
            + GENERATED[form](name, *PROGRAMS[name])
            + draw.choice(BEHIND)
        )
        if draw.random() < 0.5:
            text = f"<think>\nFirst\n{fenced(PROGRAMS[name][1])}\n</think>\n\n{text}"
        made.append((f"{number} {form} of {name}", name, text))
    return [
        *made,
        (ONE_LINE, "mean", f"Sure:\n{fenced('def mean(xs): return sum(xs) / len(xs)')}"),
    ]  # fmt: skip


def passes(program: str, test: str) -> bool:
    """Tell whether a program passes its test in this process; all forms of programs are
    listed above.
    """
    namespace: dict[str, Any] = {
        "input": lambda: 1,
        "print": lambda *a: None,
        "main": lambda: None,
    }
    try:
        exec(program, namespace)
        exec(test, namespace)
    except Exception:
        return False
    return True


def same(one: str, other: str) -> bool:
    """Tell whether two programs are the same except for comments and blank lines."""
    try:
        return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
    except SyntaxError:
        return one == other


def test_a_thousand_answers_have_the_programs_and_verdicts_that_evalplus_gives_them():
    verdicts, programs, passed = [], [], 0
    for label, name, text in answers():
        problem = Problem("1", "", "", (), entry_point=name)
        ours = program_in(problem, answer_in(text), chat=True)
        # Its providers (evalplus/provider/hf.py, vllm.py) replace the tabs before.
        spaced = answer_in(text).replace("\t", "    ")
        theirs = sanitizer.sanitize(spaced, entrypoint=name)
        test = PROGRAMS[name][2]
        passed += passes(theirs, test)
        if passes(ours, test) != passes(theirs, test):
            verdicts.append(label)
        if not same(ours, theirs):
            programs.append(label)
    assert verdicts == [ONE_LINE] and programs == [ONE_LINE]
    assert 500 < passed < 900, "right and wrong answers alike"


def test_evalplus_takes_the_programs_that_we_say_it_takes() -> None:
    for form, text in FORMS.items():
        problem = Problem("1", "", "", (), entry_point="mean")
        assert same(
            sanitizer.sanitize(text, entrypoint="mean"),
            program_in(problem, text, chat=True),
        ), form
    assert (
        sanitizer.sanitize(f"```python\n{DOCUMENTED}\n```", entrypoint="mean")
        == DOCUMENTED
    )
