"""The training loop against full logits in float64, for any cut of the batch, and its
behaviour when something fails.
"""

import copy
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback, TrainingArguments

from fcsd.base.strict import validate
from fcsd.data.config import RowsConfig
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.parallel.launch import Launch, join_launch
from fcsd.pipeline.tiny.models import tiny_tokenizer
from fcsd.training import run as run_module
from fcsd.training.arguments import Job
from fcsd.training.config import Sections, TrainConfig
from fcsd.training.early_stopping import EarlyStopper, Score
from fcsd.training.history import read_history, read_scores
from fcsd.training.losses.objectives import ObjectiveConfig
from fcsd.training.prepare import TrainingInputs
from fcsd.training.run import remove_checkpoints, train
from fcsd.training.step_loss import StepLoss
from fcsd.training.teachers.base import ModelTeacher
from tests.losses import DIVERGENCES, reference_loss
from tests.reference.tiny import tiny_model
from tests.support import few, same_tensors, user_error

LENGTH = 16
VOCABULARY = 99
SETTINGS: dict[str, Any] = {
    "max_steps": 3, "batch_size_tokens": 4 * LENGTH, "per_device_train_batch_size": 4, "learning_rate": 1e-3,
    "warmup_steps": 0, "logging_steps": 1,
}  # fmt: skip


