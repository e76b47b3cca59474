"""Before its first step, a training compares the free disk space with the most that it
keeps.
"""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fcsd.cli.main import main
from fcsd.training import best, checkpoint_writer
from fcsd.training import run as run_module
from fcsd.training.checkpoint_writer import disk_need
from fcsd.training.config import TrainConfig
from fcsd.training.trainer import DistillTrainer
from tests.support import Bench, few

GIB = 1 << 30


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_the_need_is_that_of_the_checkpoints_kept_and_of_what_is_written_beside_them():
    train = TrainConfig(max_steps=2000, save_steps=500, save_total_limit=2)
    n = 30_532_122_624  # Qwen3-30B-A3B
    need = disk_need(
        train, num_trained=n, num_parameters=n, model_itemsize=2, keeps_best=True
    )
    # float32 weights and two moments, twice, and once more while the third is written;
    # three best weights; a bfloat16 model.
    assert need.total == 3 * 12 * n + 3 * 4 * n + 2 * n
    assert need.total / 1e12 == pytest.approx(1.53, abs=0.01)
    one = train.model_copy(update={"save_total_limit": 1})
    assert (
        need.total
        - disk_need(
            one, num_trained=n, num_parameters=n, model_itemsize=2, keeps_best=True
        ).total
        == 12 * n
    )


@pytest.mark.parametrize(
    ("steps", "number"), [(400, 1), (500, 1), (501, 2), (1500, 3), (9000, 3)]
)
def test_no_more_checkpoints_are_counted_than_are_written(
    steps: int, number: int
) -> None:
    train = TrainConfig(max_steps=steps, warmup_steps=0, save_steps=500)
    need = disk_need(
        train, num_trained=8, num_parameters=10, model_itemsize=4, keeps_best=False
    )
    assert need.num_checkpoints == number and need.best == 0
    of_a_sweep = disk_need(
        train, num_trained=8, num_parameters=10, model_itemsize=0, keeps_best=False
    )
    assert of_a_sweep.num_checkpoints == min(3, (steps - 1) // 500)
    assert of_a_sweep.model == 0


@pytest.mark.parametrize("background_from", few([0, 10**9], 1))
def test_what_a_run_keeps_is_never_more_than_was_said(
    bench: Bench, background_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the bytes of the weights and states of a real run, at every
    checkpoint.
    """
    monkeypatch.setattr(checkpoint_writer, "BACKGROUND_FROM", background_from)
    folder = bench.folder / "r" / "distill"
    said: list[Any] = []
    check, on_save = run_module.check_disk, best.StopWhenScoreStalls.on_save
    monkeypatch.setattr(
        run_module, "check_disk", lambda *args: (said.append(args[1]), check(*args))
    )
    held = []

    def measured(*args: Any, **kwargs: Any) -> None:
        held.append(
            sum(path.stat().st_size for path in folder.rglob("state-*.safetensors"))
        )
        on_save(*args, **kwargs)

    monkeypatch.setattr(best.StopWhenScoreStalls, "on_save", measured)
    assert (
        main(["distill", str(bench.recipe("r", early_stopping=bench.early_stopping))])
        == 0
    )
    (need,) = said
    model = (folder / "model" / "model.safetensors").stat().st_size
    assert need.model == pytest.approx(model, rel=0.1)
    assert (
        0.6 * (need.total - need.model) < max(held) <= need.total - need.model + 100_000
    )  # headers of the files


def test_a_disk_that_is_too_small_is_refused_before_the_first_step(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB, GIB - 1000, 1000))
    monkeypatch.setattr(
        DistillTrainer, "compute_loss", lambda *args, **kwargs: pytest.fail("trained")
    )
    assert main(["distill", str(bench.recipe("r"))]) == 2
    error = capsys.readouterr().err
    assert f"{Path(bench.folder / 'r' / 'distill')}: the training needs " in error
    assert "on the disk (3 checkpoints of " in error
    assert "train.save_total_limit: 1 needs " in error
