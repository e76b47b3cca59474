"""Figures of the routing study and of steered models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fcsd.report.figure import GREY, SIZE, save_figure, set_title


def plot_steering(
    points: Sequence[Mapping[str, Any]], path: Path, note: str = ""
) -> None:
    """Draw the output's KL and the mean of the tasks against the mean time of an
    exchange, with one curve for each kind of bias.

    points: one model's points from `fcsd_steering.report.steering_points`; the first is
    without a bias.
    """
    unbiased, *biased = points
    kinds = list(dict.fromkeys(point["kind"] for point in biased))
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


def plot_routing(result: Mapping[str, Any], folder: Path) -> None:
    """Draw loads.png (experts by layers), traffic.png (sources by destinations) and,
    for two models, shift.png.

    result: the content of `routing.json` from `fcsd_steering.routing.study`.
    """
    models = result["models"]
    loads = [np.array(facts["counts"]).sum(1) for facts in models]
    shares = [load / load.mean(1, keepdims=True) for load in loads]
    traffic = [
        100 * np.array(facts["traffic"]) / np.sum(facts["traffic"]) for facts in models
    ]
    ends = ("to endpoint", "from endpoint")
    pictures = [
        ("loads.png", shares, "load / mean of the layer", ("expert", "MoE layer")),
        ("traffic.png", traffic, "per cent of all pairs", ends),
    ]
    for file, matrices, label, names in pictures:
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
