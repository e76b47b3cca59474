"""Measure how much communication was hidden in a profiler's trace, and how long each
exchange of a blocking step took.

    overlap = hidden / total        hidden = total - exposed

Total is the time in which the link is busy, exposed the part of it in which nothing is
computed.

Not covered: the slowdown of computation while rows travel (memory bandwidth, cores);
compare whole steps for that.
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.parallel.overlap.exchange import Record

Interval = tuple[float, float]


@dataclass
class Measured:
    """Seconds of communication, and the part of them in which nothing was computed."""

    total: float = 0.0
    exposed: float = 0.0

    @property
    def overlap(self) -> float:
        """Hidden / total; 0 where nothing was sent."""
        return 1 - self.exposed / self.total if self.total else 0.0


def exchange_times(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return, for each exchange of a blocking step, its seconds and those of the
    computation before its rows were needed.

    That window is the time the exchange may take in the overlapped step without a wait.
    """
    return [
        {
            "layer": record.layer,
            "kind": record.kind,
            "backward": record.backward,
            "seconds": record.waited - record.started,
            "window_s": record.needed - record.waited,
        }
        for record in records
        if record.kind != "counts"
        and record.waited is not None
        and record.needed is not None
    ]


def median_times(steps: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the medians of `exchange_times` over steps, all of which make the same
    exchanges in the same order.
    """
    medians = []
    for same_exchange in zip(*steps, strict=True):
        exchange = dict(same_exchange[0])
        for name in ("seconds", "window_s"):
            exchange[name] = statistics.median(times[name] for times in same_exchange)
        medians.append(exchange)
    return medians


def keys_of(kind: str, backward: bool) -> tuple[str, ...]:
    """Return the keys under which an exchange is measured: all, forward, backward,
    dispatch, combine, "forward dispatch" and so on.
    """
    direction = "backward" if backward else "forward"
    return "all", direction, kind, f"{direction} {kind}"


LINK = r"nccl.*(SendRecv|all_?to_?all)|rccl.*(SendRecv|all_?to_?all)|spin_kernel|gloo:all_?to_?all"
"""Names of the events that keep the link busy: kernels of NCCL and RCCL, the kernel of
an emulated link, gloo's annotations.
"""
_OTHER_COMMUNICATION = re.compile(r"nccl|rccl|gloo:|Memcpy|Memset", re.IGNORECASE)
_LABEL = re.compile(r"farskip::start (dispatch|combine|counts) (forward|backward)")
# The second name is transformers' blocking exchange.
_WAIT = re.compile(r"farskip::wait|wait_tensor")


def from_trace(
    trace: str | Path | Sequence[dict[str, Any]], link: str = LINK
) -> dict[str, Measured]:
    """Measure a trace of torch.profiler (its file, or its events); keys as `keys_of`.

    In a trace with kernels, the link is busy while a kernel runs whose name matches
    `link`; every other kernel that is not communication is computation. In a trace
    without, gloo's annotations are the communication, exposed while the host waits.
    """
    events, busy, kernels = _read_trace(trace, link)
    labels: dict[Any, tuple[str, str]] = {}
    computing = None
    waits: list[Interval] = []
    # On a GPU, an event is a kernel; its exchange is known from the launch on the host.
    if kernels:
        computing = _union(map(_interval, _computing(kernels, busy)))
        labels = _labels_by_launch(events)
    else:
        waits = _union(
            _interval(event) for event in events if _WAIT.search(event["name"])
        )
    intervals: dict[str, list[Interval]] = defaultdict(list)
    for event in busy:
        kind, direction = labels.get(event.get("args", {}).get("correlation"), ("", ""))
        if kind == "counts":
            continue
        for key in keys_of(kind, direction == "backward") if kind else ("all",):
            intervals[key].append(_interval(event))
    measured = {}
    # Exchanges may run at the same time, so their union is measured, not their sum.
    for key, spans in intervals.items():
        united = _union(spans)
        total = sum(end - start for start, end in united)
        if computing is not None:
            exposed = total - _common(united, computing)
        else:
            exposed = _common(united, waits)
        measured[key] = Measured(total / 1e6, exposed / 1e6)
    return measured


def timeline(
    trace: str | Path | Sequence[dict[str, Any]], link: str = LINK
) -> dict[str, list[Interval]]:
    """Return when a traced step computed and when its link was busy, in ms from its
    start.
    """
    events, busy, kernels = _read_trace(trace, link)
    if kernels:
        work = _computing(kernels, busy)
    else:
        # gloo's threads also run operators; they are communication.
        threads = {event["tid"] for event in busy}
        ops = [
            event
            for event in events
            if event.get("cat") == "cpu_op" and event["tid"] not in threads
        ]
        work = [event for event in ops if not event["name"].startswith("c10d::")]
    rows = {
        "computation": _union(map(_interval, work)),
        "dispatch and combine": _union(map(_interval, busy)),
    }
    # Times are relative to the first event.
    begin = min((spans[0][0] for spans in rows.values() if spans), default=0.0)
    return {
        name: [((start - begin) / 1e3, (end - begin) / 1e3) for start, end in spans]
        for name, spans in rows.items()
    }


def _read_trace(
    trace: str | Path | Sequence[dict[str, Any]], link: str
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return a trace's events, those that keep the link busy, and its kernels."""
    content: Any = trace
    if isinstance(trace, str | Path):
        content = json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]
    # Phase X: events with a beginning and a duration.
    events = [event for event in content if event.get("ph") == "X" and "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    pattern = re.compile(link, re.IGNORECASE)
    return (
        events,
        [event for event in kernels or events if pattern.search(event["name"])],
        kernels,
    )


def _computing(kernels: list[Any], busy: list[Any]) -> list[Any]:
    """Return the kernels that are not communication."""
    link = {event["name"] for event in busy}
    return [
        event
        for event in kernels
        if event["name"] not in link and not _OTHER_COMMUNICATION.search(event["name"])
    ]


def _labels_by_launch(events: Sequence[dict[str, Any]]) -> dict[Any, tuple[str, str]]:
    """Return correlation -> (kind, direction) of the kernels that were launched inside
    the annotation of an exchange.
    """
    labels = []
    for event in events:
        if event.get("cat") == "user_annotation" and (
            match := _LABEL.search(event["name"])
        ):
            labels.append((event["tid"], *_interval(event), (match[1], match[2])))
    by_launch = {}
    for event in events:
        if (
            str(event.get("cat")).startswith("cuda_")
            or event.get("cat") == "hip_runtime"
        ):
            # A kernel belongs to the annotation in which its thread launched it.
            for tid, start, end, label in labels:
                if event["tid"] == tid and start <= float(event["ts"]) <= end:
                    by_launch[event.get("args", {}).get("correlation")] = label
    return by_launch


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    united: list[Interval] = []
    for start, end in sorted(intervals):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united


def _common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Return the length of the intersection of two unions."""
    # Both are sorted and do not overlap themselves, so one walk along the two is
    # enough.
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(
            0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0])
        )
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
