"""Steps that are skipped, spikes that are rewound: against runs on the data that is left."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback

from fcsd.base.errors import Interrupted, UserError
from fcsd.parallel.ranks import ALONE
from fcsd.training import checkpoint_writer as writer_module
from fcsd.training import checkpoints as checkpoints_module
from fcsd.training import guarded
from fcsd.training import run as run_module
from fcsd.training.checkpoints import damage, newest_usable, note_files
from fcsd.training.config import SafetyConfig
from fcsd.training.guarded import GuardedSteps, Signals
from fcsd.training.run import train
from fcsd.training.safety import Guard, SpikeDetector
from fcsd.training.sweep import read_history
from fcsd.training.trainer import DistillTrainer
from tests.support import few, in_a_fork
from tests.training.test_trainer import Rows, make, teacher

__all__ = ["teacher"]  # the fixture

STEPS = 6


@pytest.fixture(autouse=True)
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in the order in which they are given, whatever the seed."""
    monkeypatch.setattr(
        DistillTrainer,
        "_get_train_sampler",
        lambda self, rows=None: SequentialSampler(rows or self.train_dataset),
    )


def rows_of(steps: list[int]) -> Any:
    """Return rows of these steps, four a step."""
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
    return replace(plan, safety=SafetyConfig.model_validate(safety or {}))


