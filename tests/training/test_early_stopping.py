"""Patience, minimum improvement, what counts as best; errors of scores and of their
changes; the time that scores take.
"""

import json
import math

import numpy as np
import pytest

from fcsd.base.text import items_text, nats, plus_minus, stopping_text
from fcsd.training.early_stopping import EarlyStopper, Score, TimeSpent


def run(
    scores: list[float], patience: int = 2, min_delta: float = 0.02
) -> tuple[EarlyStopper, list[int]]:
    stopper = EarlyStopper(every_steps=10, patience=patience, min_delta=min_delta)
    kept = []
    for index, score in enumerate(scores, start=1):
        if stopper.update(10 * index, Score([score])):
            kept.append(10 * index)
        if stopper.should_stop:
            break
    return stopper, kept


def test_it_stops_after_patience_evaluations_without_an_improvement() -> None:
    stopper, _ = run([0.5, 0.4, 0.4, 0.9])
    assert stopper.should_stop
    assert [point["step"] for point in stopper.points] == [10, 20, 30]


def test_a_gain_of_no_more_than_min_delta_is_kept_but_does_not_reset_patience() -> None:
    stopper, kept = run([0.50, 0.52, 0.52])
    assert stopper.should_stop and kept == [10, 20, 30] and stopper.best_step == 30


def test_small_gains_that_add_up_to_more_than_min_delta_reset_patience() -> None:
    stopper, _ = run([0.50, 0.515, 0.53, 0.545, 0.56])
    assert not stopper.should_stop and stopper.stalled == 0


def test_the_best_checkpoint_is_the_last_within_min_delta_of_the_highest() -> None:
    stopper, kept = run([0.5, 0.70, 0.69, 0.60], patience=5)
    assert (
        kept == [10, 20, 30] and stopper.best_step == 30 and stopper.best_score == 0.69
    )
    # Small losses do not accumulate: the reference is the highest score, not the last
    # one kept.
    stopper, kept = run([0.70, 0.69, 0.675], patience=5)
    assert kept == [10, 20] and stopper.best_step == 20
    stopper, kept = run([0.5, 0.7, 0.6, 0.7], patience=5, min_delta=0.0)
    assert kept == [10, 20, 40] and stopper.best_step == 40


def test_a_training_that_only_makes_the_model_worse_leaves_the_weights_before_it():
    stopper = EarlyStopper(every_steps=10, patience=2, min_delta=0.0)
    assert stopper.update(0, Score([0.9])) and stopper.no_gain() is None
    assert not stopper.update(10, Score([0.1])) and not stopper.update(20, Score([0.2]))
    assert stopper.should_stop and (stopper.best_step, stopper.best_score) == (0, 0.9)
    assert "best so far" not in stopper.line()
    assert "at step 0, before training" in stopper.summary()
    warning = stopper.no_gain()
    assert warning is not None and "training made the model worse" in warning
    stopper.update(30, Score([0.95]))
    assert stopper.best_step == 30 and stopper.no_gain() is None


def test_a_score_within_min_delta_of_the_best_is_not_called_the_best() -> None:
    stopper, _ = run([0.5, 0.7], min_delta=0.02)
    assert ", best so far;" in stopper.line()
    stopper.update(30, Score([0.69]))
    assert stopper.best_step == 30
    assert (
        ", within min_delta of the best (0.7000 at step 20), and later, "
        in stopper.line()
    )
    divergences, _ = divergence([0.1, 0.0999, 0.1001])
    assert (
        ", within min_delta of the best (0.0999 at step 20), and later, "
        in divergences.line()
    )


def test_its_state_goes_through_plain_data() -> None:
    stopper, _ = run([0.5, 0.4])
    copy = EarlyStopper(every_steps=10, patience=2, min_delta=0.02)
    copy.load(json.loads(json.dumps(stopper.state())))
    assert copy.state() == stopper.state()
    third = Score([0.4])
    assert [copy.update(30, third), copy.should_stop] == [
        stopper.update(30, third),
        stopper.should_stop,
    ]
    assert copy.record() == stopper.record()
    fresh = EarlyStopper(every_steps=10, patience=2, min_delta=0.02)
    fresh.load(EarlyStopper(every_steps=10, patience=2, min_delta=0.02).state())
    assert fresh.update(10, Score([0.0])) and not fresh.should_stop


def test_where_lower_is_better_a_fall_is_an_improvement() -> None:
    stopper = EarlyStopper(every_steps=1, patience=2, min_delta=0.1)
    scores = [Score([value], higher_is_better=False) for value in (3.0, 2.5, 2.45, 2.6)]
    assert [stopper.update(step, score) for step, score in enumerate(scores, 1)] == [
        True, True, True, False,
    ]  # fmt: skip
    assert stopper.should_stop and stopper.best_score == 2.45


