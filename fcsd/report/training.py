"""Report how trainings went: figures of losses and of early stopping's scores, and the
time that scoring took.

Reads only the files of finished trainings: `history.jsonl`, `scores.json`,
`manifest.json`.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fcsd.base.artifact import read_manifest
from fcsd.base.text import (
    RELATIVE,
    duration,
    items_text,
    markdown,
    plus_minus,
    scored_row,
    stopping_text,
)
from fcsd.report.table import percent, with_error
from fcsd.training.history import read_history, read_scores


def training_figures(
    training: Mapping[str, Path], folder: Path, colours: Mapping[str, str]
) -> dict[str, str]:
    """Draw losses and early-stopping scores of finished trainings, and return figure ->
    caption.

    training: model -> the folder of its training. colours: model -> its colour in all
    figures.
    """
    from fcsd.report.plots import plot_losses, plot_scores

    figures: dict[str, str] = {}
    if histories := {
        name: _by_tokens(read_history(path), path) for name, path in training.items()
    }:
        plot_losses(histories, folder / "loss.png", colours)
        lasts = ", ".join(
            f"{name} {text}"
            for name, points in histories.items()
            if (text := _last_loss(points))
        )
        figures["loss.png"] = (
            "Training loss, by the tokens trained on. Mean over the last steps:"
            f" {lasts}."
        )
    for (metric, description), curves in _stopping_curves(training).items():
        file = _figure_name(metric, figures)
        plot_scores(curves, metric, folder / file, colours)
        figures[file] = (
            f"{description} during training; the band is one standard error."
        )
    return figures


_LAST_STEPS = 50  # as in Appendix A of the paper


def _last_loss(points: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean loss of the last steps, and their number in parentheses.

    points: those of `history.jsonl`; a point that is logged every n steps is the mean
    of these n.
    """
    total = steps = 0
    # Backwards from the last point, each weighted by the steps that it covers.
    for previous, point in reversed(list(pairwise([{"step": 0}, *points]))):
        if "loss" in point and steps < _LAST_STEPS:
            covered = point["step"] - previous["step"]
            total, steps = total + covered * point["loss"], steps + covered
    return f"{total / steps:.4g} ({steps})" if steps else ""


def _by_tokens(
    points: Sequence[Mapping[str, Any]], training: Path
) -> list[dict[str, Any]]:
    """Return points with the tokens of all batches up to their step, so that runs of
    different batch sizes can be compared.
    """
    batch = read_manifest(training)["settings"]["train"]["batch_size_tokens"]
    return [{**point, "tokens": point["step"] * batch} for point in points]


def trainings_table(
    training: Mapping[str, Path],
    calibrations: Mapping[str, Mapping[str, Any]],
    sweep: Path | None = None,
) -> str:
    """Format one row for every training and calibration, and for a sweep: when it
    finished, on what, its steps, tokens and time; "" without any.

    training: model -> folder. calibrations: model -> manifest. sweep: its folder.
    """
    facts = {name: training_facts(path) for name, path in training.items()}
    for name, manifest in calibrations.items():
        results = {"finished": manifest.get("finished"), **manifest["results"]}
        facts[f"{name} (calibration)"] = results
    if sweep is not None:
        facts |= _sweep_facts(sweep)
    rows = [
        [
            name,
            of_one["finished"][:16].replace("T", " ") if of_one["finished"] else "-",
            hardware_text(of_one.get("hardware")) or "-",
            str(of_one.get("steps") or "-"),
            f"{of_one['tokens']:,}",
            duration(of_one["seconds"]) if of_one.get("seconds") else "-",
            f"{rate:,.0f}" if (rate := of_one.get("tokens_per_second")) else "-",
            _gpu_hours(of_one),
        ]
        for name, of_one in facts.items()
    ]
    header = ["training", "finished (UTC)", "on", "steps", "tokens", "time", "tokens/s", "GPU hours"]  # fmt: skip
    known = [
        column
        for column in range(len(header))
        if column < 2 or any(row[column] != "-" for row in rows)
    ]
    lines = [[line[column] for column in known] for line in (header, *rows)]
    return markdown(lines[0], lines[1:], left=3 if 2 in known else 2) if rows else ""


def _gpu_hours(facts: Mapping[str, Any]) -> str:
    hardware, seconds = facts.get("hardware"), facts.get("seconds")
    if not hardware or not seconds or "threads" in hardware:
        return "-"
    return f"{hardware['processes'] * seconds / 3600:.3g}"


