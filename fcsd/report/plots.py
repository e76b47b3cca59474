"""Figures of a run: loss and KL, scores while training, models side by side, the layer study, the sweep.

A model has one colour in all figures of a report (`model_colours`); what is no model is black and grey.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np

matplotlib.use("Agg")  # files only; no display is needed

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

_SIZE = (6.4, 3.8)
_GREY = "0.6"
Colours = Mapping[str, str]


def model_colours(names: Sequence[str], original: str = "original") -> dict[str, str]:
    """Give every model of a report its colour, by its place among them; the original is dark grey."""
    others = [name for name in names if name != original]
    return {original: "0.25"} | {name: f"C{index % 10}" for index, name in enumerate(others)}


def plot_losses(
    histories: Mapping[str, Sequence[Mapping[str, float]]], path: Path, colours: Colours | None = None
) -> None:
    """Draw the training loss by tokens for every run; each divergence and cross-entropy in panels of their own.

    histories: name -> points with `tokens` beside what was logged.
    """
    colours = colours or model_colours(list(histories))
    titles = {
        "kl": "KL to the teacher", "reverse_kl": "reverse KL to the teacher", "jsd": "JSD to the teacher",
        "ce": "cross-entropy",
    }  # fmt: skip
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for key, title in titles.items():
        for name, points in histories.items():
            # On a logarithmic axis there is no place for 0.
            if series := [(point["tokens"], point[key]) for point in points if point.get(key, 0) > 0]:
                panels.setdefault(title, {})[name] = series
    count = max(1, len(panels))
    figure, axes = plt.subplots(1, count, figsize=(_SIZE[0] * count, _SIZE[1]), squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=False):
        for name, series in lines.items():
            axis.plot(*zip(*series, strict=True), color=colours[name], label=name)
        axis.set(ylabel="nats per token", yscale="log")
        _title(axis, f"Training loss: {title}")
        _token_axis(axis)
        axis.legend()
    _save(figure, path)


def plot_timelines(timelines: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path) -> None:
    """Draw when each model computes and when its link is busy (paper Fig. 10 to 12), one above the other.

    timelines: name -> row -> (begin, end) in ms.
    """
    figure, axes = plt.subplots(
        len(timelines), 1, figsize=(2 * _SIZE[0], 1.4 * len(timelines)), sharex=True, squeeze=False
    )
    for axis, (name, rows) in zip(axes[:, 0], timelines.items(), strict=True):
        for place, (row, intervals) in enumerate(rows.items()):
            bars = [(begin, end - begin) for begin, end in intervals]
            axis.broken_barh(bars, (-place - 0.4, 0.8), color=f"C{place}", label=row)
        axis.set(yticks=[-place for place in range(len(rows))], yticklabels=list(rows))
        _title(axis, name)
    axes[-1, 0].set(xlabel="ms")
    _save(figure, path)


def plot_scores(
    curves: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, path: Path, colours: Colours | None = None
) -> None:
    """Draw the early-stopping score by tokens, with a band of one standard error to each side; shares in per cent.

    curves: name -> points of `fcsd.distill.early_stopping.EarlyStopper.record`, with `tokens`.
    """
    colours = colours or model_colours(list(curves))
    figure, axis = plt.subplots(figsize=_SIZE)
    by_kl = metric == "heldout_kl"
    shares = not by_kl and all(abs(point["score"]) <= 1 for points in curves.values() for point in points)
    scale, lowest = 100.0 if shares else 1.0, 0.0
    for name, points in curves.items():
        tokens, scores = [point["tokens"] for point in points], [scale * point["score"] for point in points]
        errors = [scale * (point["stderr"] or 0.0) for point in points]
        axis.plot(tokens, scores, marker="o", markersize=3, color=colours[name], label=name)
        low = [score - error for score, error in zip(scores, errors, strict=True)]
        if by_kl:  # on a logarithmic axis
            low = [max(value, score / 10) for value, score in zip(low, scores, strict=True)]
        high = [score + error for score, error in zip(scores, errors, strict=True)]
        axis.fill_between(tokens, low, high, color=colours[name], alpha=0.2, linewidth=0)
        lowest = min(lowest, *low)
    if by_kl:
        axis.set(ylabel="nats per token", yscale="log")
        _title(axis, "KL to the original on held-out text, while training")
    else:
        name = metric.partition(",")[0]
        axis.set(ylabel=f"{name}{' (per cent)' if shares else ''}")
        _title(axis, f"Early stopping: {name} while training")
        axis.set_ylim(bottom=lowest - 0.02 * scale)
    _token_axis(axis)
    axis.legend()
    _save(figure, path)


def _token_axis(axis: Any) -> None:
    axis.set_xlabel("tokens trained on")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, place: _count(value)))
    axis.grid(alpha=0.3)


def _count(number: float) -> str:
    """Format `512`, `1.5 M`, `10 B`."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:g}"


