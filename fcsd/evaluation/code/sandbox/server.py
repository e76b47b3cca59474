"""The fork server of the sandbox: `python -I server.py CONFIG`. Standard library only;
see the package's docstring.

CONFIG is JSON: {"folder": scratch, "memory_bytes": …, "numpy": the folder that has it,
for an interpreter that does not find it by itself, or null, "disable": [layers to leave
out, for tests]}. On standard output first a frame {"layers": {…}}; then for each job on
standard input

    48 hexadecimal digits: number, length, milliseconds; then JSON {"code": …, "tests":
    [program, …], "names": [what the tests may call] or null}

one frame {"job": number, "outcome": passed|wrong|error|timeout|memory|failure, "seconds": …, "message": …}.
milliseconds: the limit of processor time, program and examiner together; WAIT times as much may go by on the clock.
And, when nothing of the job is left, a frame {"job": number, "clean": true}.
"failure" is the sandbox's own, not the program's, and ends the server. Number and time are all that the server process
itself reads of a job, and it opens nothing that a job has left. A failure of the server
(to start a process, to make or remove a folder) ends it with an error on standard
error: the machine has failed, and the job's outcome is unknown.
"""

import contextlib
import ctypes
import gc
import importlib.util
import itertools
import json
import math
import os
import select
import shutil
import signal
import sys
import time
from typing import Any


def _sibling(name: str) -> Any:
    """Import a module that lies beside this script: `-I` takes its folder off the path."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("fcsd_sandbox_" + name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


codec, layers, processes = _sibling("codec"), _sibling("layers"), _sibling("job")
cells = _sibling("cell")

JOBS, REPLIES = processes.JOBS, processes.REPLIES
# The limit of a job is processor time of program and examiner, so that a busy machine
# fails no program; one that waits is ended after this many times the limit.
WAIT = 3.0
_NO_MEMORY = (
    "the machine ran out of memory although the program stayed within its limit; free"
    " some memory"
)
_DESCRIPTORS = 64  # more than the server ever has open
# Imported once, so that a job does not pay for it.
PRELOAD = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools",
    "hashlib", "heapq",
    "itertools", "math", "numpy", "operator", "random", "re", "statistics", "string", "typing",
)  # fmt: skip


def fork_job_process(run: Any, keep: set[int], cell: Any, cpu_s: int, done: int) -> int:
    """Start a job's process that holds only the descriptors in `keep`, confined to
    `cell`.

    Where it cannot be confined, f and the reason are written to `done` and nothing is
    run.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            if fd not in keep:
                os.dup2(null, fd)
        held = cell.enter(cpu_s)
        if held != cell.held:
            raise OSError(f"the layers of the sandbox have changed: {held}")
        descriptors = sorted(fd for fd in {2, *keep, done, _DESCRIPTORS} if fd >= 2)
        for low, high in itertools.pairwise(descriptors):
            os.closerange(low + 1, high)
    except BaseException as error:
        os.write(
            done,
            f"f{type(error).__name__}: {error}"[:250].encode(errors="replace") + b"\n",
        )
        os._exit(70)
    try:
        if done not in keep:
            os.close(done)  # before anything of the job runs
        run()
    except BaseException:
        os._exit(70)
    os._exit(0)


