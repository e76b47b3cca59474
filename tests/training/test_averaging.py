"""The average of weights that are spread over ranks: each rank averages its part, and
the whole average is scored and saved.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fcsd.base.files import read_json
from fcsd.base.weights import weights_fingerprint
from fcsd.cli.main import main
from fcsd.model.connectivity import load_model
from fcsd.training import checkpoint_writer
from tests.parallel.test_engines import ENGINES, EP, compare, launch
from tests.support import Bench

DECAY = 0.8


def whole(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the combined output of the ranks: name -> flat tensor, in float64."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(checkpoint.glob("state-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            starts, sizes = (
                json.loads(file.metadata()[key]) for key in ("starts", "sizes")
            )
            for name in file.keys():  # noqa: SIM118  a file, not a mapping
                run, parameter = file.get_tensor(name), name.split("|")[0]
                assert run.dtype == torch.float32
                into = tensors.setdefault(
                    name, torch.full((sizes[parameter],), math.nan, dtype=torch.float64)
                )
                into[starts[parameter] : starts[parameter] + len(run)] = run.double()
    return tensors


def recipe(bench: Bench, name: str) -> list[str]:
    train = {
        "max_steps": 6, "batch_size_tokens": 128, "per_device_train_batch_size": 2, "learning_rate": 1e-3,
        "warmup_steps": 1, "logging_steps": 1, "save_steps": 1, "save_total_limit": 9, "ema_decay": DECAY,
    }  # fmt: skip
    changes: dict[str, Any] = {"train": train, "early_stopping": bench.early_stopping}
    return ["distill", str(bench.recipe(name, **changes))]


@pytest.mark.breadth
@pytest.mark.parametrize("engine", [*ENGINES, "ep"])
def test_ranks_average_their_parts_and_continue_and_leave_the_average_to_the_last_bit(
    bench: Bench, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the copy of a step is that of its checkpoint
    monkeypatch.setattr(checkpoint_writer, "BACKGROUND_FROM", 0)
    config, options = f"cpu_2_{engine}", EP if engine == "ep" else []
    ended, complete = (
        [*recipe(bench, name), *options] for name in ("ended", "complete")
    )
    # The scores after steps 2 and 4 put the average into the model and take it out
    # again.
    assert launch(config, ended, ends_at=5) == [130]
    checkpoints = bench.folder / "ended" / "distill" / "checkpoints"
    states = [whole(checkpoints / f"checkpoint-{step}") for step in range(1, 5)]
    names = [name for name in states[0] if "|" not in name]
    begun = {
        name: p.detach().double().flatten()
        for name, p in load_model(bench.base).named_parameters()
    }
    assert names and set(names) == begun.keys()
    average = {name: begun[name] for name in names}
    for step, state in enumerate(states, start=1):
        d = min(DECAY, (1 + step) / (10 + step))
        average = {name: d * average[name] + (1 - d) * state[name] for name in names}
        for name in names:
            # float32: two roundings per step, each at most 6e-8 of the number
            torch.testing.assert_close(
                state[f"{name}|average"], average[name], rtol=1e-6, atol=1e-8
            )
        if step in (2, 4):
            best = whole(bench.folder / "ended" / "distill" / "best" / f"step-{step}")
            assert all(
                torch.equal(best[name], state[f"{name}|average"]) for name in names
            )
    apart = [float((average[name] - states[-1][name]).abs().max()) for name in names]
    assert max(apart) > 1e-4
    assert launch(config, ended, complete) == [0, 0]
    one, other = (bench.folder / name / "distill" for name in ("ended", "complete"))
    assert weights_fingerprint(one / "model") == weights_fingerprint(other / "model")
    assert (
        read_json(one / "scores.json")["points"]
        == read_json(other / "scores.json")["points"]
    )
    assert main(recipe(bench, "alone")) == 0
    compare(bench, "alone", "complete")
