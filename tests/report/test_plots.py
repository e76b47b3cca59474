"""Figures of a comparison, checked in the objects of matplotlib."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from fcsd.report import plots, study_plots
from fcsd.report.figure import model_colours, set_log_scale

COLOURS = model_colours(["original", "converted", "fcsd", "one", "other"])


def row(delta: float, low: float, high: float, verdict: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"delta": delta, "interval": [low, high], "num_items": 9}
    return facts | ({"verdict": verdict} if verdict else {})


def comparison(by: float) -> dict[str, Any]:
    tasks = {
        "a task with a rather long name": row(-by, -1.2 * by, -0.8 * by, "lost"),
        "b": row(0.01 * by, -0.02 * by, 0.04 * by, "within noise"),
    }
    return {"tasks": tasks, "mean": row(-by / 2, -0.6 * by, -0.4 * by, "lost")}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Yield the figures, which are normally closed once they are written."""
    kept: list[Any] = []
    monkeypatch.setattr(plt, "close", kept.append)
    yield kept
    monkeypatch.undo()
    for figure in kept:
        plt.close(figure)


def points(axis: Any) -> list[tuple[float, str, list[float]]]:
    """Return (difference, face colour, bounds) of every point of a panel, one model
    after another.
    """
    shapes = []
    for container in axis.containers:
        line, _, (bars,) = container
        (low, _), (high, _) = bars.get_segments()[0]
        shapes.append(
            (
                float(line.get_xdata()[0]),
                to_hex(line.get_markerfacecolor()),
                [float(low), float(high)],
            )
        )
    return shapes