def divergence(
    scores: list[float], patience: int = 2, min_delta: float = 0.02
) -> tuple[EarlyStopper, list[int]]:
    stopper = EarlyStopper(
        every_steps=10, patience=patience, min_delta=min_delta, metric="heldout_kl"
    )
    kept = [
        10 * index
        for index, score in enumerate(scores, start=1)
        if stopper.update(10 * index, Score([score]))
    ]
    return stopper, kept


def test_a_held_out_kl_improves_when_it_falls_by_more_than_a_share_of_itself() -> None:
    stopper, kept = divergence([2.0, 0.1, 0.0979, 0.0978])
    # 0.0979 is 2.1 % below 0.1, 0.0978 only 0.1 % further
    assert kept == [10, 20, 30, 40] and stopper.stalled == 1
    stopper, kept = divergence([0.1, 0.0981, 0.0999])
    assert (
        stopper.should_stop and stopper.best_step == 30 and stopper.best_score == 0.0999
    )
    stopper, kept = divergence([0.1, 0.05, 0.06])
    assert kept == [10, 20] and stopper.best_step == 20 and stopper.best_score == 0.05
    # rounding around a student that is its teacher
    assert divergence([-1e-9, 0.0])[1] == [10, 20]


@pytest.mark.parametrize("metric", ["pass@1", "heldout_kl"])
def test_a_score_that_is_not_finite_is_refused(metric: str) -> None:
    with pytest.raises(ValueError, match="finite number, got nan"):
        EarlyStopper(every_steps=1, patience=1, min_delta=0, metric=metric).update(
            1, Score([math.nan])
        )


# ---- errors


def test_a_score_has_the_standard_error_of_a_mean_and_its_change_the_paired_one():
    rng = np.random.default_rng(0)
    before, after = rng.random(50), rng.random(50)
    score = Score(after.tolist())
    assert score.value == pytest.approx(after.mean())
    assert score.stderr == pytest.approx(after.std(ddof=1) / math.sqrt(50))
    change, error = score.change(before.tolist())
    difference = after - before
    assert change == pytest.approx(difference.mean())
    assert error == pytest.approx(difference.std(ddof=1) / math.sqrt(50))
    assert Score([0.5]).stderr is None


def test_a_held_out_kl_has_the_error_of_a_ratio_with_rows_as_items() -> None:
    """Compared with the spread of ratios over newly drawn samples."""
    rng = np.random.default_rng(1)

    def draw() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tokens = rng.integers(5, 60, 200)
        # the loss per token of a row, similar at both times
        hard = rng.gamma(2.0, 0.5, 200)
        return tokens, tokens * hard, tokens * hard * rng.normal(0.9, 0.05, 200)

    values, changes = [], []
    for _ in range(2000):
        tokens, one, two = draw()
        values.append(two.sum() / tokens.sum())
        changes.append((two - one).sum() / tokens.sum())
    tokens, one, two = draw()
    score = Score(two.tolist(), tokens.tolist(), higher_is_better=False)
    assert score.stderr == pytest.approx(np.std(values), rel=0.15)
    change, error = score.change(one.tolist())
    assert change == pytest.approx(np.mean(changes), abs=0.02)
    assert error == pytest.approx(np.std(changes), rel=0.15)
    assert error < score.stderr / 3


def flips(
    num_items: int,
    *,
    num_passed: int,
    gained: int = 0,
    lost: int = 0,
    total: int | None = None,
) -> Score:
    """Make the first `lost` of the passing items fail, and the last `gained` of the
    others pass.
    """
    figures = [1.0] * num_passed + [0.0] * (num_items - num_passed)
    figures[:lost] = [0.0] * lost
    figures[num_items - gained :] = [1.0] * gained
    return Score(figures, num_items_total=total)


def noise(
    *scores: Score, min_delta: float = 0.02, metric: str = "pass@1"
) -> list[str | None]:
    stopper = EarlyStopper(
        every_steps=10, patience=9, min_delta=min_delta, metric=metric
    )
    stopper.update(0, scores[0])
    warnings = []
    for number, score in enumerate(scores[1:], start=1):
        stopper.update(10 * number, score)
        warnings.append(stopper.noise())
    return warnings


def test_a_min_delta_below_the_noise_of_the_items_is_warned_of_once() -> None:
    first, second = (
        flips(40, num_passed=20, total=378),
        flips(40, num_passed=20, gained=2, lost=1, total=378),
    )
    warning, again = noise(first, second, first)
    # Three of 40 items changed, by hand: d = 1/40, s = sqrt((3 - 40 d^2) / 39 / 40) =
    # 0.0437
    assert warning is not None and again is None
    assert warning.startswith(
        "early stopping: pass@1 changed by +0.0250 ± 0.0437 from step 0 to 10"
    )
    assert "paired standard error on 40 of 378 items" in warning
    assert "min_delta, 0.02, is less" in warning
    assert warning.endswith(
        "raise it, or early_stopping.limit (all 378 items: about ± 0.014)"
    )
    assert noise(first, second, min_delta=0.05) == [None]
    # A clear change says nothing about chance; unchanged items have no noise at all.
    assert noise(flips(40, num_passed=0), flips(40, num_passed=20), min_delta=0.0) == [
        None
    ]
    assert noise(first, first, min_delta=0.0) == [None]
    whole = flips(40, num_passed=20, gained=2, lost=1, total=40)
    assert str(noise(flips(40, num_passed=20, total=40), whole)[0]).endswith(
        "score on a task with more items"
    )


