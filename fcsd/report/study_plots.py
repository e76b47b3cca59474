"""Figures of studies and measurements: layers, the planner, and the timeline of a step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from fcsd.planning.layers.points import loss_text, options_head
from fcsd.report.figure import (
    GREY,
    SIZE,
    draw,
    finish,
    save_figure,
    set_log_scale,
    set_title,
)

Points = Sequence[Mapping[str, Any]]
"""Those of a layer study, or of a plan."""


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
            _plot_ends(next(cells), metric, by_side, result)
        if panels[1]:
            _plot_single(next(cells), metric, by_side, result)
    save_figure(figure, path)


def studied_sides(result: Mapping[str, Any]) -> str:
    """Return which sides of the selected layers a study rewires; empty for both."""
    return {
        "--mlp full --layers": ", attention alone",
        "--attention full --layers": ", MLP side alone",
        "--mlp": ", MLP side, with attention in all layers",
    }.get(options_head(dict(result)), "")


def _plot_ends(
    axis: Any,
    metric: Mapping[str, str],
    by_side: Mapping[str, Any],
    result: Mapping[str, Any],
) -> None:
    num_layers = result["num_hidden_layers"]
    curves = [
        ("last", "last N layers", "black", "o"),
        ("first", "first N layers", GREY, "s"),
    ]
    for selection, label, colour, marker in curves:
        if by_side[selection]:
            # The point at 0 layers is the cost of attention alone, or the original's
            # score; the original's KL is 0, which a logarithmic axis cannot show.
            original = by_side["none"] if metric["better"] == "higher" else []
            points = (by_side["attention"] or original) + by_side[selection]
            counts = [point["num_layers"] for point in points]
            style = {"marker": marker, "color": colour}
            for weights, word, line in _curves(points):
                values, errors = _values(points, metric, weights)
                look = {"label": label + word, "linestyle": line, **style}
                draw(axis, counts, values, yerr=errors, **look)
    xlabel = f"N, rewired layers of {num_layers}{studied_sides(result)}"
    if by_side["attention"]:
        xlabel = f"N of {num_layers} layers whose MLP side is outdated, too"
    axis.set(xlabel=xlabel, xlim=(-0.02 * num_layers, None))
    _finish_layers(axis, metric, "rewired from either end, untrained", grid="both")


def _plot_single(
    axis: Any,
    metric: Mapping[str, str],
    by_side: Mapping[str, Any],
    result: Mapping[str, Any],
) -> None:
    moe_layers = result["moe_layers"]
    kinds = [(True, "black", "MoE layer"), (False, GREY, "dense layer")]
    for is_moe, colour, label in kinds:
        if points := [
            candidate
            for candidate in by_side["single"]
            if (candidate["layers"][0] in moe_layers) == is_moe
        ]:
            # Points and not bars: on a logarithmic axis bars have no base, and those of
            # scores would all look alike.
            layer_indices = [candidate["layers"][0] for candidate in points]
            style = {"linestyle": "none", "color": colour}
            for weights, word, line in _curves(points):
                values, errors = _values(points, metric, weights)
                look = {"label": label + word, **style}
                if line == "--":
                    look["markerfacecolor"] = "white"
                draw(axis, layer_indices, values, yerr=errors, **look)
    for point in by_side["none"] if metric["better"] == "higher" else []:
        (value,), _ = _values([point], metric, "values")
        axis.axhline(
            value, color="black", linewidth=1, linestyle="--", label="original"
        )
    xlabel = f"index of the one rewired layer{studied_sides(result)}"
    # Attention alone, in all layers, is part of every point of such a study.
    if points := by_side["attention"]:
        xlabel = "index of the one layer whose MLP side is outdated, too"
        for weights, word, line in _curves(points):
            (value,), _ = _values(points, metric, weights)
            axis.axhline(
                value, color=GREY, linestyle=line, label=f"attention alone{word}"
            )
    axis.set(xlabel=xlabel)
    axis.set_axisbelow(True)
    _finish_layers(axis, metric, "one layer at a time, untrained", grid="y")


def _curves(points: Points) -> list[tuple[str, str, str]]:
    """Return the weights that these points were measured with, as (key of the point,
    suffix in the legend, line style).
    """
    if not all("calibrated" in point for point in points):
        return [("values", "", "-")]
    return [("values", ", copied", "-"), ("calibrated", ", calibrated", "--")]


def _values(
    points: Points, metric: Mapping[str, str], weights: str
) -> tuple[list[float], list[float]]:
    """Return values and standard errors of a metric; scores are shares, shown in per
    cent.
    """
    measured = [point[weights][metric["name"]] for point in points]
    scale = 100 if metric["better"] == "higher" else 1
    errors = [scale * (value["stderr"] or 0.0) for value in measured]
    return [scale * value["value"] for value in measured], errors


def _finish_layers(
    axis: Any, metric: Mapping[str, str], title: str, grid: Literal["both", "y"]
) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    name = "KL to the original" if metric["name"] == "kl" else metric["name"]
    set_title(axis, f"{name}: {title}")
    # A KL spans orders of magnitude.
    if metric["better"] == "lower":
        axis.set_ylabel(metric["unit"])
        set_log_scale(axis)
    else:
        axis.set(ylabel=f"{metric['unit']} (per cent)", ylim=(-2, 102))
    finish(axis, grid)


_WORTH = {
    "last": ("last N layers", "black", "o"),
    "first": ("first N layers", GREY, "s"),
    "attention": ("attention alone", "black", "^"),
    "without": ("all but the special layers", "black", "D"),
}
"""Name, colour and marker of a curve by its side."""


def plot_worth(rows: Points, path: Path, fronts: Points) -> None:
    """Draw the planned speed-up of each selection of a layer study against its cost in
    quality, and the steps of each front.

    rows, fronts: those that `fcsd.pipeline.plan` makes from a study.
    """
    figure, axis = plt.subplots(figsize=SIZE)
    measured = {row["side"] for row in rows}
    # A run of layers from either end begins with attention alone, where it is a point.
    curves = {end: {end, "attention"} for end in ("last", "first") if end in measured}
    curves = (curves or {"attention": {"attention"}}) | {"without": {"without"}}
    for end, sides in curves.items():
        name, colour, marker = _WORTH[end]
        for weights, line in (("copied", "-"), ("calibrated", "--")):
            points = [row for row in rows if row["side"] in sides]
            points = [row for row in points if row["weights"] == weights]
            points.sort(key=lambda row: row["num_layers"])
            if points:
                speed = [row["speed_up"] for row in points]
                loss = [row["loss"] for row in points]
                errors = [row["stderr"] or 0.0 for row in points]
                look = {"label": f"{name}, {weights}", "linestyle": line}
                draw(
                    axis, speed, loss, yerr=errors, marker=marker, color=colour, **look
                )
                # Number only the middle and the last point: more labels would overlap.
                for index in sorted({len(points) // 2, len(points) - 1}):
                    axis.annotate(
                        str(points[index]["num_layers"]),
                        (speed[index], loss[index]),
                        xytext=(5, 0),
                        textcoords="offset points",
                        fontsize="small",
                    )
    for front, line in zip(fronts, ("-", "--"), strict=False):
        # The regular model loses nothing, which a logarithmic axis cannot show.
        if steps := front["rows"][1 : front["steps"]]:
            weights = "calibrated" if front["calibrated"] else "copied"
            label = f"halves by time saved per loss, {weights} (predicted)"
            speed = [row["speed_up"] for row in steps]
            loss = [row["loss"] for row in steps]
            look = {"label": label, "linestyle": line, "color": "C0"}
            draw(axis, speed, loss, marker="x", **look)
    unit, metric = "", fronts[0]["metric"]
    if metric["better"] == "lower":
        set_log_scale(axis)
        unit = f", {metric['unit']}"
    axis.set(
        xlabel="planned speed-up",
        ylabel=f"{loss_text(metric)} before any distillation{unit}",
    )
    numbers = "rewired layers"
    if any(row["options"].startswith("--mlp ") for row in rows):
        numbers = "layers whose MLP side is outdated"
    set_title(axis, f"Which conversion is worth it; numbers are {numbers}")
    finish(axis)
    save_figure(figure, path)


def plot_sweep(facts: Mapping[str, Any], path: Path) -> None:
    """Draw the planned gains and the tokens/s per GPU against the swept value.

    facts: what `fcsd plan --sweep` prints as JSON. A value that was refused has no
    point.
    """
    rows = [row for row in facts["rows"] if "times" in row]
    ticks = range(len(rows))
    figure, (gains, rates) = plt.subplots(1, 2, figsize=(2 * SIZE[0], SIZE[1]))
    curves = [
        (gains, "times", "speed_up", "over regular blocks", "black"),
        (gains, "times", "over_exact", "over the best exact schedule", GREY),
        (rates, "tokens_per_second_per_gpu", "overlapped", "overlapped", "black"),
        (rates, "tokens_per_second_per_gpu", "regular", "regular", GREY),
    ]
    for axis, facts_of, key, label, colour in curves:
        values = [row[facts_of][key] for row in rows]
        draw(axis, ticks, values, color=colour, label=label)
    gains.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    rates.set(ylim=(0, None))
    set_title(gains, "Planned gain of FarSkip")
    set_title(rates, "Tokens/s per GPU")
    for axis in (gains, rates):
        axis.set_xticks(ticks, [row["value"] for row in rows])
        axis.set(xlabel=facts["swept"])
        finish(axis)
    save_figure(figure, path)
