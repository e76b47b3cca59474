"""Figures of a benchmark of servers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from fcsd.report.figure import (
    SIZE,
    legend_beside,
    model_colours,
    save_figure,
    set_title,
)
from fcsd.report.study_plots import plot_timelines


def plot_serving(result: Mapping[str, Any], folder: Path) -> None:
    """Draw the times of servers by length of prompt and number of requests (paper Fig.
    4, 6, 7), with one panel for each quantity and bars from the lowest to the highest
    round; and one layer of each traced server (Fig. 10).

    result: a result of `fcsd_bench.summary.summarise`.
    """
    rows = [row for row in result["rows"] if row["points"]]
    # Stock is to servers what the original is to models: dark grey.
    colours = model_colours([row["title"] for row in rows], "stock")
    xlabel, labels = _ticks(rows[0]["points"] if rows else [])
    figure, axes = plt.subplots(1, 3, figsize=(SIZE[0] * 2, SIZE[1]))
    panels = [
        ("ttft_ms", "Time to the first token", "ms"),
        ("tbt_ms", "Time between tokens", "ms"),
        ("output_tokens_per_s", "Output", "tokens/s"),
    ]
    for axis, (name, title, unit) in zip(axes, panels, strict=True):
        for index, row in enumerate(rows):
            values = [point[name] for point in row["points"]]
            middle = [value["median"] for value in values]
            reach = [
                [value["median"] - value["lowest"] for value in values],
                [value["highest"] - value["median"] for value in values],
            ]
            positions = [
                tick + 0.8 * ((index + 0.5) / len(rows) - 0.5)
                for tick in range(len(values))
            ]
            style = {
                "color": colours[row["title"]],
                "label": row["title"],
                "capsize": 2,
            }
            axis.bar(positions, middle, width=0.8 / len(rows), yerr=reach, **style)
        axis.set_xticks(range(len(labels)), labels)
        axis.set(xlabel=xlabel, ylabel=unit)
        axis.grid(alpha=0.3, axis="y")
        set_title(axis, title)
    if rows:
        legend_beside(axes[-1])
    save_figure(figure, folder / "serving.png", around=True)
    traces = {
        row["title"]: row["trace"]["layer"] for row in rows if row["trace"] is not None
    }
    if traces:
        plot_timelines(traces, folder / "layer.png")


def _ticks(points: Sequence[Mapping[str, Any]]) -> tuple[str, list[str]]:
    """Name the points by what varies between them."""
    names = {"prompt_tokens": "prompt tokens", "requests": "concurrent requests"}
    varied = [name for name in names if len({point[name] for point in points}) > 1]
    shown = varied or ["prompt_tokens"]
    labels = ["\n".join(str(point[name]) for name in shown) for point in points]
    return ", ".join(names[name] for name in shown), labels
