"""The best weights are as safe as a checkpoint: damaged ones are noticed, and the best
intact ones are used.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from fcsd.base.files import read_json
from fcsd.training import run as run_module
from fcsd.training.early_stopping import EarlyStopper, Score
from fcsd.training.run import train
from tests.support import few
from tests.training.test_trainer import make, teacher, weights  # noqa: F401

Damage = Callable[[Path], None]


def flip(best: Path) -> None:
    """Flip 64 bits somewhere in the weights."""
    (file,) = best.glob("state-*.safetensors")
    data = bytearray(file.read_bytes())
    for k in range(64):
        data[-1 - 97 * k] ^= 1 << (k % 8)
    file.write_bytes(data)


def cut_off(best: Path) -> None:
    (file,) = best.glob("state-*.safetensors")
    os.truncate(file, file.stat().st_size // 2)


def take_away(best: Path) -> None:
    (file,) = best.glob("state-*.safetensors")
    file.unlink()


class Watched:
    """A run with given scores, step by step, whose best weights are damaged after one
    of them.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        teacher: Any,  # noqa: F811
        scores: dict[int, float],
        **changes: Any,
    ):
        self.folder, self.scores = folder, scores
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.stopper = EarlyStopper(every_steps=2, patience=9, min_delta=0.0)
        steps: Iterator[int] = iter(scores)

        def score(model: Any) -> Score:
            step = next(steps)
            self.weights[step] = weights(model)
            return Score([scores[step]])

        settings = {"max_steps": max(scores), "save_steps": 2, **changes}
        self.run = make(folder, teacher, stopper=self.stopper, score=score, **settings)

    def left(self) -> list[int]:
        """Return the steps whose weights are those of the saved model."""
        tensors = load_file(self.folder / "model" / "model.safetensors")
        return [
            step
            for step, held in self.weights.items()
            if all(
                torch.equal(value, held[name])
                for name, value in tensors.items()
                if name in held
            )
        ]


@pytest.mark.parametrize("harm", few([flip, cut_off, take_away], 1))
@pytest.mark.parametrize(
    ("scores", "lost", "left"),
    [
        # step 4 was never the best, so nothing has kept it
        ({0: 0.5, 2: 0.9, 4: 0.7, 6: 0.6}, [2], 6),
        ({0: 0.8, 2: 0.9, 4: 0.1}, [2], 0),
        ({0: 0.8, 2: 0.9, 4: 0.1}, [0, 2], 4),
        ({0: 0.5, 2: 0.9}, [2], 2),  # the weights that the model still has
    ],
)
def test_damaged_best_weights_are_never_left(
    tmp_path: Path,
    teacher: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harm: Damage,
    scores: dict[int, float],
    lost: list[int],
    left: int,
) -> None:
    watched = Watched(tmp_path, monkeypatch, teacher, scores)

    class AtTheEnd(TrainerCallback):
        def on_train_end(self, *args: Any, **more: Any) -> None:
            for step in lost:
                harm(tmp_path / "best" / f"step-{step}")

    monkeypatch.setattr(run_module, "_tensorboard", lambda *_: [AtTheEnd()])
    # Best weights that no checkpoint names would be dropped once they are beaten.
    monkeypatch.setattr("fcsd.training.best.drop_others", lambda *_: None)
    results = train(*watched.run)
    assert watched.left() == [left]
    assert (results["best_step"], results["best_score"]) == (left, scores[left])
    assert read_json(tmp_path / "scores.json")["best_step"] == left
    said = capsys.readouterr().err
    assert f"best/step-{max(lost)}: the best weights are damaged (" in said
    assert f"taking those of step {left}, pass@1 {scores[left]:.4g}" in said


def test_a_run_that_continues_finds_its_best_weights_damaged_and_has_others_beat_what_is_left(
    tmp_path: Path,
    teacher: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Killed(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, **more: Any
        ) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_tensorboard", lambda *_: [Killed()])
        with pytest.raises(KeyboardInterrupt):
            train(
                *Watched(
                    tmp_path, monkeypatch, teacher, {0: 0.5, 2: 0.9, 4: 0.6, 6: 0.0}
                ).run
            )
    flip(tmp_path / "best" / "step-2")
    again = Watched(tmp_path, monkeypatch, teacher, {6: 0.7, 8: 0.3})
    results = train(*again.run)
    said = capsys.readouterr().err
    assert (
        "differs from what was written); all other scored weights are damaged, too"
        in said
    )
    assert (results["best_step"], results["best_score"]) == (6, 0.7)
    assert again.left() == [6]


def lose_a_digit(file: Path) -> None:
    file.write_text(re.sub(r'"best_step": \d', '"best_step": 7', file.read_text()))


@pytest.mark.parametrize(
    ("name", "harm"),
    few(
        [
            ("early_stopping.json", lambda file: os.truncate(file, 40)),
            ("early_stopping.json", lose_a_digit),
            (
                "files.json",
                lambda file: file.write_text('{"early_stopping.json": {"bytes": 1}}'),
            ),
            ("early_stopping.json", Path.unlink),
            ("early_stopping.json", lambda file: file.write_bytes(b"\xff\xfe" * 9)),
            ("files.json", Path.unlink),
        ],
        3,
    ),
)
def test_a_damaged_older_checkpoint_is_set_aside_and_does_not_end_the_training(
    tmp_path: Path,
    teacher: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    harm: Damage,
) -> None:
    checkpoint = tmp_path / "checkpoints" / "checkpoint-2"

    class InTheMiddle(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, **more: Any
        ) -> None:
            if state.global_step == 4:
                harm(checkpoint / name)
                # and a file that the system leaves beside the weights
                (tmp_path / "best" / ".DS_Store").touch()
                (tmp_path / "checkpoints" / "checkpoint-3").touch()

    monkeypatch.setattr(run_module, "_tensorboard", lambda *_: [InTheMiddle()])
    scores = {0: 0.5, 2: 0.9, 4: 0.7, 6: 0.6}
    watched = Watched(tmp_path, monkeypatch, teacher, scores, save_total_limit=9)
    results = train(*watched.run)
    assert (results["best_step"], results["best_score"]) == (2, 0.9)
    assert watched.left() == [2]
    said = capsys.readouterr().err
    assert f"{checkpoint}: is damaged ({name} " in said
    assert "fcsd sets it aside and continues the training" in said
    assert said.count("is damaged") == 1
    assert (checkpoint.parent / "damaged-checkpoint-2").is_dir()


@pytest.mark.parametrize("metric", ["pass@1", "perplexity", "heldout_kl"])
def test_the_next_best_goes_by_what_is_better(metric: str) -> None:
    """The scores of a loss should fall."""
    higher = metric == "pass@1"
    stopper = EarlyStopper(every_steps=1, patience=9, min_delta=0.0, metric=metric)
    values = [0.2, 0.5, 0.9, 0.4] if higher else [0.9, 0.5, 0.2, 0.6]
    for step, value in enumerate(values):
        stopper.update(step, Score([value], higher_is_better=higher))
    assert stopper.best_step == 2
    stopper.lose_all_but([0, 1, 3])
    assert (stopper.best_step, stopper.best_score) == (1, 0.5)
    # A score that does not reach the remaining one is not a new best; one that beats it
    # is.
    assert not stopper.update(4, Score([values[3]], higher_is_better=higher))
    assert stopper.update(5, Score([0.55 if higher else 0.45], higher_is_better=higher))
    stopper.lose_all_but([])
    assert stopper.best_step is None
    assert stopper.update(6, Score([0.7], higher_is_better=higher))