def run_job(
    number: int, length: int, timeout_s: float, cell: Any, own_space: bool
) -> bool:
    """Run one job from start to the last of its processes; False when the scorer has
    gone or the sandbox failed.
    """
    start = time.monotonic()
    cpu_s = int(timeout_s) + 2
    to_program, to_examiner, done = os.pipe(), os.pipe(), os.pipe()
    # The program first: at this moment nothing of the job has been read by anyone.
    pid = fork_job_process(
        lambda: processes.program(to_program[0], to_examiner[1]),
        {to_program[0], to_examiner[1]},
        cell,
        cpu_s,
        done[1],
    )
    link = processes.Link(to_program[1], to_examiner[0])
    keep = {JOBS, REPLIES, to_program[1], to_examiner[0], done[1]}
    judge = fork_job_process(
        lambda: processes.examiner(link, number, length, done[1]),
        keep,
        cell,
        cpu_s,
        done[1],
    )
    for fd in (*to_program, *to_examiner, done[1]):
        os.close(fd)
    poll = select.poll()
    poll.register(done[0], select.POLLIN)
    poll.register(JOBS, 0)  # only its end is of interest here
    verdict, scorer_alive = b"", True
    # the time of a program begins when its job has been read, and all of it
    check = last = math.inf
    while True:
        now_s = time.monotonic()
        if now_s >= check:
            # Sleep for half of the time that remains, then read the clocks again: two
            # processes and their threads use it up together.
            remaining_s = timeout_s - _processor_s(pid) - _processor_s(judge)
            if remaining_s <= 0 or now_s >= last:
                break
            check = min(now_s + max(remaining_s / 2, 0.02), last)
        events = dict(
            poll.poll(None if check == math.inf else max(check - now_s, 0) * 1000)
        )
        if events.get(JOBS):
            scorer_alive = False
            break
        if done[0] in events:
            verdict = os.read(done[0], 1) or b"f"
            if verdict != b"j":
                break
            verdict, start = b"", time.monotonic()
            check, last = start + timeout_s, start + WAIT * timeout_s
    in_time = bool(verdict)
    if verdict == b"d":
        _wait(pid, 0.2)  # the program is ending: its own status counts
    ended = _kill(pid, judge, own_space)
    late = os.read(done[0], 300)  # not blocking: all who could write have ended
    # that the program died, it may have seen of our own kill
    if not verdict and late[:1] == b"r":
        verdict = b"r"
    os.close(done[0])
    if not scorer_alive:
        return False
    if verdict != b"r":
        outcome, message = _classify(verdict, in_time, ended, (pid, judge), cpu_s, cell)
        if verdict == b"f" and late:
            outcome, message = "failure", late.decode(errors="replace").splitlines()[0]
        reply = {
            "job": number,
            "outcome": outcome,
            "seconds": time.monotonic() - start,
            "message": message,
        }
        codec.write_frame(REPLIES, reply)
        return outcome != "failure"
    return True


def _processor_s(pid: int) -> float:
    """Read the processor time of a process, all its threads together; 0 when it has
    ended.
    """
    try:
        return time.clock_gettime(
            ~pid << 3 | 2
        )  # CPUCLOCK_SCHED of linux/posix-timers.h, as clock_getcpuclockid
    except OSError:
        return 0.0


def _classify(
    verdict: bytes,
    in_time: bool,
    ended: dict[int, tuple[int, float]],
    pids: tuple[int, int],
    cpu_s: int,
    cell: Any,
) -> tuple[str, str]:
    """Return a job's outcome from how its two processes, program and examiner, have
    ended.
    """
    (status, usage), (_, examining) = (ended.get(pid, (None, 0.0)) for pid in pids)
    shielded = cell.held["seccomp"]
    # The program died: its wait status tells a limit from its own doing.
    if verdict == b"d" and status is not None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU or usage >= cpu_s - 0.5:
            return "timeout", "CPU time limit"
        if number == signal.SIGKILL and (lack := cell.out_of_memory()) is not False:
            if lack:
                return "failure", _NO_MEMORY
            return "memory", "killed, probably because memory ran out"
        if number:
            ending = f"signal {number}"
        else:
            ending = f"exit status {os.waitstatus_to_exitcode(status)}"
        return "error", f"the program ended itself ({ending})"
    if not in_time or examining >= cpu_s - 0.5:
        return "timeout", "time limit"
    if cell.out_of_memory():
        return "failure", _NO_MEMORY
    # With seccomp no program can end the examiner, so its end is a failure of ours.
    if not shielded:
        return (
            "error",
            "the examiner was killed; without seccomp, the program can do this",
        )
    return "failure", "the examiner ended without a verdict"


