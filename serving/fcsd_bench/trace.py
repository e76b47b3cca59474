"""Read a server's overlap from the trace of vLLM's profiler, and the timeline of one
layer (paper Fig. 10).
"""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fcsd_bench.server import NotServed

ALL_REDUCE = r"all_?reduce|cross_device_reduce|ncclDevKernel_Generic"
"""Kernels of NCCL, vLLM and FlashInfer; RCCL has one name for all collectives."""
Interval = tuple[float, float]
TRACED = ("stock", "farskip_blocking", "farskip_overlapped")


def profiler_flags(folder: Path) -> list[str]:
    """Return the flags with which `vllm serve` writes its traces into a folder."""
    chosen = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.resolve()),
        "torch_profiler_with_stack": False,
    }
    return ["--profiler-config", json.dumps(chosen)]


def read_trace(folder: Path) -> dict[str, Any]:
    """Return the overlap of the all-reduces of rank 0, and its intervals of computation
    and reduction within one layer, in ms.

    Raises:
        NotServed: no trace of rank 0, or none with all-reduces among its kernels.
    """
    # Imports torch, which nothing else in this module needs.
    from fcsd.parallel.overlap.measure import from_trace, timeline

    files = sorted(folder.glob("*rank0.*.pt.trace.json*"))
    if not files:
        raise NotServed("its profiler wrote no trace of rank 0", "")
    packed = files[-1].read_bytes()
    text = gzip.decompress(packed) if files[-1].suffix == ".gz" else packed
    events = json.loads(text)["traceEvents"]
    measured = from_trace(events, ALL_REDUCE).get("all")
    if measured is None or not any(event.get("cat") == "kernel" for event in events):
        raise NotServed(f"no all-reduce among the kernels of {files[-1]}", "")
    return {
        "total_s": measured.total,
        "exposed_s": measured.exposed,
        "overlap": measured.overlap,
        "layer": one_layer(timeline(events, ALL_REDUCE)),
    }


def one_layer(rows: Mapping[str, Sequence[Interval]]) -> dict[str, list[Interval]]:
    """Return the intervals of a layer in the middle of a timeline: from one all-reduce
    to the second one after it.
    """
    computing, reducing = rows.values()
    # A layer has two all-reduces; the middle of the trace is free of start and end
    # effects.
    middle = (len(reducing) - 1) // 2
    begin, end = reducing[middle][0], reducing[min(middle + 2, len(reducing) - 1)][1]
    return {
        name: [
            (max(a, begin) - begin, min(b, end) - begin)
            for a, b in intervals
            if a < end and b > begin
        ]
        for name, intervals in (("computation", computing), ("all-reduce", reducing))
    }
