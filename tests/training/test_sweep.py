"""The sweep chooses the batch size first, then the learning rate, by the mean loss of
the last steps; nothing is trained twice.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.cli.main import main
from fcsd.pipeline.distill import with_choice
from fcsd.pipeline.sweep import write_ready_recipe
from fcsd.recipe.load_recipe import load_recipe
from fcsd.recipe.recipe import Recipe
from fcsd.training.config import TrainConfig
from fcsd.training.history import read_history
from fcsd.training.sweep import Candidate, edges, run_sweep
from fcsd.training.trainer import DistillTrainer
from tests.support import Bench, user_error

# loss[batch size][learning rate]: the last step alone would choose another learning
# rate than the mean of the last two
LOSSES = {
    (64, 1e-3): [9.0, 3.0, 3.0],
    (128, 1e-3): [9.0, 2.0, 2.0],
    (128, 2e-3): [9.0, 2.5, 1.0],
    (128, 4e-3): [9.0, 4.0, 0.5],
}


def recipe(**sweep: object) -> Recipe:
    settings = {
        "batch_size_tokens": [64, 128], "learning_rate": [1e-3, 2e-3, 4e-3], "steps": 3, "warmup_steps": 1,
        "last_steps": 2,
    }  # fmt: skip
    return Recipe.model_validate(
        {
            "name": "x", "output_dir": "o", "model": {"path": "m"}, "data": {"train": [{"path": "d"}]},
            "train": {"learning_rate": 1e-3, "max_steps": 10, "warmup_steps": 2},
            "sweep": settings | sweep,
        }
    )  # fmt: skip


def swept(plan: Recipe, folder: Path, runner: Any, **options: Any) -> dict[str, Any]:
    """Return the sweep of a recipe, as its stage runs it."""
    assert plan.sweep is not None
    result = run_sweep(
        plan.sweep,
        plan.train,
        folder,
        runner,
        remove_checkpoints=runner.removed.append,
        **options,
    )
    write_ready_recipe(plan, result, folder)
    return result


class Runner:
    """Stands for a training: writes a given history."""

    def __init__(self, losses: dict | None = None, die_at: int | None = None):
        self.losses, self.die_at, self.ran = losses or LOSSES, die_at, []  # type: ignore[var-annotated]
        self.removed: list[Path] = []

    def __call__(self, candidate: Candidate, train: TrainConfig, folder: Path) -> None:
        key = (candidate.batch_size_tokens, candidate.learning_rate)
        assert (
            train.batch_size_tokens, train.learning_rate, train.max_steps, train.warmup_steps,
        ) == (
            *key, 3, 1,
        )  # fmt: skip
        if len(self.ran) == self.die_at:
            raise KeyboardInterrupt
        self.ran.append(key)
        if self.losses[key] is None:
            raise UserError(
                "training stopped at step 2: the loss or its gradient is not finite"
            )
        folder.mkdir(parents=True)
        lines = [
            json.dumps({"step": step, "loss": loss})
            for step, loss in enumerate(self.losses[key], start=1)
        ]
        (folder / "history.jsonl").write_text("\n".join(lines))


def table(folder: Path) -> str:
    """Return a sweep's table without the spaces that align its columns."""
    return re.sub(" +", " ", (folder / "sweep.md").read_text())


def test_it_chooses_batch_size_then_learning_rate_by_the_mean_of_the_last_steps(
    tmp_path: Path,
) -> None:
    runner = Runner()
    result = swept(recipe(), tmp_path, runner)
    assert (result["batch_size_tokens"], result["learning_rate"]) == (128, 2e-3)
    assert result["loss"] == pytest.approx(1.75)
    # (128, 1e-3) serves both stages
    assert runner.ran == [(64, 1e-3), (128, 1e-3), (128, 2e-3), (128, 4e-3)]
    text = table(tmp_path)
    assert "| learning_rate | 128 | 0.002 | 1.75000 | chosen |" in text
    # The best of the first stage is not called chosen at another rate.
    assert "| batch_size_tokens | 128 | 0.001 | 2.00000 | best batch size |" in text
    assert text.count("| chosen |") == 1


