"""A rank that fails while rows are in flight ends all ranks, and its error is the one that is told."""

import signal
from pathlib import Path

import pytest

from fcsd.cli.main import main
from fcsd.overlap import OverlappedEP
from tests.distributed.test_failure import fails
from tests.support import Bench, in_forked_ranks


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bad rows"), "ValueError: bad rows"),
        pytest.param(None, "error: rank 1 of 2 ended without an error: killed", marks=pytest.mark.slow),
    ],
    ids=["fails", "killed"],
)
def test_a_rank_that_ends_between_dispatch_and_combine_ends_the_other(
    bench: Bench, tmp_path: Path, error: BaseException | None, message: str
) -> None:
    def one(rank: int) -> int:
        if rank == 1:
            fails((OverlappedEP, "run_experts"), 6, error)
        return main(["distill", str(bench.recipe("r")), "--expert-parallel", "2", "--overlap", "full"])

    outcomes = in_forked_ranks(one, 2, tmp_path)
    output = "".join(text for _, text in outcomes)
    assert [code for code, _ in outcomes] == [1, 1 if error is not None else -signal.SIGKILL], output
    assert output.count(message) == 1, output
