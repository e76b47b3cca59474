"""The fork server of the sandbox: `python -I server.py CONFIG`. Standard library only; see the package's
docstring.

CONFIG is JSON: {"folder": scratch, "memory_bytes": …, "numpy": the folder that has it, for an interpreter that does not
find it by itself, or null, "disable": [layers to leave out, for tests]}.
On standard output first a frame {"layers": {…}}; then for each job on standard input

    48 hexadecimal digits: number, length, milliseconds;
    then JSON {"code": …, "tests": [program, …], "names": [what the tests may call] or null}

one frame {"job": number, "outcome": passed|wrong|error|timeout|memory|failure, "seconds": …, "message": …}.
milliseconds: the limit of processor time, program and examiner together; WAIT times as much may go by on the clock.
And, when nothing of the job is left, a frame {"job": number, "clean": true}; false asks for a new server.
"failure" is the sandbox's own, not the program's. Number and time are all that the server process itself
reads of a job.
"""

import contextlib
import ctypes
import gc
import importlib.util
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

JOBS, REPLIES = processes.JOBS, processes.REPLIES
# The limit of a job is processor time of program and examiner, so that a busy machine fails no program; one that waits
# is ended when so many times the limit has gone by.
WAIT = 3.0
# Imported once, so that a job does not pay for it.
PRELOAD = (
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools",
    "hashlib", "heapq",
    "itertools", "math", "numpy", "operator", "random", "re", "statistics", "string", "typing",
)  # fmt: skip


def fork_job_process(run: Any, keep: set[int], config: dict[str, Any], cpu_s: int) -> int:
    """Start a job's process that holds only the descriptors in `keep`, under the job's limits."""
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
        for fd in range(3, 64):
            if fd not in keep:
                with contextlib.suppress(OSError):
                    os.close(fd)
        disable = config["disable"]
        if "rlimits" not in disable:
            layers.limit_resources(config["memory_bytes"], cpu_s)
        if "seccomp" not in disable:
            layers.forbid_system_calls(job=True)
        run()
    except BaseException:
        os._exit(70)
    os._exit(0)


def run_job(number: int, length: int, timeout_s: float, config: dict[str, Any], own_space: bool) -> bool:
    """Run one job from start to the last of its processes; False when the scorer has gone."""
    start = time.monotonic()
    cpu_s = int(timeout_s) + 2
    to_program, to_examiner, done = os.pipe(), os.pipe(), os.pipe()
    # The program first: at this moment nothing of the job has been read by anyone.
    pid = fork_job_process(
        lambda: processes.program(to_program[0], to_examiner[1]),
        {to_program[0], to_examiner[1]},
        config,
        cpu_s,
    )
    link = processes.Link(to_program[1], to_examiner[0])
    keep = {JOBS, REPLIES, to_program[1], to_examiner[0], done[1]}
    judge = fork_job_process(lambda: processes.examiner(link, number, length, done[1]), keep, config, cpu_s)
    for fd in (*to_program, *to_examiner, done[1]):
        os.close(fd)
    poll = select.poll()
    poll.register(done[0], select.POLLIN)
    poll.register(JOBS, 0)  # only its end is of interest here
    verdict, here = b"", True
    check = last = math.inf  # the time of a program begins when its job has been read, and all of it
    while True:
        now = time.monotonic()
        if now >= check:
            remaining_s = timeout_s - _processor_s(pid) - _processor_s(judge)
            if remaining_s <= 0 or now >= last:
                break
            check = min(now + max(remaining_s / 2, 0.02), last)
        events = dict(poll.poll(None if check == math.inf else max(check - now, 0) * 1000))
        if events.get(JOBS):
            here = False
            break
        if done[0] in events:
            verdict = os.read(done[0], 1) or b"f"
            if verdict != b"j":
                break
            verdict, start = b"", time.monotonic()
            check, last = start + timeout_s, start + WAIT * timeout_s
    in_time = bool(verdict)
    if verdict == b"d":
        _wait(pid, 0.2)  # the program is ending: its own status is the one that counts
    status, usage = _kill(pid, judge, own_space)
    if here and not verdict:
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(done[0], False)
            late = os.read(done[0], 1)
            verdict = late if late == b"r" else b""  # that the program died, it may have seen of our own kill
    os.close(done[0])
    if not here:
        return False
    if verdict != b"r":
        outcome, message = _classify(
            verdict, in_time, status, usage, cpu_s, "seccomp" not in config["disable"]
        )
        seconds = time.monotonic() - start
        reply = {"job": number, "outcome": outcome, "seconds": seconds, "message": message}
        codec.write_frame(REPLIES, reply)
    return True