def test_rates_that_differ_in_their_eighth_digit_are_two_candidates(
    tmp_path: Path,
) -> None:
    rates = [1.0000001e-3, 1.0000002e-3]
    losses = {(128, rate): [9, 1, rate] for rate in rates}
    result = swept(recipe(learning_rate=rates), tmp_path, Runner(LOSSES | losses))
    assert result["learning_rate"] == min(rates)
    assert len({row["loss"] for row in result["candidates"][-2:]}) == 2


@pytest.mark.parametrize("rates", [[2e-3, 4e-3], [2e-3], [5e-4, 2e-3]])
def test_a_rate_of_the_first_stage_that_is_better_than_all_of_the_second_is_chosen(
    tmp_path: Path, rates: list[float]
) -> None:
    """0.001 is measured with the batch sizes, and not listed for the second stage."""
    runner = Runner(LOSSES | {(128, 2e-3): [9, 3, 3], (128, 5e-4): [9, 2.1, 2]})
    result = swept(recipe(learning_rate=rates), tmp_path, runner)
    assert (result["batch_size_tokens"], result["learning_rate"]) == (128, 1e-3)
    assert result["loss"] == min(row["loss"] for row in result["candidates"]) == 2
    marked = [
        line.split(" | ")[:3]
        for line in table(tmp_path).splitlines()
        if line.endswith("| chosen |")
    ]
    assert marked == [["| batch_size_tokens", "128", "0.001"]]
    ready = load_recipe(tmp_path / "recipe.yaml")
    assert ready.train.learning_rate == 1e-3
    # The rate was compared with those of the second stage, so it may lie at their end.
    assert any("learning rate" in line for line in edges(result)) == (min(rates) > 1e-3)


@pytest.mark.parametrize(
    "damage", ['{"step": 3, "lo', "[1]", '{"loss": 1.0}', "[" * 5000]
)
def test_a_history_that_was_cut_is_named_with_its_line(
    tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f'{{"step": 1, "loss": 2.0}}\n{damage}')
    with user_error(
        r"history\.jsonl, line 2: is not a point of a training.*; remove .* again"
    ):
        read_history(tmp_path)
    path.unlink()
    with user_error(r"history\.jsonl: no such file; remove"):
        read_history(tmp_path)


