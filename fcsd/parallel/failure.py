"""When one process of a launch fails, all end within seconds, and its error is printed
once.

Left to itself, a process that fails leaves the others waiting in a collective, for the
hours that a score may take, and what they print in the end is that a connection was
closed. So each rank has a thread that looks once a second into the store through which
the ranks met: who fails first writes there, prints its error, and the others end; a
rank that stops counting in there was killed.

Heavy libraries are imported by the first launch of several processes only.

Not covered: what goes wrong before the processes have met. The launcher ends those.
"""

import json
import os
import sys
import threading
import time
from typing import Any

_PERIOD_S = 1.0
# for a process to end by itself once another one has failed; then it is ended
_GRACE_S = 5.0
_DEAD_S = 6.0  # without counting, while a collective has just broken: dead
# without counting, whatever else: dead; a library that holds the GIL for long stays
# below
_SILENT_S = 300.0
# of all ranks in one part of a step: one hangs; what gloo's collectives are given, too
_HUNG_S = 1800.0
_LOST_S = 60.0  # without an answer from the store: its host is gone
_UNKNOWN_S = 10.0
# in what torch raises when a peer is gone
_COLLECTIVE = ("gloo", "NCCL", "RCCL", "ProcessGroup")

_watch: "Watch | None" = None
_launches = 0
_step_began: float | None = None  # this rank's, or its last micro-batch's


def in_step(yes: bool = True) -> None:
    """Note that this rank begins a part of what all ranks compute together, or has done
    the last one.

    Between steps the first rank may score or write for hours while the others wait for
    it in a collective.
    """
    global _step_began
    _step_began = time.monotonic() if yes else None


def further_in_step() -> None:
    """Note that this rank has got further, if it is in a step."""
    if _step_began is not None:
        in_step()


def watch_ranks() -> None:
    """Begin to watch the ranks of the default process group; does nothing where that was done."""
    global _watch, _launches
    if _watch is None:
        import torch.distributed as dist

        # A connection of its own: the group's is locked while it waits for a peer.
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        _launches += 1
        store = dist.PrefixStore(f"fcsd/{_launches}", store)
        _watch = Watch(store, dist.get_rank(), dist.get_world_size())
        _watch.start()