class Rows(torch.utils.data.Dataset):
    """Rows of two packed examples with different numbers of loss tokens, as
    `build_dataset` makes them.
    """

    def __init__(self, count: int = 12, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.rows = []
        for _ in range(count):
            cut = int(rng.integers(5, LENGTH - 4))
            ids = rng.integers(3, VOCABULARY, LENGTH).astype(np.int32)
            positions = np.concatenate(
                [np.arange(cut), np.arange(LENGTH - cut)]
            ).astype(np.int32)
            labels = ids.copy()
            labels[: int(rng.integers(1, cut))] = -100
            labels[cut] = -100
            self.rows.append(
                {"input_ids": ids, "position_ids": positions, "labels": labels}
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.rows[index]


@pytest.fixture(scope="module")
def teacher() -> Any:
    return tiny_model(
        "qwen2_moe", num_hidden_layers=2, experts_implementation="eager"
    ).requires_grad_(False)


class Training(NamedTuple):
    """The arguments of `train`."""

    inputs: TrainingInputs
    sections: Sections
    job: Job
    launch: Launch

    @property
    def student(self) -> Any:
        return self.inputs.student

    def changed(self, **fields: Any) -> "Training":
        """Return it with other fields of its inputs, sections or job."""
        parts: dict[str, Any] = {}
        for name, value in fields.items():
            if hasattr(self.inputs, name):
                parts["inputs"] = replace(self.inputs, **{name: value})
            elif hasattr(self.sections, name):
                parts["sections"] = self.sections.model_copy(update={name: value})
            else:
                parts["job"] = replace(self.job, **{name: value})
        return self._replace(**parts)


def make(
    folder: Path,
    teacher: Any,
    objective: dict[str, Any] | None = None,
    *,
    rows: Any = None,
    stopper: EarlyStopper | None = None,
    score: Callable[[Any], Score] | None = None,
    **settings: Any,
) -> Training:
    student = copy.deepcopy(teacher).requires_grad_(True)
    convert_model(student, Connectivity("all"))
    chosen = validate(ObjectiveConfig, objective or {}, "objective")
    return Training(
        TrainingInputs(
            student,
            copy.deepcopy(teacher) if chosen.has_teacher else None,
            tiny_tokenizer(VOCABULARY),
            Rows() if rows is None else rows,
        ),
        Sections(
            objective=chosen,
            train=TrainConfig.model_validate(SETTINGS | settings),
            data=RowsConfig(max_length=LENGTH),
        ),
        Job(folder, "test", 0, stopper=stopper, score=score),
        join_launch(),
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def examples(
    rows: list[dict[str, np.ndarray]],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (ids, labels) of every packed example, alone."""
    for row in rows:
        starts = [*np.flatnonzero(row["position_ids"] == 0), LENGTH]
        for begin, end in pairwise(starts):
            yield tuple(
                torch.tensor(row[name][begin:end], dtype=torch.int64)[None]
                for name in ("input_ids", "labels")
            )


def reference(
    student: Any, teacher: Any, rows: list[dict[str, np.ndarray]]
) -> dict[str, torch.Tensor]:
    """Return means over kept tokens from the full float64 logits and hidden states of
    each example on its own.
    """
    sums: dict[str, Any] = {"kl": 0.0, "ce": 0.0, "l2": 0.0}
    count = 0
    for ids, labels in examples(rows):
        out = student(ids, output_hidden_states=True, use_cache=False)
        with torch.no_grad():
            goal = teacher(ids, output_hidden_states=True, use_cache=False)
        keep = labels[0, 1:] != -100
        own = out.logits[0, :-1][keep].log_softmax(-1)
        theirs = goal.logits[0, :-1][keep].log_softmax(-1)
        sums["kl"] += (theirs.exp() * (theirs - own)).sum()
        sums["ce"] -= own.gather(1, labels[0, 1:][keep, None]).sum()
        # hidden_states[k] is o_k, but the last one is after the final norm
        for o, p in zip(blocks(student, ids), blocks(teacher, ids), strict=True):
            sums["l2"] += (o[0, :-1][keep] - p[0, :-1][keep]).square().sum()
        count += int(keep.sum())
    return {name: value / count for name, value in sums.items()}


def blocks(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return the residual stream after each layer: the input of the next layer or of
    the final norm.
    """
    seen: list[torch.Tensor] = []

    def look(_module: Any, args: Any) -> None:
        seen.append(args[0][0] if isinstance(args[0], tuple) else args[0])

    modules = [*model.model.layers[1:], model.model.norm]
    handles = [module.register_forward_pre_hook(look) for module in modules]
    try:
        model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@pytest.mark.parametrize(
    "objective",
    [{"name": "kl"}, {"name": "ce"}, {"name": "kl+l2", "l2_coefficient": 0.01}],
)
def test_the_first_logged_losses_are_those_of_full_logits_of_separate_examples(
    tmp_path: Path, teacher: Any, objective: dict[str, Any]
) -> None:
    rows = Rows(4)
    run = make(tmp_path, teacher, objective, rows=rows, max_steps=1)
    double = copy.deepcopy(run.student).double()
    expected = reference(double, copy.deepcopy(teacher).double(), rows.rows)
    train(*run)
    first = read_history(tmp_path)[0]
    for name in (
        ("kl", "l2", "ce") if objective["name"] == "kl+l2" else (objective["name"],)
    ):
        if name == "ce" and objective["name"] != "ce":
            assert "ce" not in first
            continue
        assert first[name] == pytest.approx(float(expected[name].detach()), rel=2e-5)
    total = (
        expected["kl"] + 0.01 * expected["l2"]
        if objective["name"] == "kl+l2"
        else expected[objective["name"]]
    )
    assert first["loss"] == pytest.approx(float(total.detach()), rel=2e-5)
    gradients = torch.autograd.grad(total, list(double.parameters()), allow_unused=True)
    norm = torch.stack(
        [gradient.norm() for gradient in gradients if gradient is not None]
    ).norm()
    assert first["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize(
    "objective",
    few(
        [{"name": "kl"}, {"name": "sft"}, {"name": "kl+l2", "l2_coefficient": 0.01}], 1
    ),
)
def test_padding_at_the_end_of_rows_is_not_computed_and_changes_no_loss(
    tmp_path: Path, teacher: Any, objective: dict[str, Any]
) -> None:
    lengths: list[int] = []

    def padded(row: dict[str, np.ndarray], tail: int) -> dict[str, np.ndarray]:
        ends = {
            "input_ids": np.zeros(tail),
            "position_ids": np.arange(tail),
            "labels": np.full(tail, -100),
        }
        return {
            name: np.concatenate([row[name], ends[name]]).astype(np.int32)
            for name in row
        }

    def curve(tail: int) -> list[float]:
        rows = Rows()
        rows.rows = [padded(row, tail) for row in rows.rows]
        length = LENGTH + tail
        run = make(
            tmp_path / str(tail),
            teacher,
            objective,
            rows=rows,
            save_steps=3,
            batch_size_tokens=4 * length,
        )
        run = run.changed(data=RowsConfig(max_length=length))
        for model in (run.student, run.inputs.teacher):
            if model is not None:
                model.model.embed_tokens.register_forward_pre_hook(
                    lambda _, ids: lengths.append(ids[0].shape[1])
                )
        train(*run)
        return [entry["loss"] for entry in read_history(run.job.folder)]

    assert curve(tail=240) == pytest.approx(curve(tail=0), rel=1e-5)
    assert set(lengths) == {64, LENGTH}


def test_the_weights_do_not_depend_on_how_a_batch_is_cut(
    tmp_path: Path, teacher: Any
) -> None:
    whole, cut = (
        make(tmp_path / "1", teacher),
        make(tmp_path / "4", teacher, per_device_train_batch_size=1),
    )
    before = weights(whole.student)
    train(*whole)
    train(*cut)
    for name, value in weights(whole.student).items():
        torch.testing.assert_close(
            value, cut.student.state_dict()[name], atol=2e-5, rtol=1e-3
        )
    moved = max(
        float((value - before[name]).abs().max())
        for name, value in weights(whole.student).items()
    )
    assert moved > 1e-3
    for one, other in zip(
        read_history(tmp_path / "1"), read_history(tmp_path / "4"), strict=True
    ):
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_no_hidden_states_of_one_step_are_held_when_the_teacher_gives_those_of_the_next(
    tmp_path: Path, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, held, alive = ModelTeacher.prepare, [], []

    def watched(self: ModelTeacher, batches: list[dict[str, torch.Tensor]]) -> None:
        alive.append(sum(hidden() is not None for hidden in held))
        prepare(self, batches)
        held.extend(weakref.ref(batch["teacher_hidden"]) for batch in batches)

    monkeypatch.setattr(ModelTeacher, "prepare", watched)
    train(*make(tmp_path, teacher, max_steps=3, per_device_train_batch_size=2))
    assert (alive, len(held)) == ([0, 0, 0], 3 * 2)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("freeze_embeddings_and_head", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("freeze_routers", {f"model.layers.{k}.mlp.gate.weight" for k in (0, 1)}),
    ],
)
def test_frozen_weights_stay_bit_identical_while_others_move(
    tmp_path: Path, teacher: Any, key: str, names: set[str]
) -> None:
    run = make(tmp_path, teacher, {"name": "kl", key: True})
    before = weights(run.student)
    train(*run)
    still = {
        name
        for name, value in weights(run.student).items()
        if torch.equal(value, before[name])
    }
    assert still == names
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in names)


@pytest.mark.parametrize("where", ["first", "second"])
def test_weights_that_are_not_finite_stop_the_run_and_leave_the_last_checkpoint(
    tmp_path: Path, teacher: Any, where: str
) -> None:
    run = make(tmp_path, teacher, save_steps=1)

    class Spoil(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            if state.global_step == (0 if where == "first" else 1):
                run.student.model.norm.weight.data[0] = math.nan

    add = run_module._tensorboard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            run_module, "_tensorboard", lambda *parts: [*add(*parts), Spoil()]
        )
        last = "none" if where == "first" else r"\S*checkpoint-1"
        with user_error(
            r"not finite \(on rank 0; gradient norm nan\), nor are the weights;"
            rf" the last checkpoint is {last};"
        ):
            train(*run)
    assert not (tmp_path / "model").exists()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("*"))
    assert kept == ([] if where == "first" else ["checkpoint-1"])
    if where == "second":
        saved = load_file(
            tmp_path
            / "checkpoints"
            / "checkpoint-1"
            / "state-00001-of-00001.safetensors"
        )
        assert all(value.isfinite().all() for value in saved.values())


def test_gradient_checkpointing_changes_no_loss(tmp_path: Path, teacher: Any) -> None:
    objective = {"name": "kl+l2", "l2_coefficient": 0.01}
    train(*make(tmp_path / "plain", teacher, objective))
    train(
        *make(
            tmp_path / "checkpointed", teacher, objective, gradient_checkpointing=True
        )
    )
    one, other = (
        read_history(tmp_path / "plain"),
        read_history(tmp_path / "checkpointed"),
    )
    for a, b in zip(one, other, strict=True):
        assert [a[k] for k in ("kl", "l2", "grad_norm")] == pytest.approx(
            [b[k] for k in ("kl", "l2", "grad_norm")], rel=1e-5
        )


def test_bf16_autocast_trains_near_the_float32_curve(
    tmp_path: Path, teacher: Any
) -> None:
    train(*make(tmp_path / "32", teacher))
    run = make(tmp_path / "16", teacher, bf16=True)
    train(*run)
    assert run.student.dtype == torch.float32
    one, other = (
        [p["kl"] for p in read_history(tmp_path / name)] for name in ("32", "16")
    )
    assert one == pytest.approx(other, rel=0.1) and one != other


def scripted(
    scores: list[float], seen: list[dict[str, torch.Tensor]] | None = None
) -> Callable[[Any], Score]:
    """Return a scorer that gives these scores in turn."""
    values = iter(scores)

    def score(model: Any) -> Score:
        assert not hasattr(model, "module")
        if seen is not None:
            seen.append(weights(model))
        return Score([next(values)])

    return score


def test_early_stopping_stops_at_the_right_step_and_leaves_the_later_of_equally_good_weights(
    tmp_path: Path, teacher: Any
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    stopper = EarlyStopper(every_steps=2, patience=2, min_delta=0.02)
    # the score before training, then steps 2, 4, 6, 8
    score = scripted([0.05, 0.1, 0.5, 0.5, 0.4], seen)
    results = train(
        *make(tmp_path, teacher, stopper=stopper, score=score, max_steps=50)
    )
    results.pop("early_stopping")
    hardware = results.pop("hardware")
    assert hardware["device"].startswith("CPU ") and hardware["processes"] == 1
    assert hardware["threads"] == torch.get_num_threads()
    assert results | {"last_loss": 0} == {
        "steps": 8, "last_loss": 0, "best_step": 6, "best_score": 0.5, "stopped_early": True,
    }  # fmt: skip
    scores = read_scores(tmp_path)
    assert scores is not None and scores["metric"] == "pass@1"
    points = [(point["step"], point["score"]) for point in scores["points"]]
    assert points == [(0, 0.05), (2, 0.1), (4, 0.5), (6, 0.5), (8, 0.4)]
    from fcsd.model.connectivity import load_model

    state = load_model(tmp_path / "model").state_dict()
    assert same_tensors(state, seen[3]) and not same_tensors(state, seen[4])
    remove_checkpoints(tmp_path, join_launch())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "history.jsonl",
        "model",
        "scores.json",
    ]


def test_weights_that_score_best_before_training_are_what_is_left_and_it_is_said(
    tmp_path: Path, teacher: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    stopper = EarlyStopper(every_steps=1, patience=5, min_delta=0.02)
    run = make(
        tmp_path, teacher, stopper=stopper, score=scripted([0.9, 0.1, 0.5, 0.5], seen)
    )
    before = {name: value.clone() for name, value in run.student.state_dict().items()}
    assert train(*run)["best_step"] == 0
    assert "training made the model worse" in capsys.readouterr().err
    from fcsd.model.connectivity import load_model

    state = load_model(tmp_path / "model").state_dict()
    assert same_tensors(state, before)


def test_a_scorer_that_fails_ends_the_run_with_its_error(
    tmp_path: Path, teacher: Any
) -> None:
    def score(model: Any) -> Score:
        raise RuntimeError("sandbox is gone")

    stopper = EarlyStopper(every_steps=1, patience=9, min_delta=0.0)
    with pytest.raises(RuntimeError, match="sandbox is gone"):
        train(*make(tmp_path, teacher, stopper=stopper, score=score))
    assert not (tmp_path / "model").exists()


def test_tensorboard_writes_its_events_into_the_folder_of_the_run(
    tmp_path: Path, teacher: Any
) -> None:
    pytest.importorskip("tensorboard")
    train(*make(tmp_path, teacher, max_steps=1, report_to=["tensorboard"]))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents")
    assert b"train/kl" in events.read_bytes()


def test_data_that_end_begin_again_without_a_smaller_batch_at_their_end(
    tmp_path: Path, teacher: Any
) -> None:
    run = make(tmp_path, teacher, rows=Rows(6), per_device_train_batch_size=1)
    tokens: list[int] = []
    begin_step = StepLoss.begin_step

    def look(self: StepLoss, model: Any, batches: list, *rest: Any) -> Any:
        tokens.append(sum(batch["input_ids"].numel() for batch in batches))
        return begin_step(self, model, batches, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepLoss, "begin_step", look)
        assert train(*run)["steps"] == 3
    assert tokens == [4 * LENGTH] * 3
    assert [point["step"] for point in read_history(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_the_last_step_is_logged_whatever_logging_steps_is(
    tmp_path: Path, teacher: Any
) -> None:
    train(*make(tmp_path / "each", teacher))
    train(*make(tmp_path / "two", teacher, logging_steps=2))
    each, two = read_history(tmp_path / "each"), read_history(tmp_path / "two")
    assert [point["step"] for point in two] == [2, 3]
    assert two[0]["kl"] == pytest.approx((each[0]["kl"] + each[1]["kl"]) / 2, rel=1e-6)
    assert two[1]["kl"] == pytest.approx(each[2]["kl"], rel=1e-6)


def token_figures(
    student: Any, teacher: Any, rows: Any, objective: ObjectiveConfig
) -> dict[str, torch.Tensor]:
    """Compute the figures of every kept token from full float64 logits of each example
    on its own.
    """
    figures: dict[str, list[torch.Tensor]] = {
        "divergence": [],
        "entropy": [],
        "agreement": [],
    }
    for ids, labels in examples(rows):
        keep = labels[0, 1:] != -100
        logits, teacher_logits = (
            model(ids, use_cache=False).logits[0, :-1][keep].detach()
            for model in (student, teacher)
        )
        q = (teacher_logits / objective.temperature).softmax(-1)
        agreement = logits.argmax(-1) == teacher_logits.argmax(-1)
        figures["divergence"].append(reference_loss(logits, teacher_logits, objective))
        figures["entropy"].append(-(q * q.log()).sum(-1))
        figures["agreement"].append(agreement.double())
    return {name: torch.cat(values) for name, values in figures.items()}


@pytest.mark.parametrize("rows_a_forward", few([4, 1], 1))
@pytest.mark.parametrize("settings", [*DIVERGENCES, {"name": "kl", "temperature": 2.0}])
def test_the_logged_figures_are_those_of_full_logits(
    tmp_path: Path, teacher: Any, settings: dict[str, Any], rows_a_forward: int
) -> None:
    rows = Rows(4)
    run = make(
        tmp_path,
        teacher,
        settings,
        rows=rows,
        max_steps=1,
        per_device_train_batch_size=rows_a_forward,
    )
    objective = run.sections.objective
    expected = token_figures(
        copy.deepcopy(run.student).double(),
        copy.deepcopy(teacher).double(),
        rows.rows,
        objective,
    )
    train(*run)
    first = read_history(tmp_path)[0]
    name, each = objective.name, expected["divergence"]
    assert first[name] == pytest.approx(float(each.mean()), rel=2e-5)
    assert first["loss"] == pytest.approx(float(each.mean()), rel=2e-5)
    assert first["top1_agreement"] == pytest.approx(
        float(expected["agreement"].mean()), rel=1e-6
    )
    assert 0 < first["top1_agreement"] < 1
    assert first["teacher_entropy"] == pytest.approx(
        float(expected["entropy"].mean()), rel=2e-5
    )
    for q in (50, 90, 99):
        exact = each.sort().values[max(1, math.ceil(q / 100 * len(each))) - 1]
        assert first[f"{name}_p{q}"] == pytest.approx(float(exact), rel=0.01)


def test_vocabularies_that_differ_in_padding_are_compared_up_to_the_size_that_the_objective_gives(
    tmp_path: Path, teacher: Any
) -> None:
    run = make(tmp_path / "padded", teacher, {"name": "kl", "vocab_size": VOCABULARY})
    padded = copy.deepcopy(teacher).requires_grad_(False)
    padded.resize_token_embeddings(128, mean_resizing=False)
    torch.nn.init.normal_(padded.lm_head.weight[VOCABULARY:])
    train(*run.changed(teacher=padded))
    train(*make(tmp_path / "plain", teacher))
    one, other = (read_history(tmp_path / name) for name in ("padded", "plain"))
    assert [p["kl"] for p in one] == pytest.approx([p["kl"] for p in other], rel=1e-5)
    with user_error(
        r"objective\.vocab_size 50: must be between the 99 tokens of the tokenizer"
    ):
        train(*make(tmp_path / "small", teacher, {"name": "kl", "vocab_size": 50}))


def test_a_batch_of_fewer_rows_than_a_forward_pass_is_one_of_that_many(
    tmp_path: Path, teacher: Any
) -> None:
    one, other = (
        make(tmp_path / str(rows), teacher, per_device_train_batch_size=rows)
        for rows in (4, 32)
    )
    for run in (one, other):
        train(*run)
    assert same_tensors(weights(one.student), weights(other.student))


def test_a_process_that_sees_several_gpus_trains_on_one(
    teacher: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """transformers would multiply the batch by their number, and wrap the model in
    `nn.DataParallel`.
    """
    train(*make(tmp_path / "alone", teacher))
    set_up = TrainingArguments.__post_init__

    def two_gpus(self: Any) -> None:
        set_up(self)
        self._n_gpu = 2

    monkeypatch.setattr(TrainingArguments, "__post_init__", two_gpus)
    monkeypatch.setattr(
        torch.nn.DataParallel,
        "__init__",
        lambda *args, **kwargs: pytest.fail("copies in one process"),
    )
    train(*make(tmp_path / "faked", teacher))
    assert (
        "trains on only one of the 2 visible devices; start one process per device with `accelerate launch"
        in capsys.readouterr().err
    )
    names = ("loss", "grad_norm", "kl")
    curves = [
        [[entry[name] for name in names] for entry in read_history(tmp_path / name)]
        for name in ("alone", "faked")
    ]
    assert curves[0] == curves[1]