def test_it_continues_where_it_was_cut_off(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        swept(recipe(), tmp_path, Runner(die_at=2))
    second = Runner()
    result = swept(recipe(), tmp_path, second)
    assert second.ran == [(128, 2e-3), (128, 4e-3)]
    assert result == swept(recipe(), tmp_path / "whole", Runner())


def test_a_digit_of_a_candidates_loss_does_not_change_unseen(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        swept(recipe(), tmp_path, Runner(die_at=3))
    place = tmp_path / "batch_size_tokens=128,learning_rate=0.002"
    text = (place / "result.json").read_text()
    (place / "result.json").write_text(text.replace('"loss": 1.75', '"loss": 3.75'))
    with user_error(
        r"result\.json: is damaged: .*; remove .*0\.002 to train this candidate"
    ):
        swept(recipe(), tmp_path, Runner())


@pytest.mark.parametrize("owner", ["another candidate", "another run"])
def test_the_loss_of_another_candidate_or_run_is_refused(
    owner: str, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        swept(recipe(), tmp_path / "out", Runner(die_at=3))
    file = "batch_size_tokens=128,learning_rate=0.002/result.json"
    other = tmp_path / "out" / file.replace("0.002", "0.001")
    if owner == "another run":
        swept(recipe(), tmp_path / "other", Runner(), identity="other")
        other = tmp_path / "other" / file
    shutil.copy(other, tmp_path / "out" / file)
    with user_error(r"result\.json: is damaged: .*; remove .*0\.002"):
        swept(recipe(), tmp_path / "out", Runner())


@pytest.mark.parametrize(
    "losses", [None, [2.0, 1.0]], ids=["stopped", "last step skipped"]
)
def test_a_candidate_that_diverges_has_lost(
    tmp_path: Path, losses: list[float] | None
) -> None:
    runner = Runner(LOSSES | {(128, 2e-3): losses})
    result = swept(recipe(), tmp_path, runner)
    assert (
        runner.removed.count(tmp_path / "batch_size_tokens=128,learning_rate=0.002")
        == 1
    )
    assert result["learning_rate"] == 1e-3
    assert "| diverged |" in table(tmp_path)
    json.loads(
        (tmp_path / "sweep.json").read_text(),
        parse_constant=lambda word: pytest.fail(f"{word} is not JSON"),
    )


def test_no_finite_candidate_is_an_error(tmp_path: Path) -> None:
    with user_error("no candidate ended with a finite loss"):
        swept(recipe(), tmp_path, Runner(dict.fromkeys(LOSSES)))


def test_a_best_value_at_an_end_of_its_grid_is_warned_of(tmp_path: Path) -> None:
    # the largest batch size, the learning rate in the middle or beside
    result = swept(recipe(), tmp_path, Runner())
    (warning,) = [line for line in edges(result) if "batch size" in line]
    assert warning.startswith(
        "warning: the best batch size, 128, is the largest of those tried; a larger one"
        " may be"
    )
    assert warning in (tmp_path / "sweep.md").read_text()
    tried = [
        {
            "stage": "learning_rate", "batch_size_tokens": 128, "learning_rate": rate, "loss": loss,
        }
        for rate, loss in ((1e-3, 2.0), (2e-3, 1.0), (4e-3, None))
    ]  # fmt: skip
    choice = {"batch_size_tokens": 128, "learning_rate": 2e-3}
    assert edges(choice | {"candidates": tried}) == []  # the next larger one diverged
    (low,) = edges(choice | {"candidates": tried[1:]})
    assert (
        "the best learning rate, 0.002, is the smallest of those tried; a smaller one"
        in low
    )
    assert edges(choice | {"candidates": tried[1:2]}) == []  # nothing was tried


def test_the_training_that_follows_has_the_tokens_that_the_sweep_names(
    tmp_path: Path,
) -> None:
    plan = recipe(train_tokens=10_000)
    result = swept(plan, tmp_path, Runner())
    ready = load_recipe(tmp_path / "recipe.yaml")
    # 10,000 / 128, rounded up
    assert (ready.train.batch_size_tokens, ready.train.max_steps) == (128, 79)
    assert ready.train.learning_rate == 2e-3 and ready.sweep is None
    # without the key, as in the recipe
    assert with_choice(recipe(), result).train.max_steps == 10


def test_with_equal_tokens_a_candidate_of_half_the_batch_has_twice_the_steps(
    tmp_path: Path,
) -> None:
    """train.batch_size_tokens is 128: 3 steps of 128 tokens, a warm-up of 1 and a mean
    over 2 become 6, 2 and 4 steps of 64.
    """
    plan = recipe(equal="tokens")
    base = plan.train.model_copy(update={"batch_size_tokens": 128})
    ran = []

    def run(candidate: Candidate, train: TrainConfig, folder: Path) -> None:
        ran.append((train.batch_size_tokens, train.max_steps, train.warmup_steps))
        folder.mkdir(parents=True)
        losses = (
            [9, 9, 2, 2, 2, 2]
            if train.batch_size_tokens == 64
            else [9, 1, 1.5 - candidate.learning_rate]
        )
        lines = [
            json.dumps({"step": step, "loss": loss})
            for step, loss in enumerate(losses, start=1)
        ]
        (folder / "history.jsonl").write_text("\n".join(lines))

    assert plan.sweep is not None
    result = run_sweep(
        plan.sweep, base, tmp_path, run, remove_checkpoints=lambda place: None
    )
    assert ran == [(64, 6, 2), *[(128, 3, 1)] * 3]
    losses = [row["loss"] for row in result["candidates"]]
    assert losses[0] == 2 and losses[-1] == pytest.approx((1 + 1.5 - 4e-3) / 2)
    assert (
        "last 2 steps of train.batch_size_tokens, 3 in all"
        in (tmp_path / "sweep.md").read_text()
    )


def test_a_decay_that_has_no_room_in_the_fewer_steps_of_a_larger_batch_is_refused_before_the_sweep():
    """train.batch_size_tokens is 128: 8 steps of 128 tokens become 4 of 256, 2 of
    warm-up become 1, and 4 of decay do not fit.
    """
    raw = recipe(
        equal="tokens", batch_size_tokens=[128, 256], steps=8, warmup_steps=2
    ).model_dump(mode="json")
    raw["train"] |= {
        "batch_size_tokens": 128,
        "lr_scheduler_type": "warmup_stable_decay",
    }
    raw["train"]["lr_scheduler_kwargs"] = {"num_decay_steps": 4}
    with pytest.raises(
        ValueError,
        match=r"sweep\.steps \(4 of 256 tokens\) are fewer .*warmup_steps \(1\).*\(4\)",
    ):
        Recipe.model_validate(raw)


def test_a_candidate_continues_from_its_checkpoint_and_leaves_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At real sizes a candidate takes hours."""
    plan = {
        "batch_size_tokens": [128], "learning_rate": [1e-3], "steps": 5, "warmup_steps": 0, "last_steps": 2,
    }  # fmt: skip
    train = {
        "max_steps": 5, "batch_size_tokens": 128, "learning_rate": 1e-3, "warmup_steps": 0, "save_steps": 2,
    }  # fmt: skip
    command = ["sweep", str(bench.recipe("r", sweep=plan, train=train))]
    compute, steps = DistillTrainer.compute_loss, []

    def ended(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(self.state.global_step)
        if steps.count(4) == 1 and steps[-1] == 4:
            raise KeyboardInterrupt
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(DistillTrainer, "compute_loss", ended)
    assert main(command) == 130
    place = bench.folder / "r" / "sweep" / "batch_size_tokens=128,learning_rate=0.001"
    assert sorted(path.name for path in (place / "checkpoints").iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    assert main(command) == 0
    assert sorted(set(steps[steps.index(4) + 1 :])) == [4]
    assert {path.name for path in place.iterdir()} == {"history.jsonl", "result.json"}
    assert main(["sweep", str(bench.recipe("whole", sweep=plan, train=train))]) == 0
    results = [
        read_json(bench.folder / name / "sweep" / place.name / "result.json")
        for name in ("r", "whole")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize(("better", "rate"), [(False, 4e-3), (True, 2e-3)])
def test_scores_decide_where_they_are_measured_in_the_direction_of_their_metric(
    tmp_path: Path, better: bool, rate: float
) -> None:
    """The loss would choose 128 tokens and 0.002."""
    scores = {(64, 1e-3): 0.5, (128, 1e-3): 0.4, (128, 2e-3): 0.7, (128, 4e-3): 0.3}
    if better:
        scores[64, 1e-3] = 0.1
    trained = Runner()

    def run(candidate: Candidate, train: TrainConfig, folder: Path) -> dict[str, Any]:
        trained(candidate, train, folder)
        score = scores[candidate.batch_size_tokens, candidate.learning_rate]
        return {"score": score, "stderr": 0.01, "higher_is_better": better}

    def swept_by_score(plan: Recipe) -> dict[str, Any]:
        assert plan.sweep is not None
        return run_sweep(
            plan.sweep,
            plan.train,
            tmp_path,
            run,
            remove_checkpoints=lambda place: None,
            metric="own_text_kl",
        )

    result = swept_by_score(recipe())
    assert (result["batch_size_tokens"], result["learning_rate"]) == (128, rate)
    text = table(tmp_path)
    assert text.startswith("Own_text_kl after the last step, 3 in all.")
    mark = "chosen " if better else ""
    assert f"| learning_rate | 128 | 0.002 | 0.7000 ± 0.0100 | {mark}|" in text
    # found again, not measured again
    ran = list(trained.ran)
    assert swept_by_score(recipe()) == result and trained.ran == ran
