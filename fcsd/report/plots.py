"""Figures of a run: loss and KL, pass@1 while training, models side by side, the layer study, the sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_SIZE = (6.4, 3.8)


def plot_losses(histories: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Draw the training loss by step for every run; each divergence and cross-entropy in panels of their own."""
    titles = {
        "kl": "KL to the teacher (nats per token)",
        "reverse_kl": "reverse KL (nats per token)",
        "jsd": "JSD (nats per token)",
        "ce": "cross-entropy (nats per token)",
    }
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for key, title in titles.items():
        for name, points in histories.items():
            # On a logarithmic axis there is no place for 0.
            if series := [(point["step"], point[key]) for point in points if point.get(key, 0) > 0]:
                panels.setdefault(title, {})[name] = series
    count = max(1, len(panels))
    figure, axes = plt.subplots(1, count, figsize=(_SIZE[0] * count, _SIZE[1]), squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=False):
        for name, series in lines.items():
            axis.plot(*zip(*series, strict=True), label=name)
        axis.set(xlabel="step", ylabel=title, yscale="log")
        axis.legend()
    _save(figure, path)


def plot_scores(curves: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, path: Path) -> None:
    """Draw the early-stopping score by step, with a band of one standard error to each side.

    curves: name -> points of `fcsd.distill.early_stopping.EarlyStopper.record`.
    """
    figure, axis = plt.subplots(figsize=_SIZE)
    lowest = 0.0
    for name, points in curves.items():
        steps, scores = [point["step"] for point in points], [point["score"] for point in points]
        errors = [point["stderr"] or 0.0 for point in points]
        (line,) = axis.plot(steps, scores, marker="o", markersize=3, label=name)
        low = [score - error for score, error in zip(scores, errors, strict=True)]
        if metric == "heldout_kl":  # on a logarithmic axis
            low = [max(value, score / 10) for value, score in zip(low, scores, strict=True)]
        high = [score + error for score, error in zip(scores, errors, strict=True)]
        axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        lowest = min(lowest, *low)
    if metric == "heldout_kl":
        axis.set(xlabel="step", ylabel="KL to the original, held out (nats per token)", yscale="log")
    else:
        axis.set(xlabel="step", ylabel=f"{metric.partition(',')[0]} (early-stopping task)")
        axis.set_ylim(bottom=lowest - 0.02)
    axis.legend()
    _save(figure, path)


def plot_models(
    tasks: Sequence[str],
    models: Mapping[str, Mapping[str, tuple[float, float]]],
    path: Path,
    note: str = "",
) -> None:
    """Draw bars of (score, standard error) per task and model, with bars of one standard error."""
    figure, axis = plt.subplots(figsize=(max(_SIZE[0], 0.28 * len(tasks) * (len(models) + 1) + 1), _SIZE[1]))
    width = 0.8 / max(1, len(models))
    for index, (name, scores) in enumerate(models.items()):
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(tasks))]
        values = [scores[task][0] for task in tasks]
        errors = [scores[task][1] for task in tasks]
        axis.bar(places, values, width, yerr=errors, capsize=2, label=name)
    crowded = max(map(len, tasks)) * len(tasks) > 12 * figure.get_figwidth()
    turned: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axis.set_xticks(range(len(tasks)), tasks, **turned)
    axis.set(ylabel="score", ylim=(0, 1.05))
    _legend_beside(axis, note)
    _save(figure, path, around=True)


def plot_deltas(comparisons: Mapping[str, Mapping[str, Any]], path: Path, note: str = "") -> None:
    """Draw the difference to the original in points with its 95 % interval, a row a task and the mean, a colour a
    model; filled where the verdict is not noise. A second panel where one model lies so far off that the others cannot
    be told apart.

    note: the mark of a quick look.
    """
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
    label = "difference to the original (points), 95 % interval"
    height = max(2.2, len(tasks) * (0.12 + 0.18 * len(comparisons)) + 1.2)
    figure, axes = plt.subplots(
        1, 1 + bool(near), figsize=(_SIZE[0] * (1 + bool(near)), height), sharey=True, squeeze=False,
        gridspec_kw={"wspace": 0.05},
    )  # fmt: skip
    for axis in axes[0]:
        _intervals(axis, rows, 0.7, markersize=5, capsize=2)
        if has_mean:
            axis.axhline(len(tasks) - 1.5, color="gray", linewidth=0.5)
        _difference_axis(axis, f"{label}; filled: beyond noise", note)
    axes[0][0].set_yticks(range(len(tasks)), tasks)
    axes[0][0].set_ylim(len(tasks) - 0.5, -0.5)
    if near:
        bounds = [0.0, *(100 * bound for name in near for row in rows[name] for bound in _bounds(row))]
        margin = 0.05 * (max(bounds) - min(bounds))
        axes[0][1].set_xlim(min(bounds) - margin, max(bounds) + margin)
        axes[0][1].set_xlabel("the same, enlarged")
        axes[0][0].get_legend().remove()
    _save(figure, path, around=True)


def _bounds(row: Mapping[str, Any]) -> tuple[float, float]:
    low, high = row["interval"] or (row["delta"], row["delta"])
    return min(low, row["delta"]), max(high, row["delta"])


