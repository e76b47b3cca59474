"""Links from the output of nccl-tests."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fcsd.base.errors import UserError
from fcsd.planning.network.links import read_links
from fcsd.planning.network.simulate import exchange_time
from fcsd_steering.cli import main
from fcsd_steering.network.nccl_tests import read_nccl_tests

# As printed, shortened (NVIDIA/nccl-tests, issue 214: two A40), under a line with its
# command.
SENDRECV = """\
$ mpirun -n 2 ./build/sendrecv_perf -b 256 -e 1G -f 2 -g 1
# nThread 1 nGpus 1 minBytes 256 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid 1478709 on      gpu23 device  0 [0x31] NVIDIA A40
#  Rank  1 Group  0 Pid 1171742 on      gpu24 device  0 [0x31] NVIDIA A40
#
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       
         256            64     float     sum      -1    34.24    0.01    0.01      0    33.65    0.01    0.01    N/A
         512           128     float     sum      -1    34.24    0.01    0.01      0    34.15    0.01    0.01    N/A
        1024           256     float     sum      -1    34.24    0.03    0.03      0    31.11    0.03    0.03    N/A
        2048           512     float     sum      -1    31.58    0.06    0.06      0    31.33    0.07    0.07    N/A
"""  # noqa: E501, W291
# The form of today's alltoall_perf under mpirun; times are 20 us + 1 us for each 10 kB
# on an edge.
ALLTOALL = """\
[1,0]<stdout>:# nccl-tests version 2.17.8 nccl-headers=23004 nccl-library=23004
[1,0]<stdout>:# Collective test starting: alltoall_perf
[1,0]<stdout>:#  Rank  0 Group  0 Pid 2380523 on    Node1 device  0 [0000:4e:00] NVIDIA H100 80GB HBM3
[1,0]<stdout>:#  Rank  1 Group  0 Pid 2380524 on    Node1 device  1 [0000:5f:00] NVIDIA H100 80GB HBM3
[1,0]<stdout>:#  Rank  2 Group  0 Pid 2380525 on    Node1 device  2 [0000:cb:00] NVIDIA H100 80GB HBM3
[1,0]<stdout>:#  Rank  3 Group  0 Pid 2380526 on    Node1 device  3 [0000:db:00] NVIDIA H100 80GB HBM3
[1,0]<stdout>:#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
[1,0]<stdout>:#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
[1,0]<stdout>:           0             0     float    none      -1     0.09    0.00    0.00       0     0.08    0.00    0.00    N/A
[1,0]<stdout>:     1600000        100000     float    none      -1    60.00   26.67   20.00       0    60.00   26.67   20.00    N/A
[1,0]<stdout>:     3200000        200000     float    none      -1   100.00   32.00   24.00       0   100.00   32.00   24.00    N/A
[1,0]<stdout>:     6400000        400000     float    none      -1   180.00   35.56   26.67       0   180.00   35.56   26.67    N/A
"""  # noqa: E501


def written(folder: Path, text: str) -> Path:
    path = folder / "output.txt"
    path.write_text(text)
    return path


def test_an_edge_of_an_all_to_all_carries_one_part_of_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "links.json"
    assert (
        main(
            [
                "profile-network",
                str(out),
                "--nccl-tests",
                str(written(tmp_path, ALLTOALL)),
            ]
        )
        == 0
    )
    assert "the file has the same latency and rate for all" in capsys.readouterr().out
    measured, off = read_links(out), ~np.eye(4, dtype=bool)
    assert measured.endpoints == ["Node1:0", "Node1:1", "Node1:2", "Node1:3"]
    assert (measured.collective, measured.backend) == ("all_to_all_single", "nccl")
    assert measured.libraries == {"nccl-tests": "2.17.8"}
    for phase in ("metadata", "dispatch", "combine"):
        np.testing.assert_allclose(measured.alpha(phase)[off], 20e-6, rtol=1e-3)  # type: ignore[arg-type]
        np.testing.assert_allclose(measured.beta(phase)[off], 1e-10, rtol=1e-3)  # type: ignore[arg-type]
    balanced = np.full((4, 4), 400_000.0)  # 1.6 MB per rank, as the first row has it
    assert exchange_time(measured, "dispatch", balanced) == pytest.approx(
        60e-6, rel=1e-3
    )


def test_a_ring_of_sends_carries_its_whole_size_on_an_edge_and_is_read_as_it_was_printed(
    tmp_path: Path,
) -> None:
    measured = read_nccl_tests(written(tmp_path, SENDRECV))
    assert measured.endpoints == ["gpu23:0", "gpu24:1"] and measured.collective == "p2p"
    # The time falls with the size: no rate.
    assert measured.alpha("dispatch")[0, 1] == pytest.approx(33.5e-6, rel=0.03)
    assert measured.beta("dispatch")[0, 1] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("alltoall_perf", "all_reduce_perf"), r"is of all_reduce_perf; give the output"),
        (lambda text: text.replace("alltoall_perf", ""), r"names no test; give the output of one run of all"),
        (lambda text: text + "sendrecv_perf", r"is of alltoall_perf, sendrecv_perf"),
        (lambda text: re.sub(r".*Rank  [1-3].*\n", "", text), r"lists 1 ranks"),
        (lambda text: re.sub(r".*  3200000.*\n", "", text), r"has 2 sizes; at least three"),
        (lambda text: text.replace("100.00   32.00", "100.00   64.00"), r"line 11: 3200000 bytes in 100 us are not 64"),
        (lambda text: text.replace("100.00   32.00", "Segfault"), r"line 11: not a row of nccl-tests"),
    ],
)  # fmt: skip
def test_output_that_is_none_is_refused(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_nccl_tests(written(tmp_path, change(ALLTOALL)))
