"""All-reduces that start in one place and are waited for in another, with several
backends.

All backends have the two methods of `Communication`. A tag names a collective of the
model, such as `attention.3`, and is the same on every rank and in every step. `start`
does not change its argument and returns newly allocated memory, so a compiler may reuse
the argument; the memory holds the sum after `wait` with the same tag. The argument may
be a view, such as `[:, :hidden]` of a kernel's padded output. Collectives ignore
strides, so each gets a contiguous tensor.
"""

import dataclasses
import json
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fcsd_vllm.kernels import Kernel, own_kernels
from fcsd_vllm.settings import Settings

TIMES_VARIABLE = "FCSD_SERVING_TIMES"
"""Environment variable with the folder in which `timed` writes its measurements, one
file per rank (`fcsd-bench serve`).
"""
_QUIET_S = 0.1


class Communication(Protocol):
    """A backend. If its collectives are complete when `start` returns, it has
    `at_once`."""

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Start to sum `x` over the ranks; the result is complete after `wait`."""
        ...

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Return the sum, where `x` is what `start` returned."""
        ...


class Overlapped(ABC):
    """A backend whose collectives run beside computation."""

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Start, and return the memory of the sum."""
        x = x.contiguous()
        # Memory of the computing stream, which reads it.
        summed = torch.empty_like(x)
        self.start_into(x, summed, tag)
        return summed

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Return `x` when it is complete for what runs next."""
        self.finish(tag)
        return x

    @abstractmethod
    def start_into(self, x: torch.Tensor, summed: torch.Tensor, tag: str) -> None:
        """Start to write the sum of `x` over the ranks into `summed`; both are
        contiguous.
        """

    @abstractmethod
    def finish(self, tag: str) -> None:
        """Make the computing stream wait for the sum with this tag."""


class BetweenGraphs(Overlapped):
    """Start and finish the sums of another backend between the pieces of a breakable
    graph.

    What an engine captures in pieces (a prefill, with attention between them) would end
    with sums in flight, which a capture may not. With start and end outside, a sum may
    run beside any number of pieces.

    Args:
        overlapped: the backend.
        outside: the engine's decorator of functions that run outside the graphs, each
            time with the tensors of the capture.
    """

    def __init__(
        self, overlapped: Overlapped, outside: Callable[[Any], Callable[..., Any]]
    ) -> None:
        self._start_into = outside(overlapped.start_into)
        self._finish = outside(overlapped.finish)
        self._inputs: dict[str, torch.Tensor] = {}

    def start_into(self, x: torch.Tensor, summed: torch.Tensor, tag: str) -> None:
        """Start between two pieces, in memory of the first, which later ones read."""
        self._start_into(x, summed, tag)
        # Pieces that are captured meanwhile would reuse memory that nothing holds, and
        # overwrite the input while it is read.
        self._inputs[tag] = x

    def finish(self, tag: str) -> None:
        """Wait between two pieces."""
        self._finish(tag)
        self._inputs.pop(tag, None)


class Alone:
    """One rank: the sum is the argument."""

    at_once = True

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Copy, because operators may not return their arguments."""
        return x.clone()

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Return `x`."""
        return x


class Blocking:
    """The engine's all-reduce, with the algorithm it chooses for the size; complete at
    once."""

    at_once = True

    def __init__(self, group: Any) -> None:
        self.group = group

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Sum `x`; on CPUs the engine sums in place."""
        if x.device.type == "cpu":
            return self.group.all_reduce(x.clone(memory_format=torch.contiguous_format))
        return self.group.all_reduce(x.contiguous())

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Return `x`."""
        return x


class C10d(Overlapped):
    """torch's collectives on the device's group: gloo on CPUs, NCCL or RCCL elsewhere."""

    def __init__(self, group: Any) -> None:
        self.group = group.device_group
        self.works: dict[str, Any] = {}

    def start_into(self, x: torch.Tensor, summed: torch.Tensor, tag: str) -> None:
        """Start in the process group's thread or stream."""
        summed.copy_(x)
        self.works[tag] = dist.all_reduce(summed, group=self.group, async_op=True)

    def finish(self, tag: str) -> None:
        """Wait for the thread, or make the computing stream wait."""
        self.works.pop(tag).wait()


