"""Read back what a training run logged: `history.jsonl` and `scores.json`."""

import json
from pathlib import Path
from typing import Any

from fcsd.base.files import read_json


def read_history(folder: Path) -> list[dict[str, float]]:
    """Return the logged points of a finished run, oldest first."""
    lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def read_scores(folder: Path) -> dict[str, Any] | None:
    """`EarlyStopper.record` of a finished run with early stopping; None for any other run."""
    path = folder / "scores.json"
    found: dict[str, Any] | None = read_json(path) if path.is_file() else None
    return found