def plot_models(
    tasks: Sequence[str],
    models: Mapping[str, Mapping[str, tuple[float, float]]],
    path: Path,
    note: str = "",
    colours: Colours | None = None,
    chance: Mapping[str, float] | None = None,
) -> None:
    """Draw scores in per cent, a row a task and a colour a model, with bars of one standard error.

    models: name -> task -> score and standard error, as shares. chance: task -> the score of guessing.
    """
    colours = colours or model_colours(list(models))
    figure, axis = plt.subplots(figsize=(_SIZE[0], _rows_height(len(tasks), len(models))))
    for index, (name, scores) in enumerate(models.items()):
        places = [tick + 0.7 * ((index + 0.5) / len(models) - 0.5) for tick in range(len(tasks))]
        values, errors = ([100 * scores[task][part] for task in tasks] for part in (0, 1))
        style: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 5, "capsize": 2}
        axis.errorbar(values, places, xerr=errors, color=colours[name], label=name, **style)
    for tick, task in enumerate(tasks):
        _chance(axis, tick, (chance or {}).get(task))
    axis.set_yticks(range(len(tasks)), tasks)
    axis.set(xlabel="score (per cent), one standard error", xlim=(-2, 102), ylim=(len(tasks) - 0.5, -0.5))
    axis.grid(alpha=0.3, axis="x")
    _title(axis, "Scores of every model", note)
    _legend_beside(axis)
    _save(figure, path, around=True)


def _rows_height(num_rows: int, num_models: int) -> float:
    return max(2.2, num_rows * (0.12 + 0.18 * num_models) + 1.2)


def _chance(axis: Any, tick: int, share: float | None) -> None:
    """Mark where guessing would lie in a row; the axis does not grow for it."""
    if share is None:
        return
    labelled = any(text == "chance" for text in axis.get_legend_handles_labels()[1])
    axis.plot(
        [100 * share] * 2, [tick - 0.4, tick + 0.4], color=_GREY, linestyle=":", scalex=False, scaley=False,
        label="_" if labelled else "chance",
    )  # fmt: skip


def plot_deltas(
    comparisons: Mapping[str, Mapping[str, Any]],
    path: Path,
    note: str = "",
    colours: Colours | None = None,
    chance: Mapping[str, float] | None = None,
) -> None:
    """Draw the difference to the original in points with its 95 % interval, a row a task and the mean, a colour a
    model; filled where the verdict is not noise. A second panel where one model lies so far off that the others cannot
    be told apart.

    note: the mark of a quick look. chance: task -> the score of guessing, marked where it lies among the points.
    """
    colours = colours or model_colours(list(comparisons))
    first = next(iter(comparisons.values()))
    has_mean = first["mean"] is not None and len(first["tasks"]) > 1
    tasks = [*first["tasks"], *(["mean"] if has_mean else [])]
    rows = {
        name: [comparison["tasks"].get(task) or comparison["mean"] for task in tasks]
        for name, comparison in comparisons.items()
    }
    reach = {
        name: max(100 * abs(bound) for row in each for bound in _bounds(row)) for name, each in rows.items()
    }
    near = {name: far for name, far in reach.items() if far < max(reach.values()) / 4}
    height = _rows_height(len(tasks), len(comparisons))
    figure, axes = plt.subplots(
        1, 1 + bool(near), figsize=(_SIZE[0] * (1 + bool(near)), height), sharey=True, squeeze=False,
        gridspec_kw={"wspace": 0.05},
    )  # fmt: skip
    for axis in axes[0]:
        _intervals(axis, rows, 0.7, colours, markersize=5, capsize=2)
        if has_mean:
            axis.axhline(len(tasks) - 1.5, color="gray", linewidth=0.5)
        for tick, task in enumerate(first["tasks"]):
            if task in (chance or {}):
                _chance(axis, tick, (chance or {})[task] - first["tasks"][task]["original"])
        _difference_axis(axis, "points, with the 95 % interval; filled: beyond noise")
        _title(axis, "Difference to the original", note)
    axes[0][0].set_yticks(range(len(tasks)), tasks)
    axes[0][0].set_ylim(len(tasks) - 0.5, -0.5)
    if near:
        bounds = [0.0, *(100 * bound for name in near for row in rows[name] for bound in _bounds(row))]
        margin = 0.05 * (max(bounds) - min(bounds))
        axes[0][1].set_xlim(min(bounds) - margin, max(bounds) + margin)
        axes[0][1].set_title("the same, enlarged", fontsize="medium")
        axes[0][0].get_legend().remove()
    _save(figure, path, around=True)


