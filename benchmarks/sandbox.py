"""Measure the cost of the sandbox: the time of a trivial program, and of all canonical
programs of MBPP+ and HumanEval+.

    python benchmarks/sandbox.py [--data-root ROOT] [--workers N --jobs 50 --rounds 10]
    [--json OUT]

Overhead: milliseconds of wall time per program that does nothing, median over rounds;
all variants take turns.

    two forks      the minimum for two processes per program: fork, end, wait, from an
                   interpreter that has loaded numpy, without any isolation
    interpreter    `python -I -c pass`: a fresh interpreter per program, without any isolation
    one worker     the sandbox: two processes in namespaces, Landlock, seccomp, limits, own folder; killed and cleaned
    all workers    the same on all workers: wall time over number of programs

Canonical programs: wall time of the correct solutions of all problems, base and plus
tests, on all workers; every one must pass. They are the slowest programs: a wrong one
ends at its first wrong answer. ROOT is a folder in hub layout (`fcsd evaluate --fetch
ROOT`); without it this part is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parent),
]

from turns import load_average  # noqa: E402

from fcsd.evaluation.code.problems import Problem, read_problems  # noqa: E402
from fcsd.evaluation.code.scorer import CodeScorer, default_num_workers  # noqa: E402

OVERHEAD_MS, MBPP_S = 10.0, 75.0
"""Targets: the overhead per job on any number of workers; all canonical MBPP+ programs
on two cores.
"""

_FORKS = """
import os, sys
import numpy
for line in sys.stdin:
    for _ in range(int(line)):
        children = []
        for _ in range(2):
            child = os.fork()
            if child == 0:
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    print(flush=True)
"""


def trivial(number: int) -> list[Problem]:
    return [
        Problem(str(i), "", "def f():\n    return 1\n", ("assert f() == 1\n",))
        for i in range(number)
    ]


def overhead(options: argparse.Namespace, workers: int) -> dict[str, list[float]]:
    """Return milliseconds per program, one number per round."""
    problems = trivial(options.jobs)
    programs = {problem.task_id: problem.canonical for problem in problems}
    forks = subprocess.Popen(
        [sys.executable, "-I", "-c", _FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert forks.stdin is not None and forks.stdout is not None

    def two_forks() -> None:
        forks.stdin.write(b"%d\n" % options.jobs)
        forks.stdin.flush()
        forks.stdout.readline()

    def interpreters() -> None:
        for _ in range(options.jobs):
            subprocess.run([sys.executable, "-I", "-c", "pass"], env={}, check=True)

    def scored(scorer: CodeScorer) -> Callable[[], None]:
        def run() -> None:
            wrong = [
                outcome
                for outcome in scorer.score(problems, programs)
                if not outcome.passed
            ]
            assert not wrong, wrong[0]

        return run

    with CodeScorer(num_workers=1) as one, CodeScorer(num_workers=workers) as several:
        runs = {
            "two forks": two_forks,
            "interpreter": interpreters,
            "one worker": scored(one),
            f"{workers} workers": scored(several),
        }
        if workers == 1:
            runs.pop("1 workers")
        times: dict[str, list[float]] = {name: [] for name in runs}
        names = list(runs)
        for turn in range(options.rounds + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                started = time.perf_counter()
                runs[name]()
                if turn:  # the first is not counted
                    times[name].append(
                        1e3 * (time.perf_counter() - started) / options.jobs
                    )
    forks.stdin.close()
    forks.stdout.close()
    forks.wait()
    return times


def canonical(root: Path, name: str, workers: int) -> dict[str, Any]:
    """Return the wall seconds of all canonical programs of a data set, each of which
    must pass, and the slowest three.
    """
    problems = read_problems(root / "evalplus" / name)
    with CodeScorer(num_workers=workers) as scorer:
        started = time.perf_counter()
        outcomes = scorer.self_check(problems)
        seconds = time.perf_counter() - started
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:3]
    return {
        "seconds": seconds,
        "programs": len(outcomes),
        "slowest": {outcome.task_id: outcome.seconds for outcome in slowest},
    }


def verdict(value: float, limit: float, unit: str) -> str:
    return f"target at most {limit:g} {unit}: {'met' if value <= limit else 'MISSED'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="benchmarks/sandbox.py",
    )
    parser.add_argument("--data-root", type=Path, help="data sets in hub layout")
    parser.add_argument(
        "--workers", type=int, help="by default one per core, as far as memory allows"
    )
    parser.add_argument("--jobs", type=int, default=50, help="programs in one timing")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write all measurements here")
    options = parser.parse_args(arguments)
    workers = options.workers or default_num_workers()
    loads = [load_average()]
    rounds = overhead(options, workers)
    names = {"MBPP+": "mbppplus", "HumanEval+": "humanevalplus"}
    results = {
        name: canonical(options.data_root, folder, workers)
        for name, folder in names.items()
        if options.data_root is not None
    }
    loads.append(load_average())

    floor = statistics.median(rounds["two forks"])
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {workers} workers, load {loads[0]:.1f} to {loads[1]:.1f}\n")
    print(
        f"{'a trivial program':20} {'ms, median':>11} {'least':>7} {'/ two forks':>12}"
    )
    for name, times in rounds.items():
        middle = statistics.median(times)
        ours = (
            ""
            if name in ("two forks", "interpreter")
            else "   " + verdict(middle, OVERHEAD_MS, "ms")
        )
        print(
            f"{name:20} {middle:11.1f} {min(times):7.1f} {middle / floor:12.1f}{ours}"
        )
    for name, row in results.items():
        target = (
            "   " + verdict(row["seconds"], MBPP_S, "s on 2 cores")
            if name == "MBPP+"
            else ""
        )
        slowest = ", ".join(
            f"{task} {seconds:.1f} s" for task, seconds in row["slowest"].items()
        )
        print(
            f"\n{name}: {row['programs']} canonical programs passed in"
            f" {row['seconds']:.1f} s{target}"
        )
        print(f"  slowest: {slowest}")
    if not results:
        print("\ncanonical programs: left out, no --data-root")
    if options.json:
        report = {
            "cores": cores,
            "workers": workers,
            "load": loads,
            "overhead_ms": rounds,
            "canonical": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
