"""The table and the figure of the study of depth and width."""

from pathlib import Path
from typing import Any

from benchmarks.recovery.report import summary
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_text
from fcsd.base.text import markdown

HEADER = [
    "model", "teacher's loss", "all layers: copied, calibrated", "the first alone", "but 1: copied, calibrated",
    "but 2", "but 3", "plain FCSD: batch, rate", "its last KL", "ours: last KL", "share of its tokens",
]  # fmt: skip


def write_depth(out: Path, models: dict[str, Any]) -> str:
    """Leave `depth.md` and `depth.png` in `out`; returns the table. models: of models.yaml.

    A model without a baseline yet has its untrained figures only.
    """
    rows = []
    for name, own in models["models"].items():
        path = out / "results" / name / "untrained.json"
        if path.is_file():
            trained = [read_json(file) for file in sorted(path.parent.glob("seed-*/*.json"))]
            rows.append({"model": name, **own, **read_json(path), **_best(trained)})
    text = markdown(HEADER, [_cells(row) for row in rows]) + "\n"
    write_text(out / "depth.md", text)
    plot(rows, out / "depth.png")
    return text


def _best(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The baseline and the best of the calibrated methods with most seeds, rows of `summary`; None: not run yet."""
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
        if row["method"] in calibrated and row["budget_tokens"] <= plain["budget_tokens"] / 2
    ]
    most = max((len(row["kl"]) for row in ours), default=0)
    return {"plain": plain, "ours": next((row for row in ours if len(row["kl"]) == most), None)}


def _cells(row: dict[str, Any]) -> list[str]:
    kl = row["kl"]
    pair = {name: f"{nats(values['copied'])}, {nats(values['calibrated'])}" for name, values in kl.items()}
    first = nats(kl["first"]["copied"])
    cells = [row["model"], f"{row['teacher_ce']:.3f}", pair["all"], first]
    cells += [pair.get(f"but-{count}", "") for count in (1, 2, 3)]
    for which in ("plain", "ours"):
        own = row[which]
        if which == "plain":
            cells.append(own["method"].removeprefix("kl ").removesuffix(", ema 0.95") if own else "")
        cells.append(", ".join(nats(value) for value in own["kl"].values()) if own else "")
    shares = row["ours"]["share"].values() if row["ours"] else []
    cells.append(", ".join("never" if share is None else f"{share:.2f}" for share in shares))
    return cells


def nats(value: float) -> str:
    """Three significant digits."""
    return f"{value:#.3g}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Share of tokens, and untrained KL, against depth: a line a kind of model, means and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    names = {
        "plain": "width 96",
        "wide": "width 192",
        "shared": "shared expert, width 96",
        "mla": "MLA, width 96",
    }
    styles = {"copied": "-", "calibrated": "--", "but-1": ":"}
    for kind, color in zip(names, ("C0", "C1", "C2", "C3"), strict=True):
        own = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["layers"])
        depths = [row["layers"] for row in own]
        reached = {
            row["layers"]: [share for share in row["ours"]["share"].values() if share is not None]
            for row in own
            if row["ours"]
        }
        points = {depth: shares for depth, shares in reached.items() if shares}
        means = [sum(shares) / len(shares) for shares in points.values()]
        spread = [
            [mean - min(shares) for mean, shares in zip(means, points.values(), strict=True)],
            [max(shares) - mean for mean, shares in zip(means, points.values(), strict=True)],
        ]
        left.errorbar(list(points), means, yerr=spread, marker="o", capsize=3, color=color, label=names[kind])
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
        title="tokens to plain FCSD's end", xlabel="layers", ylabel="share of plain FCSD's", ylim=(0, None)
    )
    right.set(title="untrained", xlabel="layers", ylabel="KL to the teacher, held out (nats)", yscale="log")
    for axis in (left, right):
        axis.set_xticks([6, 12, 24])
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
