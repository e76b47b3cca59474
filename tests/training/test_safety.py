"""Skipped steps, against runs on the remaining data."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler

from fcsd.base.errors import Interrupted, UserError
from fcsd.parallel.launch import ALONE
from fcsd.training import run as run_module
from fcsd.training import signals as signals_module
from fcsd.training.arguments import RecipeArguments
from fcsd.training.checkpoints import damage, newest_usable, note_files
from fcsd.training.config import SafetyConfig
from fcsd.training.history import read_history
from fcsd.training.run import train
from fcsd.training.safety import Guard, GuardedSteps
from fcsd.training.signals import Signals
from fcsd.training.trainer import DistillTrainer
from tests.support import few, json_lines, same_tensors, user_error
from tests.training.test_trainer import Rows, make, teacher

__all__ = ["teacher"]  # the fixture

STEPS = 6


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read rows in the given order, whatever the seed."""
    monkeypatch.setattr(
        DistillTrainer,
        "_get_train_sampler",
        lambda self, rows=None: SequentialSampler(rows or self.train_dataset),
    )


def rows_of(steps: list[int]) -> Any:
    """Return the rows of these steps, four per step."""
    rows = Rows(80).rows
    return [rows[4 * step + k] for step in steps for k in range(4)]


def run(
    folder: Path,
    teacher: Any,
    steps: list[int],
    safety: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    settings = {
        "lr_scheduler_type": "constant_with_warmup",
        "per_device_train_batch_size": 2,
    } | settings
    plan = make(folder, teacher, rows=rows_of(steps), **settings)
    return plan.changed(safety=SafetyConfig.model_validate(safety or {}))


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int], how: str) -> None:
    """Spoil the second micro-batch of four rows in each of these steps, wherever its
    rows occur.
    """
    numbers = {
        tuple(row["input_ids"].tolist()): index
        for index, row in enumerate(Rows(80).rows)
    }
    compute, watched = DistillTrainer.compute_loss, GuardedSteps.watched
    bad = False

    def look(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal bad
        step, row = divmod(numbers[tuple(inputs["input_ids"][0].tolist())], 4)
        bad = step in steps and row == 2
        return compute(self, model, inputs, *args, **kwargs)

    def spoiled(self: Any, loss: torch.Tensor) -> torch.Tensor:
        if bad and how == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)
        elif bad:  # the gradient stays as it is
            loss = loss + float(how)
        return watched(self, loss)

    monkeypatch.setattr(DistillTrainer, "compute_loss", look)
    monkeypatch.setattr(GuardedSteps, "watched", spoiled)


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    return same_tensors(final(one), final(other))


def events(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / "events.jsonl")


# ---- skipped steps


