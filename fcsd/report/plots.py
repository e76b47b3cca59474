"""Figures of a run: loss and KL, pass@1 while training, models side by side, KL against rewired layers, the sweep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

_SIZE = (6.4, 3.8)


def plot_losses(histories: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Training loss by step for every run; KL and cross-entropy in panels of their own."""
    panels = {
        "KL to the teacher (nats per token)": {
            name: _series(points, "kl") for name, points in histories.items()
        },
        "cross-entropy (nats per token)": {name: _series(points, "ce") for name, points in histories.items()},
    }
    panels = {title: {n: s for n, s in series.items() if s[0]} for title, series in panels.items()}
    panels = {title: series for title, series in panels.items() if series}
    figure, axes = plt.subplots(
        1, max(1, len(panels)), figsize=(_SIZE[0] * max(1, len(panels)), _SIZE[1]), squeeze=False
    )
    for axis, (title, series) in zip(axes[0], panels.items(), strict=False):
        for name, (steps, values) in series.items():
            axis.plot(steps, values, label=name)
        axis.set(xlabel="step", ylabel=title, yscale="log")
        axis.legend()
    _save(figure, path)


def plot_scores(scores: Mapping[str, Sequence[tuple[int, float]]], path: Path) -> None:
    """pass@1 on the early-stopping task by step."""
    figure, axis = plt.subplots(figsize=_SIZE)
    for name, points in scores.items():
        axis.plot(
            [step for step, _ in points], [score for _, score in points], marker="o", markersize=3, label=name
        )
    axis.set(xlabel="step", ylabel="pass@1 (early-stopping task)", ylim=(-0.02, 1.02))
    axis.legend()
    _save(figure, path)


def plot_models(
    tasks: Sequence[str], models: Mapping[str, Mapping[str, tuple[float, float]]], path: Path
) -> None:
    """Bars of (score, standard error) per task and model, with bars of one standard error."""
    figure, axis = plt.subplots(
        figsize=(max(_SIZE[0], 1.1 * len(tasks) * max(1, len(models)) * 0.35 + 2), _SIZE[1])
    )
    width = 0.8 / max(1, len(models))
    for index, (name, scores) in enumerate(models.items()):
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(tasks))]
        values = [scores[task][0] for task in tasks]
        errors = [scores[task][1] for task in tasks]
        axis.bar(places, values, width, yerr=errors, capsize=2, label=name)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set(ylabel="score", ylim=(0, 1.05))
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, path)


def plot_layers(result: Mapping[str, Any], path: Path) -> None:
    """Untrained KL to the original against the number of rewired layers, from both ends (paper Fig. 3)."""
    figure, axis = plt.subplots(figsize=_SIZE)
    for side, label, colour in (("last", "from the end", "tab:blue"), ("first", "from the start", "tab:red")):
        points = [point for point in result["points"] if point["side"] == side]
        axis.errorbar(
            [point["num_layers"] for point in points],
            [point["kl"] for point in points],
            yerr=[point["stderr"] or 0.0 for point in points],
            marker="o",
            markersize=4,
            capsize=2,
            label=label,
            color=colour,
        )
    axis.set(
        xlabel=f"rewired layers of {result['num_hidden_layers']} (untrained)",
        ylabel="KL to the original (nats per token)",
    )
    axis.legend()
    _save(figure, path)


def plot_sweep(result: Mapping[str, Any], folder: Path) -> None:
    """`sweep.png`: loss of every candidate of both stages; diverged ones are left out."""
    figure, axes = plt.subplots(1, 2, figsize=(2 * _SIZE[0] * 0.75, _SIZE[1]))
    for axis, key in zip(axes, ("batch_size_tokens", "learning_rate"), strict=True):
        rows = sorted(
            (row for row in result["candidates"] if row["stage"] == key and row["loss"] is not None),
            key=lambda row: row[key],
        )
        axis.plot([row[key] for row in rows], [row["loss"] for row in rows], marker="o")
        chosen = [row for row in rows if row[key] == result[key]]
        axis.plot(
            [row[key] for row in chosen],
            [row["loss"] for row in chosen],
            "o",
            color="tab:red",
            label="chosen",
        )
        axis.set(xscale="log", xlabel=key, ylabel=f"mean loss of the last {result['last_steps']} steps")
        axis.legend()
    _save(figure, folder / "sweep.png")


def _series(points: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    chosen = [point for point in points if point.get(key, 0) > 0]
    return [point["step"] for point in chosen], [point[key] for point in chosen]


def _save(figure: Figure, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    figure.tight_layout()
    figure.savefig(temporary, dpi=130, format="png", bbox_inches="tight")
    plt.close(figure)
    temporary.replace(path)
