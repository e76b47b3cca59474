"""Tables for people and, with `as_json`, for programs."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Sequence[str]]


def markdown(header: Sequence[str], rows: Rows) -> str:
    """A Markdown table that also reads well as plain text: columns padded, all but the first aligned to the right."""
    widths = [max(len(line[index]) for line in [header, *rows]) for index in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    # The first column is ruled `|----|`, the others `|---:|`, which aligns them to the right.
    rule = "|".join("-" * (width + 1) + ("-" if index == 0 else ":") for index, width in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


def percent(value: float | None, stderr: float | None = None) -> str:
    """`97.5` or `97.5 ± 1.1`, in per cent."""
    if value is None or not math.isfinite(value):
        return "-"
    text = f"{100 * value:.1f}"
    return text if stderr is None or not math.isfinite(stderr) else f"{text} ± {100 * stderr:.1f}"


def models_table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a model: rewired layers, training, every task's score, mean, KL to the original.

    models: name -> {"layers": text, "training": text, "result": what `fcsd evaluate` measured}.
    """
    tasks = list(next(iter(models.values()))["result"]["tasks"])
    units = {
        task: row["metric"].split(",")[0]
        for task, row in next(iter(models.values()))["result"]["tasks"].items()
    }
    header = [
        "model",
        "rewired",
        "training",
        *[f"{task} {units[task]}" for task in tasks],
        "mean",
        "KL to original",
    ]
    rows = []
    for name, model in models.items():
        result = model["result"]
        kl = result.get("kl_to_original")
        scores = [percent(result["tasks"][task]["value"], result["tasks"][task]["stderr"]) for task in tasks]
        rows.append(
            [
                name,
                model["layers"],
                model["training"],
                *scores,
                percent(result["mean"]),
                f"{kl['kl']:.4f}" if kl and kl["kl"] is not None else "-",
            ]
        )
    return markdown(header, rows)


def paired_table(comparisons: Mapping[str, Mapping[str, Any]]) -> str:
    """One row a model and task: both scores, paired delta, items gained and lost, McNemar's p."""
    header = ["model, task", "n", "original", "model", "delta", "gained", "lost", "p", "retained %"]
    rows = []
    for name, comparison in comparisons.items():
        for task, row in comparison["tasks"].items():
            rows.append(
                [
                    f"{name}, {task}",
                    str(row["num_items"]),
                    percent(row["original"]),
                    percent(row["converted"]),
                    percent(row["delta"], row["delta_stderr"]),
                    str(row["gained"]),
                    str(row["lost"]),
                    f"{row['p_value']:.3f}",
                    _retained(row),
                ]
            )
        mean = comparison["mean"]
        rows.append(
            [
                f"{name}, mean",
                "",
                percent(mean["original"]),
                percent(mean["converted"]),
                percent(mean["delta"], mean["delta_stderr"]),
                "",
                "",
                "",
                _retained(mean),
            ]
        )
    return markdown(header, rows)


def _retained(row: Mapping[str, Any]) -> str:
    return "-" if row["retained_percent"] is None else f"{row['retained_percent']:.1f}"


def result_table(folder: Path) -> str:
    """The results in one folder of `fcsd evaluate`."""
    from fcsd.evaluate.runner import read_result

    result, _ = read_result(folder)
    rows = [
        [
            task,
            row["metric"],
            str(row["num_fewshot"]),
            str(row["num_items"]),
            percent(row["value"], row["stderr"]),
        ]
        for task, row in result["tasks"].items()
    ]
    table = markdown(["task", "metric", "shots", "n", "score"], rows)
    limit = result["settings"]["limit"]
    note = f"\nOnly the first {limit} items of every task: a quick look, not a result." if limit else ""
    return f"{table}\nmean {percent(result['mean'], result['mean_stderr'])}{note}"


def comparison_table(original: Path, converted: Sequence[Path], *, as_json: bool = False) -> str:
    """`fcsd compare`: results of one model against others, on the same items."""
    from fcsd.evaluate.runner import read_result
    from fcsd.evaluate.scores import compare

    def load(folder: Path) -> dict[str, Any]:
        result, samples = read_result(folder)
        return {"result": result, "samples": samples}

    first = load(original)
    comparisons = {str(folder): compare(first, load(folder)) for folder in converted}
    return json.dumps(comparisons, indent=2) if as_json else paired_table(comparisons)


def families_table(*, as_json: bool = False) -> str:
    """`fcsd families`: what can be converted."""
    from fcsd.families import FAMILIES

    facts = [
        {
            "model_type": name,
            "shared_experts": bool(family.block_shared or family.layer_shared),
            "classes": family.causal_lm,
        }
        for name, family in sorted(FAMILIES.items())
    ]
    if as_json:
        return json.dumps(facts, indent=2)
    rows = [
        [str(fact["model_type"]), "yes" if fact["shared_experts"] else "no", str(fact["classes"])]
        for fact in facts
    ]
    return markdown(["model_type", "shared experts", "class"], rows)
