"""Two processes train what one process trains, and fail together with one message."""

import json
import math
from typing import Any

import psutil
import pytest
import torch
from transformers import TrainerCallback

from fcsd.cli.main import main
from fcsd.training import run as run_module
from tests.parallel.test_engines import compare as compare_runs
from tests.parallel.test_engines import launch
from tests.reference.ranks import run_ranks
from tests.support import Bench, few, history


def compare(bench: Bench, one: str, two: str) -> None:
    """Check for the same loss curve, statistics and weights, up to the order of
    floating-point sums.
    """
    compare_runs(bench, one, two)
    for a, b in zip(history(bench, one), history(bench, two), strict=True):
        assert a["top1_agreement"] == pytest.approx(b["top1_agreement"], abs=0.02)
        for name in ("kl_p50", "kl_p90", "kl_p99"):
            assert a[name] == pytest.approx(b[name], rel=0.03)


def test_two_processes_train_what_one_trains(bench: Bench) -> None:
    changes: dict[str, Any] = {
        "early_stopping": bench.early_stopping | {"every_steps": 4},
        "data": {"train": [{"path": str(bench.rows)}], "max_length": 32},
    }
    assert launch("cpu_2", ["distill", str(bench.recipe("two", **changes))]) == [0]
    assert main(["distill", str(bench.recipe("one", **changes))]) == 0
    compare(bench, "one", "two")
    assert best_step(bench, "two") == 12


def best_step(bench: Bench, name: str) -> int:
    manifest = json.loads(
        (bench.folder / name / "distill" / "manifest.json").read_text()
    )
    return int(manifest["results"]["best_step"])


def ranks(rank: int, command: list[str], spoil: str) -> tuple[int, str]:
    """Run a command on this rank; return (exit status, what it printed as an error)."""
    import contextlib
    import io

    if spoil == "scorer":
        import fcsd.evaluation.backend

        def broken(*args: Any, **kwargs: Any) -> Any:
            from fcsd.base.errors import UserError

            raise UserError("the sandbox is gone")

        fcsd.evaluation.backend.InMemoryBackend.in_batches = broken  # type: ignore[method-assign]
    if spoil == "nan":

        class Spoil(TrainerCallback):
            def on_step_begin(
                self,
                args: Any,
                state: Any,
                control: Any,
                model: Any = None,
                **kwargs: Any,
            ) -> None:
                if state.global_step == 2 and rank == 0:
                    model.model.norm.weight.data[0] = math.nan

        # a fork of its own: nothing to undo
        run_module._tensorboard = lambda *_: [Spoil()]
    captured = io.StringIO()
    with contextlib.redirect_stderr(captured):
        status = main(command)
    lines = [line for line in captured.getvalue().splitlines() if "error:" in line]
    return status, "\n".join(lines)


@pytest.mark.parametrize(
    ("spoil", "message"),
    few(
        [
            ("nan", "not finite"),
            ("scorer", "the sandbox is gone"),
            ("the recipe", "train.batch_size_tokens: 96 is not a multiple"),
        ],
        2,
    ),
)
def test_an_error_that_all_ranks_learn_of_is_printed_by_one(
    bench: Bench, spoil: str, message: str
) -> None:
    path = bench.recipe("r", early_stopping=bench.early_stopping | {"every_steps": 4})
    command = [
        "distill",
        str(path),
        *(["--set", "train.batch_size_tokens=96"] if spoil == "the recipe" else []),
    ]
    outcomes = run_ranks(ranks, 2, command, spoil)
    assert [status for status, _ in outcomes] == [2, 2]
    (error,) = [error for _, error in outcomes if error]
    assert message in error and error.count("\n") == 0
    assert not (bench.folder / "r" / "distill" / "model").exists()


def threads_of_a_rank(rank: int) -> tuple[int, int]:
    from fcsd.parallel.launch import join_launch

    return join_launch().ranks.size, torch.get_num_threads()


def test_ranks_whose_launcher_sets_no_number_of_threads_share_the_cores_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    share = max(1, psutil.cpu_count(logical=False) // 2)
    # a warning is an error here
    assert run_ranks(threads_of_a_rank, 2) == [(2, share)] * 2


@pytest.mark.breadth
def test_two_forked_ranks_train_what_one_trains(bench: Bench) -> None:
    changes = {"early_stopping": bench.early_stopping | {"every_steps": 4}}
    command = ["distill", str(bench.recipe("two", **changes))]
    assert [status for status, _ in run_ranks(ranks, 2, command, "")] == [0, 0]
    assert main(["distill", str(bench.recipe("one", **changes))]) == 0
    compare(bench, "one", "two")
    assert best_step(bench, "two") == 12


def test_a_launch_that_lost_its_processes_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import PartialState

    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_MIXED_PRECISION": "no",
    }.items():
        monkeypatch.setenv(name, value)
    PartialState._reset_state()
    assert main(["distill", str(bench.recipe("r"))]) == 2
    assert (
        "add --multi_gpu (it starts CPU processes there), or --config_file configs/cpu_2.yaml"
        in capsys.readouterr().err
    )