def test_of_a_held_out_kl_the_noise_is_a_share_of_it() -> None:
    tokens, rng = [10] * 30, np.random.default_rng(2)
    one, two = (
        Score((1.0 + 0.1 * rng.standard_normal(30)).tolist(), tokens) for _ in range(2)
    )
    error = two.change(one.figures)[1]
    assert error is not None
    share = error / one.value
    (warning,) = noise(one, two, min_delta=0.9 * share, metric="heldout_kl")
    assert warning is not None
    assert f"({share:.3g} of the score)" in warning
    assert "30 rows" in warning
    assert warning.endswith("raise it, or data.heldout_examples")
    assert noise(one, two, min_delta=1.1 * share, metric="heldout_kl") == [None]


def test_a_line_states_items_errors_and_the_change() -> None:
    stopper = EarlyStopper(every_steps=10, patience=9, min_delta=0.02)
    stopper.update(0, flips(40, num_passed=20, total=378))
    assert stopper.line() == "step 0: pass@1 0.5000 ± 0.0801 (40 of 378 items); 0 s"
    stopper.update(10, flips(40, num_passed=20, gained=2, lost=1, total=378))
    assert (
        stopper.line()
        == "step 10: pass@1 0.5250 ± 0.0800 (40 of 378 items), +0.0250 ± 0.0437 since"
        " step 0, best so far; 0 s"
    )
    stopper.update(20, flips(40, num_passed=20, lost=10, total=378))
    assert (
        "-0.2750 ± 0.0715 since step 10, 1 of 9 without an improvement; 0 s"
        in stopper.line()
    )
    stopper.time.scoring_s, stopper.time._run_s = 90.0, 3600.0
    assert (
        stopper.summary()
        == "early stopping: 3 scores on 40 of 378 items; best pass@1 0.5250 ± 0.0800 at"
        " step 10; scoring took 2 min of 1 h 00 min, 2.5 % of the run's time"
    )


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(0.4123, 0.025, "0.4123 ± 0.0250"), (0.5, None, "0.5000"), (0, 0, "0.0000 ± 0.0000"),
     (0.000123, 0.0000456, "0.0001230 ± 0.0000456"), (1e-30, None, "0.000000000000")],
)  # fmt: skip
def test_small_figures_are_printed_with_more_digits(
    value: float, error: float | None, text: str
) -> None:
    assert plus_minus(value, error) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.25, "1.250"), (0.18704, "0.1870"), (12.3456, "12.35"), (123456.7, "123457"), (4.2e-5, "0.00004200"),
     (0.99999, "1.0000"), (-0.00123456, "-0.001235"), (float("nan"), "nan")],
)  # fmt: skip
def test_a_kl_is_printed_with_four_significant_digits_however_small_it_is(
    value: float, text: str
) -> None:
    assert nats(value) == text


def test_what_is_scored_is_said_in_words() -> None:
    code = {
        "metric": "pass@1", "kind": "code", "task": "mine", "dataset": "a/b", "split": "test",
    }  # fmt: skip
    assert stopping_text({"task": code}) == "pass@1 on `a/b`, split `test`"
    # of a manifest of schema_version 1
    assert stopping_text(code) == "pass@1 on `a/b`, split `test`"
    task = {
        "metric": "acc_norm,none", "kind": "likelihood", "task": "hellaswag", "dataset": "Rowan/hellaswag",
    }  # fmt: skip
    assert stopping_text({"task": task}) == "acc_norm of hellaswag on `Rowan/hellaswag`"
    assert (
        stopping_text({"metric": "heldout_kl"}) == "KL to the original on held-out text"
    )
    assert items_text("heldout_kl", 256, None) == "256 rows"
    assert items_text("acc,none", 7, None) == "7 items"


# ---- time


def test_the_share_of_the_time_counts_preparation_and_continues_after_a_restart():
    now = [100.0]
    time = TimeSpent(clock=lambda: now[0])
    with time.scoring():
        now[0] += 6  # prepared before training
    time.start()
    now[0] += 20
    with time.scoring():
        now[0] += 4
    assert (time.scoring_s, time.run_s, time.last_s) == (10.0, 30.0, 4.0)
    kept = json.loads(json.dumps(time.state()))
    now[0] += 50  # lost with the process
    restarted = TimeSpent(clock=lambda: now[0])
    with restarted.scoring():
        now[0] += 2
    restarted.resume(kept)
    restarted.start()
    now[0] += 8
    restarted.stop()
    now[0] += 99
    assert (restarted.scoring_s, restarted.run_s) == (12.0, 40.0)
    assert restarted.share == 0.3
    assert TimeSpent().share == 0.0