def spoil(monkeypatch: pytest.MonkeyPatch, steps: set[int], how: str) -> None:
    """Spoil the second micro-batch of four rows of each of these steps, wherever its
    rows come up.
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
            loss = loss + (100.0 if how == "spike" else float(how))
        return watched(self, loss)

    monkeypatch.setattr(DistillTrainer, "compute_loss", look)
    monkeypatch.setattr(GuardedSteps, "watched", spoiled)


def final(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same(one: Path, other: Path) -> bool:
    a, b = final(one), final(other)
    return a.keys() == b.keys() and all(
        torch.equal(value, b[name]) for name, value in a.items()
    )


def events(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()
    ]


# ---- skipped steps


@pytest.mark.parametrize("how", ["nan", "inf", "gradient"])
def test_a_step_that_is_not_finite_leaves_no_trace_but_its_record(
    tmp_path: Path,
    teacher: Any,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(run(tmp_path / "without", teacher, [0, 1, 3, 4], max_steps=4))
    spoil(monkeypatch, {2}, how)
    results = train(run(tmp_path / "skipped", teacher, [0, 1, 2, 3, 4], max_steps=5))
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
    train(run(tmp_path / "each", teacher, [0, 1, 2, 3], max_steps=4, **decay))
    spoil(monkeypatch, {9}, "nan")
    train(
        run(
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


def test_too_many_skipped_steps_in_a_row_end_the_run_with_what_to_do_and_a_rewind_passes_over_them(
    tmp_path: Path, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run(tmp_path / "without", teacher, [0, 1, 6, 7, 8], max_steps=5))
    plan = {"max_steps": 5, "save_steps": 1, "save_total_limit": 9}
    order = [0, 1, 2, 3, 4, 6, 7, 8]
    spoil(monkeypatch, {2, 3, 4}, "nan")
    with pytest.raises(UserError) as stopped:
        train(run(tmp_path / "r", teacher, order, {"max_skipped_steps": 2}, **plan))
    why = "the loss is not finite (on rank 0; gradient norm nan) for 3 steps in a row"
    last = tmp_path / "r" / "checkpoints" / "checkpoint-4"
    assert (
        str(stopped.value)
        == f"training stopped before step 5: {why}; the last checkpoint is {last}; run"
        " again with safety.max_rewinds: 1 to skip these batches, lower"
        " train.learning_rate or check the data"
    )
    with monkeypatch.context() as patch:
        spoil(patch, {2, 3, 4}, "nan")
        results = train(
            run(
                tmp_path / "r",
                teacher,
                order,
                {"max_skipped_steps": 2, "max_rewinds": 1},
                **plan,
            )
        )
    assert (
        results["steps"] == 5
        and results["skipped_steps"] == 3
        and results["rewinds"] == 1
    )
    assert same(tmp_path / "without", tmp_path / "r")
    rewind = events(tmp_path / "r")[-1]
    assert rewind == {
        "event": "rewind",
        "step": 5,
        "to_step": 2,
        "passed_steps": 3,
        "cause": "skipped",
    }


# ---- spikes


def test_a_loss_far_above_the_median_is_an_outlier_and_becomes_usual_where_it_stays() -> (
    None
):
    detector = SpikeDetector(window=20, threshold=6.0)
    noise = [1.0 + 0.01 * math.sin(7 * k) for k in range(20)]
    assert not any(detector.add(loss) for loss in noise)
    middle = sorted(noise)[9:11]
    usual = sum(middle) / 2
    distances = sorted(abs(loss - usual) for loss in noise)
    spread = max(1.4826 * (distances[9] + distances[10]) / 2, 0.02 * usual)
    assert detector.limit == pytest.approx(usual + 6 * spread)
    assert not detector.add(detector.limit - 1e-6) and detector.add(
        detector.limit + 1e-6
    )
    assert not detector.add(0.1)  # far below is no spike
    spikes = [detector.add(3.0) for _ in range(20)]
    assert all(spikes[:5]) and not any(spikes[-5:])


def test_nothing_is_a_spike_before_the_usual_loss_is_known_or_without_a_threshold() -> (
    None
):
    detector = SpikeDetector(window=128, threshold=6.0)
    assert not any(detector.add(loss) for loss in [1.0] * 15 + [50.0])
    assert detector.add(50.0)
    off = SpikeDetector(window=16, threshold=None)
    assert not any(off.add(loss) for loss in [1.0] * 30 + [50.0])


def test_a_guard_that_goes_on_from_its_state_judges_as_one_that_was_not_interrupted() -> (
    None
):
    settings = SafetyConfig(
        spike_window=16, spike_steps=3, max_rewinds=1, max_skipped_steps=1
    )
    losses = [1.0] * 20 + [9.0, 9.0, math.nan, 9.0, 1.0, math.inf, math.nan]

    def judged(guard: Guard, start: int, stop: int) -> list[str]:
        return [guard.decide(k + 1, [losses[k], 1.0], 1.0) for k in range(start, stop)]

    whole = Guard(settings)
    expected = judged(whole, 0, len(losses))
    assert expected[20:] == ["go", "go", "skip", "rewind", "go", "skip", "rewind"]
    for cut in range(18, len(losses)):
        one, other = Guard(settings), Guard(settings)
        verdicts = judged(one, 0, cut)
        other.load(json.loads(json.dumps(one.state(), allow_nan=False)))
        assert verdicts + judged(other, cut, len(losses)) == expected
        assert other.state() == whole.state()


def test_a_spike_is_reported_with_its_length_and_peak(
    tmp_path: Path,
    teacher: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(monkeypatch, {10, 11}, "spike")
    settings = {"spike_window": 8}
    results = train(
        run(
            tmp_path,
            teacher,
            list(range(14)),
            settings,
            max_steps=14,
            learning_rate=1e-6,
        )
    )
    assert (
        results["spikes"] == 1 and "rewinds" not in results and results["steps"] == 14
    )
    (event,) = events(tmp_path)
    assert (event["step"], event["steps"]) == (11, 2) and event["peak"] > 100 > event[
        "limit"
    ] > event["usual"]
    assert "step 11: the loss is 1" in capsys.readouterr().err


def test_a_spike_that_lasts_is_rewound_and_its_batches_are_passed_over(
    tmp_path: Path, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"max_steps": 14, "learning_rate": 1e-6, "save_steps": 4}
    spoiled = {10, 11, 12}
    order = list(range(18))
    # Spoiled from step 11 on, back to checkpoint 8: the batches of steps 9 to 13 are
    # passed over.
    train(run(tmp_path / "without", teacher, [*range(8), *range(13, 19)], **plan))
    spoil(monkeypatch, spoiled, "spike")
    settings = {"spike_window": 8, "spike_steps": 3, "max_rewinds": 2}
    results = train(run(tmp_path / "rewound", teacher, [*order, 18], settings, **plan))
    assert results["steps"] == 14 and results["rewinds"] == 1 and results["spikes"] == 1
    assert same(tmp_path / "without", tmp_path / "rewound")
    one, other = read_history(tmp_path / "without"), read_history(tmp_path / "rewound")
    assert [point["step"] for point in other] == list(range(1, 15))
    assert [a["loss"] for a in one] == [b["loss"] for b in other]
    spike, rewind = events(tmp_path / "rewound")
    assert (spike["step"], spike["steps"]) == (11, 3)
    assert rewind == {
        "event": "rewind",
        "step": 13,
        "to_step": 8,
        "passed_steps": 5,
        "cause": "spike",
    }


@pytest.mark.parametrize(
    ("holder", "place", "call"),
    few(
        [
            # noted; the first call is that of the start
            (checkpoints_module, "_finish_rewind", 2),
            (guarded, "note_rewind", 1),  # it is decided, and nothing noted
            (DistillTrainer, "restore", 1),
            # while the first checkpoint behind it is written
            (writer_module, "note_files", 5),
        ],
        1,
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_is_killed_while_it_goes_back_ends_as_one_that_was_not(
    tmp_path: Path,
    teacher: Any,
    holder: Any,
    place: str,
    call: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"spike_window": 8, "spike_steps": 3, "max_rewinds": 1}
    plan = {
        "max_steps": 14,
        "learning_rate": 1e-6,
        "save_steps": 3,
        "save_total_limit": 4,
    }
    spoil(monkeypatch, {10, 11, 12}, "spike")

    def training(name: str) -> dict[str, Any]:
        # The spike is in steps 11 to 13: back to 9, and the batches of 10 to 13 are
        # passed over. 12 is a checkpoint.
        return train(run(tmp_path / name, teacher, list(range(18)), settings, **plan))

    def killed() -> int:
        original, calls = getattr(holder, place), 0

        def die(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(holder, place, die)
        training("killed")
        return 0

    whole = training("whole")
    assert whole["rewinds"] == 1
    assert in_a_fork(killed, tmp_path / "output") == -signal.SIGKILL, (
        tmp_path / "output"
    ).read_text()
    assert training("killed") == whole
    assert same(tmp_path / "whole", tmp_path / "killed")
    assert events(tmp_path / "whole") == events(tmp_path / "killed")


@pytest.mark.parametrize("whole", [[3], []])
def test_a_run_goes_back_to_a_whole_checkpoint_only_and_skips_where_there_is_none(
    tmp_path: Path,
    teacher: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    whole: list[int],
) -> None:
    spoil(monkeypatch, {8, 9}, "nan")
    kept = tmp_path / "r" / "checkpoints"

    class Harm(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, **more: Any
        ) -> None:
            if state.global_step == 7:
                for step in {3, 6} - {*whole}:
                    (file,) = (kept / f"checkpoint-{step}").glob("state-*.safetensors")
                    os.truncate(file, 100)

    monkeypatch.setattr(run_module, "_tensorboard", lambda run: [Harm()])
    settings = {"max_skipped_steps": 1, "max_rewinds": 1}
    plan = {
        "max_steps": 10,
        "learning_rate": 1e-6,
        "save_steps": 3,
        "save_total_limit": 4,
    }
    training = run(tmp_path / "r", teacher, list(range(20)), settings, **plan)
    if whole:
        results = train(training)
        assert results["rewinds"] == 1 and results["steps"] == 10
        assert events(tmp_path / "r")[-1]["to_step"] == 3
        said = capsys.readouterr().err
        assert "checkpoint-6: is damaged (state-" in said and " has 100 of " in said
        assert f"continuing from {kept}/checkpoint-3" in said
    else:
        with pytest.raises(UserError, match="training stopped before step"):
            train(training)


# ---- checkpoints


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_used(
    tmp_path: Path,
    teacher: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = {"max_steps": 6, "save_steps": 2}
    train(run(tmp_path / "whole", teacher, list(range(6)), **plan))
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_leave_model", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(run(tmp_path / "r", teacher, list(range(6)), **plan))
    kept = tmp_path / "r" / "checkpoints"
    cut = max((kept / "checkpoint-6").iterdir(), key=lambda path: path.stat().st_size)
    size = cut.stat().st_size
    os.truncate(cut, size // 2)
    capsys.readouterr()
    train(run(tmp_path / "r", teacher, list(range(6)), **plan))
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
    with pytest.raises(
        UserError,
        match=(
            r"checkpoint-5: is damaged \(inside/a is missing\), and all other checkpoints are damaged"
        ),
    ):
        newest_usable(tmp_path)
    assert checkpoint.is_dir()
    assert newest_usable(tmp_path / "nowhere") is None


# ---- signals


@pytest.mark.parametrize("helpers", [0, 1])
def test_a_signal_ends_a_run_with_a_checkpoint_from_which_it_goes_on_to_the_same_weights(
    tmp_path: Path, teacher: Any, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # more than are trained: a helper that is ahead has not given them all, and lives
    steps = list(range(12))
    train(run(tmp_path / "whole", teacher, steps, max_steps=5))
    compute, arguments = DistillTrainer.compute_loss, run_module._arguments

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

    monkeypatch.setattr(run_module, "_arguments", with_helpers)
    with monkeypatch.context() as patch, pytest.raises(Interrupted) as interruption:
        patch.setattr(DistillTrainer, "compute_loss", signalled)
        train(run(tmp_path / "r", teacher, steps, max_steps=5))
    last = tmp_path / "r" / "checkpoints" / "checkpoint-3"
    assert interruption.value.status == 143
    assert (
        str(interruption.value)
        == f"ended by SIGTERM after step 3 of 5; run the same command again to continue from {last}"
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    train(run(tmp_path / "r", teacher, steps, max_steps=5))
    assert same(tmp_path / "whole", tmp_path / "r")


def test_a_second_signal_ends_at_once_and_an_echo_of_the_first_does_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Signals() as signals:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT
        monkeypatch.setattr(guarded, "_ECHO_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (
        capfd.readouterr().err.count(
            "SIGINT: finishing this step; a second signal stops now"
        )
        == 1
    )