def plot_members(name: str, comparisons: Mapping[str, Mapping[str, Any]], path: Path, note: str = "") -> None:
    """Draw the difference to the original of every member of a group (the subjects of MMLU), sorted by the first
    model's; filled where the interval does not hold 0.

    comparisons: model -> `paired` with `members`.
    """
    first = next(iter(comparisons.values()))["members"]
    members = sorted(first, key=lambda member: -first[member]["delta"])
    step = 0.17 * max(1.0, 0.6 * len(comparisons))
    figure, axis = plt.subplots(figsize=(_SIZE[0], step * len(members) + 1.2))
    rows = {model: [row["members"][member] for member in members] for model, row in comparisons.items()}
    _intervals(axis, rows, 0.6, markersize=3, linewidth=0.7)
    labels = [f"{member.removeprefix(f'{name}_')} ({first[member]['num_items']})" for member in members]
    axis.set_yticks(range(len(members)), labels, fontsize=6)
    _difference_axis(axis, f"{name}: difference to the original (points), 95 % interval", note)
    axis.set_ylim(len(members) - 0.5, -0.5)
    _save(figure, path, around=True)


def _intervals(
    axis: Any, models: Mapping[str, Sequence[Mapping[str, Any]]], space: float, **style: Any
) -> None:
    """Draw the differences to the original, in points, with their 95 % intervals: a tick a row, the models side by side
    in `space` around it."""
    for index, (name, rows) in enumerate(models.items()):
        colour = f"C{index % 10}"
        for tick, row in enumerate(rows):
            delta, (low, high) = row["delta"], _bounds(row)
            # Of members there is no verdict, only the interval.
            noise = row["verdict"] == "within noise" if "verdict" in row else low <= 0 <= high
            axis.errorbar(
                [100 * delta], [tick + space * ((index + 0.5) / len(models) - 0.5)],
                xerr=[[100 * (delta - low)], [100 * (high - delta)]], linestyle="none", marker="o", color=colour,
                markerfacecolor="white" if noise else colour, label="_" if tick else name, **style,
            )  # fmt: skip


def _difference_axis(axis: Any, label: str, note: str) -> None:
    axis.axvline(0, color="black", linewidth=1, zorder=0)
    axis.set(xlabel=label)
    axis.grid(alpha=0.3, axis="x")
    _legend_beside(axis, note)


def _legend_beside(axis: Any, note: str) -> None:
    if note:
        axis.set_title(note, fontsize="small", color="tab:red")
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
        ("last", "last N layers", "tab:blue", "o"),
        ("first", "first N layers", "tab:red", "s"),
    ):
        if by_side[side]:
            # 0 layers: the original's score; its KL is 0, for which a logarithmic axis has no place.
            points = (by_side["none"] if metric["better"] == "higher" else []) + by_side[side]
            style = {"marker": marker, "markersize": 4, "capsize": 2, "label": label, "color": colour}
            axis.errorbar([p["num_layers"] for p in points], *_values(points, metric["name"]), **style)
    axis.set(xlabel=f"N, rewired layers of {num_layers}", xlim=(-0.02 * num_layers, None))
    _finish_layers(axis, metric, "rewired from either end, untrained", grid="both")


def _plot_single(
    axis: Any, metric: Mapping[str, str], by_side: Mapping[str, Any], moe_layers: Sequence[int]
) -> None:
    for is_moe, colour, label in ((True, "tab:green", "MoE layer"), (False, "tab:gray", "dense layer")):
        points = [p for p in by_side["single"] if (p["layers"][0] in moe_layers) == is_moe]
        if points:
            places = [p["layers"][0] for p in points]
            values, errors = _values(points, metric["name"])
            if metric["better"] == "lower":
                axis.bar(places, values, yerr=errors, color=colour, label=label, capsize=2)
            else:  # a score's bars would all look alike: what is read is the distance to the original
                style = {"linestyle": "none", "marker": "o", "markersize": 5, "capsize": 2}
                axis.errorbar(places, values, errors, color=colour, label=label, **style)
    for point in by_side["none"] if metric["better"] == "higher" else []:
        value = point["values"][metric["name"]]["value"]
        axis.axhline(value, color="black", linewidth=1, linestyle="--", label="original")
    axis.set(xlabel="index of the one rewired layer")
    axis.set_axisbelow(True)
    _finish_layers(axis, metric, "one layer at a time, untrained", grid="y")


def _values(points: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Return values and standard errors of a metric."""
    found = [point["values"][name] for point in points]
    return [value["value"] for value in found], [value["stderr"] for value in found]


def _finish_layers(axis: Any, metric: Mapping[str, str], title: str, grid: Literal["both", "y"]) -> None:
    axis.set_title(title, fontsize="medium")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    name = "KL to the original" if metric["name"] == "kl" else metric["name"]
    axis.set(ylabel=f"{name} ({metric['unit']})")
    if metric["better"] == "lower":  # a KL spans orders of magnitude, and is 0 without rewired layers
        axis.set_yscale("log")
    else:  # scores are shares
        axis.set_ylim(-0.02, 1.02)
    axis.grid(alpha=0.3, axis=grid)
    axis.legend()


def plot_sweep(result: Mapping[str, Any], folder: Path) -> None:
    """Draw `sweep.png`: loss of every candidate of both stages; diverged ones are left out."""
    figure, axes = plt.subplots(1, 2, figsize=(2 * _SIZE[0] * 0.75, _SIZE[1]))
    for axis, key in zip(axes, ("batch_size_tokens", "learning_rate"), strict=True):
        rows = sorted(
            (row for row in result["candidates"] if row["stage"] == key and row["loss"] is not None),
            key=lambda row: row[key],
        )
        chosen = [row for row in rows if row[key] == result[key]]
        for points, style in ((rows, {}), (chosen, {"linestyle": "", "color": "tab:red", "label": "chosen"})):
            axis.plot([row[key] for row in points], [row["loss"] for row in points], marker="o", **style)
        axis.set(xscale="log", xlabel=key, ylabel=f"mean loss of the last {result['last_steps']} steps")
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