def _bounds(row: Mapping[str, Any]) -> tuple[float, float]:
    low, high = row["interval"] or (row["delta"], row["delta"])
    return min(low, row["delta"]), max(high, row["delta"])


def plot_members(
    name: str,
    comparisons: Mapping[str, Mapping[str, Any]],
    path: Path,
    note: str = "",
    colours: Colours | None = None,
) -> None:
    """Draw the difference to the original of every member of a group (the subjects of MMLU), sorted by the first
    model's; filled where the interval does not hold 0.

    comparisons: model -> `paired` with `members`.
    """
    first = next(iter(comparisons.values()))["members"]
    members = sorted(first, key=lambda member: -first[member]["delta"])
    step = 0.17 * max(1.0, 0.6 * len(comparisons))
    figure, axis = plt.subplots(figsize=(_SIZE[0], step * len(members) + 1.2))
    rows = {model: [row["members"][member] for member in members] for model, row in comparisons.items()}
    _intervals(axis, rows, 0.6, colours or model_colours(list(comparisons)), markersize=3, linewidth=0.7)
    labels = [f"{member.removeprefix(f'{name}_')} ({first[member]['num_items']})" for member in members]
    axis.set_yticks(range(len(members)), labels, fontsize=6)
    _difference_axis(axis, "points, with the 95 % interval")
    _title(axis, f"{name}: difference to the original", note)
    axis.set_ylim(len(members) - 0.5, -0.5)
    _save(figure, path, around=True)


def _intervals(
    axis: Any,
    models: Mapping[str, Sequence[Mapping[str, Any]]],
    space: float,
    colours: Colours,
    **style: Any,
) -> None:
    """Draw the differences to the original, in points, with their 95 % intervals: a tick a row, the models side by side
    in `space` around it."""
    for index, (name, rows) in enumerate(models.items()):
        colour = colours[name]
        for tick, row in enumerate(rows):
            delta, (low, high) = row["delta"], _bounds(row)
            # Of members there is no verdict, only the interval.
            noise = row["verdict"] == "within noise" if "verdict" in row else low <= 0 <= high
            axis.errorbar(
                [100 * delta], [tick + space * ((index + 0.5) / len(models) - 0.5)],
                xerr=[[100 * (delta - low)], [100 * (high - delta)]], linestyle="none", marker="o", color=colour,
                markerfacecolor="white" if noise else colour, label="_" if tick else name, **style,
            )  # fmt: skip


def _difference_axis(axis: Any, label: str) -> None:
    axis.axvline(0, color="black", linewidth=1, zorder=0)
    axis.set(xlabel=label)
    axis.grid(alpha=0.3, axis="x")
    _legend_beside(axis)


def _title(axis: Any, title: str, note: str = "") -> None:
    """Write a title, and in red below it the mark of a quick look."""
    axis.set_title(title, fontsize="medium", pad=20 if note else None)
    if note:
        place = {
            "xy": (0.5, 1.0),
            "xycoords": "axes fraction",
            "xytext": (0, 6),
            "textcoords": "offset points",
        }
        axis.annotate(note, ha="center", fontsize="small", color="tab:red", **place)


def _legend_beside(axis: Any) -> None:
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def plot_layers(result: Mapping[str, Any], path: Path) -> None:
    """Draw the layer study, a row a metric: number of rewired layers from both ends (paper Fig. 3), and one layer at a
    time.

    result: what `fcsd.layers.study` writes to `layers.json`.
    """
    metrics, points = result["metrics"], result["points"]
    by_side = {side: [p for p in points if p["side"] == side] for side in ("none", "first", "last", "single")}
    panels = [by_side["first"] + by_side["last"] != [], by_side["single"] != []]
    figure, axes = plt.subplots(
        len(metrics),
        sum(panels),
        figsize=(_SIZE[0] * 0.85 * sum(panels), _SIZE[1] * len(metrics)),
        squeeze=False,
    )
    for row, metric in zip(axes, metrics, strict=True):
        cells = iter(row)
        if panels[0]:
            _plot_ends(next(cells), metric, by_side, result["num_hidden_layers"])
        if panels[1]:
            _plot_single(next(cells), metric, by_side, result["moe_layers"])
    _save(figure, path)


