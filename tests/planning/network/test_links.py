"""Links from a file and from the output of nccl-tests: what is read, and what is
refused in one line.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fcsd.base.errors import UserError
from fcsd.planning.network.links import read_links, write_links
from fcsd.planning.network.simulate import edge_times, exchange_time
from tests.planning.network.test_simulate import BYTES, links
from tests.support import user_error


def ports(direction: str, rates: list[float | None]) -> Callable[[Any], None]:
    return lambda value: value["ports"].update({f"{direction}_s_per_byte": rates})


def hops(
    alpha: Any, beta: Any, forwarding: str | None = "store_and_forward"
) -> Callable[[Any], None]:
    """Return a change of a links file: the hops of the dispatch's edge 0 -> 1."""

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
    # of a measurement, of which there was none
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
    assert composed.dispatch.r2[0] == [None] * 3
    assert not any(map(any, composed.dispatch.refined))
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
        (lambda v: v.update(world_size=4), r"world_size 4, but it names 3 endpoints"),
        (lambda v: v["dispatch"]["beta_s_per_byte"][1].__setitem__(2, -1.0), r"edge 1 -> 2 is negative"),
        (lambda v: v["combine"]["alpha_s"][0].__setitem__(1, float("nan")), r"combine\.alpha_s.*finite"),
        (lambda v: v["dispatch"]["alpha_s"][0].pop(), r"dispatch\.alpha_s: needs 3 rows of 3, but an edge is missing"),
        (lambda v: v["dispatch"]["alpha_s"][0].__setitem__(1, None), r"dispatch\.alpha_s.*number.*got None"),
        (lambda v: v.update(collective="ring"), r"collective: .* 'p2p' or 'all_to_all_single', got 'ring'"),
        (lambda v: v.pop("combine"), r"combine: is required"),
        (lambda v: v["dispatch"]["beta_s_per_byte"][1].__setitem__(2, 1e308), r"edge 1 -> 2 is not a valid time"),
        (lambda v: v["ports"].update(egress_s_per_byte=[None]), r"ports\.egress_s_per_byte: needs 3 values"),
        (ports("egress", [None, -1.0, None]), r"egress_s_per_byte: endpoint 1: -1 seconds per byte; must be 0 to"),
        (ports("ingress", [1e30, None, None]), r"endpoint 0: 1e\+30 seconds per byte; must be 0 to 1e"),
        (ports("ingress", [float("nan"), None, None]), r"ports\.ingress_s_per_byte\.0: .*finite number, got nan"),
        (ports("egress", [None, None, float("inf")]), r"ports\.egress_s_per_byte\.2: .*finite number, got inf"),
        (ports("egress", [None, True, None]), r"ports\.egress_s_per_byte\.1: a number is needed, got True"),
        (lambda v: v["dispatch"]["alpha_s"][0].__setitem__(2, False), r"dispatch\.alpha_s\.0\.2: a number is needed"),
        (lambda v: v["dispatch"].update(forwarding="cut_through"), r"forwarding: 'cut_through', with 0 edges given"),
        (hops([1.0], [1.0], None), r"forwarding: None, with 1 edges .*; with such edges it must be store_and_forw"),
        (hops([1.0], [1.0], "cut"), r"dispatch: forwarding: 'cut', with 1 edges"),
        (hops([1.0, 2.0], [1.0]), r"edge 0 -> 1: alpha_s and beta_.* need a list with the same hops, .* got \[1\.0, 2"),
        (hops([1.0], 0.5), r"edge 0 -> 1: .* one or more, got \[1\.0\] and 0\.5"),
        (hops([], []), r"edge 0 -> 1: .* one or more, got \[\] and \[\]"),
        (hops([1.0, -2.0], [1.0, 1.0]), r"alpha_s: edge 0 -> 1, hop 1: a number of 0 or more is needed, got -2\.0"),
        (hops([1.0], [True]), r"beta_s_per_byte: edge 0 -> 1, hop 0: a number of 0 or more is needed, got True"),
        (hops([float("nan")], [1.0]), r"hop 0: a number of 0 or more is needed, got nan"),
        (hops([9e5, 9e5], [1.0, 1.0]), r"dispatch\.alpha_s: edge 0 -> 1 is not a valid time \(1\.8e\+06 s\)"),
    ],
)  # fmt: skip
def test_links_that_cannot_be_are_refused(
    change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    value = json.loads(links().model_dump_json())
    change(value)
    (tmp_path / "links.json").write_text(json.dumps(value))
    with user_error(message):
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
    assert str(refused.value).endswith("; `fcsd-steer profile-network` writes one")


def test_links_of_another_world_or_collective_are_refused() -> None:
    links().require(3, "p2p")
    with user_error("between 3 endpoints, but 8 were requested"):
        links().require(8)
    with user_error("measured with p2p, the exchanges are all_to_all_single"):
        links().require(collective="all_to_all_single")
    with user_error("between 3 endpoints, but 2 were requested"):
        exchange_time(links(), "dispatch", BYTES[:2, :2])
