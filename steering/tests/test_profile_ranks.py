"""A profile between real ranks: what is exchanged, what the command leaves, and what it
leaves where a rank dies.
"""

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from testbed import exchange_counts

import fcsd_steering.network.measure
from fcsd.parallel.overlap.transport import AllToAll
from fcsd.planning.network.links import Collective, read_links
from fcsd.planning.network.simulate import Payload
from fcsd_steering.cli import main
from fcsd_steering.network.exchange import GroupExchange, SendReceive
from fcsd_steering.network.measure import describe
from tests.planning.network.test_simulate import links
from tests.reference.ranks import run_ranks
from tests.support import in_forked_ranks

ROWS = np.array([[2, 0, 3], [1, 4, 0], [0, 5, 1]])  # from each rank to each
COLLECTIVES: tuple[Collective, ...] = ("p2p", "all_to_all_single")


def exchanged(rank: int) -> Any:
    received = []
    for transport in (SendReceive(None), AllToAll(None)):
        sent = torch.cat(
            [
                torch.full((int(n), 2), 10.0 * rank + to)
                for to, n in enumerate(ROWS[rank])
            ]
        )
        rows = torch.full((int(ROWS[:, rank].sum()), 2), -1.0)
        transport.start(rows, sent, ROWS[:, rank].tolist(), ROWS[rank].tolist()).wait()
        received.append(rows[:, 0].tolist())
    times = [
        GroupExchange(None, each, torch.device("cpu"))(ROWS * 1000.0)
        for each in COLLECTIVES
    ]
    counted = exchange_counts(
        GroupExchange(None, "p2p", torch.device("cpu")),
        np.stack([ROWS, 2 * ROWS]),
        Payload(8, 4),
    )
    return received, times, counted.total


def test_both_collectives_bring_every_rank_its_rows_and_all_ranks_one_time() -> None:
    by_rank = run_ranks(exchanged, 3)
    for rank, (received, times, total) in enumerate(by_rank):
        expected = [
            10.0 * source + rank
            for source in range(3)
            for _ in range(ROWS[source, rank])
        ]
        assert received == [expected, expected]
        assert times == by_rank[0][1] and min(times) > 0
        assert total.shape == (2,) and (total == by_rank[0][2]).all()


def test_the_command_leaves_links_between_all_ranks_and_says_how_far_simulation_is_off(
    tmp_path: Path,
) -> None:
    path = tmp_path / "links.json"
    words = [
        "profile-network", str(path), "--max-bytes", "65536", "--collective", "p2p", "--check",
    ]  # fmt: skip
    outcomes = in_forked_ranks(lambda _: main(words), 4, tmp_path)
    assert [code for code, _ in outcomes] == [0] * 4, outcomes
    assert "4 endpoints, p2p of gloo: latency" in outcomes[0][1]
    assert "simulated against measured, 18 patterns: mean error" in outcomes[0][1]
    assert [text for _, text in outcomes[1:]] == [""] * 3  # one rank speaks
    links = read_links(path)
    assert (
        links.world_size == 4 and links.backend == "gloo" and links.libraries["torch"]
    )
    assert len(set(links.endpoints)) == 4 and links.dispatch.repeats == 3
    off = ~np.eye(4, dtype=bool)
    assert (links.alpha("dispatch") + links.beta("dispatch"))[off].min() > 0


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "fails"])
def test_a_rank_that_dies_during_a_profile_ends_all_and_leaves_no_file(
    tmp_path: Path, killed: bool
) -> None:
    path = tmp_path / "out" / "links.json"
    path.parent.mkdir()

    def one(rank: int) -> int:
        calls = {"n": 0}

        class Dies(GroupExchange):
            def __call__(self, num_bytes: Any) -> float:
                calls["n"] += 1
                if rank == 1 and calls["n"] == 20:
                    if killed:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("no such device")
                return super().__call__(num_bytes)

        fcsd_steering.network.measure.GroupExchange = Dies  # type: ignore[misc]  # in a fork of its own
        return main(["profile-network", str(path), "--max-bytes", "4096"])

    outcomes = in_forked_ranks(one, 2, tmp_path)
    output = "".join(text for _, text in outcomes)
    assert [code for code, _ in outcomes] == [
        1,
        -signal.SIGKILL if killed else 1,
    ], output
    message = (
        "error: rank 1 of 2 ended without an error: killed"
        if killed
        else "ValueError: no such device"
    )
    assert output.count(message) == 1, output
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"links between ranks, but was started as a single rank; start it with `accelerate launch"),
        (["--nccl-tests", "nowhere.txt"], r"nowhere\.txt: no such file"),
        (["--nccl-tests", "x", "--check"], r"--check has no effect with --nccl-tests"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile-network", str(tmp_path / "links.json"), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    assert (
        main(
            [
                "profile-network", str(tmp_path / "rows.jsonl"), "--nccl-tests", "nowhere.txt",
            ]
        )
        == 2
    )  # fmt: skip
    assert (
        "rows.jsonl: exists and is another kind of file; name another file"
        in capsys.readouterr().err
    )


def test_a_rate_that_noise_hides_is_said_to_be_unknown() -> None:
    """The fit gives 0 s a byte where time did not rise with the size."""
    flat = links().dispatch.model_copy(
        update={"beta_s_per_byte": [[0.0] * 3] * 3, "r2": [[0.5] * 3] * 3}
    )
    words = describe(links().model_copy(update={"dispatch": flat}))
    assert "rate too fast to measure to too fast to measure" in words
    assert "Gb/s" not in words
