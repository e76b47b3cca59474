"""Communication that is reported as hidden is hidden: in records, in a trace of a GPU,
and in one of gloo.
"""

import pytest

from benchmarks.overlap.report import from_records
from fcsd.parallel.overlap.exchange import Record
from fcsd.parallel.overlap.measure import from_trace


def test_of_records_what_the_host_waits_for_is_exposed() -> None:
    """One exchange is launched at 0, waited for from 6 to 8, and arrives at 8; the
    other is launched at 10, arrives at 14, and is waited for at 15.
    """
    records = [
        Record("dispatch", 0, False, 1, started=0, waiting=6, waited=8, done=8),
        Record("combine", 0, True, 1, started=10, waiting=15, waited=15, done=14),
        Record("counts", 0, False, 1, started=0, waiting=0, waited=5),
    ]
    measured = from_records(records)
    assert (measured["forward"].total, measured["forward"].exposed) == (8, 2)
    assert measured["forward dispatch"].overlap == pytest.approx(0.75)
    assert measured["backward"].overlap == 1
    assert measured["all"].overlap == pytest.approx(1 - 2 / 13)


def event(
    name: str, ts: int, dur: int, cat: str, correlation: int | None = None, tid: int = 1
) -> dict:
    args = {} if correlation is None else {"correlation": correlation}
    return {
        "ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid, "args": args,
    }  # fmt: skip


def test_of_a_gpus_trace_link_kernels_count_as_hidden_where_others_run() -> None:
    """The dispatch is busy from 100 to 200 beside computation from 120 to 180; the
    combine of the backward pass is busy from 300 to 340 beside computation from 300 to
    400.
    """
    events = [
        event("farskip::start dispatch forward 0", 10, 5, "user_annotation"),
        event("cudaLaunchKernelExC", 12, 1, "cuda_runtime", 7),
        event("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 100, 100, "kernel", 7, tid=20),
        event("sm90_xmma_gemm_bf16", 120, 60, "kernel", 8, tid=7),
        event("farskip::start combine backward 0", 20, 5, "user_annotation", tid=2),
        event("cudaLaunchKernel", 21, 1, "cuda_runtime", 9, tid=2),
        event("at::cuda::spin_kernel(long)", 300, 40, "kernel", 9, tid=21),
        event("elementwise_kernel", 300, 100, "kernel", 10, tid=7),
        event("ncclDevKernel_AllGather_RING_LL", 130, 60, "kernel", 11, tid=22),
        event("Memcpy DtoD", 100, 100, "gpu_memcpy", 12, tid=20),
    ]  # fmt: skip
    measured = from_trace(events)
    assert measured["forward dispatch"].total == pytest.approx(100e-6)
    assert measured["forward"].overlap == pytest.approx(0.6)
    assert measured["backward combine"].overlap == 1
    assert measured["all"].overlap == pytest.approx(1 - 40 / 140)


def test_of_gloos_trace_what_falls_into_a_wait_is_exposed() -> None:
    events = [
        event("gloo:all_to_all", 0, 100, "user_annotation", tid=9),
        event("farskip::wait dispatch forward 0", 80, 40, "user_annotation"),
        event("aten::mm", 0, 80, "cpu_op"),
    ]
    assert from_trace(events)["all"].overlap == pytest.approx(0.8)
