"""`fcsd run` says which stage starts, and how long the remaining stages will take."""

import io
from types import SimpleNamespace

import pytest

from fcsd.pipeline.run import run_progress
from fcsd.training.run import ProgressBar
from tests.support import Bench, run_of


def test_the_time_left_is_that_of_the_work_left_at_the_pace_of_its_kind(
    bench: Bench,
) -> None:
    """Two trainings of 12 steps: four passes per token with a teacher, three
    without.
    """
    now, out = [0.0], io.StringIO()
    run = run_of(bench.recipe("r", variants={"sft": {"objective.name": "sft"}}))
    progress = run_progress(run, stream=out, clock=lambda: now[0])

    def after(seconds: float, stage: str) -> str:
        now[0] += seconds
        progress.start(stage)
        return out.getvalue().splitlines()[-1]

    assert after(0, "conversion") == "== 1/8: conversion"
    assert after(60, "distillation fcsd") == "== 2/8: distillation fcsd"
    now[0] += 600
    # 600 s of this one, and three quarters of 1200 s of the other
    assert progress.left(0.5) == "about 25 min + 4 stages"
    assert (
        after(600, "distillation sft")
        == "== 3/8: distillation sft; 21 min so far, about 15 min + 4 stages left"
    )
    assert after(900, "evaluation of original") == "== 4/8: evaluation of original"
    assert after(120, "evaluation of converted").endswith(
        "converted; 38 min so far, about 6 min left"
    )
    now[0] += 45
    progress.end()
    ended = [line.strip() for line in out.getvalue().splitlines() if "took" in line]
    assert ended[0] == "conversion took 1 min"
    assert ended[-1] == "evaluation of converted took 45 s"
    assert len(ended) == 5


def test_what_is_finished_or_behind_a_checkpoint_is_no_work_any_more(
    bench: Bench,
) -> None:
    run = run_of(bench.recipe("r", variants={"sft": {"objective.name": "sft"}}))
    whole = run_progress(run).tasks
    (run.layout.stage("fcsd") / "checkpoints" / "checkpoint-9").mkdir(parents=True)
    run.layout.convert.mkdir(parents=True)
    (run.layout.convert / "manifest.json").write_text("{}")
    progress = run_progress(run, stream=io.StringIO())
    assert progress.kept == 1
    assert list(progress.tasks) == [name for name in whole if name != "conversion"]
    assert (
        progress.tasks["distillation fcsd"].amount
        == whole["distillation fcsd"].amount / 4
    )  # 3 of 12 steps


def test_the_bar_of_a_training_shows_what_all_stages_still_take() -> None:
    shares: list[float] = []
    bar = ProgressBar(
        "distil", lambda share: shares.append(share) or f"about {share:.2f} h"
    )
    state = SimpleNamespace(is_world_process_zero=True, max_steps=12, global_step=4)
    bar.on_train_begin(None, state, None)
    state.global_step = 6
    bar.on_log(None, state, None, logs={"kl": 0.5, "tokens_per_second": 10.0})
    assert shares == [0.25]  # 2 of the 8 steps after the checkpoint
    assert bar.bar.postfix == "kl 0.5000, run: 0.25 h"
    bar.close()


def test_the_bar_fits_a_terminal_of_80_columns_to_its_last_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("sys.stderr", screen)
    bar = ProgressBar("distil sft", lambda share: "about 23 h 05 min + 6 stages")
    state = SimpleNamespace(is_world_process_zero=True, max_steps=20000, global_step=0)
    bar.on_train_begin(None, state, None)
    state.global_step = 12000
    bar.on_log(None, state, None, logs={"kl": 0.0123, "tokens_per_second": 10.0})
    bar.on_step_end(None, state, None)
    bar.bar.ncols = 80
    bar.bar.refresh()
    line = screen.getvalue().rsplit("\r", 1)[-1]
    bar.close()
    assert len(line) <= 80 and "kl 0.01230" in line, line
    assert line.rstrip().endswith("run: 23 h 05 min + 6 stages"), line
