"""The tables and the figure of the study of depth and width."""

import re
from pathlib import Path
from typing import Any

from benchmarks.recovery.report import summary
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_text
from fcsd.base.text import markdown

UNTRAINED = [
    "model",
    "teacher",
    "all, copied; calibrated",
    "first alone",
    "but 1, copied",
    "but 1, 2, 3, calibrated",
]
TRAINED = [
    "model",
    "plain FCSD's batch, rate",
    "its last KL",
    "ours, half of the tokens",
    "share",
]
KINDS = {
    "plain": "width 96",
    "wide": "width 192",
    "shared": "shared expert, width 96",
    "mla": "MLA, width 96",
}


def write_depth(out: Path, models: dict[str, Any]) -> str:
    """Leave `depth.md` and `depth.png` in `out`; returns the tables. models: of
    models.yaml.

    A model without a baseline yet has its untrained figures only.
    """
    rows = []
    for name, own in models["models"].items():
        path = out / "results" / name / "untrained.json"
        if path.is_file():
            trained = [
                read_json(file) for file in sorted(path.parent.glob("seed-*/*.json"))
            ]
            rows.append({"model": name, **own, **read_json(path), **_best(trained)})
    tables = [
        markdown(UNTRAINED, [_untrained(row) for row in rows]),
        markdown(TRAINED, [_trained(row) for row in rows if row["plain"] is not None]),
    ]
    text = "\n\n".join(tables) + "\n"
    write_text(out / "depth.md", text)
    plot(rows, out / "depth.png")
    return text


def _best(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The baseline and the best of the calibrated methods with most seeds, rows of
    `summary`; None: not run yet.
    """
    try:
        table = summary(results)
    except UserError:
        return {"plain": None, "ours": None}
    plain = next(row for row in table if row["is_baseline"])
    calibrated = {row["method"] for row in results if row.get("calibration_tokens")}
    # At most half of the tokens: a longer run ends lower and falls later.
    ours = [
        row
        for row in table
        if row["method"] in calibrated
        and row["budget_tokens"] <= plain["budget_tokens"] / 2
    ]
    most = max((len(row["kl"]) for row in ours), default=0)
    return {
        "plain": plain,
        "ours": next((row for row in ours if len(row["kl"]) == most), None),
    }


def _untrained(row: dict[str, Any]) -> list[str]:
    """KL of rewired selections, nats."""
    kl = row["kl"]
    both = "; ".join(nats(kl["all"][which]) for which in ("copied", "calibrated"))
    calibrated = ", ".join(
        nats(kl[f"but-{count}"]["calibrated"])
        for count in (1, 2, 3)
        if f"but-{count}" in kl
    )
    copied = [nats(kl[name]["copied"]) for name in ("first", "but-1")]
    return [row["model"], f"{row['teacher_ce']:.2f}", both, *copied, calibrated]


def _trained(row: dict[str, Any]) -> list[str]:
    """Last KL by seed, and share of the baseline's tokens at which the calibrated run
    is where the baseline ends.
    """
    plain, ours = row["plain"], row["ours"]
    setting = re.search(r"(\S+), (\d+) tokens a step", plain["method"])
    cells = [
        row["model"],
        f"{setting[2]}, {setting[1]}"
        if setting
        else plain["method"].removeprefix("kl "),
    ]
    cells += [
        ", ".join(nats(value) for value in own["kl"].values()) if own else ""
        for own in (plain, ours)
    ]
    shares = ours["share"].values() if ours else []
    return [
        *cells,
        ", ".join("never" if share is None else f"{share:.2f}" for share in shares),
    ]


def nats(value: float) -> str:
    """Three significant digits."""
    return f"{value:#.3g}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Share of tokens, and untrained KL, against depth: a line a kind of model, means
    and range over seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    styles = {"copied": "-", "calibrated": "--", "but-1": ":"}
    for kind, color in zip(KINDS, ("C0", "C1", "C2", "C3"), strict=True):
        own = sorted(
            (row for row in rows if row["kind"] == kind), key=lambda row: row["layers"]
        )
        depths = [row["layers"] for row in own]
        reached = {
            row["layers"]: [
                share for share in row["ours"]["share"].values() if share is not None
            ]
            for row in own
            if row["ours"]
        }
        points = {depth: shares for depth, shares in reached.items() if shares}
        means = [sum(shares) / len(shares) for shares in points.values()]
        spread = [
            [
                mean - min(shares)
                for mean, shares in zip(means, points.values(), strict=True)
            ],
            [
                max(shares) - mean
                for mean, shares in zip(means, points.values(), strict=True)
            ],
        ]
        left.errorbar(
            list(points),
            means,
            yerr=spread,
            marker="o",
            capsize=3,
            color=color,
            label=KINDS[kind],
        )
        curves = {
            "copied": [row["kl"]["all"]["copied"] for row in own],
            "calibrated": [row["kl"]["all"]["calibrated"] for row in own],
            "but-1": [row["kl"]["but-1"]["calibrated"] for row in own],
        }
        for name, values in curves.items():
            right.plot(depths, values, styles[name], marker="o", color=color)
    for style, label in (
        ("-", "all, copied"),
        ("--", "all, calibrated"),
        (":", "all but the first, calibrated"),
    ):
        right.plot([], [], style, color="black", label=label)
    left.set(
        title="tokens to plain FCSD's end",
        xlabel="layers",
        ylabel="share of plain FCSD's",
        ylim=(0, 0.6),
    )
    right.set(
        title="untrained",
        xlabel="layers",
        ylabel="KL to the teacher, held out (nats)",
        yscale="log",
    )
    right.set_ylim(top=10)  # room for the legend
    for axis in (left, right):
        axis.set_xticks([6, 12, 24])
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
