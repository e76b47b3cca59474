"""Several ranks on one machine: forked processes with a gloo group (forking takes 0.2
s, spawning 18 s).
"""

import contextlib
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call `fn(rank, *args)` in `world_size` forked processes with torch.distributed
    initialised (gloo).

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set as torchrun sets
    them, and torch runs one thread per rank. Results must pickle; tensors come back
    through plain pickling.

    Returns:
        Each rank's result, by rank.

    Raises:
        RuntimeError: with the traceback of the first rank that failed; the other ranks
            are stopped at once.
        TimeoutError: the ranks were not done after `timeout_s` seconds.
    """
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        ranks = [
            context.Process(
                target=_rank,
                args=(fn, rank, world_size, port, folder, pipes[rank][1], args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for _, writer in pipes:
            writer.close()
        try:
            return _collect([reader for reader, _ in pipes], ranks, timeout_s)
        finally:
            for rank in ranks:
                if rank.is_alive() and rank.pid is not None:
                    os.kill(rank.pid, signal.SIGKILL)
                rank.join()


def in_turn(items: Iterable[Item]) -> Iterator[Item]:
    """Yield each item. On a rank, equal meshes share their groups, and all other groups
    end with their item, because each has threads.

    The groups of a mesh must stay: for an equal mesh, DTensor's caches return the one
    that they saw first.
    """
    import torch.distributed as dist

    meshes = functools.cache(dist.device_mesh.init_device_mesh)
    new_group, made = dist.new_group, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(new_group(*args, **kwargs))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        for module in (dist, dist.device_mesh):
            patch.setattr(module, "init_device_mesh", meshes)
        for item in items:
            yield item
            while made:
                dist.destroy_process_group(made.pop(0))


def import_what_deepspeed_imports() -> None:
    """Import before forking what DeepSpeed's engine imports when it is created, which
    would otherwise take each rank 1.4 s.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._inductor.compile_fx")


def _collect(readers: list[Any], ranks: list[Any], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(readers))
    deadline = time.monotonic() + timeout_s
    while waiting:
        remaining = deadline - time.monotonic()
        ready = multiprocessing.connection.wait(
            list(waiting.values()), max(remaining, 0)
        )
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(waiting)} were not done after {timeout_s:g} s"
            )
        for rank in [rank for rank, reader in waiting.items() if reader in ready]:
            try:
                ok, value = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                ranks[rank].join()
                raise RuntimeError(
                    f"rank {rank} died with exit code {ranks[rank].exitcode}"
                ) from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}{_others(waiting)}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _others(waiting: dict[int, Any]) -> str:
    """Return the errors of other ranks that failed at the same time: one of them may
    have caused the first one's failure.
    """
    failures = ""
    for rank, reader in waiting.items():
        if reader.poll(0.5):
            with contextlib.suppress(EOFError):
                ok, value = pickle.loads(reader.recv_bytes())
                failures += "" if ok else f"\nrank {rank} failed:\n{value}"
    return failures


def _send(pipe: Any, ok: bool, value: Any) -> None:
    # not `send`: torch would pass tensors as handles to a process that ends
    pipe.send_bytes(pickle.dumps((ok, value)))


def _rank(
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    pipe: Any,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # the parent may have run alone before
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world_size,
            store=store,
            timeout=timedelta(seconds=60),
        )
        _send(pipe, True, fn(rank, *args))
    except BaseException:  # any failure of a rank is reported
        _send(pipe, False, traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.close()
    # the parent's exit handlers (pytest, wandb) are not this process's business
    os._exit(0)
