"""Programs that try to pass without being right: they attack the examiner, not the
machine.
"""

import itertools
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from fcsd.evaluation.code import oracle, sandbox
from fcsd.evaluation.code.oracle import fcsd_grade
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.sandbox.codec import Codec
from fcsd.evaluation.code.scorer import CodeScorer
from tests.evaluation.code.attacks import (
    ATTACKED,
    PROBLEM,
    attack,
    job_bytes,
    raw_server,
    run,
)
from tests.support import few

ORACLE = Path(oracle.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scorer() -> Iterator[CodeScorer]:
    with CodeScorer(num_workers=1, timeout_s=3.0, memory_bytes=1 << 30) as s:
        yield s


def grade(
    answer: Any,
    right: Any,
    tolerance: float = 0,
    rule: str = "equal",
    inputs: Any = (1,),
) -> None:
    """Judge `answer` after it was passed on by the program, as in the sandbox."""
    crossed = Codec().decode(json.loads(json.dumps(Codec().encode(answer))))
    fcsd_grade(lambda *_: crossed, [inputs], [right], 0, None, tolerance, rule)


def raw(*frames: str) -> str:
    """Return code that writes frames of this text into every pipe that it has."""
    return f"""
import os
for text in {frames!r}:
    data = text.encode()
    for fd in range(3, 64):
        try:
            os.write(fd, b"%016x" % len(data) + data)
        except OSError:
            pass
"""


class Everything:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


ANSWERS: list[Any] = [
    numpy.empty(0), numpy.empty((0, 1)), numpy.empty((0, 2)), numpy.float64(1), numpy.bool_(True), numpy.full(3, 7),
    numpy.array([True, True]), numpy.array([[]]), numpy.ma.masked_all(2), [[]], [[], []], math.nan, [math.nan],
    math.inf, iter(()), (x for x in ()), Everything(), [Everything()],
]  # fmt: skip


@pytest.mark.parametrize(
    "answer",
    few([(answer,) for answer in ANSWERS], 20),
    ids=lambda answer: repr(answer).partition(" at 0x")[0],
)
def test_no_answer_equals_what_it_is_not(answer: Any) -> None:
    """numpy finds no difference between an empty array and anything else, and
    broadcasts a number to any length.
    """
    rights = (7, 7.5, [], [7], [7.5], [7, 8], [7.5, 8.5], (7.5,), "x", None, {}, {7: 8})
    for right, tolerance in itertools.product(rights, (0, 1e-4)):
        with pytest.raises((AssertionError, ValueError, TypeError)):
            grade(answer, right, tolerance)


@pytest.mark.parametrize(
    ("rule", "right", "inputs"),
    [("set", [8], (1,)), ("not_none", False, (1,)), ("root", 0, ([1.0, 1.0],)), ("pyramid", 33, (3, 4)),
     ("digit_distance", 8, (1, 9))],
)  # fmt: skip
def test_no_answer_passes_a_special_oracle_without_being_right(
    rule: str, right: Any, inputs: Any
) -> None:
    for answer in ANSWERS:
        with pytest.raises((AssertionError, ValueError, TypeError, OverflowError)):
            grade(answer, right, 1e-4, rule, inputs)


def test_an_empty_array_is_wrong_in_the_sandbox_too(scorer: CodeScorer) -> None:
    setup = "inputs = [[1]]\nresults = [7]\n"
    tests = (setup, ORACLE, "fcsd_grade(f, inputs, results, 0, None, 0, 'equal')\n")
    problem = Problem("g", "", "", tests, names=("f",))
    assert run(scorer, "def f(x): return 7\n", problem).passed
    assert (
        run(scorer, "import numpy\ndef f(x): return numpy.empty(0)\n", problem).outcome
        == "wrong"
    )


@pytest.mark.parametrize(
    "error", ["StopIteration", "StopAsyncIteration", "GeneratorExit", "AssertionError"]
)
def test_the_end_of_an_iteration_does_not_end_the_loop_of_a_test(
    scorer: CodeScorer, error: str
) -> None:
    test = "for one, right in zip(map(f, [1, 2]), [2, 3]):\n    assert one == right\n"
    assert (
        run(scorer, f"def f(x): raise {error}\n", Problem("m", "", "", (test,))).outcome
        == "error"
    )


@pytest.mark.parametrize(
    "names",
    [["f", "__builtins__", "__name__", "__import__", "exec", "zip", "a b"], {"f": 1}, "f", 5, None,
     [["f"]], ["f"] * 10000],
    ids=lambda names: str(names)[:30],
)  # fmt: skip
def test_a_forged_list_of_names_replaces_nothing_that_the_tests_use(
    scorer: CodeScorer, names: Any
) -> None:
    code = raw(json.dumps({"value": names})) + "def f(x): return None\n"
    test = "assert [f(x) for x, right in zip([1], [2]) if f(x) == right] == [2]\n"
    assert run(scorer, code, Problem("n", "", "", (test,))).outcome in (
        "wrong",
        "error",
    )


@pytest.mark.parametrize(
    "frame",
    ["[" * 100000, '{"value":' + '{"t":"tuple","v":[' * 2000 + "]}" * 2000 + "}", "null", "[]", '"passed"', "{}",
     '{"error": {"t": 1}, "text": [1]}', '{"error": "AssertionError"}', '{"error": "SystemExit", "text": "0"}',
     '{"error": "ExceptionGroup", "text": ""}', '{"value": {"t": "handle", "v": 0}}',
     '{"value": {"t": "handle", "v": -1, "truth": 1}}', '{"value": 1, "value": NaN, "error": "x", "text": ""}',
     '{"value": {"t": "int", "v": "__class__"}}', '{"value": {"t": "range", "v": [0, 1e400]}}', "9" * 5000,
     '{"value": {"t": "numpy", "v": ["|V8", [1], [1]]}}', '{"value": {"t": "numpy", "v": ["<f8", [-1, 0], []]}}',
     '{"value": {"t": "Decimal", "v": "sNaN"}}', '{"value": {"t": "dict", "v": [[[1], 1]]}}', "\x00"],
    ids=lambda frame: frame[:30],
)  # fmt: skip
def test_answers_given_before_they_are_asked_for_are_only_wrong(
    scorer: CodeScorer, frame: str
) -> None:
    for first in (json.dumps({"value": ["f"]}), frame):
        outcome = run(scorer, raw(first, frame, frame) + "def f(x): return None\n")
        assert outcome.outcome in ("wrong", "error"), outcome


def test_a_length_that_is_none_is_an_error(scorer: CodeScorer) -> None:
    for length in (b"-00000000000000f", b"ffffffffffffffff", b"zzzzzzzzzzzzzzzz"):
        code = f"""
import os
for fd in range(3, 64):
    try:
        os.write(fd, {length!r} + b"x" * 100)
    except OSError:
        pass
def f(x): return None
"""
        assert run(scorer, code).outcome == "error"


@pytest.mark.parametrize(
    "body",
    [
        "for pid in range(1, 9):\n    os.kill(pid, 0) if pid != os.getpid() else None",
        "open(f'/proc/{os.getppid() or 1}/mem', 'r+b')",
        "[open(f'/proc/{os.getpid() + n}/mem', 'rb') for n in (1, -1)]",
        "assert os.read(os.open(f'/proc/{os.getpid() + 1}/fd/0', os.O_RDONLY), 1)",
        "os.pidfd_open(os.getpid() + 1)",
        "assert l.ptrace(16, os.getpid() + 1, 0, 0) == 0",
        "assert l.process_vm_readv(os.getpid() + 1, 0, 0, 0, 0, 0) == 0",
        "assert l.prctl(1, 0) == 0",
    ],
)
def test_the_examiner_is_not_in_reach(scorer: CodeScorer, body: str) -> None:
    attack(scorer, f"import os, ctypes\nl = ctypes.CDLL(None)\n{body}")


def test_threads_that_continue_after_the_answer_do_not_reach_the_next_program(
    scorer: CodeScorer,
) -> None:
    code = """
import os, threading, time
def flood():
    data = b'{"value": 42}'
    while True:
        for fd in range(3, 64):
            try:
                os.write(fd, b"%016x" % len(data) + data)
            except OSError:
                pass
def f(x):
    threading.Thread(target=flood, daemon=True).start()
    return None
"""
    for _ in range(3):
        assert run(scorer, code).outcome == "wrong"


def test_an_exit_while_the_examiner_waits_is_no_pass(scorer: CodeScorer) -> None:
    late = (
        "import os, threading, time\nthreading.Timer(0.05, os._exit, [0]).start()\ndef"
        " f(x): time.sleep(9)\n"
    )
    assert run(scorer, late).outcome == "error"
    closed = "import os\ndef f(x):\n    os.closerange(0, 64)\n    return x + 1\n"
    assert run(scorer, closed).outcome == "error"


def test_a_file_of_the_program_is_not_what_its_tests_import(scorer: CodeScorer) -> None:
    code = """
for name in ("numpy", "math", "unusual_module"):
    open(name + ".py", "w").write("def isclose(*a): return True\\n")
def f(x): return None
"""
    test = (
        "import math\ntry:\n    import unusual_module\nexcept ImportError:\n    assert"
        " math.isclose(f(1) or 0, 2)\n"
    )
    assert run(scorer, code, Problem("i", "", "", (test,))).outcome == "wrong"


def test_deep_recursion_ends_where_python_ends_it_and_may_be_allowed_by_the_program(
    scorer: CodeScorer,
) -> None:
    deep = (
        "def g(n): return 0 if n == 0 else 1 + g(n - 1)\ndef f(): return g({n}) =="
        " {n}\n"
    )
    assert run(scorer, deep.format(n=900), ATTACKED).passed
    assert run(scorer, deep.format(n=1100), ATTACKED).message.startswith(
        "RecursionError"
    )
    assert run(
        scorer,
        "import sys\nsys.setrecursionlimit(9999)\n" + deep.format(n=2000),
        ATTACKED,
    ).passed


def test_the_time_of_a_program_begins_when_its_job_has_been_read(
    tmp_path: Path,
) -> None:
    """A job that is cut off would leave its rest in the pipe, where the server would
    take it for the next job.
    """
    with raw_server(tmp_path) as (send, receive):
        assert receive()["layers"]["seccomp"]
        for number, wait_s in enumerate((1.2, 0)):
            job = job_bytes(number, PROBLEM.canonical, PROBLEM.tests, 1000)
            send(job[:60])
            time.sleep(wait_s)
            send(job[60:])
            assert receive()["outcome"] == "passed"
            assert receive() == {"job": number, "clean": True}


def test_a_program_that_waits_for_a_processor_is_not_ended_at_once(
    tmp_path: Path,
) -> None:
    """The limit is processor time, so that a busy machine fails no program; a program
    that only waits is ended after three times the limit.
    """
    jobs = [
        ("time.sleep(0.8)", "passed", 0.8),
        ("time.sleep(60)", "timeout", 1.5),
        ("while 1: pass", "timeout", 0.5),
    ]
    with raw_server(tmp_path) as (send, receive):
        receive()
        for number, (body, outcome, at_least) in enumerate(jobs):
            code = f"import time\ndef f(x):\n    {body}\n    return x + 1\n"
            send(job_bytes(number, code, ["assert f(1) == 2\n"], 500))
            reply = receive()
            assert (reply["outcome"], receive()["clean"]) == (outcome, True)
            assert at_least <= reply["seconds"] < 60


def test_a_program_that_is_ended_for_time_did_not_run_out_of_memory(
    tmp_path: Path,
) -> None:
    """The examiner may see the program die before it is ended itself, as sometimes
    happens on a busy machine.
    """
    scripts = shutil.copytree(Path(sandbox.__file__).parent, tmp_path / "scripts")
    slow = (scripts / "server.py").read_text()
    kill = "end(target, signal.SIGKILL)"
    assert slow.count(kill) == 1
    (scripts / "server.py").write_text(slow.replace(kill, f"{kill}; time.sleep(0.5)"))
    (tmp_path / "work").mkdir()
    with raw_server(tmp_path / "work", scripts=scripts) as (send, receive):
        receive()
        send(
            job_bytes(0, "def f(x):\n    while 1: pass\n", ["assert f(1) == 2\n"], 300)
        )
        reply = receive()
        assert (reply["outcome"], reply["message"]) == ("timeout", "time limit")
        assert receive() == {"job": 0, "clean": True}


def test_numpy_can_be_imported_from_where_the_interpreter_alone_does_not_look(
    tmp_path: Path,
) -> None:
    """numpy may be installed only for the user, or through PYTHONPATH: an isolated
    interpreter reads neither.
    """
    code = "import numpy\ndef f(): return numpy.float64(1)\n"
    job = job_bytes(
        0, code, ["import numpy\nassert type(f()) is numpy.float64\n"], 20000
    )
    for place, outcome in (
        (None, "error"),
        (Path(numpy.__file__).parents[1], "passed"),
    ):
        folder = tmp_path / outcome
        folder.mkdir()
        with raw_server(folder, flags=["-S"], numpy=place) as (send, receive):
            assert receive()["layers"]["writes_restricted"]
            send(job)
            assert receive()["outcome"] == outcome
            assert receive()["clean"]