def test_what_is_noise_is_hollow_and_the_bars_are_the_intervals(
    tmp_path: Path, drawn: list[Any]
) -> None:
    plots.plot_deltas(
        {"fcsd": comparison(0.1)},
        tmp_path / "x.png",
        note="a quick look",
        colours=COLOURS,
    )
    (axis,) = drawn[0].axes
    assert [t.get_text() for t in axis.get_yticklabels()] == [
        "a task with a rather long name",
        "b",
        "mean",
    ]
    assert [(value, face != "#ffffff") for value, face, _ in points(axis)] == [
        (pytest.approx(-10), True), (pytest.approx(0.1), False), (pytest.approx(-5), True),
    ]  # fmt: skip
    assert [bounds for *_, bounds in points(axis)] == [
        pytest.approx([-12, -8]), pytest.approx([-0.2, 0.4]), pytest.approx([-6, -4]),
    ]  # fmt: skip
    assert axis.get_title() == "Difference to the original"
    assert [text.get_text() for text in axis.texts] == ["a quick look"]
    assert [t.get_text() for t in axis.get_legend().get_texts()] == ["fcsd"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_far_off_does_not_hide_how_the_others_differ(
    tmp_path: Path, drawn: list[Any]
) -> None:
    plots.plot_deltas(
        {"converted": comparison(0.8), "fcsd": comparison(0.02)},
        tmp_path / "x.png",
        colours=COLOURS,
    )
    plots.plot_deltas(
        {"one": comparison(0.04), "other": comparison(0.02)},
        tmp_path / "y.png",
        colours=COLOURS,
    )
    whole, near = drawn[0].axes
    assert whole.get_xlim()[0] < -96
    assert -3 < near.get_xlim()[0] < -2.4
    assert near.get_xlim()[1] > 0
    assert len(drawn[1].axes) == 1


def test_the_members_of_a_group_are_sorted_and_carry_their_number_of_items(
    tmp_path: Path, drawn: list[Any]
) -> None:
    members = {
        f"mmlu_{i}": row(i / 100, (i - 2) / 100, (i + 2) / 100, None)
        for i in range(-28, 29)
    }
    plots.plot_members(
        "mmlu", {"fcsd": {"members": members}}, tmp_path / "x.png", colours=COLOURS
    )
    (axis,) = drawn[0].axes
    labels = [t.get_text() for t in axis.get_yticklabels()]
    assert len(labels) == 57 and labels[0] == "28 (9)" and labels[-1] == "-28 (9)"
    assert sum(face == "#ffffff" for _, face, _ in points(axis)) == 5, (
        "those whose interval holds 0"
    )


def series(axis: Any) -> dict[str, tuple[list[float], list[float], str]]:
    """Return label -> positions, values and colour of the lines of a panel."""
    return {
        str(line.get_label()): (
            list(line.get_xdata()),
            list(line.get_ydata()),
            to_hex(line.get_color()),
        )
        for line in axis.lines
    }


def test_a_model_has_one_colour_in_all_figures(
    tmp_path: Path, drawn: list[Any]
) -> None:
    colours = model_colours(["original", "converted", "fcsd", "sft"])
    assert len(set(colours.values())) == 4
    points_ = [{"step": 1, "tokens": 512, "kl": 1.0, "score": 0.5, "stderr": 0.1}]
    plots.plot_losses({"fcsd": points_}, tmp_path / "a.png", colours)
    plots.plot_scores(
        {"sft": points_, "fcsd": points_}, "pass@1", tmp_path / "b.png", colours
    )
    plots.plot_deltas({"fcsd": comparison(0.1)}, tmp_path / "c.png", colours=colours)
    expected = to_hex(colours["fcsd"])
    assert (
        series(drawn[0].axes[0])["fcsd"][2]
        == series(drawn[1].axes[0])["fcsd"][2]
        == expected
    )
    assert points(drawn[2].axes[0])[0][1] == expected


def test_trainings_are_drawn_by_tokens_and_shares_in_per_cent(
    tmp_path: Path, drawn: list[Any]
) -> None:
    curve = [
        {"tokens": 1000, "score": 0.25, "stderr": 0.05, "kl": 2.0},
        {"tokens": 1_500_000, "score": 0.5, "stderr": None},
    ]
    plots.plot_scores({"fcsd": curve}, "pass@1", tmp_path / "a.png", colours=COLOURS)
    plots.plot_scores(
        {"fcsd": [point | {"score": 100 * point["score"]} for point in curve]},
        "perplexity",
        tmp_path / "b.png",
        colours=COLOURS,
    )
    axis, other = drawn[0].axes[0], drawn[1].axes[0]
    assert series(axis)["fcsd"][:2] == ([1000, 1_500_000], [25.0, 50.0])
    assert axis.get_xlabel() == "tokens trained on"
    assert axis.get_ylabel() == "pass@1 (per cent)"
    assert axis.xaxis.get_major_formatter()(1_500_000, 0) == "1.5 M"
    assert series(other)["fcsd"][1] == [25.0, 50.0]
    assert other.get_ylabel() == "perplexity"


def test_the_sweep_has_a_tick_for_every_value_that_was_tried(
    tmp_path: Path, drawn: list[Any]
) -> None:
    tried = [("batch_size_tokens", 65536, 2e-5, 0.3), ("batch_size_tokens", 131072, 2e-5, 0.2),
             ("learning_rate", 131072, 2e-5, 0.2), ("learning_rate", 131072, 4e-5, None)]  # fmt: skip
    rows = [
        dict(
            zip(
                ("stage", "batch_size_tokens", "learning_rate", "loss"),
                row,
                strict=True,
            )
        )
        for row in tried
    ]
    plots.plot_sweep(
        {
            "batch_size_tokens": 131072, "learning_rate": 2e-5, "last_steps": 9, "candidates": rows,
        },
        tmp_path,
    )  # fmt: skip
    batch, rate = drawn[0].axes
    labels = [
        [tick.get_text() for tick in axis.get_xticklabels()] for axis in (batch, rate)
    ]
    assert labels == [["65,536", "131,072"], ["2e-05", "4e-05"]]
    assert list(batch.get_xticks(minor=True)) == []
    assert series(rate)["diverged"][0] == [4e-5]
    assert series(batch)["chosen"][0] == [131072]
    assert batch.get_title() == "Batch size, at learning rate 2e-05"


def test_the_rate_of_the_first_stage_is_drawn_among_those_of_the_second(
    tmp_path: Path, drawn: list[Any]
) -> None:
    tried = [("batch_size_tokens", 512, 2e-3, 0.4), ("batch_size_tokens", 1024, 2e-3, 0.2),
             ("learning_rate", 1024, 3e-3, 0.5), ("learning_rate", 1024, 1e-3, 0.3)]  # fmt: skip
    keys = ("stage", "batch_size_tokens", "learning_rate", "loss")
    result = {
        "batch_size_tokens": 1024,
        "learning_rate": 2e-3,
        "last_steps": 9,
        "candidates": [dict(zip(keys, row, strict=True)) for row in tried],
    }
    plots.plot_sweep(result, tmp_path)
    _, rate = drawn[0].axes
    (line,) = [line for line in rate.lines if len(line.get_xdata()) == 3]
    assert list(line.get_xdata()) == [1e-3, 2e-3, 3e-3]
    assert list(line.get_ydata()) == [0.3, 0.2, 0.5]
    assert series(rate)["chosen"][0] == [2e-3]


def test_what_guessing_gives_is_marked_in_the_rows_of_its_tasks(
    tmp_path: Path, drawn: list[Any]
) -> None:
    scores = {"original": {"a": (0.5, 0.01), "b": (0.9, 0.01)}}
    plots.plot_models(
        ["a", "b"], scores, tmp_path / "x.png", chance={"b": 0.25}, colours=COLOURS
    )
    (axis,) = drawn[0].axes
    places, rows, _ = series(axis)["chance"]
    assert places == [25, 25]
    assert rows == [0.6, 1.4]
    assert axis.get_title() == "Scores of every model"
    whole = comparison(0.8)
    whole["tasks"]["b"]["original"] = 0.9
    plots.plot_deltas(
        {"fcsd": whole}, tmp_path / "y.png", chance={"b": 0.25}, colours=COLOURS
    )
    assert series(drawn[1].axes[0])["chance"][0] == [pytest.approx(-65)] * 2


def test_on_logarithmic_axes_there_are_points_and_no_bars(
    tmp_path: Path, drawn: list[Any]
) -> None:
    values = {"kl": {"value": 0.01, "stderr": 0.001}}
    single = [
        {"side": "single", "num_layers": 1, "layers": [i], "values": values}
        for i in (0, 1)
    ]
    study = {
        "metrics": [{"name": "kl", "unit": "nats per token", "better": "lower"}], "num_hidden_layers": 2,
        "moe_layers": [1], "points": single, "study": {"attention": "partial", "mlp": "outdated"},
    }  # fmt: skip
    study_plots.plot_layers(study, tmp_path / "x.png")
    (axis,) = drawn[0].axes
    assert axis.get_yscale() == "log"
    assert len(axis.patches) == 0
    assert len(axis.containers) == 2
    assert axis.get_title() == "KL to the original: one layer at a time, untrained"


@pytest.mark.parametrize("values", [(0.151, 0.178), (0.02, 1.6), (0.0004, 7.0)])
def test_a_logarithmic_axis_has_plain_numbers_however_wide_it_is(
    values: tuple[float, float],
) -> None:
    figure, axis = plt.subplots()
    axis.plot([0, 1], values)
    set_log_scale(axis)
    figure.canvas.draw()
    low, high = axis.get_ylim()
    ticks = axis.yaxis.get_ticklabels()
    shown = [tick for tick in ticks if low <= tick.get_position()[1] <= high]
    plt.close(figure)
    assert 2 <= len(shown) <= 9
    assert [float(tick.get_text()) for tick in shown] == pytest.approx(
        [tick.get_position()[1] for tick in shown]
    )
