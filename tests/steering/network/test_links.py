"""Links as a file, and from the output of nccl-tests: what is read, and what is refused
in one line.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.steering.network.links import read_links, write_links
from fcsd.steering.network.nccl_tests import read_nccl_tests
from fcsd.steering.network.simulate import edge_times, exchange_time
from tests.steering.network.test_simulate import BYTES, links

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
    assert "all have the same latency and rate here" in capsys.readouterr().out
    measured, off = read_links(out), ~np.eye(4, dtype=bool)
    assert measured.endpoints == ["Node1:0", "Node1:1", "Node1:2", "Node1:3"]
    assert (measured.collective, measured.backend) == ("all_to_all_single", "nccl")
    assert measured.libraries == {"nccl-tests": "2.17.8"}
    for phase in ("metadata", "dispatch", "combine"):
        np.testing.assert_allclose(measured.alpha(phase)[off], 20e-6, rtol=1e-3)  # type: ignore[arg-type]
        np.testing.assert_allclose(measured.beta(phase)[off], 1e-10, rtol=1e-3)  # type: ignore[arg-type]
    balanced = np.full((4, 4), 400_000.0)  # 1.6 MB a rank, as the first row has it
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
        (lambda text: text.replace("alltoall_perf", "all_reduce_perf"), r"is of all_reduce_perf; the output of one"),
        (lambda text: text.replace("alltoall_perf", ""), r"names no test; the output of one run of alltoall_perf or"),
        (lambda text: text + "sendrecv_perf", r"is of alltoall_perf, sendrecv_perf"),
        (lambda text: re.sub(r".*Rank  [1-3].*\n", "", text), r"lists 1 ranks"),
        (lambda text: re.sub(r".*  3200000.*\n", "", text), r"has 2 sizes, at least three"),
        (lambda text: text.replace("100.00   32.00", "100.00   64.00"), r"line 11: 3200000 bytes in 100 us are not 64"),
        (lambda text: text.replace("100.00   32.00", "Segfault"), r"line 11: no row of nccl-tests"),
    ],
)  # fmt: skip
def test_output_that_is_none_is_refused(
    change: Callable[[str], str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read_nccl_tests(written(tmp_path, change(ALLTOALL)))


def ports(direction: str, rates: list[float | None]) -> Callable[[Any], None]:
    return lambda value: value["ports"].update({f"{direction}_s_per_byte": rates})


def hops(
    alpha: Any, beta: Any, forwarding: str | None = "store_and_forward"
) -> Callable[[Any], None]:
    """A change of a links file: the hops of the dispatch's edge 0 -> 1."""

    def change(value: Any) -> None:
        (
            value["dispatch"]["alpha_s"][0][1],
            value["dispatch"]["beta_s_per_byte"][0][1],
        ) = (
            alpha,
            beta,
        )
        value["dispatch"] |= {} if forwarding is None else {"forwarding": forwarding}

    return change


@pytest.mark.parametrize(
    ("forwarding", "beta"), [("store_and_forward", 0.011), ("cut_through", 0.008)]
)
def test_an_edge_of_three_hops_is_the_one_composed_by_hand(
    forwarding: str, beta: float, tmp_path: Path
) -> None:
    """Equation 7: NVLink, card, card; 3000 bytes take 0.5 s and, by store and forward,
    3 + 24 + 6 s.
    """
    value = json.loads(links().model_dump_json())
    hops([0.1, 0.3, 0.1], [0.001, 0.008, 0.002], forwarding)(value)
    # of a measurement, which there was none of
    for name in ("r2", "refined", "repeats"):
        del value["dispatch"][name]
    (tmp_path / "links.json").write_text(json.dumps(value))
    composed = read_links(tmp_path / "links.json")
    assert composed.alpha("dispatch")[0, 1] == pytest.approx(0.5)
    assert composed.beta("dispatch")[0, 1] == pytest.approx(beta)
    sent = np.zeros((3, 3))
    sent[0, 1] = 3000
    assert edge_times(composed, "dispatch", sent)[0, 1] == pytest.approx(
        0.5 + 3000 * beta
    )
    assert composed.dispatch.r2[0] == [None] * 3 and not any(
        map(any, composed.dispatch.refined)
    )
    for phase in ("metadata", "combine"):  # and the other edges
        assert getattr(composed, phase) == getattr(links(), phase)
    rest = np.ones((3, 3), dtype=bool)
    rest[0, 1] = False
    np.testing.assert_array_equal(
        composed.beta("dispatch")[rest], links().beta("dispatch")[rest]
    )
    write_links(tmp_path / "again.json", composed)
    assert read_links(tmp_path / "again.json") == composed


