"""Figures of a comparison, looked at as matplotlib holds them."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from fcsd.report import plots


def row(delta: float, low: float, high: float, verdict: str | None) -> dict[str, Any]:
    found: dict[str, Any] = {"delta": delta, "interval": [low, high], "num_items": 9}
    return found | ({"verdict": verdict} if verdict else {})


def comparison(by: float) -> dict[str, Any]:
    tasks = {
        "a task with a rather long name": row(-by, -1.2 * by, -0.8 * by, "lost"),
        "b": row(0.01 * by, -0.02 * by, 0.04 * by, "within noise"),
    }
    return {"tasks": tasks, "mean": row(-by / 2, -0.6 * by, -0.4 * by, "lost")}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures, which are closed when they are written."""
    kept: list[Any] = []
    monkeypatch.setattr(plots.plt, "close", kept.append)
    yield kept
    monkeypatch.undo()
    for figure in kept:
        plt.close(figure)


def points(axis: Any) -> list[tuple[float, str, list[float]]]:
    """(difference, colour of the face, bounds) of every point of a panel, a model after the other."""
    found = []
    for container in axis.containers:
        line, _, (bars,) = container
        ((low, _), (high, _)) = bars.get_segments()[0]
        found.append(
            (float(line.get_xdata()[0]), to_hex(line.get_markerfacecolor()), [float(low), float(high)])
        )
    return found


def test_what_is_noise_is_hollow_and_the_bars_are_the_intervals(tmp_path: Path, drawn: list[Any]) -> None:
    plots.plot_deltas({"fcsd": comparison(0.1)}, tmp_path / "x.png", note="a quick look")
    (axis,) = drawn[0].axes
    assert [t.get_text() for t in axis.get_yticklabels()] == ["a task with a rather long name", "b", "mean"]
    assert [(value, face != "#ffffff") for value, face, _ in points(axis)] == [
        (pytest.approx(-10), True), (pytest.approx(0.1), False), (pytest.approx(-5), True),
    ]  # fmt: skip
    assert [bounds for *_, bounds in points(axis)] == [
        pytest.approx([-12, -8]), pytest.approx([-0.2, 0.4]), pytest.approx([-6, -4]),
    ]  # fmt: skip
    assert axis.get_title() == "a quick look" and [t.get_text() for t in axis.get_legend().get_texts()] == [
        "fcsd"
    ]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_far_off_does_not_hide_how_the_others_differ(tmp_path: Path, drawn: list[Any]) -> None:
    plots.plot_deltas({"converted": comparison(0.8), "fcsd": comparison(0.02)}, tmp_path / "x.png")
    plots.plot_deltas({"one": comparison(0.04), "other": comparison(0.02)}, tmp_path / "y.png")
    whole, near = drawn[0].axes
    assert whole.get_xlim()[0] < -96 and -3 < near.get_xlim()[0] < -2.4 and near.get_xlim()[1] > 0
    assert len(drawn[1].axes) == 1


def test_the_members_of_a_group_are_sorted_and_carry_their_number_of_items(
    tmp_path: Path, drawn: list[Any]
) -> None:
    members = {f"mmlu_{i}": row(i / 100, (i - 2) / 100, (i + 2) / 100, None) for i in range(-28, 29)}
    plots.plot_members("mmlu", {"fcsd": {"members": members}}, tmp_path / "x.png")
    (axis,) = drawn[0].axes
    labels = [t.get_text() for t in axis.get_yticklabels()]
    assert len(labels) == 57 and labels[0] == "28 (9)" and labels[-1] == "-28 (9)"
    assert sum(face == "#ffffff" for _, face, _ in points(axis)) == 5, "those whose interval holds 0"