def _plot_ends(axis: Any, metric: Mapping[str, str], by_side: Mapping[str, Any], num_layers: int) -> None:
    for side, label, colour, marker in (
        ("last", "last N layers", "black", "o"),
        ("first", "first N layers", _GREY, "s"),
    ):
        if by_side[side]:
            # 0 layers: the original's score; its KL is 0, for which a logarithmic axis has no place.
            points = (by_side["none"] if metric["better"] == "higher" else []) + by_side[side]
            for weights, word, line in _curves(points):
                style = {"marker": marker, "markersize": 4, "capsize": 2, "color": colour, "linestyle": line}
                places = [p["num_layers"] for p in points]
                axis.errorbar(places, *_values(points, metric, weights), label=label + word, **style)
    axis.set(xlabel=f"N, rewired layers of {num_layers}", xlim=(-0.02 * num_layers, None))
    _finish_layers(axis, metric, "rewired from either end, untrained", grid="both")


def _plot_single(
    axis: Any, metric: Mapping[str, str], by_side: Mapping[str, Any], moe_layers: Sequence[int]
) -> None:
    for is_moe, colour, label in ((True, "black", "MoE layer"), (False, _GREY, "dense layer")):
        if points := [p for p in by_side["single"] if (p["layers"][0] in moe_layers) == is_moe]:
            # Points: bars have no foot on a logarithmic axis, and those of scores would all look alike.
            style = {"linestyle": "none", "marker": "o", "markersize": 5, "capsize": 2, "color": colour}
            places = [p["layers"][0] for p in points]
            for weights, word, line in _curves(points):
                fill = {"markerfacecolor": "white"} if line == "--" else {}
                axis.errorbar(places, *_values(points, metric, weights), label=label + word, **style, **fill)
    for point in by_side["none"] if metric["better"] == "higher" else []:
        (value,), _ = _values([point], metric, "values")
        axis.axhline(value, color="black", linewidth=1, linestyle="--", label="original")
    axis.set(xlabel="index of the one rewired layer")
    axis.set_axisbelow(True)
    _finish_layers(axis, metric, "one layer at a time, untrained", grid="y")


