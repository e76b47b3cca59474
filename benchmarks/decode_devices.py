"""What runs the steps of `benchmarks.decode_step` and their all-reduces: a GPU, or a
simulated clock.
"""

import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ALL_REDUCE = "all_reduce_stand_in"
REPLAYS, TRACED = 10, 3
"""Steps in one timing, and in one trace."""


class Flight(NamedTuple):
    """A sum on its way. source: kept, so that its memory is not reused meanwhile."""

    value: torch.Tensor
    source: torch.Tensor | None = None
    done: Any = None


class Gpu:
    """Kernels of the GPU in captured graphs."""

    def __init__(self) -> None:
        from benchmarks.decode_kernels import run_all_reduce

        self.name = torch.cuda.get_device_name()
        self.side = torch.cuda.Stream()  # as the plugin makes it
        self.all_reduce = run_all_reduce

    def absent(self, x: torch.Tensor, us: float, sms: int) -> Flight:
        return Flight(x)

    def in_line(self, x: torch.Tensor, us: float, sms: int) -> Flight:
        summed = torch.empty_like(x)
        self.all_reduce(x, summed, us, sms)
        return Flight(summed)

    def beside(self, x: torch.Tensor, us: float, sms: int) -> Flight:
        """Start when the computing stream has written x."""
        ready, done = torch.cuda.Event(), torch.cuda.Event()
        summed = torch.empty_like(x)
        ready.record()
        self.side.wait_event(ready)
        with torch.cuda.stream(self.side):
            self.all_reduce(x, summed, us, sms)
            done.record()
        return Flight(summed, x, done)

    def wait(self, flight: Flight) -> torch.Tensor:
        if flight.done is not None:
            torch.cuda.current_stream().wait_event(flight.done)
        return flight.value

    def captured(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return what replays a step; its first runs, which compile, are not captured."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            step()
        return graph.replay

    def seconds(self, replay: Callable[[], Any]) -> float:
        """Return the seconds of a step, the mean of several without a pause."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / REPLAYS

    def trace(self, replay: Callable[[], Any]) -> list[dict[str, Any]]:
        """Return the profiler's events of some steps, as a trace's file has them."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(TRACED):
                replay()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return json.loads(path.read_text())["traceEvents"]


class Rehearsal:
    """The same on a simulated clock in microseconds: each block of a layer takes 20,
    each launch 1 more. A sum is NaN until something has waited for it.
    """

    BLOCK, LAUNCH = 20.0, 1.0
    name = "a rehearsal: times are those of a simulated clock"

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.now, self.free = 0.0, 0.0
        self.events: list[dict[str, Any]] = []

    def record(self, name: str, begin: float, us: float) -> float:
        event = {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": us}
        self.events.append(event)
        return begin + us

    def absent(self, x: torch.Tensor, us: float, sms: int) -> Flight:
        self.now = self.record("block", self.now, self.BLOCK) + self.LAUNCH
        return Flight(x)

    def in_line(self, x: torch.Tensor, us: float, sms: int) -> Flight:
        self.absent(x, us, sms)
        self.now = self.record(ALL_REDUCE, self.now, us) + self.LAUNCH
        return Flight(x.clone())

    def beside(self, x: torch.Tensor, us: float, sms: int) -> Flight:
        self.absent(x, us, sms)
        self.free = self.record(ALL_REDUCE, max(self.now, self.free), us)
        return Flight(torch.full_like(x, math.nan), x, self.free)

    def wait(self, flight: Flight) -> torch.Tensor:
        if flight.source is None:
            return flight.value
        self.now = max(self.now, flight.done)
        return flight.value.copy_(flight.source)

    def captured(self, step: Callable[[], Any]) -> Callable[[], Any]:
        return step

    def seconds(self, replay: Callable[[], Any]) -> float:
        self.restart()
        replay()
        return self.now / 1e6

    def trace(self, replay: Callable[[], Any]) -> list[dict[str, Any]]:
        self.restart()
        for _ in range(TRACED):
            replay()
        return self.events
