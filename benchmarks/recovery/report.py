"""The table and the figure from the results of the runs."""

import fnmatch
import itertools
import math
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_json, write_text
from fcsd.base.text import markdown

# methods with this beginning are plain FCSD at different settings; the best of them is
# the baseline
BASELINE = "kl "


def tokens_to_reach(curve: list[list[float]], kl: float) -> float | None:
    """At how many tokens a curve of (tokens, KL) is first at or below `kl`; None:
    never.

    Between two points ln(KL) is taken as linear.
    """
    for (before, above), (after, below) in itertools.pairwise(curve):
        if below <= kl:
            if above <= kl:
                return before
            share = (math.log(above) - math.log(kl)) / (
                math.log(above) - math.log(below)
            )
            return before + share * (after - before)
    return None


def baseline(results: list[dict[str, Any]]) -> str:
    """The plain method with the lowest mean last KL, of those that were run with the most seeds."""
    last: dict[str, list[float]] = {}
    for row in results:
        if row["method"].startswith(BASELINE):
            last.setdefault(row["method"], []).append(row["curve"][-1][1])
    if not last:
        raise UserError(
            f"no result of a method '{BASELINE}…' yet, with which the others are"
            " compared"
        )
    most = max(map(len, last.values()))
    return min(
        (name for name in last if len(last[name]) == most),
        key=lambda name: sum(last[name]) / most,
    )


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a method, best first: last KL by seed, and tokens to the baseline's last
    KL as a share of its budget.
    """
    plain = baseline(results)
    goal = {row["seed"]: row for row in results if row["method"] == plain}
    rows: dict[str, dict[str, Any]] = {}
    for row in sorted(results, key=lambda row: row["seed"]):
        if row["seed"] not in goal:
            continue
        own = rows.setdefault(
            row["method"],
            {"method": row["method"], "kl": {}, "share": {}, "is_baseline": False},
        )
        target = goal[row["seed"]]
        reached = tokens_to_reach(row["curve"], target["curve"][-1][1])
        own["kl"][row["seed"]] = row["curve"][-1][1]
        # counted in full, though nothing is trained on them
        used = row.get("calibration_tokens", 0)
        own["share"][row["seed"]] = (
            None if reached is None else (reached + used) / target["budget_tokens"]
        )
        own["budget_tokens"] = row["budget_tokens"]
        own["is_baseline"] = row["method"] == plain
    return sorted(
        rows.values(), key=lambda row: sum(row["kl"].values()) / len(row["kl"])
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a method, its budget, last KL and share of tokens by seed."""
    seeds = sorted({seed for row in rows for seed in row["kl"]})
    header = [
        "method",
        "budget (tokens)",
        *[f"KL, seed {seed}" for seed in seeds],
        *[f"tokens, seed {seed}" for seed in seeds],
    ]
    body = []
    for row in rows:
        shares = [row["share"].get(seed, "") for seed in seeds]
        body.append(
            [
                (
                    f"**{row['method']}** (baseline)"
                    if row["is_baseline"]
                    else row["method"]
                ),
                f"{row['budget_tokens']:,}",
                *[
                    f"{row['kl'][seed]:.4f}" if seed in row["kl"] else ""
                    for seed in seeds
                ],
                *[
                    (
                        share
                        if share == ""
                        else "never"
                        if share is None
                        else f"{share:.2f}"
                    )
                    for share in shares
                ],
            ]
        )
    return markdown(header, body)


def write_report(out: Path, shown: list[str]) -> str:
    """Leave `recovery.md`, `recovery.json` and `recovery.png` in `out`; returns the
    text.

    shown: patterns of the methods in the figure.
    """
    results_of: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((out / "results").glob("*/seed-*/*.json")):
        row = read_json(path)
        results_of.setdefault(row["model"], []).append(row)
    if not results_of:
        raise UserError(f"{out}: no results yet")
    rows = {model: summary(results) for model, results in results_of.items()}
    parts = [
        "KL(teacher || student) on held-out text at the end, nats per token; tokens"
        " that a method needs to the KL with which the baseline ends, as a share of the"
        " baseline's budget; those of a calibration are counted."
    ]
    for model, each in rows.items():
        parts += [f"## {model}", table(each)]
    text = "\n\n".join(parts) + "\n"
    write_text(out / "recovery.md", text)
    write_json(out / "recovery.json", rows)
    plot(results_of, out / "recovery.png", shown)
    return text


def plot(
    results_of: dict[str, list[dict[str, Any]]], path: Path, shown: list[str]
) -> None:
    """KL against tokens, one panel a model; lines are geometric means over seeds, bands
    the seeds' range.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(results_of),
        figsize=(5.5 * len(results_of), 4),
        squeeze=False,
        sharey=True,
    )
    for axis, (model, results) in zip(axes[0], results_of.items(), strict=True):
        plain = baseline(results)
        names = [row["method"] for row in summary(results)]
        for name in names:
            if not any(fnmatch.fnmatch(name, pattern) for pattern in shown):
                continue
            curves = [row["curve"] for row in results if row["method"] == name]
            used = next(
                row.get("calibration_tokens", 0)
                for row in results
                if row["method"] == name
            )
            tokens = [point[0] + used for point in curves[0][1:]]
            values = [[point[1] for point in curve[1:]] for curve in curves]
            middle = [
                math.exp(sum(map(math.log, column)) / len(column))
                for column in zip(*values, strict=True)
            ]
            style = {"color": "black", "linewidth": 2} if name == plain else {}
            (line,) = axis.plot(tokens, middle, label=name, **style)
            low, high = (
                [pick(column) for column in zip(*values, strict=True)]
                for pick in (min, max)
            )
            axis.fill_between(tokens, low, high, alpha=0.15, color=line.get_color())
        axis.set(title=model, xlabel="tokens", yscale="log")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("KL to the teacher, held out (nats per token)")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
