"""Weights and optimiser on disk: reading gives what was written, or an error that says
what is missing.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fcsd.parallel.launch import ALONE
from fcsd.parallel.state import (
    StateFile,
    check_state,
    read_state,
    state_files,
    write_optimizer_settings,
)
from tests.reference.tiny import X, tiny_model
from tests.support import user_error


def trained(steps: int, seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    model = tiny_model("qwen2_moe", seed=seed, num_hidden_layers=2, num_experts=4)
    model.lm_head.requires_grad_(False)
    groups = [
        {
            "params": [p for p in model.parameters() if p.requires_grad],
            "initial_lr": 1e-3,
        }
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    go_on(model, optimizer, steps)
    return model, optimizer


def write_state(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    for file in state_files(model, optimizer, ALONE):
        file.copied({}).write(folder)
    write_optimizer_settings(folder, model, optimizer, ALONE)


def go_on(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(X, labels=X, use_cache=False).loss.backward()
        optimizer.step()


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcsd.parallel.state.FILE_BYTES", 20_000)


def test_a_training_continues_to_the_last_bit_from_several_files(
    tmp_path: Path, small_files: None
) -> None:
    model, optimizer = trained(2)
    write_state(tmp_path, model, optimizer)
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert (
        len(files) > 5
        and {"state-00001-of-00001.safetensors", "state-00001-of-00001.1.safetensors"}
        < files
    )
    check_state(tmp_path)
    go_on(model, optimizer, 2)
    other, fresh = trained(0, seed=1)
    other.lm_head.weight.data.copy_(model.lm_head.weight)  # frozen: not stored
    fresh.param_groups[0]["lr"] = 5.0
    read_state(tmp_path, other, fresh, ALONE)
    assert fresh.param_groups[0]["lr"] == 1e-3
    go_on(other, fresh, 2)
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_a_file_is_read_by_safetensors_and_has_the_bytes_that_were_noted(
    tmp_path: Path,
) -> None:
    runs = {
        "half": torch.arange(5, dtype=torch.bfloat16),
        "ä|exp_avg": torch.randn(7),
        "none": torch.empty(0),
        "large": torch.randn(5_000_000),  # more than one piece
    }
    noted = StateFile("state.safetensors", runs, {"files": "1"}).write(tmp_path)
    path = tmp_path / "state.safetensors"
    assert noted == {
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    tensors = load_file(path)
    assert tensors.keys() == runs.keys()
    assert all(torch.equal(tensors[name], runs[name]) for name in runs)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"files": "1"}
        assert torch.equal(
            file.get_slice("large")[10:4_000_000], runs["large"][10:4_000_000]
        )
    again = tmp_path / "again"
    again.mkdir()
    assert StateFile("state.safetensors", runs, {"files": "1"}).write(again) == noted


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda path: path.unlink(),
            r"cannot be read .* the checkpoint is damaged: remove it",
        ),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be read"),
    ],
    ids=["missing", "cut off"],
)
@pytest.mark.parametrize(
    "name", ["state-00001-of-00001.1.safetensors", "state-00001-of-00001.3.safetensors"]
)
def test_a_file_that_is_not_whole_is_named(
    tmp_path: Path, small_files: None, spoil: Any, message: str, name: str
) -> None:
    write_state(tmp_path, *trained(1))
    spoil(tmp_path / name)
    with user_error(message) as error:
        check_state(tmp_path)
    assert name in str(error.value)


def test_a_rank_whose_files_are_missing_is_counted(tmp_path: Path) -> None:
    write_state(tmp_path, *trained(1))
    (tmp_path / "state-00001-of-00001.safetensors").rename(
        tmp_path / "state-00002-of-00003.safetensors"
    )
    with user_error("1 of 3 state files exist"):
        check_state(tmp_path)


def test_the_checkpoint_of_another_model_or_optimiser_is_refused(
    tmp_path: Path,
) -> None:
    model, optimizer = trained(1)
    write_state(tmp_path, model, optimizer)
    model.lm_head.requires_grad_(True)
    with user_error(
        r"holds no numbers of 'lm_head.weight' instead of 3168; .* other trainable"
    ):
        read_state(tmp_path, model, None, ALONE)
    model.lm_head.requires_grad_(False)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with user_error("an optimiser of 1 parameter groups, but this one has 2"):
        read_state(tmp_path, model, optimizer, ALONE)
