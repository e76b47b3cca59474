"""Run generated programs in the sandbox and classify the outcome of each: the scorer's
side of `fcsd.evaluation.code.sandbox`.

A failure of the scorer raises `ScorerError`; it is never a score of 0.

Not covered: outcomes of programs that depend on the order of sets are as random as that
order.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, get_args

from fcsd.base.errors import ScorerError, UserError
from fcsd.base.memory import available_memory
from fcsd.base.text import progress_bar
from fcsd.base.writing import scratch_folder
from fcsd.evaluation.code.sanitise import program_in

if TYPE_CHECKING:
    from fcsd.evaluation.code.problems import Problem

OutcomeClass = Literal["passed", "wrong", "error", "timeout", "memory"]
OUTCOME_CLASSES: tuple[OutcomeClass, ...] = get_args(OutcomeClass)
LAYERS = ("namespaces", "scratch", "landlock", "seccomp", "rlimits")
MEMORY_BYTES = 4 << 30  # one canonical program of MBPP+ needs 2.2 GB
# The limit of a canonical solution, which sets the limit of its problem, as a multiple
# of an ordinary program's limit. Mbpp/255 took 137 s on a machine with five jobs a
# core.
_CANONICAL_FACTOR, _CANONICAL_MIN_S = 12.0, 600.0
# A program may take this many times as long as the canonical solution of its problem,
# where that was measured.
_SLOWER = 4.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    passed   ran all tests to their end
    wrong    a test's assertion failed
    error    another exception, in the program or in a test, or the program ended itself
    timeout  not finished in time
    memory   more memory than allowed

    base: the same for the original benchmark's tests alone; None where a problem has no
    such part.
    """

    task_id: str
    outcome: OutcomeClass
    seconds: float
    message: str = ""
    base: OutcomeClass | None = None

    @property
    def passed(self) -> bool:
        """True when the program counts."""
        return self.outcome == "passed"


_CANONICAL_PASSED: dict[str, Outcome] = {}  # in this process, by sandbox and problem


def default_num_workers(memory_bytes: int = MEMORY_BYTES) -> int:
    """Choose one worker a core that this process may use, and no more than fit the
    available memory.
    """
    # Programs that run at the same time share the available memory.
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, available_memory() // memory_bytes))


