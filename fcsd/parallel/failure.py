"""End all processes of a launch within seconds when one of them fails, and print its
error once.

Otherwise, when a process fails, the others wait in a collective for the hours that a
score may take, and finally print only that a connection was closed. So each rank has a
thread that looks once per second into the store through which the ranks met. The first
rank to fail writes its error there and prints it, and the others end; a rank whose
heartbeat stops was killed.

Heavy libraries are imported only by the first launch of several processes.

Not covered: failures before the processes have met. The launcher ends those.
"""

import json
import os
import sys
import threading
import time
from typing import Any

_PERIOD_S = 1.0
# A process has this long to end by itself once another one has failed.
_GRACE_S = 5.0
# A rank is dead if its heartbeat has stood still for so long after a collective broke...
_DEAD_S = 6.0
# ... and at any other time; a library that holds the GIL for long stays below this.
_SILENT_S = 300.0
# If all ranks stay in one part of a step for so long, one of them hangs. It is also
# gloo's default timeout, which the groups of the exchanges have (transport.py).
_HUNG_S = 1800.0
_LOST_S = 60.0  # without an answer from the store: its host is gone
_UNKNOWN_S = 10.0
# Words in the errors that torch raises when a peer is gone.
_COLLECTIVE = ("gloo", "NCCL", "RCCL", "ProcessGroup")

_watch: "Watch | None" = None
_launches = 0
_step_began: float | None = None  # this rank's, or its last micro-batch's


def in_step(yes: bool = True) -> None:
    """Note that this rank begins a part of a step that all ranks compute together, or
    has finished the last part.

    Between steps the first rank may score or write for hours while the others wait for
    it in a collective, so no time limit holds there.
    """
    global _step_began
    _step_began = time.monotonic() if yes else None


def further_in_step() -> None:
    """Record that this rank has made progress, if it is in a step."""
    if _step_began is not None:
        in_step()


def watch_ranks() -> None:
    """Begin to watch the ranks of the default process group, unless they are watched."""
    global _watch, _launches
    if _watch is None:
        import torch.distributed as dist

        # The group's own connection is locked while it waits for a peer.
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        _launches += 1
        store = dist.PrefixStore(f"fcsd/{_launches}", store)
        _watch = Watch(store, dist.get_rank(), dist.get_world_size())
        _watch.start()


