"""What the plugin's backend `timed` writes is what `fcsd-bench serve` reads."""

import importlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fcsd_bench.times import (
    TIMES_VARIABLE,
    communication_between,
    settled_times,
)
from tests.reference.ranks import run_ranks
from tests.support import ROOT


def measured(rank: int, folder: Path) -> list[Any]:
    sys.path.insert(0, str(ROOT / "serving"))
    communication = importlib.import_module("fcsd_vllm.communication")
    settings = importlib.import_module("fcsd_vllm.settings").Settings(
        comm="timed", latency_ms=50
    )
    timed = communication.make_communication(
        settings, SimpleNamespace(world_size=2, device_group=dist.group.WORLD)
    )
    sums = []
    for step in range(3):
        x = torch.full((4, 8), float(rank + step))
        summed = timed.start(x, f"attention.{step}")
        if step == 2:
            # Computation that takes longer, beside which the last one is hidden.
            timed.pending[f"attention.{step}"].done.wait()
        sums.append(timed.wait(summed, f"attention.{step}").mean().item())
    while not (folder / f"rank{rank}.json").is_file() or timed.written != timed.times:
        time.sleep(0.01)
    return sums


def test_the_times_of_a_server_are_read_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMES_VARIABLE, str(tmp_path))
    assert run_ranks(measured, 2, tmp_path) == [[1.0, 3.0, 5.0]] * 2
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "rank0.json",
        "rank1.json",
    ]
    communication = communication_between({}, settled_times(tmp_path))
    assert communication is not None and communication["ranks"] == 2
    assert (communication["collectives"], communication["bytes"]) == (6, 6 * 4 * 8 * 4)
    # each takes the emulated latency at least
    assert communication["total_s"] >= 6 * 0.05
    assert 0 < communication["overlap"] < 1
