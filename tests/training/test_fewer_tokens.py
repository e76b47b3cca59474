"""The settings for fewer tokens in the training loop: for any cut of a batch, across a
kill, on two processes.
"""

import copy
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from fcsd.base.files import read_json
from fcsd.base.weights import weights_fingerprint
from fcsd.cli.main import main
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import join_launch
from fcsd.training import best as best_module
from fcsd.training import run as run_module
from fcsd.training.arguments import refuse_what_cannot_be_sharded
from fcsd.training.early_stopping import EarlyStopper, Score
from fcsd.training.heldout import HeldoutKL
from fcsd.training.history import read_history
from fcsd.training.losses.head import attach_loss_head
from fcsd.training.losses.objectives import KLWithL2ObjectiveConfig
from fcsd.training.run import train
from fcsd.training.teachers.base import ModelTeacher
from tests.parallel.test_engines import compare as compare_spread
from tests.parallel.test_engines import launch
from tests.reference.ranks import run_ranks
from tests.support import Bench, assert_killed, history, user_error
from tests.training.test_parallel import compare, ranks
from tests.training.test_trainer import (
    Rows,
    make,
    reference,
    teacher,  # noqa: F401
    weights,
)

OBJECTIVE = {
    "name": "kl+l2", "l2_coefficient": 2.0, "l2_relative": True, "l2_until": 0.5,
}  # fmt: skip