def test_links_are_written_and_read_as_they_were(tmp_path: Path) -> None:
    write_links(tmp_path / "links.json", links(egress=[0.5, None, None]))
    assert read_links(tmp_path / "links.json") == links(egress=[0.5, None, None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(version=2), r"links\.json: version: Input should be 1, got 2"),
        (lambda v: v.update(world_size=4), r"world_size 4, but 3 endpoints are named"),
        (lambda v: v["dispatch"]["beta_s_per_byte"][1].__setitem__(2, -1.0), r"edge 1 -> 2 is negative"),
        (lambda v: v["combine"]["alpha_s"][0].__setitem__(1, float("nan")), r"combine\.alpha_s.*finite"),
        (lambda v: v["dispatch"]["alpha_s"][0].pop(), r"dispatch\.alpha_s: needs 3 rows of 3, an edge is missing"),
        (lambda v: v["dispatch"]["alpha_s"][0].__setitem__(1, None), r"dispatch\.alpha_s.*number.*got None"),
        (lambda v: v.update(collective="ring"), r"collective: .* 'p2p' or 'all_to_all_single', got 'ring'"),
        (lambda v: v.pop("combine"), r"combine: is required"),
        (lambda v: v["dispatch"]["beta_s_per_byte"][1].__setitem__(2, 1e308), r"edge 1 -> 2 is no time \(1e\+308 s\)"),
        (lambda v: v["ports"].update(egress_s_per_byte=[None]), r"ports\.egress_s_per_byte: needs 3 values"),
        (ports("egress", [None, -1.0, None]), r"ports\.egress_s_per_byte: endpoint 1: -1 seconds a byte; 0 or more"),
        (ports("ingress", [1e30, None, None]), r"endpoint 0: 1e\+30 seconds a byte; 0 or more is needed, at most 1e"),
        (ports("ingress", [float("nan"), None, None]), r"ports\.ingress_s_per_byte\.0: .*finite number, got nan"),
        (ports("egress", [None, None, float("inf")]), r"ports\.egress_s_per_byte\.2: .*finite number, got inf"),
        (ports("egress", [None, True, None]), r"ports\.egress_s_per_byte\.1: a number is needed, got True"),
        (lambda v: v["dispatch"]["alpha_s"][0].__setitem__(2, False), r"dispatch\.alpha_s\.0\.2: a number is needed"),
        (lambda v: v["dispatch"].update(forwarding="cut_through"), r"forwarding: 'cut_through', with 0 edges given"),
        (hops([1.0], [1.0], None), r"forwarding: None, with 1 edges given by their hops; those need store_and_forw"),
        (hops([1.0], [1.0], "cut"), r"dispatch: forwarding: 'cut', with 1 edges"),
        (hops([1.0, 2.0], [1.0]), r"edge 0 -> 1: alpha_s and beta_.* need a list with the same hops, .* got \[1\.0, 2"),
        (hops([1.0], 0.5), r"edge 0 -> 1: .* one or more, got \[1\.0\] and 0\.5"),
        (hops([], []), r"edge 0 -> 1: .* one or more, got \[\] and \[\]"),
        (hops([1.0, -2.0], [1.0, 1.0]), r"alpha_s: edge 0 -> 1, hop 1: a number of 0 or more is needed, got -2\.0"),
        (hops([1.0], [True]), r"beta_s_per_byte: edge 0 -> 1, hop 0: a number of 0 or more is needed, got True"),
        (hops([float("nan")], [1.0]), r"hop 0: a number of 0 or more is needed, got nan"),
        (hops([9e5, 9e5], [1.0, 1.0]), r"dispatch\.alpha_s: edge 0 -> 1 is no time \(1\.8e\+06 s\)"),
    ],
)  # fmt: skip
def test_links_that_cannot_be_are_refused(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    value = json.loads(links().model_dump_json())
    change(value)
    (tmp_path / "links.json").write_text(json.dumps(value))
    with pytest.raises(UserError, match=message):
        read_links(tmp_path / "links.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is a folder, a JSON file is needed"),
        (b"", "not valid JSON"),
        (b"<!DOCTYPE html>", "not valid JSON"),
        (bytes(range(128, 256)), "not a text file"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "holds something else (no endpoints or ports)"),
        (b'{"step_s": 1}', "holds something else (no endpoints or ports)"),
    ],
    ids=["folder", "empty", "html", "binary", "nested", "list", "times"],
)
def test_a_file_without_links_is_refused_in_other_words_than_one_with_a_mistake(
    content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "links.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_links(path)
    assert str(refused.value).startswith(f"{path}: {message}")
    assert str(refused.value).endswith("; `fcsd profile-network` writes one")


def test_links_of_another_world_or_collective_are_refused() -> None:
    links().require(3, "p2p")
    with pytest.raises(UserError, match="between 3 endpoints, 8 are asked for"):
        links().require(8)
    with pytest.raises(
        UserError, match="measured with p2p, the exchanges are all_to_all_single"
    ):
        links().require(collective="all_to_all_single")
    with pytest.raises(UserError, match="between 3 endpoints, 2 are asked for"):
        exchange_time(links(), "dispatch", BYTES[:2, :2])
