"""Shared by the tests of the sandbox: problems that an attack would pass, and
configurations of less capable machines.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fcsd.evaluation.code import sandbox
from fcsd.evaluation.code.problems import Problem
from fcsd.evaluation.code.sandbox import codec
from fcsd.evaluation.code.scorer import CodeScorer, Outcome

PROBLEM = Problem(
    "p",
    "add one",
    "def f(x):\n    return x + 1\n",
    ("assert f(41) == 42\nassert f(1) == 2\n",),
)
# f returns True when the attack has succeeded; the test of ATTACKED passes in exactly
# that case.
ATTACKED = Problem(
    "a", "attack", "def f():\n    return True\n", ("assert f() is True\n",)
)

# A machine that forbids namespaces (as most containers do) is above the floor. Without
# seccomp, on a machine that is neither x86_64 nor aarch64, programs run only if the
# user accepts that, and everything still holds except what `shielded` tests.
CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "all layers": (),
    "no namespaces": ("namespaces",),
    "no seccomp": ("seccomp",),
}


def run(scorer: CodeScorer, code: str, problem: Problem = PROBLEM) -> Outcome:
    """Return the outcome of a program, and check that the server still judges correctly
    after it.
    """
    outcome = scorer.score([problem], {problem.task_id: code})[0]
    ((again,),) = scorer.score_samples(
        [PROBLEM], {"p": [PROBLEM.canonical]}, timeout_s=20.0
    )
    assert again.passed, f"after {code!r}: {again}"
    return outcome


def attack(scorer: CodeScorer, body: str) -> Outcome:
    """Run `body` as the body of a function that returns True if the attack succeeds."""
    lines = "\n".join("    " + line for line in body.strip().splitlines())
    outcome = run(scorer, f"def f():\n{lines}\n    return True\n", ATTACKED)
    assert not outcome.passed, outcome
    return outcome


def job_bytes(number: int, code: str, tests: Sequence[str], limit_ms: int) -> bytes:
    """Return a job as the scorer writes it to a server."""
    body = json.dumps({"code": code, "tests": list(tests), "names": None}).encode()
    return f"{number:016x}{len(body):016x}{limit_ms:016x}".encode() + body


@contextlib.contextmanager
def raw_server(
    folder: Path,
    python: str = sys.executable,
    scripts: Path | None = None,
    disable: Sequence[str] = (),
    flags: Sequence[str] = (),
    numpy: Path | None = None,
    **options: Any,
) -> Iterator[tuple[Callable[[bytes], Any], Callable[[], Any]]]:
    """Start a server without its scorer; yield a function that writes to it and one
    that reads its next frame. The server must end by itself.
    """
    place = scripts or Path(sandbox.__file__).parent
    config = {
        "folder": str(folder),
        "memory_bytes": 1 << 30,
        "disable": list(disable),
        "numpy": numpy and str(numpy),
    }
    command = [python, "-I", "-B", *flags, str(place / "server.py"), json.dumps(config)]
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={},
        **options,
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        yield server.stdin.write, lambda: codec.read_frame(server.stdout.fileno())  # type: ignore[union-attr]
    finally:
        server.stdin.close()
        server.stdout.close()
        assert server.wait(120) == 0