def stop_watching() -> None:
    """Stop watching, at the end of a command."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def first_failure(
    text: str, status: int, error: BaseException
) -> tuple[str | None, int]:
    """Return the text that this process prints about its error (None: another process
    prints it), and the status to end with.

    text, status: the values for a process without others.
    """
    if _watch is not None:
        return _watch.first_failure(text, status, error)
    if os.environ.get("RANK", "0") != "0":
        # The ranks have not met yet. The first one usually fails by the same mistake
        # and prints it; the launcher then ends this process.
        time.sleep(_UNKNOWN_S)
    return text, status


def wait_until_known() -> None:
    """Keep the store alive until the other ranks know of the failure, or for seconds."""
    if _watch is not None:
        _watch.wait_until_known()


class Watch:
    """The thread of one rank that watches a store of torch.distributed."""

    def __init__(self, store: Any, rank: int, world_size: int):
        self.store, self.rank, self.world_size = store, rank, world_size
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="fcsd-ranks", daemon=True
        )

    def start(self) -> None:
        """Begin the heartbeat, and look for failures."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: other ranks' failures no longer concern this one."""
        self._stopped.set()
        self._thread.join(2 * _PERIOD_S)

    # ---- in the thread

    def _run(self) -> None:
        answered, heartbeat, last_hang = time.monotonic(), 0, ""
        last_heartbeats: dict[int, tuple[str, float]] = {}
        while not self._stopped.wait(_PERIOD_S):
            try:
                heartbeat += 1
                self.store.set(f"heartbeat/{self.rank}", str(heartbeat))
                if self.store.check(["failure"]):
                    self._end_rank()
                    return
                if (hang := _where_it_hangs()) != last_hang:
                    last_hang = hang
                    self.store.set(f"hung/{self.rank}", last_hang)
                if self.rank == 0 and heartbeat % 10 == 0:
                    self._look_for_silence(last_heartbeats)
                    if last_hang:
                        self._look_for_a_hang()
                answered = time.monotonic()
            except Exception:
                # Stores raise errors of many types when their host is gone.
                if time.monotonic() - answered > _LOST_S:
                    self._exit(
                        f"rank {self.rank} of {self.world_size}: the first rank's"
                        " machine is gone",
                        1,
                    )

    def _end_rank(self) -> None:
        failure = self._failure()
        self.store.set(f"knows/{self.rank}", "1")
        # The main thread may now raise an error because a peer is gone, and end.
        if failure["rank"] != self.rank and not self._stopped.wait(_GRACE_S):
            self._exit("", failure["status"])

    def _exit(self, text: str, status: int) -> None:
        # The main thread waits in a collective that never ends, and cannot be
        # interrupted there.
        if text:
            print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _look_for_silence(self, last_heartbeats: dict[int, tuple[str, float]]) -> None:
        for rank, heartbeat in self._of_all("heartbeat").items():
            # Times are this rank's own: the clocks of machines differ.
            if last_heartbeats.get(rank, ("", 0.0))[0] != heartbeat:
                last_heartbeats[rank] = (heartbeat, time.monotonic())
        silent = [
            rank
            for rank, (_, time_of_change) in last_heartbeats.items()
            if time.monotonic() - time_of_change > _SILENT_S
        ]
        if silent and self._claim(self._silence_text(silent), 1):
            print(self._silence_text(silent), file=sys.stderr)

    def _look_for_a_hang(self) -> None:
        hangs = self._of_all("hung")
        if not all(hangs.values()):
            return
        hung_ranks = [
            f"rank {rank} is in {function}" for rank, function in hangs.items()
        ]
        text = (
            "fcsd: error: no rank has got any further in its training step for"
            f" {_HUNG_S / 60:g} minutes, so one of them hangs: {'; '.join(hung_ranks)};"
            " run the same command again to continue from the last checkpoint"
        )
        if self._claim(text, 1):
            self.store.set(f"knows/{self.rank}", "1")
            self.wait_until_known()
            self._exit(text, 1)  # this rank's main thread would wait on

    # ---- in both threads

    def _of_all(self, topic: str) -> dict[int, str]:
        """Return the value that each rank has written as `heartbeat` or `hung`; "" for
        none.
        """
        keys = {rank: f"{topic}/{rank}" for rank in range(self.world_size)}
        return {
            rank: self.store.get(key).decode() if self.store.check([key]) else ""
            for rank, key in keys.items()
        }

    def _failure(self) -> dict[str, Any]:
        return json.loads(self.store.get("failure"))

    def _claim(self, text: str, status: int) -> bool:
        """Return whether this is the first failure."""
        own_failure = json.dumps({"rank": self.rank, "text": text, "status": status})
        return (
            self.store.compare_set("failure", "", own_failure).decode() == own_failure
        )

    def _silence_text(self, ranks: list[int]) -> str:
        if len(ranks) == 1:
            names = f"rank {ranks[0]}"
        else:
            names = f"ranks {', '.join(map(str, ranks))}"
        return (
            f"fcsd: error: {names} of {self.world_size} ended without an error: killed"
            " (out of memory?), or the machine is gone; run the same command again to"
            " continue from the last checkpoint"
        )

    # ---- in the main thread

    def first_failure(
        self, text: str, status: int, error: BaseException
    ) -> tuple[str | None, int]:
        """See the function of this name."""
        try:
            if any(word in f"{type(error).__name__} {error}" for word in _COLLECTIVE):
                text = self._killed_ranks_text(error) or text
            first = self._claim(text, status)
            # The thread may have stopped looking already.
            self.store.set(f"knows/{self.rank}", "1")
            return (text, status) if first else (None, self._failure()["status"])
        except Exception:
            # The store's host has ended before this process.
            return text, status

    def _killed_ranks_text(self, error: BaseException) -> str | None:
        """Return the text that blames a broken collective on ranks that were killed, if
        any were: the broken collective is seldom the cause.
        """
        # Long enough for several heartbeats of every living rank.
        heartbeats, start = self._of_all("heartbeat"), time.monotonic()
        while time.monotonic() - start < _DEAD_S and not self.store.check(["failure"]):
            self._stopped.wait(_PERIOD_S / 5)
        dead = [
            rank
            for rank, heartbeat in self._of_all("heartbeat").items()
            if heartbeat == heartbeats[rank] and rank != self.rank
        ]
        return self._silence_text(dead) if dead else None

    def wait_until_known(self) -> None:
        """See the function of this name."""
        start = time.monotonic()
        keys = [f"knows/{rank}" for rank in range(self.world_size)]
        try:
            while time.monotonic() - start < _GRACE_S and not self.store.check(keys):
                self._stopped.wait(_PERIOD_S / 5)
        except Exception:
            # The store's host has ended; the other ranks notice that by themselves.
            return


def _where_it_hangs() -> str:
    """Return the main thread's current function once its step takes too long; else ""."""
    if _step_began is None or time.monotonic() - _step_began < _HUNG_S:
        return ""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
