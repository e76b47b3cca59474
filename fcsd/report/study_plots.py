"""Figures of studies and measurements: layers, routing, steering, serving, the planner,
and the timeline of a step.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fcsd.report.figure import (
    GREY,
    SIZE,
    legend_beside,
    model_colours,
    save_figure,
    set_title,
)


def plot_timelines(
    timelines: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path
) -> None:
    """Draw when each model computes and when its link is busy (paper Fig. 10 to 12),
    with one panel above the other.

    timelines: name -> row -> (begin, end) in ms.
    """
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(2 * SIZE[0], 1.4 * len(timelines)),
        sharex=True,
        squeeze=False,
    )
    for axis, (name, rows) in zip(axes[:, 0], timelines.items(), strict=True):
        for index, (row, intervals) in enumerate(rows.items()):
            bars = [(begin, end - begin) for begin, end in intervals]
            axis.broken_barh(bars, (-index - 0.4, 0.8), color=f"C{index}", label=row)
        axis.set(yticks=[-index for index in range(len(rows))], yticklabels=list(rows))
        set_title(axis, name)
    axes[-1, 0].set(xlabel="ms")
    save_figure(figure, path)


def plot_layers(result: Mapping[str, Any], path: Path) -> None:
    """Draw the layer study, with one row of panels for each metric: layers rewired from
    either end (paper Fig. 3), and one layer at a time.

    result: the content of `layers.json` from `fcsd.planning.layers.study`.
    """
    metrics, points = result["metrics"], result["points"]
    by_side = {
        selection: [point for point in points if point["side"] == selection]
        for selection in ("none", "attention", "first", "last", "single")
    }
    panels = [by_side["first"] + by_side["last"] != [], by_side["single"] != []]
    figure, axes = plt.subplots(
        len(metrics),
        sum(panels),
        figsize=(SIZE[0] * 0.85 * sum(panels), SIZE[1] * len(metrics)),
        squeeze=False,
    )
    for row, metric in zip(axes, metrics, strict=True):
        cells = iter(row)
        if panels[0]:
            _plot_ends(next(cells), metric, by_side, result["num_hidden_layers"])
        if panels[1]:
            _plot_single(next(cells), metric, by_side, result["moe_layers"])
    save_figure(figure, path)


def _plot_ends(
    axis: Any, metric: Mapping[str, str], by_side: Mapping[str, Any], num_layers: int
) -> None:
    for selection, label, colour, marker in (
        ("last", "last N layers", "black", "o"),
        ("first", "first N layers", GREY, "s"),
    ):
        if by_side[selection]:
            # At 0 layers stands what attention alone costs, or the original's score; its
            # KL is 0, which a logarithmic axis cannot show.
            original = by_side["none"] if metric["better"] == "higher" else []
            points = (by_side["attention"] or original) + by_side[selection]
            for weights, word, line in _curves(points):
                style = {
                    "marker": marker,
                    "markersize": 4,
                    "capsize": 2,
                    "color": colour,
                    "linestyle": line,
                }
                counts = [point["num_layers"] for point in points]
                axis.errorbar(
                    counts,
                    *_values(points, metric, weights),
                    label=label + word,
                    **style,
                )
    xlabel = f"N, rewired layers of {num_layers}"
    if by_side["attention"]:
        xlabel = f"N layers of {num_layers} whose MLP side is outdated, too"
    axis.set(xlabel=xlabel, xlim=(-0.02 * num_layers, None))
    _finish_layers(axis, metric, "rewired from either end, untrained", grid="both")


def _plot_single(
    axis: Any,
    metric: Mapping[str, str],
    by_side: Mapping[str, Any],
    moe_layers: Sequence[int],
) -> None:
    for is_moe, colour, label in (
        (True, "black", "MoE layer"),
        (False, GREY, "dense layer"),
    ):
        if points := [
            candidate
            for candidate in by_side["single"]
            if (candidate["layers"][0] in moe_layers) == is_moe
        ]:
            # Points and not bars: on a logarithmic axis bars have no base, and those of
            # scores would all look alike.
            style = {
                "linestyle": "none",
                "marker": "o",
                "markersize": 5,
                "capsize": 2,
                "color": colour,
            }
            layer_indices = [candidate["layers"][0] for candidate in points]
            for weights, word, line in _curves(points):
                fill = {"markerfacecolor": "white"} if line == "--" else {}
                axis.errorbar(
                    layer_indices,
                    *_values(points, metric, weights),
                    label=label + word,
                    **style,
                    **fill,
                )
    for point in by_side["none"] if metric["better"] == "higher" else []:
        (value,), _ = _values([point], metric, "values")
        axis.axhline(
            value, color="black", linewidth=1, linestyle="--", label="original"
        )
    axis.set(xlabel="index of the one rewired layer")
    axis.set_axisbelow(True)
    _finish_layers(axis, metric, "one layer at a time, untrained", grid="y")


def _curves(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the weights that these points were measured with, as (key of the point,
    suffix in the legend, line style).
    """
    if not all("calibrated" in point for point in points):
        return [("values", "", "-")]
    return [("values", ", copied", "-"), ("calibrated", ", calibrated", "--")]


