"""Run a command that ends with the process that started it, however that process ends:
Ctrl-C, an error, a kill.

    python guard.py COMMAND…

The starting process holds the other end of this process's standard input. When that end
closes, even because the starting process was killed, this process ends the command and
everything that it started: SIGTERM first, SIGKILL after `PATIENCE_S`. Processes that
have left the command's group become children of this process when their parents end,
and are ended as well. This file uses the standard library only and runs as a script.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 20.0
"""Seconds that a server has to shut down and free its GPUs and shared memory."""
_PR_SET_CHILD_SUBREAPER = 36


def main(words: list[str]) -> int:
    """Run the command; return its exit status, 128 plus the number of the signal that ended it."""
    # Orphaned descendants then become children of this process instead of init's, so
    # that it can end them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", flush=True)
        return 127
    # A Popen that nobody holds would take the status of a command that has ended by
    # then, and `_reap` would wait for it for ever: `process` lives to the end.
    leader = process.pid
    # Wait for the command to end, a signal, or the end of standard input, whichever
    # comes first.
    ended: dict[int, int] = {}
    while (
        leader not in ended
        and not signals
        and not select.select([sys.stdin], [], [], 0.05)[0]
    ):
        _reap(ended)
    _end_all(leader, ended)
    # A command that survives SIGKILL for the whole patience is reported as killed.
    status = (
        os.waitstatus_to_exitcode(ended[leader]) if leader in ended else -signal.SIGKILL
    )
    return status if status >= 0 else 128 - status


def _reap(ended: dict[int, int]) -> bool:
    """Record the children that have ended; return whether any are alive."""
    while True:
        try:
            child, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if not child:
            return True
        ended[child] = status


def _end_all(leader: int, ended: dict[int, int]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        # In a loop, since descendants become children of this process as their parents
        # end.
        until, pids = time.monotonic() + PATIENCE_S, set[int]()
        while _reap(ended):
            _signal_all(leader, number, pids)
            if time.monotonic() > until:
                break
            time.sleep(0.05)


def _signal_all(leader: int, number: int, pids: set[int]) -> None:
    """Signal the command's group once, and once each child in another group."""
    if leader not in pids:
        pids.add(leader)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, number)
    children = ""
    # A kernel without this list: only the group is signalled.
    with contextlib.suppress(OSError):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(
            encoding="ascii"
        )
    for child in children.split():
        with contextlib.suppress(ProcessLookupError):
            if int(child) not in pids and os.getpgid(int(child)) != leader:
                pids.add(int(child))
                os.kill(int(child), number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
