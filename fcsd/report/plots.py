"""Figures of a run: loss and KL, scores while training, models side by side, the sweep.

A model has the same colour in all figures of a report (`model_colours`); everything
else is black and grey.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from fcsd.base.text import RELATIVE
from fcsd.evaluation.scores import Comparison, Row, Rows
from fcsd.report.figure import (
    GREY,
    SIZE,
    Colours,
    draw,
    finish,
    legend_beside,
    save_figure,
    set_log_scale,
    set_title,
)
from fcsd.training.losses.objectives import MEASURES
from fcsd.training.sweep import figure_of, figure_text, tried

_PANELS = {
    key: (f"Training loss: {measure.title}", "nats per token")
    for key, measure in MEASURES.items()
}
_PANELS["load_max_over_mean"] = ("Load of a layer's busiest expert", "times the mean")


def plot_losses(
    histories: Mapping[str, Sequence[Mapping[str, float]]], path: Path, colours: Colours
) -> None:
    """Draw the training loss of every run by tokens, with separate panels for each
    divergence and cross-entropy, and the busiest expert's load where it was logged.

    histories: name -> logged points, each with `tokens`.
    """
    panels: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for key, panel in _PANELS.items():
        for name, points in histories.items():
            # A logarithmic axis cannot show 0.
            if series := [
                (point["tokens"], point[key])
                for point in points
                if point.get(key, 0) > 0
            ]:
                panels.setdefault(panel, {})[name] = series
    count = max(1, len(panels))
    figure, axes = plt.subplots(
        1, count, figsize=(SIZE[0] * count, SIZE[1]), squeeze=False
    )
    for axis, ((title, unit), lines) in zip(axes[0], panels.items(), strict=False):
        for name, series in lines.items():
            axis.plot(*zip(*series, strict=True), color=colours[name], label=name)
        axis.set_ylabel(unit)
        set_log_scale(axis)
        set_title(axis, title)
        _token_axis(axis)
    save_figure(figure, path)


def plot_scores(
    curves: Mapping[str, Sequence[Mapping[str, Any]]],
    metric: str,
    path: Path,
    colours: Colours,
) -> None:
    """Draw the early-stopping score by tokens, with a band of one standard error on
    each side; shares are drawn in per cent.

    curves: name -> points of `fcsd.training.early_stopping.EarlyStopper.record`, with
    `tokens`.
    """
    figure, axis = plt.subplots(figsize=SIZE)
    by_kl = metric in RELATIVE
    shares = not by_kl and all(
        abs(point["score"]) <= 1 for points in curves.values() for point in points
    )
    scale, lowest = 100.0 if shares else 1.0, 0.0
    for name, points in curves.items():
        tokens = [point["tokens"] for point in points]
        scores = [scale * point["score"] for point in points]
        errors = [scale * (point["stderr"] or 0.0) for point in points]
        colour = colours[name]
        axis.plot(tokens, scores, marker="o", markersize=3, color=colour, label=name)
        # The logarithmic axis of KL cannot show a band that reaches 0.
        low, high = [], []
        for score, error in zip(scores, errors, strict=True):
            low.append(max(score - error, score / 10) if by_kl else score - error)
            high.append(score + error)
        axis.fill_between(tokens, low, high, color=colour, alpha=0.2, linewidth=0)
        lowest = min(lowest, *low)
    if by_kl:
        axis.set_ylabel("nats per token")
        set_log_scale(axis)
        text = "held-out text" if metric == "heldout_kl" else "the student's own text"
        set_title(axis, f"KL to the original on {text}, while training")
    else:
        name = metric.partition(",")[0]
        axis.set(ylabel=f"{name}{' (per cent)' if shares else ''}")
        set_title(axis, f"Early stopping: {name} while training")
        axis.set_ylim(bottom=lowest - 0.02 * scale)
    _token_axis(axis)
    save_figure(figure, path)


def _token_axis(axis: Any) -> None:
    axis.set_xlabel("tokens trained on")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, position: _count(value)))
    finish(axis)


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
    colours: Colours,
    note: str = "",
    chance: Mapping[str, float] | None = None,
) -> None:
    """Draw scores in per cent, with one row for each task, one colour for each model,
    and bars of one standard error.

    models: name -> task -> score and standard error, as shares. chance: task -> the
    score of guessing.
    """
    figure, axis = plt.subplots(
        figsize=(SIZE[0], _rows_height(len(tasks), len(models)))
    )
    for index, (name, scores) in enumerate(models.items()):
        # Models lie side by side around the tick of their task.
        shift = 0.7 * ((index + 0.5) / len(models) - 0.5)
        heights = [tick + shift for tick in range(len(tasks))]
        values, errors = (
            [100 * scores[task][part] for task in tasks] for part in (0, 1)
        )
        look = {"color": colours[name], "label": name, "linestyle": "none"}
        draw(axis, values, heights, xerr=errors, markersize=5, **look)
    for tick, task in enumerate(tasks):
        _chance(axis, tick, (chance or {}).get(task))
    axis.set_yticks(range(len(tasks)), tasks)
    axis.set(
        xlabel="score (per cent), one standard error",
        xlim=(-2, 102),
        ylim=(len(tasks) - 0.5, -0.5),
    )
    axis.grid(alpha=0.3, axis="x")
    set_title(axis, "Scores of every model", note)
    legend_beside(axis)
    save_figure(figure, path, around=True)


def plot_own_text(
    task: str,
    models: Rows,
    path: Path,
    colours: Colours,
    note: str = "",
) -> None:
    """Draw the divergence of models from their original along their own samples, for
    the first tokens of a text and for all, with bars of one standard error.

    models: name -> the task's entry in its result.
    """
    figure, axis = plt.subplots(figsize=SIZE)
    first = next(iter(models.values()))["metrics"]
    lengths = [name for name in first if re.fullmatch(r"own_text_kl_[0-9]+", name)]
    ticks = [*(f"first {name.rpartition('_')[2]}" for name in lengths), "all"]
    for name, row in models.items():
        points = [*(row["metrics"][length] for length in lengths), row]
        values = [point["value"] for point in points]
        errors = [point["stderr"] or 0.0 for point in points]
        look = {"color": colours[name], "label": name}
        draw(axis, range(len(points)), values, yerr=errors, **look)
    axis.set_xticks(range(len(ticks)), ticks)
    axis.set(xlabel="tokens of the text", ylabel="nats per token")
    set_log_scale(axis)
    set_title(axis, f"{task}: KL(model || original) at the model's own tokens", note)
    finish(axis)
    save_figure(figure, path)


def _rows_height(num_rows: int, num_models: int) -> float:
    return max(2.2, num_rows * (0.12 + 0.18 * num_models) + 1.2)


def _chance(axis: Any, tick: int, share: float | None) -> None:
    """Mark the score of guessing in a row, without extending the axis for it."""
    if share is None:
        return
    labelled = any(text == "chance" for text in axis.get_legend_handles_labels()[1])
    axis.plot(
        [100 * share] * 2, [tick - 0.4, tick + 0.4], color=GREY, linestyle=":", scalex=False, scaley=False,
        label="_" if labelled else "chance",
    )  # fmt: skip


def plot_deltas(
    comparisons: Mapping[str, Comparison],
    path: Path,
    colours: Colours,
    note: str = "",
    chance: Mapping[str, float] | None = None,
) -> None:
    """Draw the difference to the original in points with its 95 % interval: one row for
    each task and the mean, one colour for each model, filled where the verdict is not
    noise. A second panel enlarges the models near the original where another is so far
    off that they cannot be told apart.

    note: the mark of a quick look. chance: task -> the score of guessing, marked where
    it lies among the points.
    """
    first = next(iter(comparisons.values()))
    has_mean = first["mean"] is not None and len(first["tasks"]) > 1
    tasks = [*first["tasks"], *(["mean"] if has_mean else [])]
    rows = {
        name: [comparison["tasks"].get(task) or comparison["mean"] for task in tasks]
        for name, comparison in comparisons.items()
    }
    reach = {
        name: max(abs(bound) for row in model_rows for bound in _bounds(row))
        for name, model_rows in rows.items()
    }
    # Models within a quarter of the widest reach would be squeezed around 0.
    near = [name for name in reach if reach[name] < max(reach.values()) / 4]
    height = _rows_height(len(tasks), len(comparisons))
    figure, axes = plt.subplots(
        1, 1 + bool(near), figsize=(SIZE[0] * (1 + bool(near)), height), sharey=True, squeeze=False,
        gridspec_kw={"wspace": 0.05},
    )  # fmt: skip
    for axis in axes[0]:
        _intervals(axis, rows, 0.7, colours, markersize=5)
        if has_mean:
            axis.axhline(len(tasks) - 1.5, color="gray", linewidth=0.5)
        for tick, task in enumerate(first["tasks"]):
            if task in (chance or {}):
                _chance(
                    axis, tick, (chance or {})[task] - first["tasks"][task]["original"]
                )
        _difference_axis(axis, "points, with the 95 % interval; filled: beyond noise")
        set_title(axis, "Difference to the original", note)
    axes[0][0].set_yticks(range(len(tasks)), tasks)
    axes[0][0].set_ylim(len(tasks) - 0.5, -0.5)
    if near:
        of_near = [row for name in near for row in rows[name]]
        low = min(0.0, *(100 * _bounds(row)[0] for row in of_near))
        high = max(0.0, *(100 * _bounds(row)[1] for row in of_near))
        margin = 0.05 * (high - low)
        axes[0][1].set_xlim(low - margin, high + margin)
        axes[0][1].set_title("the same, enlarged", fontsize="medium")
        axes[0][0].get_legend().remove()
    save_figure(figure, path, around=True)


def _bounds(row: Row) -> tuple[float, float]:
    low, high = row["interval"] or (row["delta"], row["delta"])
    return min(low, row["delta"]), max(high, row["delta"])


def plot_members(
    name: str,
    comparisons: Mapping[str, Comparison],
    path: Path,
    colours: Colours,
    note: str = "",
) -> None:
    """Draw the difference to the original of every member of a group (the subjects of
    MMLU), sorted by the first model's; filled where the interval excludes 0.

    comparisons: model -> `paired` with `members`.
    """
    first = next(iter(comparisons.values()))["members"]
    members = sorted(first, key=lambda member: -first[member]["delta"])
    # Height of a row: room for its name and for the models side by side.
    step = 0.17 * max(1.0, 0.6 * len(comparisons))
    figure, axis = plt.subplots(figsize=(SIZE[0], step * len(members) + 1.2))
    rows = {
        model: [row["members"][member] for member in members]
        for model, row in comparisons.items()
    }
    _intervals(axis, rows, 0.6, colours, markersize=3, linewidth=0.7, capsize=0)
    labels = [
        f"{member.removeprefix(f'{name}_')} ({first[member]['num_items']})"
        for member in members
    ]
    axis.set_yticks(range(len(members)), labels, fontsize=6)
    _difference_axis(axis, "points, with the 95 % interval")
    set_title(axis, f"{name}: difference to the original", note)
    axis.set_ylim(len(members) - 0.5, -0.5)
    save_figure(figure, path, around=True)


def _intervals(
    axis: Any,
    models: Mapping[str, Sequence[Row]],
    space: float,
    colours: Colours,
    **style: Any,
) -> None:
    """Draw the differences to the original, in points, with their 95 % intervals: one
    tick for each row, with the models side by side in `space` around it.
    """
    for index, (name, rows) in enumerate(models.items()):
        colour = colours[name]
        shift = space * ((index + 0.5) / len(models) - 0.5)
        for tick, row in enumerate(rows):
            delta, (low, high) = row["delta"], _bounds(row)
            # Members have no verdict, only the interval.
            noise = low <= 0 <= high
            if "verdict" in row:
                noise = row["verdict"] in ("within noise", "at the floor")
            look = {
                "color": colour, "markerfacecolor": "white" if noise else colour, "linestyle": "none",
                "label": "_" if tick else name, "xerr": [[100 * (delta - low)], [100 * (high - delta)]],
            }  # fmt: skip
            draw(axis, [100 * delta], [tick + shift], **look, **style)


def _difference_axis(axis: Any, label: str) -> None:
    axis.axvline(0, color="black", linewidth=1, zorder=0)
    axis.set(xlabel=label)
    axis.grid(alpha=0.3, axis="x")
    legend_beside(axis)


def plot_sweep(result: Mapping[str, Any], folder: Path) -> None:
    """Draw `sweep.png`: the loss or score of every candidate of both stages, with a tick for
    each value tried; diverged candidates lie at the upper edge.
    """
    figure, axes = plt.subplots(1, 2, figsize=(2 * SIZE[0] * 0.75, SIZE[1]))
    # Each stage varies one value and keeps the other fixed; the title names the fixed
    # one.
    rate, batch = "learning_rate", "batch_size_tokens"
    first_rate = next((row[rate] for row in tried(result, batch)), 0)
    panels = [
        (axes[0], batch, "Batch size", f"learning rate {first_rate:g}"),
        (axes[1], rate, "Learning rate", f"{result[batch]:,} tokens per batch"),
    ]
    for axis, key, name, where in panels:
        rows = tried(result, key)
        done = [row for row in rows if row["loss"] is not None]
        chosen = [row for row in done if row[key] == result[key]]
        failed = [row for row in rows if row not in done]
        circle = {"marker": "o", "markerfacecolor": "white"}
        star = {"marker": "*", "linestyle": "", "markersize": 14, "label": "chosen"}
        for points, style in ((done, circle), (chosen, star)):
            axis.plot(
                [row[key] for row in points],
                [figure_of(row) for row in points],
                color="black",
                **style,
            )
        if failed:
            axis.plot(
                [row[key] for row in failed], [0.97] * len(failed), "x", color="black", label="diverged",
                transform=axis.get_xaxis_transform(),
            )  # fmt: skip
        axis.set(
            xscale="log",
            xlabel=f"{name.lower()}{' (tokens)' if key == batch else ''}",
            ylabel=figure_text(result).replace(" over ", "\nover "),
        )
        axis.xaxis.set_major_locator(FixedLocator([row[key] for row in rows]))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_minor_formatter(NullFormatter())
        text_of = ("{:,.0f}" if key == batch else "{:g}").format
        axis.xaxis.set_major_formatter(
            FuncFormatter(lambda value, position, text_of=text_of: text_of(value))
        )
        axis.tick_params(axis="x", rotation=30 if len(rows) > 5 else 0)
        set_title(axis, f"{name}, at {where}")
        finish(axis)
    save_figure(figure, folder / "sweep.png")