def stop_watching() -> None:
    """Stop to watch, at the end of a command."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def first_failure(
    text: str, status: int, error: BaseException
) -> tuple[str | None, int]:
    """Return what this process prints about its error (None: another prints it), and
    the status to end with.

    text, status: the error as this process would print it, and end, if it were alone.
    """
    if _watch is not None:
        return _watch.first_failure(text, status, error)
    if os.environ.get("RANK", "0") != "0":
        # The ranks are yet to find each other. The first one mostly ends with the same
        # mistake and prints it; the launcher then ends this process.
        time.sleep(_UNKNOWN_S)
    return text, status


def wait_until_known() -> None:
    """Keep the store alive until the other ranks know; for seconds at most."""
    if _watch is not None:
        _watch.wait_until_known()


class Watch:
    """One rank's thread; `store` is one of torch.distributed's."""

    def __init__(self, store: Any, rank: int, world_size: int):
        self.store, self.rank, self.world_size = store, rank, world_size
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="fcsd-ranks", daemon=True
        )

    def start(self) -> None:
        """Begin to count and to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: no rank's failure concerns this one any more."""
        self._stopped.set()
        self._thread.join(2 * _PERIOD_S)

    # ---- in the thread

    def _run(self) -> None:
        answered, count, place = time.monotonic(), 0, ""
        heard: dict[int, tuple[str, float]] = {}
        while not self._stopped.wait(_PERIOD_S):
            try:
                count += 1
                self.store.set(f"count/{self.rank}", str(count))
                if self.store.check(["failure"]):
                    self._end()
                    return
                if (now := _where_it_hangs()) != place:
                    place = now
                    self.store.set(f"hung/{self.rank}", place)
                if self.rank == 0 and count % 10 == 0:
                    self._look_for_silence(heard)
                    if place:
                        self._look_for_a_hang()
                answered = time.monotonic()
            except Exception:  # whatever a store says when its host is gone
                if time.monotonic() - answered > _LOST_S:
                    self._exit(
                        f"rank {self.rank} of {self.world_size}: the first rank's"
                        " machine is gone",
                        1,
                    )

    def _end(self) -> None:
        failure = self._failure()
        self.store.set(f"knows/{self.rank}", "1")
        if failure["rank"] != self.rank and not self._stopped.wait(_GRACE_S):
            self._exit("", failure["status"])

    def _exit(self, text: str, status: int) -> None:
        # The main thread waits in a collective that will never end, and cannot be
        # interrupted there.
        if text:
            print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _look_for_silence(self, heard: dict[int, tuple[str, float]]) -> None:
        for rank, count in self._of_all("count").items():
            if heard.get(rank, ("", 0.0))[0] != count:
                heard[rank] = (count, time.monotonic())
        silent = [
            rank for rank, (_, at) in heard.items() if time.monotonic() - at > _SILENT_S
        ]
        if silent and self._claim(self._silent(silent), 1):
            print(self._silent(silent), file=sys.stderr)

    def _look_for_a_hang(self) -> None:
        places = self._of_all("hung")
        if not all(places.values()):
            return
        text = (
            "fcsd: error: no rank has got any further in its training step for"
            f" {_HUNG_S / 60:g} minutes, so one of them hangs:"
            f" {'; '.join(f'rank {rank} is in {place}' for rank, place in places.items())};"
            " run the same command again to go on from the last checkpoint"
        )
        if self._claim(text, 1):
            self.store.set(f"knows/{self.rank}", "1")
            self.wait_until_known()
            self._exit(text, 1)  # this rank's main thread would wait on

    # ---- in both threads

    def _of_all(self, what: str) -> dict[int, str]:
        """Return what each rank has written as `count` or `hung`; "" for one that has not."""
        keys = {rank: f"{what}/{rank}" for rank in range(self.world_size)}
        return {
            rank: self.store.get(k).decode() if self.store.check([k]) else ""
            for rank, k in keys.items()
        }

    def _failure(self) -> dict[str, Any]:
        return json.loads(self.store.get("failure"))

    def _claim(self, text: str, status: int) -> bool:
        """Return whether this is the first failure."""
        mine = json.dumps({"rank": self.rank, "text": text, "status": status})
        return self.store.compare_set("failure", "", mine).decode() == mine

    def _silent(self, ranks: list[int]) -> str:
        names = (
            f"rank {ranks[0]}"
            if len(ranks) == 1
            else f"ranks {', '.join(map(str, ranks))}"
        )
        return (
            f"fcsd: error: {names} of {self.world_size} ended without an error: killed"
            " (out of memory?), or the machine is gone; run the same command again to"
            " go on from the last checkpoint"
        )

    # ---- in the main thread

    def first_failure(
        self, text: str, status: int, error: BaseException
    ) -> tuple[str | None, int]:
        """See the function of this name."""
        try:
            if any(word in f"{type(error).__name__} {error}" for word in _COLLECTIVE):
                text = self._behind(error) or text
            first = self._claim(text, status)
            # the thread may not look any more
            self.store.set(f"knows/{self.rank}", "1")
            return (text, status) if first else (None, self._failure()["status"])
        except Exception:  # the store's host has ended before this process
            return text, status

    def _behind(self, error: BaseException) -> str | None:
        """Blame a broken collective on the ranks that were killed, if that is what
        happened: it is seldom the cause.
        """
        before, begun = self._of_all("count"), time.monotonic()
        while time.monotonic() - begun < _DEAD_S and not self.store.check(["failure"]):
            self._stopped.wait(_PERIOD_S / 5)
        after = self._of_all("count")
        dead = [
            rank for rank in before if before[rank] == after[rank] and rank != self.rank
        ]
        return self._silent(dead) if dead else None

    def wait_until_known(self) -> None:
        """See the function of this name."""
        begun, keys = (
            time.monotonic(),
            [f"knows/{rank}" for rank in range(self.world_size)],
        )
        try:
            while time.monotonic() - begun < _GRACE_S and not self.store.check(keys):
                self._stopped.wait(_PERIOD_S / 5)
        # the store's host has ended, which the other ranks see by themselves
        except Exception:
            return


def _where_it_hangs() -> str:
    """Return the function that the main thread is in, once its step has taken too long; else ""."""
    if _step_began is None or time.monotonic() - _step_began < _HUNG_S:
        return ""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
