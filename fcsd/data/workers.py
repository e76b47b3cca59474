"""Run work on pieces in other processes, with results in the order of the pieces.

Not covered: machines without fork, where this process does the work.
"""

import gc
import itertools
import multiprocessing
import os
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.helper import obey_only_parent
from fcsd.base.memory import check_shared_memory

MOST_WORKERS = 8

_work: Callable[[Any], Any]  # of a worker, which has one for its life


def default_workers() -> int:
    """Return the number of processes that tokenize: one per core, eight at most. The
    ranks are waiting meanwhile, so the cores are free.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(MOST_WORKERS, cores)


def in_order(
    work: Callable[[Any], Any], pieces: Iterator[Any], num_workers: int
) -> Generator[tuple[Any, Any]]:
    """Yield each piece with `work(piece)`, in the order of the pieces.

    The workers are forks: `work` may be any function, and has access to the current
    state of this process. This process does the work itself if there is a single piece,
    or fewer than two workers. Raises UserError: a worker has ended, or `work` raised
    it.
    """
    first = [
        piece for piece in (next(pieces, None), next(pieces, None)) if piece is not None
    ]
    # A daemon process must not have children.
    alone = multiprocessing.current_process().daemon or not hasattr(os, "fork")
    if num_workers < 2 or len(first) < 2 or alone:
        for piece in itertools.chain(first, pieces):
            yield piece, work(piece)
        return
    check_shared_memory()
    # Forks inherit the tokenizer, which need not be pickled.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        num_workers, context, initializer=_begin_worker, initargs=(work, os.getpid())
    )
    waiting: deque[tuple[Any, Future[Any]]] = deque()
    try:
        # A bounded queue keeps the pieces in memory few.
        for piece in itertools.chain(first, pieces):
            waiting.append((piece, _submit(pool, piece)))
            if len(waiting) > num_workers:
                earliest, future = waiting.popleft()
                yield earliest, future.result()
        while waiting:
            earliest, future = waiting.popleft()
            yield earliest, future.result()
    except BrokenProcessPool:
        raise UserError(
            "data: a tokenizing process has ended; the system may have killed it"
            " because memory ran out. Run the same command again to continue from the"
            " last shard"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, piece: Any) -> Future[Any]:
    with warnings.catch_warnings():
        # Python 3.12 warns about forks of processes with threads; the child runs no
        # code that takes their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pool.submit(_call_work, piece)


def _begin_worker(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    # The collector need not scan the parent's objects again and again.
    gc.freeze()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    obey_only_parent(parent)


def _call_work(piece: Any) -> Any:
    return _work(piece)
