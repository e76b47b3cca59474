"""Training on the student's own text: what it writes, its gradients against full logits
in float64 and TRL's loss on the same samples, and a run on ranks or after a kill.
"""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fcsd.training.own_text import OwnText
from fcsd.training.run import train
from fcsd.training.sweep import read_history
from fcsd.training.trainer import DistillTrainer
from tests.losses import objective_of, reference_divergence
from tests.reference.tiny import tiny_model
from tests.training.test_trainer import LENGTH, Rows, make


@pytest.fixture(scope="module")
def teacher() -> Any:
    model = tiny_model(
        "qwen2_moe", num_hidden_layers=2, experts_implementation="eager"
    ).requires_grad_(False)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.copy_(weight + 0.1 * torch.randn_like(weight))
    return model


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, np.ndarray]]:
    """The rows of all steps after the student has written."""
    rows: list[dict[str, np.ndarray]] = []
    write = OwnText.write

    def noted(self: Any, model: Any, batches: list[Any], step: int) -> None:
        write(self, model, batches, step)
        for batch in batches:
            rows.extend(
                {name: batch[name][index].numpy().copy() for name in batch}
                for index in range(len(batch["input_ids"]))
            )

    monkeypatch.setattr(OwnText, "write", noted)
    return rows


OBJECTIVES = [
    {"name": "kl"},
    {"name": "reverse_kl"},
    {"name": "jsd", "jsd_beta": 0.3, "temperature": 1.5},
]


def separate(rows: list[dict[str, np.ndarray]]) -> list[tuple[torch.Tensor, ...]]:
    """Return ids and labels (1, T) of each example."""
    return [
        tuple(
            torch.tensor(row[name][begin:end], dtype=torch.int64)[None]
            for name in ("input_ids", "labels")
        )
        for row in rows
        for begin, end in pairwise([*np.flatnonzero(row["position_ids"] == 0), LENGTH])
    ]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda by: by["name"])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_loss_and_gradients_are_those_of_full_logits_on_the_stored_samples(
    tmp_path: Path,
    teacher: Any,
    written: list[dict[str, np.ndarray]],
    monkeypatch: pytest.MonkeyPatch,
    objective: dict[str, Any],
    share: float,
) -> None:
    gradients: dict[str, torch.Tensor] = {}
    norm = DistillTrainer._get_grad_norm

    def noted(self: Any, model: Any, *args: Any, **kwargs: Any) -> float:
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                gradients[name] = weight.grad.clone()
        return norm(self, model, *args, **kwargs)

    monkeypatch.setattr(DistillTrainer, "_get_grad_norm", noted)
    by = objective_of(**objective)
    rows = Rows(4)
    chosen = objective | {"own_text": share}
    # gradients as they are, not clipped
    run = make(tmp_path, teacher, chosen, rows=rows, max_steps=1, max_grad_norm=1e9)
    student, original = (
        copy.deepcopy(model).double() for model in (run.student, teacher)
    )
    train(run)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, labels in separate(written):
        keep = labels[0, 1:] != -100
        own, theirs = (
            model(ids, use_cache=False).logits[0, :-1][keep]
            for model in (student, original)
        )
        total = total + reference_divergence(own, theirs, by).sum()
        count += int(keep.sum())
    (total / count).backward()
    entry = read_history(tmp_path)[0]
    assert entry["own_rows"] == (4 if share == 1 else 1)
    assert entry["loss"] == pytest.approx(float(total.detach() / count), rel=2e-5)
    expected = {
        name: weight.grad
        for name, weight in student.named_parameters()
        if weight.grad is not None and bool(weight.grad.any())
    }
    assert expected.keys() <= gradients.keys()
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        difference = float((gradients[name].double() - gradient).abs().max())
        assert difference <= 2e-4 * scale, name
