"""A rank that fails or is killed ends all ranks, and one of them says which rank failed."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.data.batches import Collator
from fcsd.parallel import failure
from fcsd.training.best import StopWhenScoreStalls
from fcsd.training.trainer import DistillTrainer
from tests.support import ROOT, Bench, few, in_forked_ranks, start


def fails(place: tuple[Any, str], after: int, error: BaseException | None) -> None:
    """Make the function at `place` raise an error from call number `after` on; None: it
    kills the process.
    """
    holder, name = place
    original, calls = getattr(holder, name), {"n": 0}

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls["n"] += 1
        if calls["n"] < after:
            return original(*args, **kwargs)
        if error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        assert error is not None
        raise error

    setattr(holder, name, broken)  # in a fork of its own: nothing to undo


@pytest.mark.parametrize(
    ("place", "after", "error", "status", "message"),
    few([
        ((Collator, "__call__"), 3, UserError("row 7 is bad"), 2, "error: row 7 is bad (rank 1 of 2)"),
        ((DistillTrainer, "compute_loss"), 3, KeyError("hidden"), 1, "KeyError: 'hidden'"),
        ((DistillTrainer, "_save_rng_state"), 1, ValueError("cannot save"), 1, "ValueError: cannot save"),
        ((DistillTrainer, "compute_loss"), 3, None, 1, "error: rank 1 of 2 ended without an error: killed"),
    ], 2),
    ids=["data", "loss", "saving", "killed"],
)  # fmt: skip
def test_a_failure_on_the_second_rank_ends_the_first(
    bench: Bench,
    tmp_path: Path,
    place: tuple[Any, str],
    after: int,
    error: BaseException | None,
    status: int,
    message: str,
) -> None:
    first, path = tmp_path / "pid", str(bench.recipe("r"))

    def one(rank: int) -> int:
        if rank == 1:
            fails(place, after, error)
        else:
            first.write_text(str(os.getpid()))
        status = main(["distill", path])
        # As between GPUs, no connection breaks while this one lives: the other has to
        # be ended.
        if rank == 1 and isinstance(error, KeyError):
            while Path(f"/proc/{first.read_text()}").exists():
                time.sleep(0.1)
        return status

    outcomes = in_forked_ranks(one, 2, tmp_path)
    output = "".join(text for _, text in outcomes)
    assert [code for code, _ in outcomes] == [
        status,
        -signal.SIGKILL if error is None else status,
    ], output
    assert output.count(message) == 1, output
    assert output.count("(rank ") == (0 if error is None else 1)
    assert "gloo" not in output


LAUNCH = ("-m", "accelerate.commands.launch", "--config_file")


@pytest.mark.breadth
def test_a_bug_on_the_second_process_of_a_launch_ends_it_with_its_error_printed_once(
    bench: Bench, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from fcsd.cli.main import main\n"
        "from fcsd.training.trainer import DistillTrainer\n"
        "if os.environ['RANK'] == '1':\n"
        "    def broken(*args, **kwargs): raise IndexError('expert 9')\n"
        "    DistillTrainer.compute_loss = broken\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    config = str(ROOT / "configs" / "cpu_2.yaml")
    command = (*LAUNCH, config, str(script), "distill", str(bench.recipe("r")))
    with start(*command, PYTHONPATH=str(ROOT)) as child:
        _, error = child.communicate()
    assert child.returncode != 0
    assert error.count("IndexError: expert 9\n") == 1, error
    assert error.count("fcsd distill: failed (rank 1 of 2)\n") == 1, error


@pytest.mark.breadth
def test_a_launcher_that_gets_sigterm_ends_as_the_docs_say_and_the_run_with_a_checkpoint(
    bench: Bench,
) -> None:
    """`accelerate launch` starts FSDP2 from its configuration."""
    checkpoints = bench.folder / "r" / "distill" / "checkpoints"
    config = str(ROOT / "configs" / "cpu_2_fsdp2.yaml")
    recipe = str(bench.recipe("r"))
    command = (
        *LAUNCH, config, "-m", "fcsd", "distill", recipe, "--set", "train.max_steps=100000",
    )  # fmt: skip
    with start(*command) as child:
        while child.poll() is None and not (checkpoints / "checkpoint-4").exists():
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        _, error = child.communicate()
    # torch's elastic agent has this status, whatever the statuses of its processes
    assert child.returncode == 1, error
    ours, _, agents = error.partition("Traceback (most recent call last)")
    (line,) = (line for line in ours.splitlines() if "ended by SIGTERM" in line)
    assert line.endswith(
        "(the launcher's status 1 and traceback below come from this signal, not from"
        " another error)"
    )
    assert "SignalException" in agents and "fcsd" not in agents.splitlines()[-1]
    step = int(line.partition("after step ")[2].split()[0])
    assert (checkpoints / f"checkpoint-{step}").is_dir() and step >= 4
    page = " ".join((ROOT / "docs" / "distil.md").read_text().split())
    status = "exit with status 1 and a harmless traceback of torch's elastic agent"
    assert f"{status} (`SignalException`" in page


def test_what_takes_long_between_steps_is_no_part_of_one_in_which_a_rank_could_hang(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are scores and checkpoints, for which other ranks may wait for hours."""
    seen: dict[str, set[bool]] = {}

    def watch(holder: Any, name: str) -> None:
        original = getattr(holder, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(failure._step_began is not None)
            return original(*args, **kwargs)

        monkeypatch.setattr(holder, name, call)

    watch(DistillTrainer, "compute_loss")
    watch(StopWhenScoreStalls, "_evaluate")
    watch(DistillTrainer, "_save_checkpoint")
    rows = {"path": str(bench.rows)}
    data = {"train": [rows], "heldout": rows, "heldout_examples": 8, "max_length": 32}
    stopping = {
        "metric": "heldout_kl", "every_steps": 4, "patience": 9, "min_delta": 0.0,
    }  # fmt: skip
    assert (
        main(["distill", str(bench.recipe("r", data=data, early_stopping=stopping))])
        == 0
    )
    assert seen == {
        "compute_loss": {True},
        "_evaluate": {False},
        "_save_checkpoint": {False},
    }
    assert failure._where_it_hangs() == ""


def test_getting_further_counts_within_a_step_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A teacher's computation for a score is not a step, and may take hours."""
    monkeypatch.setattr(failure, "_step_began", None)
    failure.further_in_step()
    assert failure._step_began is None
    monkeypatch.setattr(failure, "_step_began", 1.0)
    failure.further_in_step()
    assert failure._step_began is not None and failure._step_began > 1.0