_ended: dict[int, tuple[int, float]] = {}


def _reap(block: bool) -> bool:
    """Collect one ended child; False when there is none (or, not blocking, none that
    has ended).
    """
    try:
        pid, status, usage = os.wait4(-1, 0 if block else os.WNOHANG)
    except ChildProcessError:
        return False
    if pid:
        _ended[pid] = (status, usage.ru_utime + usage.ru_stime)
    return bool(pid)


def _wait(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while pid not in _ended and time.monotonic() < end:
        if not _reap(block=False):
            time.sleep(0.002)


def _kill(pid: int, judge: int, own_space: bool) -> dict[int, tuple[int, float]]:
    """End everything of the job; (wait status, CPU seconds) of each of its processes."""
    # The group as well: without seccomp a program may have started processes.
    for target in (pid, judge):
        for end in (os.kill, os.killpg):  # each leads its own group
            with contextlib.suppress(OSError):
                if target not in _ended or end is os.killpg:
                    end(target, signal.SIGKILL)
    if own_space:
        with contextlib.suppress(OSError):
            # from the first process of a namespace: every other process in it
            os.kill(-1, signal.SIGKILL)
        while _reap(block=True):
            pass
    else:
        while not {pid, judge} <= _ended.keys() and _reap(block=True):
            pass
        while _reap(block=False):
            pass
    ended = dict(_ended)
    _ended.clear()
    return ended


def serve(config: dict[str, Any], namespaces: list[str]) -> None:
    """Apply the layers, report them, and run jobs until standard input ends."""
    layers.prctl(layers.PR_SET_CHILD_SUBREAPER, 1)
    modules = config["numpy"] if importlib.util.find_spec("numpy") is None else None
    # installed for the user alone, or by PYTHONPATH, which `-I` does not read
    if modules:
        sys.path.append(modules)
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            __import__(name)
    cell = cells.Cell(config, namespaces, modules)
    seccomp = "seccomp" not in config["disable"] and layers.forbid_system_calls(
        job=False
    )
    layers.prctl(layers.PR_SET_DUMPABLE, 0)
    cell.prepare()
    report = {
        "namespaces": namespaces,
        "seccomp": seccomp,
        # A network namespace alone leaves sockets with a path (a container engine's!)
        # and those to a hypervisor.
        "network_off": seccomp,
        **cell.report(),
    }
    codec.write_frame(REPLIES, {"layers": report})
    gc.collect()
    gc.freeze()  # pages shared with the jobs stay shared
    while True:
        try:
            header = codec.read_exactly(JOBS, 48)
        except EOFError:
            return
        number, length, milliseconds = (
            int(header[i : i + 16], 16) for i in (0, 16, 32)
        )
        if not run_job(number, length, milliseconds / 1000, cell, "pid" in namespaces):
            return
        cell.end()
        codec.write_frame(REPLIES, {"job": number, "clean": True})
        cell.prepare()  # ahead, while the scorer writes the next job


def main() -> None:
    """Enter the namespaces, start the server in them, wait, and clean up, also when the
    scorer is killed.
    """
    config = json.loads(sys.argv[1])
    scorer = os.getppid()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # if memory runs out, end a program, not the process that holds a model
        file.write("1000")
    if "namespaces" in config["disable"]:
        namespaces = []
    else:
        namespaces = layers.unshare_namespaces()
    # no program of the same user reads or writes this memory
    layers.prctl(layers.PR_SET_DUMPABLE, 0)
    pid = os.fork()
    if pid == 0:
        layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            serve(config, namespaces)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    os.close(JOBS)
    os.close(REPLIES)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if os.getppid() != scorer:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            status = 1
            break
        time.sleep(0.05)
    shutil.rmtree(config["folder"], ignore_errors=True)
    os._exit(0 if status == 0 else 1)


if __name__ == "__main__":
    ctypes.CDLL(None).umask(0o077)
    main()