def _processor_s(pid: int) -> float:
    """Read the processor time of a process, all its threads together; 0 when it has ended."""
    try:
        return time.clock_gettime(
            ~pid << 3 | 2
        )  # CPUCLOCK_SCHED of linux/posix-timers.h, as clock_getcpuclockid
    except OSError:
        return 0.0


def _classify(
    verdict: bytes, in_time: bool, status: int | None, usage: float, cpu_s: int, shielded: bool
) -> tuple[str, str]:
    if verdict == b"d" and status is not None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if number == signal.SIGXCPU or usage >= cpu_s - 0.5:
            return "timeout", "CPU time limit"
        if number == signal.SIGKILL:
            return "memory", "killed, most likely for memory"
        ending = f"signal {number}" if number else f"exit status {os.waitstatus_to_exitcode(status)}"
        return "error", f"the program ended itself ({ending})"
    if not in_time:
        return "timeout", "time limit"
    if not shielded:
        return "error", "the examiner was ended, which without seccomp the program can do"
    return "failure", "the examiner ended without a verdict"


_ended: dict[int, tuple[int, float]] = {}


def _reap(block: bool) -> bool:
    """Collect one ended child; False when there is none (or, not blocking, none that has ended)."""
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


def _kill(pid: int, judge: int, own_space: bool) -> tuple[int | None, float]:
    """End everything of the job; (wait status, CPU seconds) of the program."""
    for target in (pid, judge):
        for end in (os.kill, os.killpg):  # each leads its own group
            with contextlib.suppress(OSError):
                if target not in _ended or end is os.killpg:
                    end(target, signal.SIGKILL)
    if own_space:
        with contextlib.suppress(OSError):
            os.kill(-1, signal.SIGKILL)  # from the first process of a namespace: every other process in it
        while _reap(block=True):
            pass
    else:
        while not {pid, judge} <= _ended.keys() and _reap(block=True):
            pass
        while _reap(block=False):
            pass
    status, usage = _ended.get(pid, (None, 0.0))
    _ended.clear()
    return status, usage


def serve(config: dict[str, Any], namespaces: list[str]) -> None:
    """Apply the layers, report them, and run jobs until standard input ends."""
    folder, disable = config["folder"], config["disable"]
    layers.prctl(layers.PR_SET_CHILD_SUBREAPER, 1)
    scratch = "user" in namespaces and "scratch" not in disable and layers.mount_scratch(folder)
    os.chdir(folder)  # after the mount: a path from before would lead below it
    modules = config["numpy"] if importlib.util.find_spec("numpy") is None else None
    if modules:  # installed for the user alone, or by PYTHONPATH, which `-I` does not read
        sys.path.append(modules)
    for name in PRELOAD:
        with contextlib.suppress(ImportError):
            __import__(name)
    capabilities = layers.drop_capabilities()
    landlock = 0 if "landlock" in disable else layers.restrict_files(folder if scratch else None, modules)
    seccomp = "seccomp" not in disable and layers.forbid_system_calls(job=False)
    layers.prctl(layers.PR_SET_DUMPABLE, 0)
    sys.setrecursionlimit(4000)  # removing nested folders
    report = {
        "namespaces": namespaces,
        "landlock_abi": landlock,
        "seccomp": seccomp,
        "no_capabilities": capabilities,
        "rlimits": "rlimits" not in disable,
        "scratch": "tmpfs" if scratch else ("none" if landlock else "unlimited"),
        # A network namespace alone leaves sockets with a path (a container engine's!) and those to a hypervisor.
        "network_off": seccomp,
        "writes_restricted": landlock > 0,
    }
    codec.write_frame(REPLIES, {"layers": report})
    gc.collect()
    gc.freeze()  # pages shared with the jobs stay shared
    own_space = "pid" in namespaces
    while True:
        try:
            header = codec.read_exactly(JOBS, 48)
        except EOFError:
            return
        number, length, milliseconds = (int(header[i : i + 16], 16) for i in (0, 16, 32))
        place = os.path.join(folder, "job")
        if scratch:
            os.mkdir(place, 0o700)
            os.chdir(place)
        os.environ.update(HOME=os.getcwd(), TMPDIR=os.getcwd())
        if not run_job(number, length, milliseconds / 1000, config, own_space):
            return
        os.chdir(folder)
        if scratch:
            shutil.rmtree(place, ignore_errors=True)
        clean = not (scratch and os.path.exists(place))  # a folder that resists: only a new server is clean
        codec.write_frame(REPLIES, {"job": number, "clean": clean})


def main() -> None:
    """Enter the namespaces, start the server in them, wait, and clean up, also when the scorer is killed."""
    config = json.loads(sys.argv[1])
    scorer = os.getppid()
    namespaces = [] if "namespaces" in config["disable"] else layers.unshare_namespaces()
    layers.prctl(layers.PR_SET_DUMPABLE, 0)  # no program of the same user reads or writes this memory
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