def _curves(points: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return what these points were measured with: key, word of the legend, style of the line."""
    if not all("calibrated" in point for point in points):
        return [("values", "", "-")]
    return [("values", ", copied", "-"), ("calibrated", ", calibrated", "--")]


def _values(
    points: Sequence[Mapping[str, Any]], metric: Mapping[str, str], weights: str
) -> tuple[list[float], list[float]]:
    """Return values and standard errors of a metric; scores, which are shares, in per cent."""
    found, scale = (
        [point[weights][metric["name"]] for point in points],
        100 if metric["better"] == "higher" else 1,
    )
    return [scale * value["value"] for value in found], [scale * value["stderr"] for value in found]


def _finish_layers(axis: Any, metric: Mapping[str, str], title: str, grid: Literal["both", "y"]) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    name = "KL to the original" if metric["name"] == "kl" else metric["name"]
    _title(axis, f"{name}: {title}")
    if metric["better"] == "lower":  # a KL spans orders of magnitude, and is 0 without rewired layers
        axis.set(ylabel=metric["unit"], yscale="log")
    else:
        axis.set(ylabel=f"{metric['unit']} (per cent)", ylim=(-2, 102))
    axis.grid(alpha=0.3, axis=grid)
    axis.legend()


def plot_steering(points: Sequence[Mapping[str, Any]], path: Path, note: str = "") -> None:
    """Draw the output's KL and the mean of the tasks against the mean time of an exchange, a curve a kind of bias.

    points: of `fcsd.report.steering.steering_points`, the original first.
    """
    original, kinds = points[0], list(dict.fromkeys(point["kind"] for point in points[1:]))
    figure, axes = plt.subplots(1, 2, figsize=(2 * _SIZE[0], _SIZE[1]))
    for index, kind in enumerate(kinds):
        curve = [original, *(point for point in points if point["kind"] == kind)]
        times = [100 * point["exchange"]["mean_s"] / original["exchange"]["mean_s"] for point in curve]
        style = {"color": f"C{index}", "marker": "o", "markersize": 4, "capsize": 2, "label": kind}
        kl = [point["kl"] for point in curve]
        axes[0].errorbar(
            times, [each["kl"] for each in kl], yerr=[each["stderr"] or 0.0 for each in kl], **style
        )
        errors = [100 * (point["mean_stderr"] or 0.0) for point in curve]
        axes[1].errorbar(times, [100 * point["mean"] for point in curve], yerr=errors, **style)
        for point, time in zip(curve[1:], times[1:], strict=True):
            place = {
                "textcoords": "offset points",
                "xytext": (4, 4),
                "fontsize": "x-small",
                "color": f"C{index}",
            }
            axes[0].annotate(f"{point['strength']:g}", (time, point["kl"]["kl"]), **place)
    _title(axes[0], "KL of the output to the original's", note)
    _title(axes[1], "Mean of the tasks", note)
    axes[0].set(ylabel="nats per token", ylim=(0, None))
    axes[1].set(ylabel="per cent")
    for axis in axes:
        axis.set(xlabel="mean time of an exchange, per cent of the original's")
        axis.grid(alpha=0.3)
        axis.legend()
    _save(figure, path)


def plot_serving(result: Mapping[str, Any], folder: Path) -> None:
    """Draw what servers of vLLM took by length of prompt (paper Fig. 4, 6, 7), a panel a figure, with the lowest and
    the highest round; and one layer of those that were traced (Fig. 10).

    result: what `fcsd.bench.summary.summarise` returns.
    """
    rows = [row for row in result["rows"] if row["points"]]
    colours = model_colours([row["title"] for row in rows], "stock")
    figure, axes = plt.subplots(1, 3, figsize=(_SIZE[0] * 2, _SIZE[1]))
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
            places = [place + 0.8 * ((index + 0.5) / len(rows) - 0.5) for place in range(len(values))]
            style = {"color": colours[row["title"]], "label": row["title"], "capsize": 2}
            axis.bar(places, middle, width=0.8 / len(rows), yerr=reach, **style)
        lengths = [str(point["prompt_tokens"]) for point in rows[0]["points"]] if rows else []
        axis.set_xticks(range(len(lengths)), lengths)
        axis.set(xlabel="tokens of the prompt", ylabel=unit)
        axis.grid(alpha=0.3, axis="y")
        _title(axis, title)
    if rows:
        _legend_beside(axes[-1])
    _save(figure, folder / "serving.png", around=True)
    traces = {row["title"]: row["trace"]["layer"] for row in rows if row["trace"] is not None}
    if traces:
        plot_timelines(traces, folder / "layer.png")


def plot_routing(result: Mapping[str, Any], folder: Path) -> None:
    """Draw loads.png (experts by layers), traffic.png (sources by destinations) and, of two models, shift.png.

    result: what `fcsd.routing.study` writes to `routing.json`.
    """
    models = result["models"]
    loads = [np.array(facts["counts"]).sum(1) for facts in models]
    shares = [each / each.mean(1, keepdims=True) for each in loads]
    traffic = [100 * np.array(facts["traffic"]) / np.sum(facts["traffic"]) for facts in models]
    for file, matrices, label, names in (
        ("loads.png", shares, "load / mean of the layer", ("expert", "MoE layer")),
        ("traffic.png", traffic, "per cent of all pairs", ("to endpoint", "from endpoint")),
    ):
        figure, axes = plt.subplots(1, len(models), figsize=(_SIZE[0] * len(models), _SIZE[1]), squeeze=False)
        highest = max(float(matrix.max()) for matrix in matrices)
        for axis, facts, matrix in zip(axes[0], models, matrices, strict=True):
            image = axis.imshow(
                matrix, aspect="auto", cmap="viridis", vmin=0, vmax=highest, interpolation="nearest"
            )
            axis.set(xlabel=names[0], ylabel=names[1])
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_locator(MaxNLocator(integer=True))
            if file == "loads.png":
                axis.yaxis.set_major_formatter(FuncFormatter(_named(facts["layers"])))
            _title(axis, Path(facts["name"]).name)
            figure.colorbar(image, ax=axis, label=label)
        _save(figure, folder / file)
    if (found := result["comparison"]) is not None:
        figure, (moved, spread) = plt.subplots(1, 2, figsize=(_SIZE[0] * 2, _SIZE[1]))
        layers = models[0]["layers"]
        moved.bar(layers, [100 * share for share in found["layer_moved"]], color=_GREY)
        moved.set(ylabel="per cent of (token, expert) pairs")
        _title(moved, "Routes moved")
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
        _title(spread, "How unevenly experts are used")
        spread.legend()
        for axis in (moved, spread):
            axis.set(xlabel="MoE layer")
            axis.grid(alpha=0.3)
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _save(figure, folder / "shift.png")


def _named(layers: Sequence[int]) -> Any:
    """Return a formatter that writes the index of the layer at each place."""
    return lambda value, place: str(layers[int(value)]) if 0 <= value < len(layers) else ""


def plot_worth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw which conversion is worth it: speed-up of each selection of a layer study against what it costs.

    rows: what `fcsd.stages.plan` makes of a study.
    """
    figure, axis = plt.subplots(figsize=_SIZE)
    for side, colour, marker in (("last", "black", "o"), ("first", _GREY, "s")):
        for weights, line in (("copied", "-"), ("calibrated", "--")):
            points = sorted(
                (row for row in rows if (row["side"], row["weights"]) == (side, weights)),
                key=lambda row: row["num_layers"],
            )
            if points:
                speed = [row["speed_up"] for row in points]
                loss = [row["loss"] for row in points]
                errors = [row["stderr"] for row in points]
                style: Any = {
                    "marker": marker, "markersize": 4, "color": colour, "linestyle": line, "capsize": 2
                }  # fmt: skip
                axis.errorbar(speed, loss, yerr=errors, label=f"{side} N layers, {weights}", **style)
                for place in sorted({len(points) // 2, len(points) - 1}):
                    at: Any = {"xytext": (5, 0), "textcoords": "offset points", "fontsize": "small"}
                    axis.annotate(str(points[place]["num_layers"]), (speed[place], loss[place]), **at)
    if rows[0]["metric"] == "KL":
        axis.set_yscale("log")
    axis.set(xlabel="planned speed-up", ylabel=f"{rows[0]['metric']} before any distillation")
    axis.grid(alpha=0.3)
    _title(axis, "Which conversion is worth it; numbers are rewired layers")
    axis.legend()
    _save(figure, path)


def plot_sweep(result: Mapping[str, Any], folder: Path) -> None:
    """Draw `sweep.png`: loss of every candidate of both stages, a tick a tried value; diverged ones at the upper
    edge."""
    figure, axes = plt.subplots(1, 2, figsize=(2 * _SIZE[0] * 0.75, _SIZE[1]))
    rate, batch = "learning_rate", "batch_size_tokens"
    fixed = {key: {row[key] for row in result["candidates"] if row["stage"] != key} for key in (rate, batch)}
    for axis, key, name, where in (
        (axes[0], batch, "Batch size", f"learning rate {next(iter(fixed[rate]), 0):g}"),
        (axes[1], rate, "Learning rate", f"{result[batch]:,} tokens a batch"),
    ):
        rows = sorted((row for row in result["candidates"] if row["stage"] == key), key=lambda row: row[key])
        done = [row for row in rows if row["loss"] is not None]
        chosen, failed = (
            [row for row in done if row[key] == result[key]],
            [row for row in rows if row not in done],
        )
        for points, style in (
            (done, {"marker": "o", "markerfacecolor": "white"}),
            (chosen, {"marker": "*", "linestyle": "", "markersize": 14, "label": "chosen"}),
        ):
            axis.plot([row[key] for row in points], [row["loss"] for row in points], color="black", **style)
        if failed:
            axis.plot(
                [row[key] for row in failed], [0.97] * len(failed), "x", color="black", label="diverged",
                transform=axis.get_xaxis_transform(),
            )  # fmt: skip
        axis.set(
            xscale="log",
            xlabel=f"{name.lower()}{' (tokens)' if key == batch else ''}",
            ylabel=f"mean loss of the last {result['last_steps']} steps",
        )
        axis.xaxis.set_major_locator(FixedLocator([row[key] for row in rows]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_minor_formatter(NullFormatter())
        shown = ("{:,.0f}" if key == batch else "{:g}").format
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, place, shown=shown: shown(value)))
        axis.tick_params(axis="x", rotation=30 if len(rows) > 5 else 0)
        axis.grid(alpha=0.3)
        _title(axis, f"{name}, at {where}")
        axis.legend()
    _save(figure, folder / "sweep.png")


def _save(figure: Figure, path: Path, *, around: bool = False) -> None:
    """Write the figure; around: names and legend stand around axes of the size they were given, not inside it."""
    temporary = path.with_name(f".{path.name}.tmp")
    if not around:
        figure.tight_layout()
    figure.savefig(temporary, dpi=130, format="png", bbox_inches="tight")
    plt.close(figure)
    temporary.replace(path)
