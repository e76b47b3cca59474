"""A rank that fails, dies, hangs or sends wrong rows while rows are in flight ends all
ranks, and its error is printed.
"""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fcsd.cli.main import main
from fcsd.parallel import failure
from fcsd.parallel.overlap import OverlappedEP
from fcsd.parallel.overlap.exchange import Port
from tests.support import Bench, in_forked_ranks

# a call in the second layer of the student's first step: rows of the first layer are in
# flight
FIFTH = 5


def impatient() -> None:
    """Make this rank wait for seconds instead of hours or minutes: in a collective, and
    for ranks that are gone.
    """
    patience = timedelta(seconds=6)
    distributed_c10d._get_default_timeout = lambda _: patience
    distributed_c10d._set_pg_timeout(patience)
    failure._PERIOD_S, failure._GRACE_S, failure._DEAD_S = 0.2, 1.0, 2.0


def replace(name: str, instead: Callable[..., Any]) -> None:
    """Call `instead` with the original and the arguments from the fifth call on. In a
    fork, there is nothing to undo.
    """
    original, calls = getattr(OverlappedEP, name), [0]

    def run(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return (
            original(*args, **kwargs)
            if calls[0] < FIFTH
            else instead(original, *args, **kwargs)
        )

    setattr(OverlappedEP, name, run)


def fails() -> None:
    def bad(*_: Any) -> None:
        raise ValueError("bad rows")

    replace("run_experts", bad)


def killed() -> None:
    replace("run_experts", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def hangs() -> None:
    replace("run_experts", lambda *_: time.sleep(60))


def sends_other_rows() -> None:
    def wide(original: Any, ep: Any, rows: Any, *rest: Any) -> Any:
        return original(ep, rows.double(), *rest)

    replace("start_dispatch", wide)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fails, "ValueError: bad rows"),
        pytest.param(killed, "error: rank 1 of 2 ended without an error: killed", marks=pytest.mark.breadth),
        pytest.param(hangs, "Timed out waiting", marks=pytest.mark.breadth),
        (sends_other_rows, "their models or precisions differ"),
    ],
    ids=["fails", "killed", "hangs", "sends other rows"],
)  # fmt: skip
def test_a_rank_that_goes_wrong_between_dispatch_and_combine_ends_the_other(
    bench: Bench, tmp_path: Path, fault: Callable[[], None], message: str
) -> None:
    path = str(bench.recipe("r"))

    def one(rank: int) -> int:
        impatient()
        if rank == 1:
            fault()
        return main(["distill", path, "--expert-parallel", "2", "--overlap", "full"])

    outcomes = in_forked_ranks(one, 2, tmp_path)
    output = "".join(text for _, text in outcomes)
    assert [code for code, _ in outcomes] == [
        1,
        -signal.SIGKILL if fault is killed else 1,
    ], output
    assert output.count(message) == 1, output


@pytest.mark.breadth
def test_a_rank_that_hangs_while_others_gather_weights_ends_all_long_before_the_launch_loses_patience(
    bench: Bench, tmp_path: Path
) -> None:
    """The launch lets them wait for 12 hours, because one of them may have to compute a
    score.
    """

    path = str(bench.recipe("r"))

    def one(rank: int) -> int:
        failure._PERIOD_S, failure._GRACE_S, failure._HUNG_S = 0.2, 1.0, 6.0
        unshard, calls = FSDPParamGroup.unshard, [0]

        def hangs(group: Any, *args: Any, **kwargs: Any) -> Any:
            calls[0] += failure._step_began is not None
            if rank == 1 and calls[0] == 3 * FIFTH:
                time.sleep(60)
            return unshard(group, *args, **kwargs)

        FSDPParamGroup.unshard = hangs  # type: ignore[method-assign]
        return main(["distill", path, "--expert-parallel", "2", "--overlap", "full"])

    outcomes = in_forked_ranks(one, 2, tmp_path)
    output = "".join(text for _, text in outcomes)
    assert [code for code, _ in outcomes] == [1, 1], output
    assert output.count("so one of them hangs: rank 0 is in ") == 1, output
    assert f"; rank 1 is in hangs ({__file__}, line " in output, output


def test_the_exchange_that_breaks_is_named() -> None:
    class Broken:
        def start(self, *_: Any) -> Any:
            return self

        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    rows = torch.zeros(2, 3)
    flight = Port(Broken(), 7).launch("combine", True, rows, rows, [2], [2])
    with pytest.raises(RuntimeError, match="closed by peer") as error:
        flight.wait()
    assert error.value.__notes__ == [
        "while this rank waited for the combine of layer 7, backward pass"
    ]