class CodeScorer:
    """A pool of sandbox servers, each in a fresh process; use it as a context manager.

    Args:
        num_workers: programs that run at the same time; None: `default_num_workers`.
        allow_weak_sandbox: run even where programs cannot be kept off the network and
            from writing files.
        timeout_s: processor time of one program and its tests; the wall time may be
            three times as long. More for problems whose canonical solution took more
            than a quarter of it in `self_check`.
        memory_bytes: address space of one program.
        disable: layers of `LAYERS` to leave out, to test machines that lack them.
        progress: draw a bar.

    Raises:
        UserError: the sandbox would be too weak. ScorerError: a server fails; the next
            call starts it again.
    """

    def __init__(
        self,
        *,
        num_workers: int | None = None,
        allow_weak_sandbox: bool = False,
        timeout_s: float = 10.0,
        memory_bytes: int = MEMORY_BYTES,
        disable: Collection[str] = (),
        progress: bool = False,
    ):
        unknown = sorted(set(disable) - set(LAYERS))
        if unknown:
            raise ValueError(
                f"disable: unknown layers {unknown}; allowed: {', '.join(LAYERS)}"
            )
        if num_workers is None:
            num_workers = default_num_workers(memory_bytes)
        self.num_workers, self.progress = num_workers, progress
        if self.num_workers < 1 or timeout_s <= 0 or memory_bytes <= 0:
            raise ValueError("num_workers, timeout_s and memory_bytes must be positive")
        self.allow_weak_sandbox, self.disable = allow_weak_sandbox, sorted(disable)
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        # No server is started here, but in the `with` block, which ends them all.
        self.layers: dict[str, Any] = {}
        self._canonical_s: dict[tuple[str, str], float] = {}
        self._servers: list[SandboxServer] = []

    def __enter__(self) -> CodeScorer:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all servers and their programs."""
        for server in self._servers:
            server.stop()
        self._servers = []

    def _start(self) -> None:
        """Bring the pool to its size; servers that have ended are replaced."""
        for server in self._servers:
            if server.broken:
                server.stop()
        self._servers = [server for server in self._servers if not server.broken]
        while len(self._servers) < self.num_workers:
            self._servers.append(SandboxServer(self.memory_bytes, self.disable))
        for layers in [server.ready() for server in self._servers]:
            self.layers = layers
            self._refuse_weak()

    def _refuse_weak(self) -> None:
        # Only these two are required; a result records which of the others were active.
        required = {
            "network_off": (
                "keep generated programs off the network (seccomp on x86_64 or aarch64)"
            ),
            "writes_restricted": "keep them from writing files (Landlock)",
        }
        missing = [text for layer, text in required.items() if not self.layers[layer]]
        if missing and not self.allow_weak_sandbox:
            raise UserError(
                "code tasks: this machine's sandbox cannot"
                f" {' and cannot '.join(missing)}; run on a newer kernel or in a"
                " container that allows it, or accept the risk: --allow-weak-sandbox,"
                " or allow_weak_sandbox in a recipe and in Python"
            )

    def self_check(
        self, problems: Sequence[Problem], *, timeout_s: float | None = None
    ) -> list[Outcome]:
        """Score the canonical solutions, which must all pass; their times set the time
        limits of their problems.

        Where no problem has one, a program of ours must pass a test of ours. One that
        has passed in this process, in the same sandbox, is not run again; but for the
        first of all, which tells whether the sandbox still works.

        Raises:
            ScorerError: one does not pass, so that no score of this scorer on this
                machine means anything.
        """
        limit = max(_CANONICAL_FACTOR * (timeout_s or self.timeout_s), _CANONICAL_MIN_S)
        problems = [problem for problem in problems if problem.canonical]
        if not problems:
            from fcsd.evaluation.code.problems import PROBE

            problems = [PROBE]
        jobs = [(problem, problem.canonical, limit) for problem in problems]
        sandbox = json.dumps(
            [self.layers, self.memory_bytes, self.disable, limit], sort_keys=True
        )
        # The same solutions are checked for every model of a run, and need to run once
        # only.
        keys = [_fingerprint(sandbox, problem) for problem in problems]
        unknown = [
            number
            for number, key in enumerate(keys)
            if not number or key not in _CANONICAL_PASSED
        ]
        new = self._run([jobs[number] for number in unknown], "canonical solutions")
        ran = dict(zip(unknown, new, strict=True))
        outcomes = [
            ran.get(number) or _CANONICAL_PASSED[key] for number, key in enumerate(keys)
        ]
        if failed := [outcome for outcome in outcomes if not outcome.passed]:
            examples = "; ".join(
                f"{o.task_id}: {o.outcome} {o.message}".rstrip() for o in failed[:3]
            )
            raise ScorerError(
                f"{len(failed)} of {len(outcomes)} canonical solutions do not pass"
                f" their own tests ({examples}): the scorer or the data set is broken, so"
                " no score is given"
            )
        for problem, key, outcome in zip(problems, keys, outcomes, strict=True):
            _CANONICAL_PASSED.setdefault(key, outcome)
            self._canonical_s[problem.task_id, problem.canonical] = outcome.seconds
        return outcomes

    def score(
        self, problems: Sequence[Problem], completions: Mapping[str, str]
    ) -> list[Outcome]:
        """Run the program in each completion (`program_in`) against the tests of its
        problem.
        """
        by_id = {problem.task_id: problem for problem in problems}
        programs = {
            task_id: [program_in(by_id[task_id], text) if task_id in by_id else text]
            for task_id, text in completions.items()
        }
        return [outcomes[0] for outcomes in self.score_samples(problems, programs)]

    def score_samples(
        self,
        problems: Sequence[Problem],
        programs: Mapping[str, Sequence[str]],
        *,
        timeout_s: float | None = None,
    ) -> list[list[Outcome]]:
        """Score one or more programs for every problem: one list a problem, in their
        order.

        timeout_s: of one program, instead of the scorer's own.

        Raises:
            UserError: a problem without program, or a program for an unknown problem.
            ScorerError: the sandbox failed.
        """
        problem_ids = {problem.task_id for problem in problems}
        program_ids = {task_id for task_id, texts in programs.items() if texts}
        missing = sorted(problem_ids - program_ids)
        extra = sorted(program_ids - problem_ids)
        if missing or extra:
            mismatch = f"{extra[0]} is not a problem" if extra else ""
            if missing:
                mismatch = f"no completion for problem {missing[0]}"
            raise UserError(
                f"completions do not match the problems: {mismatch}"
                f" ({len(missing)} missing, {len(extra)} unknown)"
            )
        jobs = []
        for problem in problems:
            # A problem that is slow for the canonical solution gets more time for every
            # program.
            key = problem.task_id, problem.canonical
            slow = _SLOWER * self._canonical_s.get(key, 0.0)
            limit = max(timeout_s or self.timeout_s, slow)
            jobs += [(problem, text, limit) for text in programs[problem.task_id]]
        outcomes = iter(self._run(jobs, "programs"))
        return [
            [next(outcomes) for _ in programs[problem.task_id]] for problem in problems
        ]

    def _run(
        self, jobs: Sequence[tuple[Problem, str, float]], description: str
    ) -> list[Outcome]:
        self._start()
        # The threads only wait: programs run in the servers' processes.
        idle: SimpleQueue[SandboxServer] = SimpleQueue()
        for server in self._servers:
            idle.put(server)
        bar = progress_bar(total=len(jobs), desc=description, shown=self.progress)

        def grade(job: tuple[Problem, str, float]) -> Outcome:
            server = idle.get()
            try:
                return _grade(server, *job)
            finally:
                idle.put(server)
                bar.update()

        try:
            with bar, ThreadPoolExecutor(len(self._servers)) as pool:
                # an error cancels the jobs that have not begun
                return list(pool.map(grade, jobs))
        except BaseException:
            self.close()
            raise


def _fingerprint(sandbox: str, problem: Problem) -> str:
    """Return the identity of a problem, its tests and its canonical solution in a
    sandbox.
    """
    return hashlib.sha256(
        f"{sandbox}{astuple(problem)!r}".encode("utf-8", "surrogatepass")
    ).hexdigest()


def _grade(
    server: SandboxServer, problem: Problem, program: str, limit: float
) -> Outcome:
    """Run a program against the base tests, if there are any, and if it passes against
    the others.
    """

    def run(tests: Sequence[str]) -> Outcome:
        reply = server.run(program, tests, limit, problem.names)
        outcome, message = reply.get("outcome"), str(reply.get("message", reply))
        if outcome not in OUTCOME_CLASSES:
            raise ScorerError(
                f"problem {problem.task_id}: the sandbox failed: {message}"
            )
        return Outcome(problem.task_id, outcome, float(reply["seconds"]), message)

    if not problem.base_tests:
        return run(problem.tests)
    # A pass needs both parts, and the base outcome is also reported separately.
    base = run(problem.base_tests)
    if not base.passed:
        return replace(base, base=base.outcome)
    plus = run(problem.tests)
    return replace(plus, base=base.outcome, seconds=base.seconds + plus.seconds)


_SERVER = Path(__file__).parent / "sandbox" / "server.py"
# the server ends a job at _WAIT times its limit
_START_S, _GRACE_S, _WAIT = 60.0, 30.0, 3.0


class SandboxServer:
    """One sandbox server process and the pipes to it; one job at a time."""

    def __init__(self, memory_bytes: int, disable: Sequence[str]):
        self.memory_bytes, self.disable = memory_bytes, list(disable)
        self._number = 0
        try:
            self._spawn()
        except OSError as error:
            raise ScorerError(
                f"cannot start a sandbox server: {error}; the programs were not graded;"
                f" make sure that {tempfile.gettempdir()} has free space and that"
                " memory and processes suffice, then call again"
            ) from error

    def _spawn(self) -> None:
        self.broken = True  # not started, ended, or no longer answering
        self._layers: dict[str, Any] | None = None
        numpy = importlib.util.find_spec("numpy")
        with contextlib.ExitStack() as opened:
            self.folder = str(opened.enter_context(scratch_folder("fcsd-sandbox")))
            self._log = opened.enter_context(tempfile.TemporaryFile())
            config = {
                "folder": self.folder,
                "memory_bytes": self.memory_bytes,
                "disable": self.disable,
                "numpy": (
                    str(Path(numpy.origin).parents[1])
                    if numpy and numpy.origin
                    else None
                ),
            }
            # Nothing of this process reaches the server: no environment, no
            # descriptors, another working directory.
            one_thread = {
                f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")
            }
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_SERVER), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", **one_thread},
                cwd=self.folder,
                bufsize=0,
            )
            self._opened = opened.pop_all()
        self.broken = False

    def ready(self) -> dict[str, Any]:
        """Read the layers of a started server."""
        if self._layers is None:
            self._layers = self._read(time.monotonic() + _START_S)["layers"]
        return self._layers

    def run(
        self,
        code: str,
        tests: Sequence[str],
        limit_s: float,
        names: Sequence[str] | None,
    ) -> dict[str, Any]:
        """Run one job and return the server's reply. names: as `Problem.names`."""
        self.ready()
        self._number += 1
        body = json.dumps({"code": code, "tests": list(tests), "names": names}).encode()
        message = memoryview(
            f"{self._number:016x}{len(body):016x}{round(limit_s * 1000):016x}".encode()
            + body
        )
        deadline = time.monotonic() + _WAIT * limit_s + _GRACE_S
        assert self._process.stdin is not None
        try:
            while message:
                message = message[self._process.stdin.write(message) or 0 :]
        except OSError:
            raise self._failure("accepts no more programs") from None
        outcome: dict[str, Any] | None = None
        while True:
            reply = self._read(deadline)
            if reply.get("job") != self._number:
                raise self._failure("answers for another program")
            if "clean" in reply:
                if outcome is None:
                    raise self._failure("gave no outcome")
                return outcome
            if reply.get("outcome") == "failure":
                self.broken = True
                return reply
            # The examiner may have replied in the moment in which the server gave it
            # up: the first counts.
            outcome = outcome or reply

    def _read(self, deadline: float) -> dict[str, Any]:
        size = int(self._read_exactly(16, deadline), 16)
        try:
            reply = json.loads(self._read_exactly(size, deadline))
        except ValueError:
            raise self._failure("wrote something that is not a reply") from None
        return dict(reply)

    def _read_exactly(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd, parts = self._process.stdout.fileno(), b""
        while len(parts) < size:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([fd], [], [], remaining_s)[0]:
                raise self._failure("does not answer")
            part = os.read(fd, size - len(parts))
            if not part:
                raise self._failure("has ended")
            parts += part
        return parts

    def _failure(self, problem: str) -> ScorerError:
        """Build the error that says how the server ended; it is not used again."""
        self.broken = True
        status: Any = "running"
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self._process.wait(2.0)
        self._log.seek(0)
        log = self._log.read().decode(errors="replace").strip().splitlines()
        return ScorerError(
            f"the sandbox server {problem} (exit status"
            f" {status}){': ' + log[-1] if log else ''}; the scorer failed and did not"
            " grade the programs; call again to restart it"
        )

    def stop(self) -> None:
        """End the server and all that runs in it, and remove its folder."""
        process = self._process
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.terminate()  # the supervisor kills its server and cleans up
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._opened.close()
