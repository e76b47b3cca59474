"""Run processes that take turns, so that a busy machine affects all of them, and read
what they report about themselves.

A benchmark starts itself once per variant (`--worker NAME`); each process answers every
line on its input with one measurement as JSON.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def resident(key: str) -> int:
    """Return the memory of this process in bytes: `VmRSS` is the current value, `VmHWM`
    the peak since `reset_peak`.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def start(script: str, name: str, arguments: list[str]) -> subprocess.Popen:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **os.environ}
    return subprocess.Popen(
        [sys.executable, script, "--worker", name, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def ask(name: str, process: subprocess.Popen) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        raise SystemExit(f"{name}: failed, see above")
    return json.loads(answer)


def take_turns(
    names: list[str], rounds: int, script: str, arguments: list[str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the answers of every process: a first one, for which the processes are
    started one after another, and one per round.

    The order rotates from round to round.
    """
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    processes: dict[str, subprocess.Popen] = {}
    try:
        # one after another, because their preparations would disturb each other
        for name in names:
            processes[name] = start(script, name, arguments)
            measured[name].append(ask(name, processes[name]))
        for k in range(rounds):
            for name in names[k % len(names) :] + names[: k % len(names)]:
                measured[name].append(ask(name, processes[name]))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return measured


def load_average() -> float:
    """Return the load of the last minute: if it exceeds the benchmark's own processes,
    times are those of a busy machine.
    """
    return os.getloadavg()[0]
