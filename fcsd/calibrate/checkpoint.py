"""Calibrate from folder to folder."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fcsd.calibrate.model import batches_of, calibrate_model
from fcsd.calibrate.walk import real_tokens
from fcsd.connectivity.spec import Connectivity
from fcsd.distributed.launch import Launch
from fcsd.models.load import ModelFolder, load_checkpoint, to_device


def calibrate_checkpoint(
    original: ModelFolder,
    out: Path,
    connectivity: Connectivity,
    rows: Sequence[Any],
    *,
    ridge: float,
    launch: Launch,
) -> dict[str, Any]:
    """Write the original, converted and calibrated."""
    teacher = to_device(load_checkpoint(original), original.folder, launch.device)
    student = to_device(load_checkpoint(original, connectivity), original.folder, launch.device)
    layers = calibrate_model(student, teacher, rows, ridge=ridge, ranks=launch.ranks)
    if launch.first:
        student.save_pretrained(out)
    launch.wait()
    tokens = sum(int(real_tokens(batch).sum()) for batch in batches_of(rows))
    return {"tokens": tokens, "layers": layers}


def take_rows(rows: Any, num_tokens: int) -> list[Any]:
    """Take rows, in order, until they hold `num_tokens` tokens of text, or there are no more."""
    found: list[Any] = []
    count = 0
    for row in itertools.islice(_once(rows), num_tokens):
        found.append(row)
        count += int(real_tokens(batches_of([row])[0]).sum())
        if count >= num_tokens:
            break
    return found


def _once(rows: Any) -> Iterable[Any]:
    return (rows[k] for k in range(len(rows))) if hasattr(rows, "__len__") else rows
