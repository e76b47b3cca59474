"""Read what a finished training has logged: its points and its scores."""

from pathlib import Path
from typing import Any

from fcsd.base.artifact import check_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import parse_json, read_json, read_text


def read_history(folder: Path) -> list[dict[str, float]]:
    """Return the logged points of a finished run, oldest first; UserError for a damaged
    file.
    """
    check_outputs(folder, "history.jsonl")
    path = folder / "history.jsonl"
    advice = f"remove {folder} to run this training again"
    points = []
    for number, line in enumerate(read_text(path, hint=advice).splitlines(), start=1):
        try:
            point = parse_json(line)
        except ValueError:
            point = None
        if not isinstance(point, dict) or not isinstance(point.get("step"), int):
            raise UserError(
                f"{path}, line {number}: is not a point of a training, so the file is"
                f" damaged; {advice}"
            )
        points.append(point)
    return points


def read_scores(folder: Path) -> dict[str, Any] | None:
    """Return `EarlyStopper.record` of a finished run with early stopping; None for any
    other run.
    """
    check_outputs(folder, "scores.json")
    path = folder / "scores.json"
    scores: dict[str, Any] | None = (
        read_json(path, keys=["points"]) if path.is_file() else None
    )
    return scores
