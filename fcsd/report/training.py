"""Report how trainings went: figures of losses and of early stopping's scores, and what those scores cost.

Reads only what finished trainings left: `history.jsonl`, `scores.json`, `manifest.json`.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fcsd.files import read_json
from fcsd.text import duration


def training_figures(training: Mapping[str, Path], folder: Path) -> dict[str, str]:
    """Draw the losses, and the scores of early stopping, of finished trainings (name -> their folder); figure ->
    caption."""
    from fcsd.distill.history import read_history
    from fcsd.report.plots import plot_losses, plot_scores

    figures: dict[str, str] = {}
    if histories := {name: read_history(path) for name, path in training.items()}:
        plot_losses(histories, folder / "loss.png")
        figures["loss.png"] = "Training loss."
    for (metric, what), curves in _stopping_curves(training).items():
        file = _figure_name(metric, figures)
        plot_scores(curves, metric, folder / file)
        figures[file] = f"{what} during training; the band is one standard error."
    return figures


def stopping_table(training: Mapping[str, Mapping[str, Any]]) -> str:
    """Format for every training with early stopping (name -> its manifest): best score, items, and what the scores took
    of the time; "" for none."""
    from fcsd.text import items_text, plus_minus, scored_row

    rows = []
    for name, manifest in training.items():
        results, plan = manifest["results"], manifest["settings"].get("early_stopping")
        found = results.get("early_stopping")
        if found is not None and plan is not None:
            best = results["best_score"]
            score = "-" if best is None else plus_minus(best, found["best_stderr"])
            metric = scored_row(plan)["metric"]
            rows.append(
                f"| {name} | {score} | {results['best_step']} |"
                f" {items_text(metric, found['num_items'], found['num_items_total'])} | {found['num_scores']} |"
                f" {duration(found['scoring_s'])}, {100 * found['share_of_time']:.1f} % |"
            )
    if not rows:
        return ""
    head = "| training | best score | at step | measured on | scores | of the run's time |\n|---|---|---|---|---|---|\n"
    return head + "\n".join(rows)


def _stopping_curves(
    training: Mapping[str, Path],
) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """Return (metric, what it is of) -> the points of every training that was stopped by it."""
    from fcsd.distill.history import read_scores
    from fcsd.text import scored_row, stopping_text

    curves: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for name, path in training.items():
        found = read_scores(path)
        plan = read_json(path / "manifest.json")["settings"].get("early_stopping")
        if found is not None and plan is not None:
            curves.setdefault((scored_row(plan)["metric"], stopping_text(plan)), {})[name] = found["points"]
    return curves


def _figure_name(metric: str, taken: Collection[str]) -> str:
    """Name `pass_at_1.png`, `heldout_kl.png`, `acc.png`; with a number where several tasks have this metric."""
    stem = re.sub(r"\W+", "_", metric.partition(",")[0].replace("@", "_at_"))
    name, number = f"{stem}.png", 2
    while name in taken:
        name, number = f"{stem}_{number}.png", number + 1
    return name