class Stream(Overlapped):
    """All-reduces on a stream that runs beside the computing one: by NCCL or RCCL with a
    separate communicator, and by `kernels` where one takes the message.

    Events are created once per tag, so that a captured graph may hold them.
    """

    def __init__(self, group: Any, kernels: Sequence[Kernel] = ()) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        self.communicator = PyNcclCommunicator(
            group=group.cpu_group, device=group.device
        )
        if self.communicator.disabled:
            raise RuntimeError(
                "fcsd-serving: comm: stream needs NCCL or RCCL, which this engine has"
                " not loaded; use comm: c10d"
            )
        self.kernels = kernels
        self.stream = torch.cuda.Stream()
        self.events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = {}
        self.inputs: dict[str, Any] = {}

    def start_into(self, x: torch.Tensor, summed: torch.Tensor, tag: str) -> None:
        """Start when the computing stream has written `x`."""
        own = next((kernel for kernel in self.kernels if kernel.fits(x)), None)

        def reduce(communicator: Any, stream: Any) -> None:
            if own is None:
                communicator.all_reduce(x, summed, stream=stream)
                return
            with torch.cuda.stream(stream):
                own.reduce(x, out=summed)

        self.begin(reduce, x, tag)

    def finish(self, tag: str) -> None:
        """Make the computing stream wait; the process continues."""
        torch.cuda.current_stream().wait_event(self.events[tag][1])
        self.inputs.pop(tag, None)

    def begin(
        self, run: Callable[[Any, Any], object], inputs: Any, tag: str
    ) -> Callable[[], None]:
        """Queue collectives, given communicator and stream, after the work of the
        computing stream; return the function that waits.
        """
        if tag not in self.events:
            self.events[tag] = (torch.cuda.Event(), torch.cuda.Event())
        ready, done = self.events[tag]
        ready.record()
        self.stream.wait_event(ready)
        run(self.communicator, self.stream)
        done.record(self.stream)
        # keep its memory from being freed and reused while it is read
        self.inputs[tag] = inputs
        return lambda: self.finish(tag)


@dataclass
class Times:
    """The measurements of `Timed` on this rank; all seconds refer to the same
    collectives."""

    collectives: int = 0
    bytes: int = 0
    total_s: float = 0.0
    """From the moment at which all ranks have reached a collective to its end,
    including the emulated network.
    """
    exposed_s: float = 0.0
    """The part of it in which the computing thread waited."""
    behind_s: float = 0.0
    """The rest of that thread's waiting: for ranks that had not arrived, and for the
    other thread to run.
    """

    @property
    def hidden(self) -> float:
        """Return the fraction of the total that ran beside computation; 0 where there was none."""
        return 1 - self.exposed_s / self.total_s if self.total_s else 0.0


@dataclass
class _Turn:
    """One collective in the queue of `Timed`: when all ranks had reached it, and when
    it ended."""

    run: Callable[[], object]
    bytes: int
    done: threading.Event = field(default_factory=threading.Event)
    met: float = 0.0
    ended: float = 0.0
    error: Exception | None = None


