"""Do pieces of work in other processes, with results in the order of the pieces.

A worker has one piece at a time and gets the next one when its result is taken, so that neither side ever waits for the
other to empty a pipe, and as many pieces are done ahead as there are workers.

Not covered: machines without fork, where the work is done in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from fcsd.errors import UserError

MOST_WORKERS = 8
_PARENT_CHECK_S = 5.0


def default_workers() -> int:
    """Return how many processes may work beside the ranks of this machine: its free cores, eight at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(0, min(MOST_WORKERS, cores - int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def in_order(
    work: Callable[[Any], Any], pieces: Iterator[tuple[Any, Any]], num_workers: int
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield mark, piece and `work(piece)` of every (mark, piece), in their order; 0 workers: in this process.

    The workers are forks: `work` may be any function, and sees what this process has now.

    Raises:
        UserError: a worker has ended, or `work` has raised it.
    """
    if num_workers == 0 or multiprocessing.current_process().daemon or not hasattr(os, "fork"):
        for mark, piece in pieces:
            yield mark, piece, work(piece)
        return
    pool = _Pool(work)
    try:
        waiting: deque[tuple[_Worker, Any, Any]] = deque()
        for mark, piece in pieces:
            if len(waiting) < num_workers:
                worker = pool.start()
            else:
                worker, mark_before, piece_before = waiting.popleft()
                result = worker.result()
                worker.connection.send(piece)
                waiting.append((worker, mark, piece))
                yield mark_before, piece_before, result
                continue
            worker.connection.send(piece)
            waiting.append((worker, mark, piece))
        while waiting:
            worker, mark, piece = waiting.popleft()
            yield mark, piece, worker.result()
    finally:
        pool.close()


class _Worker:
    def __init__(self, process: Any, connection: Connection):
        self.process, self.connection = process, connection

    def result(self) -> Any:
        try:
            done, value = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(_PARENT_CHECK_S)
            raise UserError(
                f"data: a process that tokenizes has ended (status {self.process.exitcode}); it may have been killed"
                " for the memory that it took. Run the same command again to go on from the last checkpoint"
            ) from None
        if not done:
            raise value
        return value


class _Pool:
    """Workers that are started one by one; `close` ends them, at the latest when this process ends."""

    def __init__(self, work: Callable[[Any], Any]):
        self.work = work
        self.workers: list[_Worker] = []
        # Before multiprocessing ends its children by a signal, which ours ignore.
        self.close = Finalize(self, _close, args=(self.workers,), exitpriority=10)

    def start(self) -> _Worker:
        context = multiprocessing.get_context("fork")
        mine, theirs = context.Pipe()
        inherited = [*(worker.connection for worker in self.workers), mine]
        process = context.Process(target=_serve, args=(theirs, self.work, inherited), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; the child runs no code that takes their locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        self.workers.append(_Worker(process, mine))
        return self.workers[-1]


def _close(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(_PARENT_CHECK_S)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
    workers.clear()


def _serve(connection: Connection, work: Callable[[Any], Any], inherited: list[Connection]) -> None:
    """Work until the other end is closed; it is when that process is killed, if no other one has inherited it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(
            number, signal.SIG_IGN
        )  # a scheduler sends them to all: this one is needed to the last step
    for other in inherited:
        other.close()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = os.getppid()
    while True:
        while not connection.poll(_PARENT_CHECK_S):
            if os.getppid() != parent:
                return
        try:
            piece = connection.recv()
        except (EOFError, OSError):
            return
        answer: tuple[bool, Any]
        try:
            answer = True, work(piece)
        except Exception as error:
            answer = False, error
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return