def test_the_loss_is_the_sum_of_its_terms_however_a_batch_is_cut(
    tmp_path: Path,
    teacher: Any,  # noqa: F811
) -> None:
    settings: dict[str, Any] = {"max_steps": 4}
    train(*make(tmp_path / "1", teacher, OBJECTIVE, **settings))
    train(
        *make(
            tmp_path / "4",
            teacher,
            OBJECTIVE,
            per_device_train_batch_size=1,
            **settings,
        )
    )
    whole, cut = read_history(tmp_path / "1"), read_history(tmp_path / "4")
    for step, (one, other) in enumerate(zip(whole, cut, strict=True)):
        names = ["loss", "kl", "grad_norm", "learning_rate"] + ["l2"] * (step < 2)
        assert [one[name] for name in names] == pytest.approx(
            [other[name] for name in names], rel=1e-3
        )
        coefficient = 2.0 * max(0.0, 1 - step / 2)
        total = one["kl"] + coefficient * one.get("l2", 0.0)
        assert one["loss"] == pytest.approx(total, rel=1e-5)
    # that of the middle layer
    assert "l2" not in whole[2] and whole[0]["learning_rate"] == 1e-3


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_with_an_average_it_is_the_average_that_is_scored_and_left(
    tmp_path: Path,
    teacher: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    is_calibrated: bool,
) -> None:
    """The average leaves weights that are already a good start no faster than the decay
    allows.
    """
    seen: list[dict[str, torch.Tensor]] = []
    scored: list[torch.Tensor] = []

    class Look(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            seen.append(weights(run.student))

    monkeypatch.setattr(run_module, "_tensorboard", lambda *_: [Look()])

    def score(model: Any) -> Score:
        scored.append(model.lm_head.weight.detach().clone())
        return Score([0.5])

    stopper = EarlyStopper(every_steps=2, patience=9, min_delta=0.0)
    run = make(
        tmp_path, teacher, max_steps=4, ema_decay=0.3, stopper=stopper, score=score
    )
    if is_calibrated:
        run.student.config.farskip_calibration = {
            "tokens": 1,
            "ridge": 1e-3,
            "layers": [0],
        }
    average = {name: value.double() for name, value in weights(run.student).items()}
    before = average["lm_head.weight"]
    train(*run)
    after_two = None
    for step, own in enumerate(seen, start=1):
        d = 0.3 if is_calibrated else min(0.3, (1 + step) / (10 + step))
        average = {
            name: d * average[name] + (1 - d) * own[name].double() for name in average
        }
        after_two = average["lm_head.weight"] if step == 2 else after_two
    written = load_file(tmp_path / "model" / "model.safetensors")
    # Four steps of two roundings, at most 6e-8 each.
    for name, value in average.items():
        if name in written:  # experts are saved one by one
            torch.testing.assert_close(
                written[name].double(), value, rtol=1e-6, atol=1e-7
            )
    for head, wanted in zip(
        scored, (before, after_two, average["lm_head.weight"]), strict=True
    ):
        torch.testing.assert_close(head.double(), wanted, rtol=1e-6, atol=1e-7)
    assert not torch.equal(written["lm_head.weight"], seen[-1]["lm_head.weight"])


@pytest.mark.usefixtures("float64")
def test_the_held_out_kl_is_that_of_full_logits_of_separate_examples(
    teacher: Any,  # noqa: F811
) -> None:
    rows, teacher = Rows(4, seed=3), copy.deepcopy(teacher).double()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        student.lm_head.weight.mul_(0.9)
        student.model.norm.weight.mul_(1.1)
    wanted = reference(copy.deepcopy(student).eval(), teacher, rows.rows)
    attach_loss_head(student.train())
    for own in (None, ModelTeacher(copy.deepcopy(teacher))):
        score = HeldoutKL(rows, lambda: copy.deepcopy(teacher), join_launch())
        score.set_teacher(own)
        assert score(student) == score(student)
        assert score(student).value == pytest.approx(float(wanted["kl"]), rel=1e-9)
    same = copy.deepcopy(teacher)
    attach_loss_head(same)
    assert student.training and score(same).value == pytest.approx(0, abs=1e-12)


def test_held_out_text_without_a_token_to_predict_is_refused(
    teacher: Any,  # noqa: F811
) -> None:
    rows = Rows(1)
    rows.rows[0]["labels"][:] = -100
    student = copy.deepcopy(teacher)
    attach_loss_head(student)
    with user_error(r"data\.heldout: no row has a token to predict"):
        HeldoutKL(rows, lambda: copy.deepcopy(teacher), join_launch())(student)


def settings(bench: Bench) -> dict[str, Any]:
    """Return settings with everything that a checkpoint has to remember."""
    rows = {"path": str(bench.rows)}
    return {
        "objective": OBJECTIVE,
        "train": {
            "max_steps": 12, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
            "warmup_steps": 2, "logging_steps": 1, "save_steps": 4, "ema_decay": 0.9,
        },
        "data": {"train": [rows], "heldout": rows, "heldout_examples": 8, "max_length": 32},
        "early_stopping": {"metric": "heldout_kl", "every_steps": 4, "patience": 9, "min_delta": 0.0},
    }  # fmt: skip


@pytest.mark.breadth
def test_a_run_with_all_of_them_that_is_killed_continues_to_the_same_weights(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = settings(bench)
    command = ["distill", str(bench.recipe("killed", **changes))]

    def killed() -> int:
        monkeypatch.setattr(
            best_module.StopWhenScoreStalls,
            "on_save",
            lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL),
        )
        return main(command)

    assert_killed(killed, tmp_path / "output")
    assert (
        bench.folder / "killed" / "distill" / "checkpoints" / "checkpoint-4"
    ).is_dir()
    assert main(command) == 0
    assert main(["distill", str(bench.recipe("whole", **changes))]) == 0
    one, other = (bench.folder / name / "distill" for name in ("killed", "whole"))
    assert read_json(one / "scores.json") == read_json(other / "scores.json")
    assert weights_fingerprint(one / "model") == weights_fingerprint(other / "model")
    scores = read_json(one / "scores.json")
    assert scores["metric"] == "heldout_kl"
    assert scores["points"][-1]["score"] < scores["points"][0]["score"]


@pytest.mark.breadth
def test_two_forked_ranks_train_with_them_what_one_trains(bench: Bench) -> None:
    command = ["distill", str(bench.recipe("two", **settings(bench)))]
    assert [status for status, _ in run_ranks(ranks, 2, command, "")] == [0, 0]
    assert main(["distill", str(bench.recipe("one", **settings(bench)))]) == 0
    compare(bench, "one", "two")
    for a, b in zip(history(bench, "one"), history(bench, "two"), strict=True):
        assert a.get("l2", 0) == pytest.approx(b.get("l2", 0), rel=1e-2)


def test_a_lora_student_is_its_own_teacher_for_all_of_them(bench: Bench) -> None:
    changes = settings(bench)
    changes["train"]["max_steps"] = 4
    changes["lora"] = {"r": 4, "target_modules": ["q_proj", "o_proj"]}
    for backend in ("sharded", "adapter_off"):
        path = bench.recipe(backend, **changes, teacher={"backend": backend})
        assert main(["distill", str(path)]) == 0
    one, other = (
        bench.folder / backend / "distill" for backend in ("sharded", "adapter_off")
    )
    assert read_json(one / "scores.json") == read_json(other / "scores.json")
    assert weights_fingerprint(one / "model") == weights_fingerprint(other / "model")


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("engine", "options"), [("fsdp2", []), ("ep", ["--expert-parallel", "2"])]
)
def test_two_ranks_with_spread_weights_train_with_them_what_one_trains(
    bench: Bench, engine: str, options: list[str]
) -> None:
    changes = settings(bench)
    assert launch(
        f"cpu_2_{engine}", ["distill", str(bench.recipe("two", **changes)), *options]
    ) == [0]
    assert main(["distill", str(bench.recipe("one", **changes))]) == 0
    compare_spread(bench, "one", "two")
    one, two = (
        read_json(bench.folder / name / "distill" / "scores.json")
        for name in ("one", "two")
    )
    for a, b in zip(one["points"], two["points"], strict=True):
        assert a["step"] == b["step"]
        for key in ("score", "stderr"):
            assert a[key] == pytest.approx(b[key], rel=1e-3)


def test_heldout_kl_beside_hidden_terms_is_refused_under_zero_3() -> None:
    with user_error(r"heldout_kl does not work with kl\+l2 under ZeRO-3; use FSDP2"):
        refuse_what_cannot_be_sharded(
            KLWithL2ObjectiveConfig(**OBJECTIVE), Engine("zero3"), by_heldout_kl=True
        )


def test_spread_weights_and_no_teacher_that_is_run_have_no_held_out_kl(
    teacher: Any,  # noqa: F811
) -> None:
    with user_error(r"heldout_kl needs a loaded teacher: .* teacher\.backend: sharded"):
        launch = replace(join_launch(), engine=Engine("fsdp2"))
        HeldoutKL(Rows(1), lambda: teacher, launch).set_teacher(None)