class Timed(Overlapped):
    """A thread that runs collectives one after another, as a stream does, and can
    emulate a slower network.

    It replaces `Stream` without a GPU, to test the order and to measure how much could
    be hidden.
    """

    def __init__(self, group: Any, settings: Settings) -> None:
        self.group = group.device_group
        self.settings = settings
        self.times = Times()
        self.pending: dict[str, _Turn] = {}
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        folder = os.environ.get(TIMES_VARIABLE)
        self.times_file = (
            Path(folder) / f"rank{dist.get_rank()}.json" if folder else None
        )
        self.written = Times()
        threading.Thread(
            target=self._run, daemon=True, name="fcsd-communication"
        ).start()

    def start_into(self, x: torch.Tensor, summed: torch.Tensor, tag: str) -> None:
        """Queue a copy of `x`; wait at once if it is small."""
        summed.copy_(x)
        self.begin(lambda: dist.all_reduce(summed, group=self.group), x.nbytes, tag)

    def begin(
        self, run: Callable[[], object], num_bytes: int, tag: str
    ) -> Callable[[], None]:
        """Queue a collective, and wait at once if it is small; return the function that
        waits.
        """
        self.pending[tag] = _Turn(run, num_bytes)
        self.queue.put(self.pending[tag])
        self.times.collectives += 1
        self.times.bytes += num_bytes
        if num_bytes < self.settings.min_overlap_bytes:
            self.finish(tag)
        return lambda: self.finish(tag)

    def finish(self, tag: str) -> None:
        """Wait for the thread, and add to the measurements."""
        if (turn := self.pending.pop(tag, None)) is None:
            return
        asked = time.perf_counter()
        turn.done.wait()
        if turn.error is not None:
            raise turn.error
        exposed = max(0.0, turn.ended - max(asked, turn.met))
        self.times.exposed_s += exposed
        self.times.behind_s += time.perf_counter() - asked - exposed
        self.times.total_s += turn.ended - turn.met

    def _run(self) -> None:
        while True:
            try:
                turn = self.queue.get(
                    timeout=None if self.times_file is None else _QUIET_S
                )
            except queue.Empty:
                self._write_times()
                continue
            try:
                self._take(turn)
            # usually another rank is gone; raised where the result is waited for
            except Exception as error:
                turn.error = error
            turn.done.set()

    @torch.inference_mode()
    def _take(self, turn: _Turn) -> None:
        dist.barrier(group=self.group)
        turn.met = time.perf_counter()
        turn.run()
        speed = self.settings.bandwidth_gb_per_s * 1e9
        network_s = self.settings.latency_ms / 1e3 + (
            turn.bytes / speed if speed else 0.0
        )
        time.sleep(max(0.0, network_s - (time.perf_counter() - turn.met)))
        turn.ended = time.perf_counter()

    def _write_times(self) -> None:
        """Write the measurements if there are new ones, first under a temporary name."""
        times = dataclasses.replace(self.times)
        if self.times_file is not None and times != self.written:
            half = self.times_file.with_suffix(".tmp")
            half.write_text(
                json.dumps({"schema_version": 1, **dataclasses.asdict(times)}),
                encoding="utf-8",
            )
            half.replace(self.times_file)
            self.written = times


class SmallAtOnce:
    """Use the chosen backend for large messages, and the engine's all-reduce for small
    ones."""

    def __init__(
        self, large: Communication, small: Communication, min_bytes: int
    ) -> None:
        self.large, self.small, self.min_bytes = large, small, min_bytes

    def start(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Choose by the size of the message, which is the same on every rank."""
        return (self.small if x.nbytes < self.min_bytes else self.large).start(x, tag)

    def wait(self, x: torch.Tensor, tag: str) -> torch.Tensor:
        """Choose as `start` did."""
        return (self.small if x.nbytes < self.min_bytes else self.large).wait(x, tag)


def make_communication(
    settings: Settings,
    group: Any,
    outside: Callable[[Any], Callable[..., Any]] | None = None,
) -> Communication:
    """Return the backend that the settings name, over the ranks of a group coordinator
    of an engine.

    Args:
        outside: what `BetweenGraphs` needs, where the engine captures breakable graphs.
    """
    if group.world_size == 1:
        return Alone()
    blocking = Blocking(group)
    if settings.comm == "blocking":
        return blocking
    overlapped: Overlapped
    if settings.comm == "timed":
        overlapped = Timed(group, settings)
    elif settings.comm == "c10d":
        overlapped = C10d(group)
    else:
        overlapped = Stream(
            group, own_kernels(group) if settings.comm == "stream" else ()
        )
    large = overlapped if outside is None else BetweenGraphs(overlapped, outside)
    if settings.min_overlap_bytes and settings.comm != "timed":
        return SmallAtOnce(large, blocking, settings.min_overlap_bytes)
    return large
