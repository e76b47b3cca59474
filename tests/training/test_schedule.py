"""Learning rates of `step` and `warmup_stable_decay`: by hand, the same in a recipe and
in Python, and across a kill.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.base.weights import weights_fingerprint
from fcsd.cli.main import main
from fcsd.parallel.launch import join_launch
from fcsd.recipe.load_recipe import load_recipe
from fcsd.training import resumable as resumable_module
from fcsd.training.arguments import Job, RecipeArguments
from fcsd.training.fcsd_config import FCSDConfig
from fcsd.training.history import read_history
from fcsd.training.optimizer import learning_rate_schedule
from tests.support import Bench, in_a_fork, user_error
from tests.training.test_resume import die

# DeepSeek-V2-Lite (arXiv 2405.04434, App. B): x 0.316 after about 80 % of the tokens,
# and again after 90 %.
STEP = {"milestones": [0.8, 0.9], "gamma": 0.316}
DECAY = {"num_decay_steps": 0.4, "decay_type": "linear", "min_lr_ratio": 0.2}
# Shares of learning_rate in ten steps, two of them warm-up.
BY_HAND = {
    "step": (STEP, [0, 0.5, 1, 1, 1, 1, 1, 1, 0.316, 0.316**2]),
    # The warm-up begins at min_lr_ratio. Four steps of decay: from 1 by 0.8 / 4 each.
    "warmup_stable_decay": (DECAY, [0.2, 0.6, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4]),
}


def rates(arguments: Any) -> list[float]:
    optimizer = torch.optim.AdamW(
        [torch.zeros(1, requires_grad=True)], lr=arguments.learning_rate
    )
    schedule = learning_rate_schedule(arguments, optimizer, 10)
    by_step = []
    for _ in range(10):
        by_step.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return by_step


@pytest.mark.parametrize(("name", "by_hand"), BY_HAND.items(), ids=BY_HAND)
def test_a_recipe_and_python_have_the_rates_by_hand(
    bench: Bench, tmp_path: Path, name: str, by_hand: tuple[dict, list[float]]
) -> None:
    settings, shares = by_hand
    schedule = {
        "lr_scheduler_type": name, "lr_scheduler_kwargs": settings, "warmup_steps": 2, "max_steps": 10,
        "learning_rate": 4.2e-4,
    }  # fmt: skip
    expected = pytest.approx([4.2e-4 * share for share in shares], rel=1e-12)
    assert rates(FCSDConfig(output_dir=str(tmp_path), **schedule)) == expected
    train = {
        "batch_size_tokens": 128,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
    } | schedule
    assert main(["distill", str(bench.recipe("r", train=train))]) == 0
    points = read_history(bench.folder / "r" / "distill")
    assert [point["learning_rate"] for point in points] == expected


@pytest.mark.breadth
def test_a_run_with_steps_that_was_killed_continues_to_the_same_weights(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A milestone before the checkpoint at step 4, from which training continues, and
    # one after it.
    changes = [
        "train.lr_scheduler_type=step",
        "train.lr_scheduler_kwargs={milestones: [0.25, 0.7], gamma: 0.1}",
    ]
    more = [word for change in changes for word in ("--set", change)]
    assert main(["distill", str(bench.recipe("whole")), *more]) == 0
    command = ["distill", str(bench.recipe("killed")), *more]

    write = resumable_module.write_json

    def write_or_die(place: Path, value: Any) -> None:
        die() if place.parent.name == "checkpoint-8" else write(place, value)

    def killed() -> int:
        monkeypatch.setattr(resumable_module, "write_json", write_or_die)
        return main(command)

    assert in_a_fork(killed, tmp_path / "output") < 0, (tmp_path / "output").read_text()
    assert main(command) == 0
    one, other = (bench.folder / name / "distill" for name in ("whole", "killed"))
    assert [point["learning_rate"] for point in read_history(one)] == [
        point["learning_rate"] for point in read_history(other)
    ]
    assert weights_fingerprint(one / "model") == weights_fingerprint(other / "model")


def test_what_does_not_fit_a_schedule_is_one_line(bench: Bench, tmp_path: Path) -> None:
    for text, message in {
        "lr_scheduler_type=step": (
            r"train\.lr_scheduler_kwargs\.milestones: is required"
        ),
        "lr_scheduler_kwargs={gamma: 0.5}": (
            r"lr_scheduler_kwargs: no meaning for lr_scheduler_type 'cosine', only for"
            " cosine_with_min_lr, step, warmup_stable_decay"
        ),
        "min_lr_rate=0.1": r"train\.min_lr_rate: unknown key",
    }.items():
        with user_error(message):
            load_recipe(bench.recipe(), [f"train.{text}"])
    with user_error(r"milestones\.0: must be less than 1, got 800"):
        FCSDConfig(
            output_dir=str(tmp_path),
            lr_scheduler_type="step",
            lr_scheduler_kwargs={"milestones": [800]},
        )
    decay = {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 11},
    }
    message = (
        r"num_decay_steps \(11 steps\) and warmup_steps \(2\) are more than max_steps"
        r" \(12\)"
    )
    train = {"batch_size_tokens": 128, "max_steps": 12, "warmup_steps": 2} | decay
    with user_error(message):
        load_recipe(bench.recipe("long", train=train))
    with user_error(message):
        FCSDConfig(output_dir=str(tmp_path), max_steps=12, warmup_steps=2, **decay)
    sweep = {
        "batch_size_tokens": [128], "learning_rate": [1e-3], "steps": 8, "warmup_steps": 2,
    }  # fmt: skip
    decay["lr_scheduler_kwargs"] = {"num_decay_steps": 8}
    with user_error(
        r"sweep\.steps \(8\) are fewer than sweep\.warmup_steps \(2\) and .* \(8\)"
    ):
        load_recipe(bench.recipe("swept", train=train | decay, sweep=sweep))


def test_pythons_gamma_is_that_of_torch(tmp_path: Path) -> None:
    arguments = FCSDConfig(
        output_dir=str(tmp_path), lr_scheduler_type="step", lr_scheduler_kwargs={"milestones": [0.5]},
        max_steps=10, learning_rate=1.0,
    )  # fmt: skip
    weight = torch.zeros(1, requires_grad=True)
    reference = torch.optim.AdamW([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.MultiStepLR(reference, [5])
    expected = []
    for _ in range(10):
        expected.append(reference.param_groups[0]["lr"])
        reference.step()
        schedule.step()
    assert rates(arguments) == pytest.approx(expected, rel=1e-12)
    assert arguments.to_dict()["lr_scheduler_type"] == "step"


def test_trackers_are_shown_the_sections_of_a_recipe(
    bench: Bench, tmp_path: Path
) -> None:
    recipe = load_recipe(bench.recipe("r", objective={"name": "jsd", "jsd_beta": 0.25}))
    job = Job(tmp_path, "distil r", 7)
    student = torch.nn.Linear(1, 1)
    arguments = RecipeArguments.of(recipe.sections, job, join_launch(), student)
    shown = arguments.to_dict()
    assert shown["objective"] == "jsd" and shown["jsd_beta"] == 0.25
    assert shown["batch_size_tokens"] == recipe.train.batch_size_tokens
    assert shown["max_length"] == recipe.data.max_length
    assert shown["safety"] == {"max_skipped_steps": 10}
    assert (shown["seed"], shown["run_name"]) == (7, "distil r")
    assert "sections" not in shown and "train" not in shown