@pytest.mark.parametrize("how", few(["nan", "inf", "gradient"], 1))
def test_a_step_that_is_not_finite_leaves_no_trace_but_its_record(
    tmp_path: Path,
    teacher: Any,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(*run(tmp_path / "without", teacher, [0, 1, 3, 4], max_steps=4))
    spoil(monkeypatch, {2}, how)
    results = train(*run(tmp_path / "skipped", teacher, [0, 1, 2, 3, 4], max_steps=5))
    assert same(tmp_path / "without", tmp_path / "skipped")
    assert results["steps"] == 5 and results["skipped_steps"] == 1
    one, other = read_history(tmp_path / "without"), read_history(tmp_path / "skipped")
    assert [point["step"] for point in other] == [1, 2, 4, 5]
    for a, b in zip(one, other, strict=True):
        assert [a[k] for k in ("loss", "kl", "kl_p90", "grad_norm")] == [
            b[k] for k in ("loss", "kl", "kl_p90", "grad_norm")
        ]
    assert "skipped_steps" not in other[1] and other[2]["skipped_steps"] == 1
    (event,) = events(tmp_path / "skipped")
    assert (event["event"], event["step"], event["steps"]) == ("skipped", 3, 1)
    assert event["ranks"] == ([] if how == "gradient" else [0])
    assert (
        f"step 3: skipped, the {'gradient' if how == 'gradient' else 'loss'} is not"
        " finite" in capsys.readouterr().err
    )


def test_logged_means_and_the_schedule_are_those_of_the_steps_that_were_not_skipped(
    tmp_path: Path, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    decay = {"lr_scheduler_type": "linear"}
    train(*run(tmp_path / "each", teacher, [0, 1, 2, 3], max_steps=4, **decay))
    spoil(monkeypatch, {9}, "nan")
    train(
        *run(
            tmp_path / "all",
            teacher,
            [0, 9, 1, 2],
            max_steps=4,
            logging_steps=4,
            **decay,
        )
    )
    each, (mean,) = read_history(tmp_path / "each"), read_history(tmp_path / "all")
    assert mean["step"] == 4
    for name in ("loss", "kl", "top1_agreement"):
        assert mean[name] == pytest.approx(
            sum(point[name] for point in each[:3]) / 3, rel=1e-5
        )
    assert mean["learning_rate"] == each[2]["learning_rate"]


def test_too_many_skipped_steps_in_a_row_end_the_run_with_what_to_do(
    tmp_path: Path, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"max_steps": 5, "save_steps": 1, "save_total_limit": 9}
    order = [0, 1, 2, 3, 4, 6, 7, 8]
    spoil(monkeypatch, {2, 3, 4}, "nan")
    with pytest.raises(UserError) as stopped:
        train(*run(tmp_path / "r", teacher, order, {"max_skipped_steps": 2}, **plan))
    why = "the loss is not finite (on rank 0; gradient norm nan) for 3 steps in a row"
    last = tmp_path / "r" / "checkpoints" / "checkpoint-4"
    assert (
        str(stopped.value)
        == f"training stopped before step 5: {why}; the last checkpoint is {last};"
        " lower train.learning_rate or check the data"
    )


def test_a_guard_that_continues_from_its_state_decides_as_one_that_was_not_interrupted():
    settings = SafetyConfig(max_skipped_steps=1)
    losses = [1.0, 9.0, math.nan, 9.0, 1.0, math.inf, math.nan]

    def judged(guard: Guard, start: int, stop: int) -> list[str]:
        return [guard.decide(k + 1, [losses[k], 1.0], 1.0) for k in range(start, stop)]

    whole = Guard(settings)
    expected = judged(whole, 0, len(losses))
    assert expected == ["go", "go", "skip", "go", "go", "skip", "stop"]
    for cut in range(len(losses)):
        one, other = Guard(settings), Guard(settings)
        verdicts = judged(one, 0, cut)
        other.load(json.loads(json.dumps(one.state(), allow_nan=False)))
        assert verdicts + judged(other, cut, len(losses)) == expected
        assert other.state() == whole.state()


# ---- checkpoints


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(
    tmp_path: Path,
    teacher: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = {"max_steps": 6, "save_steps": 2}
    train(*run(tmp_path / "whole", teacher, list(range(6)), **plan))
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_leave_model", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(*run(tmp_path / "r", teacher, list(range(6)), **plan))
    kept = tmp_path / "r" / "checkpoints"
    cut = max((kept / "checkpoint-6").iterdir(), key=lambda path: path.stat().st_size)
    size = cut.stat().st_size
    os.truncate(cut, size // 2)
    capsys.readouterr()
    train(*run(tmp_path / "r", teacher, list(range(6)), **plan))
    assert (
        f"{kept}/checkpoint-6: is damaged ({cut.name} has {size // 2} of {size} bytes);"
        f" continuing from {kept}/checkpoint-4" in capsys.readouterr().err
    )
    assert same(tmp_path / "whole", tmp_path / "r")


def test_damage_is_said_and_where_no_checkpoint_is_whole_nothing_is_begun_anew(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "checkpoint-5"
    (checkpoint / "inside").mkdir(parents=True)
    (checkpoint / "inside" / "a").write_bytes(b"12345")
    assert damage(checkpoint) == "files.json is missing or damaged"
    note_files(checkpoint, ALONE)
    assert damage(checkpoint) is None and newest_usable(tmp_path) == checkpoint
    (checkpoint / "inside" / "a").write_bytes(b"12745")
    assert damage(checkpoint) == "inside/a differs from what was written"
    (checkpoint / "inside" / "a").unlink()
    assert damage(checkpoint) == "inside/a is missing"
    with user_error(
        r"checkpoint-5: is damaged \(inside/a is missing\), and all other checkpoints are damaged"
    ):
        newest_usable(tmp_path)
    assert checkpoint.is_dir()
    assert newest_usable(tmp_path / "nowhere") is None


# ---- signals


@pytest.mark.parametrize("helpers", few([0, 1], 1))
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_continues_to_the_same_weights(
    tmp_path: Path, teacher: Any, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # more than are trained on: a helper that reads ahead has not delivered them all,
    # and still runs
    steps = list(range(12))
    train(*run(tmp_path / "whole", teacher, steps, max_steps=5))
    compute, arguments = DistillTrainer.compute_loss, RecipeArguments.of

    def signalled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 2:
            children = multiprocessing.active_children()
            assert len(children) == helpers
            pids = [*(child.pid for child in children), os.getpid()]
            # as a scheduler: of another process
            subprocess.run(["kill", *map(str, pids)], check=True)
        return compute(self, *args, **kwargs)

    def with_helpers(*args: Any) -> Any:
        changed = arguments(*args)
        changed.dataloader_num_workers = helpers
        return changed

    monkeypatch.setattr(RecipeArguments, "of", with_helpers)
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as interruption:
        patch.setattr(DistillTrainer, "compute_loss", signalled)
        train(*run(tmp_path / "r", teacher, steps, max_steps=5))
    last = tmp_path / "r" / "checkpoints" / "checkpoint-3"
    assert interruption.value.status == 143
    assert (
        str(interruption.value)
        == f"ended by SIGTERM after step 3 of 5; run the same command again to continue from {last}"
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    train(*run(tmp_path / "r", teacher, steps, max_steps=5))
    assert same(tmp_path / "whole", tmp_path / "r")


def test_a_second_signal_ends_at_once_and_an_echo_of_the_first_does_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Signals() as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        monkeypatch.setattr(signals_module, "_ECHO_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (
        capfd.readouterr().err.count(
            "SIGINT: finishing this step; a second signal stops now"
        )
        == 1
    )