def _values(
    points: Sequence[Mapping[str, Any]], metric: Mapping[str, str], weights: str
) -> tuple[list[float], list[float]]:
    """Return values and standard errors of a metric; scores are shares, shown in per
    cent.
    """
    values, scale = (
        [point[weights][metric["name"]] for point in points],
        100 if metric["better"] == "higher" else 1,
    )
    return [scale * value["value"] for value in values], [
        scale * (value["stderr"] or 0.0) for value in values
    ]


def _finish_layers(
    axis: Any, metric: Mapping[str, str], title: str, grid: Literal["both", "y"]
) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    name = "KL to the original" if metric["name"] == "kl" else metric["name"]
    set_title(axis, f"{name}: {title}")
    # A KL spans orders of magnitude.
    if metric["better"] == "lower":
        axis.set(ylabel=metric["unit"], yscale="log")
    else:
        axis.set(ylabel=f"{metric['unit']} (per cent)", ylim=(-2, 102))
    axis.grid(alpha=0.3, axis=grid)
    axis.legend()


def plot_steering(
    points: Sequence[Mapping[str, Any]], path: Path, note: str = ""
) -> None:
    """Draw the output's KL and the mean of the tasks against the mean time of an
    exchange, with one curve for each kind of bias.

    points: those of one model from `fcsd.report.steering.steering_points`; the first is
    without a bias.
    """
    unbiased, kinds = (
        points[0],
        list(dict.fromkeys(point["kind"] for point in points[1:])),
    )
    figure, axes = plt.subplots(1, 2, figsize=(2 * SIZE[0], SIZE[1]))
    for index, kind in enumerate(kinds):
        # Every curve begins at the model without a bias.
        curve = [unbiased, *(point for point in points if point["kind"] == kind)]
        times = [
            100 * point["exchange"]["mean_s"] / unbiased["exchange"]["mean_s"]
            for point in curve
        ]
        style = {
            "color": f"C{index}",
            "marker": "o",
            "markersize": 4,
            "capsize": 2,
            "label": kind,
        }
        kl = [point["kl"] for point in curve]
        axes[0].errorbar(
            times,
            [estimate["kl"] for estimate in kl],
            yerr=[estimate["stderr"] or 0.0 for estimate in kl],
            **style,
        )
        errors = [100 * (point["mean_stderr"] or 0.0) for point in curve]
        axes[1].errorbar(
            times, [100 * point["mean"] for point in curve], yerr=errors, **style
        )
        for point, time in zip(curve[1:], times[1:], strict=True):
            label_style = {
                "textcoords": "offset points",
                "xytext": (4, 4),
                "fontsize": "x-small",
                "color": f"C{index}",
            }
            axes[0].annotate(
                f"{point['strength']:g}", (time, point["kl"]["kl"]), **label_style
            )
    set_title(axes[0], "KL of the output to the original's", note)
    set_title(axes[1], "Mean of the tasks", note)
    axes[0].set(ylabel="nats per token", ylim=(0, None))
    axes[1].set(ylabel="per cent")
    for axis in axes:
        axis.set(xlabel="mean time of an exchange, per cent of that without a bias")
        axis.grid(alpha=0.3)
        axis.legend()
    save_figure(figure, path)


def plot_serving(result: Mapping[str, Any], folder: Path) -> None:
    """Draw the times of servers by length of prompt (paper Fig. 4, 6, 7), with one
    panel for each quantity and bars from the lowest to the highest round; and one layer
    of each traced server (Fig. 10).

    result: a result of `fcsd.planning.servers.summary.summarise`.
    """
    rows = [row for row in result["rows"] if row["points"]]
    # Stock is to servers what the original is to models: dark grey.
    colours = model_colours([row["title"] for row in rows], "stock")
    figure, axes = plt.subplots(1, 3, figsize=(SIZE[0] * 2, SIZE[1]))
    for axis, (name, title, unit) in zip(
        axes,
        (
            ("ttft_ms", "Time to the first token", "ms"),
            ("tbt_ms", "Time between tokens", "ms"),
            ("output_tokens_per_s", "Output", "tokens/s"),
        ),
        strict=True,
    ):
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
        lengths = (
            [str(point["prompt_tokens"]) for point in rows[0]["points"]] if rows else []
        )
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set(xlabel="tokens of the prompt", ylabel=unit)
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


