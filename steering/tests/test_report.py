"""The tables on steered routers, from points written by hand."""

import re
from pathlib import Path
from typing import Any

import pytest

from fcsd_steering.report import at_equal_time, steering_figure, steering_parts


def point(
    name: str, kind: str | None, strength: float, mean_ms: float, kl: float
) -> dict[str, Any]:
    return {
        "name": name, "model": "original", "kind": kind, "strength": strength, "kl": {"kl": kl, "stderr": 0.001},
        "exchange": {"mean_s": mean_ms / 1e3, "p95_s": 1.5 * mean_ms / 1e3, "num_exchanges": 8, "tokens": 2048.0},
        "routing": {"cv": 0.25, "avg_layer_cv": 0.5}
        | ({"kl": 0.01, "avg_layer_kl": 0.02, "routes_moved": 0.125} if kind else {}),
        "mean": 0.5, "mean_stderr": 0.01,
    }  # fmt: skip


POINTS = [
    point("original", None, 0.0, 10.0, 0.0),
    point("camoe-0.1", "camoe", 0.1, 9.0, 0.01),
    point("camoe-0.25", "camoe", 0.25, 8.0, 0.04),
    point("bottleneck-0.1", "bottleneck", 0.1, 9.5, 0.0004),
    point("bottleneck-0.25", "bottleneck", 0.25, 8.5, 0.01),
]
MODELS = {
    each["name"]: {"result": {"tasks": {"boolq": {"value": 0.75, "stderr": 0.02}}}}
    for each in POINTS
}


def test_both_tables_of_camoe_are_written() -> None:
    text = re.sub(" +", " ", "\n".join(steering_parts(POINTS, MODELS)))
    assert (
        "| camoe | 0.25 | 8.000 (-20.0 %) | 12.000 (-20.0 %) | 75.0 ± 2.0 | 50.0 |"
        in text
    )
    assert "| none | 0 | 10.000 | 15.000 | 75.0 ± 2.0 | 50.0 |" in text
    assert (
        "| camoe | 0.1 | 0.2500 | 0.5000 | 0.01000 | 0.02000 | 12.5 % | 0.01000 |"
        in text
    )
    assert "| none | 0 | 0.2500 | 0.5000 | 0 | 0 | 0.0 % | 0 |" in text
    assert "8 exchanges of 2,048 tokens at each endpoint" in text


def test_kinds_are_compared_at_equal_time_and_only_where_both_reach_it() -> None:
    (row,) = at_equal_time(POINTS)  # bottleneck never reaches the time of camoe-0.25
    assert (row["name"], row["time"], row["camoe"]) == (
        "camoe-0.1",
        pytest.approx(0.9),
        0.01,
    )
    # halfway between 9.5 and 8.5 ms the root of the KL is halfway between 0.02 and 0.1
    assert row["bottleneck"] == pytest.approx(0.06**2) and row[
        "ratio"
    ] == pytest.approx(0.36)
    assert (
        at_equal_time([each for each in POINTS if each["kind"] != "bottleneck"]) == []
    )


def test_a_run_without_steered_models_has_no_chapter(tmp_path: Path) -> None:
    assert steering_parts([], {}) == [] and steering_figure([], tmp_path) == {}


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    assert list(steering_figure(POINTS, tmp_path)) == ["steering.png"]
    assert (tmp_path / "steering.png").stat().st_size > 10_000