def training_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a finished training: `finished`, `hardware`, `steps` of
    `max_steps`, `stopped_early`, `tokens`, `seconds` in its steps, over all restarts,
    and `tokens_per_second`; None for what is not known.
    """
    manifest = read_manifest(path)
    results, train = manifest["results"], manifest["settings"]["train"]
    return {
        "finished": manifest.get("finished"),
        "hardware": results.get("hardware"),
        "steps": results["steps"],
        "max_steps": train.get("max_steps"),
        "stopped_early": results.get("stopped_early"),
        "tokens": results["steps"] * train["batch_size_tokens"],
    } | _pace(_by_tokens(read_history(path), path))


def _pace(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `seconds` and `tokens_per_second` of logged points that have `tokens`."""
    tokens = seconds = 0.0
    for previous, point in pairwise([{"tokens": 0}, *points]):
        if rate := point.get("tokens_per_second"):
            covered = point["tokens"] - previous["tokens"]
            tokens, seconds = tokens + covered, seconds + covered / rate
    return {
        "seconds": seconds or None,
        "tokens_per_second": tokens / seconds if seconds else None,
    }


def _sweep_facts(sweep: Path) -> dict[str, dict[str, Any]]:
    """Return the facts of all trainings of a sweep together, under their number."""
    manifest = read_manifest(sweep)
    candidates = manifest["results"]["candidates"]
    num_tokens = 0
    seconds: float | None = 0.0
    for candidate in candidates:
        batch = candidate["batch_size_tokens"]
        points = [
            {**point, "tokens": point["step"] * batch}
            for point in read_history(sweep / candidate["folder"])
        ]
        num_tokens += points[-1]["tokens"] if points else 0
        pace = _pace(points)["seconds"]
        seconds = seconds + pace if pace and seconds is not None else None
    return {
        f"sweep ({len(candidates)} trainings)": {
            "finished": manifest.get("finished"),
            "tokens": num_tokens,
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds if seconds else None,
        }
    }


def training_text(facts: Mapping[str, Any]) -> str:
    """Describe how a training ended, in one sentence, from `training_facts`."""
    of = f" of {facts['max_steps']}" if facts["max_steps"] else ""
    text = (
        f"trained for {facts['steps']}{of} steps"
        f"{' (stopped early)' if facts['stopped_early'] else ''}, on"
        f" {facts['tokens']:,} tokens"
    )
    if facts["seconds"]:
        text += (
            f", in {duration(facts['seconds'])}"
            f" ({facts['tokens_per_second']:,.0f} tokens per second)"
        )
    if hardware := hardware_text(facts["hardware"]):
        text += f", on {hardware}"
    return f"{text}."


def hardware_text(hardware: Mapping[str, Any] | None) -> str:
    """Format the hardware of a training: `8 × NVIDIA H200`, or `CPU AMD EPYC (2
    threads)`; "" where it is not recorded.
    """
    if not hardware:
        return ""
    device, count = hardware["device"], hardware["processes"]
    if (threads := hardware.get("threads")) is None:
        return f"{count} × {device}"
    many = f"{count} processes of " if count > 1 else ""
    return f"{device} ({many}{threads} thread{'' if threads == 1 else 's'})"


def stopping_table(training: Mapping[str, Mapping[str, Any]]) -> str:
    """Format one row for every training with early stopping (name -> its manifest):
    best score, items, and the share of time spent on scoring; "" without any.
    """
    rows = []
    for name, manifest in training.items():
        results, rule = manifest["results"], manifest["settings"].get("early_stopping")
        outcome = results.get("early_stopping")
        if outcome is not None and rule is not None:
            best = results["best_score"]
            metric = scored_row(rule)["metric"]
            score = "-" if best is None else plus_minus(best, outcome["best_stderr"])
            # Scores that are shares are shown in per cent, as in all other tables.
            if best is not None and metric not in RELATIVE and abs(best) <= 1:
                score = f"{with_error(percent(best), outcome['best_stderr'])} %"
            items = items_text(metric, outcome["num_items"], outcome["num_items_total"])
            time = f"{duration(outcome['scoring_s'])}, {100 * outcome['share_of_time']:.1f} %"
            rows.append(
                [
                    name,
                    score,
                    str(results["best_step"]),
                    items,
                    str(outcome["num_scores"]),
                    time,
                ]
            )
    header = [
        "training",
        "best score",
        "at step",
        "measured on",
        "scores",
        "of the run's time",
    ]
    return markdown(header, rows) if rows else ""


def _stopping_curves(
    training: Mapping[str, Path],
) -> dict[tuple[str, str], dict[str, list[dict[str, Any]]]]:
    """Return (metric, its description) -> the points of every training scored by it."""
    curves: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for name, path in training.items():
        scores = read_scores(path)
        rule = read_manifest(path)["settings"].get("early_stopping")
        if scores is not None and rule is not None:
            curves.setdefault((scored_row(rule)["metric"], stopping_text(rule)), {})[
                name
            ] = _by_tokens(scores["points"], path)
    return curves


def _figure_name(metric: str, existing: Collection[str]) -> str:
    """Name `pass_at_1.png`, `heldout_kl.png`, `acc.png`; with a number where several
    tasks have this metric.
    """
    stem = re.sub(r"\W+", "_", metric.partition(",")[0].replace("@", "_at_"))
    name, number = f"{stem}.png", 2
    while name in existing:
        name, number = f"{stem}_{number}.png", number + 1
    return name