def plot_routing(result: Mapping[str, Any], folder: Path) -> None:
    """Draw loads.png (experts by layers), traffic.png (sources by destinations) and,
    for two models, shift.png.

    result: the content of `routing.json` from `fcsd.steering.routing.study`.
    """
    models = result["models"]
    loads = [np.array(facts["counts"]).sum(1) for facts in models]
    shares = [load / load.mean(1, keepdims=True) for load in loads]
    traffic = [
        100 * np.array(facts["traffic"]) / np.sum(facts["traffic"]) for facts in models
    ]
    for file, matrices, label, names in (
        ("loads.png", shares, "load / mean of the layer", ("expert", "MoE layer")),
        (
            "traffic.png",
            traffic,
            "per cent of all pairs",
            ("to endpoint", "from endpoint"),
        ),
    ):
        figure, axes = plt.subplots(
            1, len(models), figsize=(SIZE[0] * len(models), SIZE[1]), squeeze=False
        )
        # One colour scale for both models, so that they can be compared.
        highest = max(float(matrix.max()) for matrix in matrices)
        for axis, facts, matrix in zip(axes[0], models, matrices, strict=True):
            image = axis.imshow(
                matrix,
                aspect="auto",
                cmap="viridis",
                vmin=0,
                vmax=highest,
                interpolation="nearest",
            )
            axis.set(xlabel=names[0], ylabel=names[1])
            for scale in (axis.xaxis, axis.yaxis):
                scale.set_major_locator(MaxNLocator(integer=True))
            if file == "loads.png":
                axis.yaxis.set_major_formatter(FuncFormatter(_named(facts["layers"])))
            set_title(axis, Path(facts["name"]).name)
            figure.colorbar(image, ax=axis, label=label)
        save_figure(figure, folder / file)
    if (comparison := result["comparison"]) is not None:
        figure, (moved, spread) = plt.subplots(1, 2, figsize=(SIZE[0] * 2, SIZE[1]))
        layers = models[0]["layers"]
        moved.bar(
            layers, [100 * share for share in comparison["layer_moved"]], color=GREY
        )
        moved.set(ylabel="per cent of (token, expert) pairs")
        set_title(moved, "Routes moved")
        for facts, colour in ((models[1], "0.25"), (models[0], "C0")):
            spread.plot(
                layers,
                facts["layer_cv"],
                color=colour,
                marker="o",
                markersize=3,
                label=Path(facts["name"]).name,
            )
        spread.set(ylabel="standard deviation / mean of loads", ylim=(0, None))
        set_title(spread, "How unevenly experts are used")
        spread.legend()
        for axis in (moved, spread):
            axis.set(xlabel="MoE layer")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        save_figure(figure, folder / "shift.png")


def _named(layers: Sequence[int]) -> Any:
    """Return a formatter that labels each row of a matrix with its layer's index."""
    return lambda value, position: (
        str(layers[int(value)]) if 0 <= value < len(layers) else ""
    )


def plot_worth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the planned speed-up of each selection of a layer study against its cost in
    quality.

    rows: those that `fcsd.pipeline.plan` makes from a study.
    """
    figure, axis = plt.subplots(figsize=SIZE)
    for end, colour, marker in (("last", "black", "o"), ("first", GREY, "s")):
        for weights, line in (("copied", "-"), ("calibrated", "--")):
            points = sorted(
                (
                    row
                    for row in rows
                    if (row["side"], row["weights"]) == (end, weights)
                ),
                key=lambda row: row["num_layers"],
            )
            if points:
                speed = [row["speed_up"] for row in points]
                loss = [row["loss"] for row in points]
                errors = [row["stderr"] or 0.0 for row in points]
                style: Any = {
                    "marker": marker, "markersize": 4, "color": colour, "linestyle": line, "capsize": 2
                }  # fmt: skip
                axis.errorbar(
                    speed,
                    loss,
                    yerr=errors,
                    label=f"{end} N layers, {weights}",
                    **style,
                )
                # Number only the middle and the last point: more labels would overlap.
                for index in sorted({len(points) // 2, len(points) - 1}):
                    label_style: Any = {
                        "xytext": (5, 0),
                        "textcoords": "offset points",
                        "fontsize": "small",
                    }
                    axis.annotate(
                        str(points[index]["num_layers"]),
                        (speed[index], loss[index]),
                        **label_style,
                    )
    unit = ""
    if rows[0]["metric"] == "KL":
        axis.set_yscale("log")
        unit = ", nats per token"
    axis.set(
        xlabel="planned speed-up",
        ylabel=f"{rows[0]['metric']} before any distillation{unit}",
    )
    axis.grid(alpha=0.3)
    set_title(axis, "Which conversion is worth it; numbers are rewired layers")
    axis.legend()
    save_figure(figure, path)
