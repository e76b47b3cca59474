"""Which layers to rewire for a given share, from a finished layer study.

    proposal   the N layers that hurt least when each is rewired alone (greedy; of equals the later one)
    last N     the paper's choice for partial conversion (Table 2), to compare with

A sum of sensitivities is not the quality of the selection. A layer alone reads nothing in flight: only its MoE input is
outdated. In a run of selected layers every one but the first also reads its attention input without the routed output
before it, and what one layer breaks changes what the next one reads. Only `verify` measures a selection.

Not covered: the quality after distillation.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fcsd.config.strict import did_you_mean
from fcsd.distributed.launch import Launch
from fcsd.errors import UserError
from fcsd.files import read_json
from fcsd.inspect.table import ranges
from fcsd.layers.study import KL, Study, difference, layers_stage, measuring, read_study
from fcsd.models.load import find_model
from fcsd.text import markdown


def plan_layers(
    folder: Path,
    budget: str,
    *,
    metric: str | None = None,
    model: str | None = None,
    verify: Launch | None = None,
) -> dict[str, Any]:
    """Return the proposal for `budget` (`90%` or a number of layers) from the study in `folder`; all of it JSON-able.

    Args:
        metric: of the study; None: the KL, or else the first task.
        verify: measure the proposal and the last N layers on the study's own model and data, paired, in this launch.
        model: where the study's model lies now.

    Raises:
        UserError: no finished study with sides 'single', budget out of range, unknown metric, another model than the
            study's.
    """
    study = read_study(folder)
    num_layers = study["num_hidden_layers"]
    count = parse_budget(budget, num_layers)
    names = [row["name"] for row in study["metrics"]]
    if metric is not None and metric not in names:
        raise UserError(
            f"metric {metric!r}: not in this study{did_you_mean(metric, names)}; it has {', '.join(names)}"
        )
    chosen = metric or names[0]
    sensitivities, errors = _sensitivities(study, chosen, folder)
    proposal = least_sensitive(sensitivities, count)
    last = list(range(num_layers - count, num_layers))
    settings = study["study"]
    sides = (settings["attention"], settings["mlp"])
    result: dict[str, Any] = {
        "study": str(folder),
        "metric": next(row for row in study["metrics"] if row["name"] == chosen),
        "budget": budget,
        "num_layers": count,
        "num_hidden_layers": num_layers,
        "layers": proposal,
        "selection": selection_text(proposal),
        "connectivity": {"layers": proposal, "attention": sides[0], "mlp": sides[1]},
        "sensitivities": [
            {"layer": layer, "value": value, "stderr": error, "rewired": layer in proposal}
            for layer, (value, error) in enumerate(zip(sensitivities, errors, strict=True))
        ],
        "selections": [],
    }
    for name, layers in (("proposal", proposal), (f"last {count}", last)):
        overlapped, total = overlapped_collectives(layers, study["moe_layers"], *sides)
        result["selections"].append(
            {
                "name": name,
                "layers": layers,
                "selection": selection_text(layers),
                "sum_of_sensitivities": sum(sensitivities[layer] for layer in layers),
                "overlapped_collectives": overlapped,
                "collectives": total,
                "measured": _in_study(study, layers, chosen),
            }
        )
    result["difference"] = (
        _verify(folder, study, result, chosen, model, verify) if verify is not None else None
    )
    return result


def parse_budget(text: str, num_layers: int) -> int:
    """Return a share such as `90%` (rounded as selections are) or a number as a number of decoder layers."""
    if match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text):
        share = float(match[1])
        count = int(share * num_layers / 100 + 0.5)
        if 0 < share <= 100 and count >= 1:
            return count
    elif re.fullmatch(r"\s*\d+\s*", text) and 1 <= int(text) <= num_layers:
        return int(text)
    raise UserError(
        f"budget {text!r}: needs a share above 0% and at most 100% that is at least one of the {num_layers} layers,"
        f" or a number from 1 to {num_layers}"
    )


def least_sensitive(sensitivities: Sequence[float], count: int) -> list[int]:
    """Return the `count` layers with the smallest sensitivity, by index; of equal ones the later (paper Fig. 3)."""
    ranked = sorted(range(len(sensitivities)), key=lambda layer: (sensitivities[layer], -layer))
    return sorted(ranked[:count])


def selection_text(layers: Sequence[int]) -> str:
    """Sorted indices as `--layers` reads them: `3,5-27`; `none` for no layer."""
    return ranges(layers) if layers else "none"


def overlapped_collectives(
    layers: Sequence[int], moe_layers: Sequence[int], attention: str, mlp: str
) -> tuple[int, int]:
    """Return (collectives that no longer block, all): dispatch and combine of each MoE layer under expert parallelism.

    The dispatch of a rewired MoE layer does not wait for its own attention (mlp: outdated). Its combine is not waited
    for by the attention of the next layer if that is rewired too (attention: partial): few long runs overlap more.
    """
    selected = set(layers)
    moe = [layer for layer in moe_layers if layer in selected]
    dispatch = len(moe) if mlp == "outdated" else 0
    combine = sum(layer + 1 in selected for layer in moe) if attention == "partial" else 0
    return dispatch + combine, 2 * len(moe_layers)


def _sensitivities(study: dict[str, Any], metric: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return what each layer alone costs: its KL, or what the task's score loses against the original."""
    points = {p["layers"][0]: p["values"][metric] for p in study["points"] if p["side"] == "single"}
    if not points:
        raise UserError(f"{folder}: this study has no sensitivities; run `fcsd layers` with --sides single")
    values = [points[layer] for layer in range(study["num_hidden_layers"])]
    if metric == KL:
        return [row["value"] for row in values], [row["stderr"] for row in values]
    (original,) = (p["values"][metric]["value"] for p in study["points"] if p["side"] == "none")
    return [original - row["value"] for row in values], [row["stderr"] for row in values]


def _in_study(study: dict[str, Any], layers: Sequence[int], metric: str) -> dict[str, Any] | None:
    """Return what the study itself has measured of this selection."""
    return next((p["values"][metric] for p in study["points"] if p["layers"] == list(layers)), None)


def _verify(
    folder: Path,
    study: dict[str, Any],
    result: dict[str, Any],
    metric: str,
    model: str | None,
    launch: Launch,
) -> dict[str, Any]:
    """Measure both selections, on the study's settings; proposal - last N, paired."""
    plan = Study.model_validate(study["study"])
    if model is not None:
        plan = plan.model_copy(
            update={"model": plan.model.model_copy(update={"path": model, "revision": None})}
        )
    source = find_model(plan.model)
    made_from, now = read_json(folder / "manifest.json")["inputs"], layers_stage(plan, source, folder).inputs
    if made_from["original"] != now["original"]:
        raise UserError(
            f"{plan.model.path}: is not the model of the study in {folder} (its weights differ); give the original with"
            " --model, or run `fcsd layers` on this one"
        )
    if changed := sorted(name for name in made_from if made_from[name] != now.get(name)):
        raise UserError(
            f"{folder}: {', '.join(changed)}: is not what the study was measured on; run `fcsd layers` again"
        )
    with measuring(plan, source, launch) as measure:
        measured = [measure(row["layers"]) for row in result["selections"]]
    for row, each in zip(result["selections"], measured, strict=True):
        row["measured"] = asdict(each.values[metric])
    return asdict(difference(measured[0], measured[1], metric))


def plan_text(plan: dict[str, Any], *, as_json: bool = False) -> str:
    """Return the proposal for people (table, comparison, `--layers` text, YAML of a recipe), or as JSON."""
    if as_json:
        return json.dumps(plan, indent=2)
    metric = plan["metric"]
    unit = "KL" if metric["name"] == KL else f"{metric['name']} lost"
    rows = [
        [str(row["layer"]), _number(row), "rewired" if row["rewired"] else "regular"]
        for row in plan["sensitivities"]
    ]
    compared = [
        [
            row["name"],
            row["selection"],
            f"{row['sum_of_sensitivities']:.3g}",
            _number(row["measured"]) if row["measured"] else "-",
            f"{row['overlapped_collectives']} of {row['collectives']}",
        ]
        for row in plan["selections"]
    ]
    measured = "KL" if metric["name"] == KL else metric["name"]
    header = ["selection", "layers", f"sum of {unit} alone", f"{measured} measured", "collectives overlapped"]
    return "\n".join(
        [
            markdown(["layer", f"{unit} alone", ""], rows),
            "",
            markdown(header, compared),
            "",
            _verdict(plan),
            "",
            f"--layers {plan['selection']}",
            "",
            "connectivity:",
            f"  layers: {json.dumps(plan['layers'])}",
            f"  attention: {plan['connectivity']['attention']}",
            f"  mlp: {plan['connectivity']['mlp']}",
        ]
    )


def _verdict(plan: dict[str, Any]) -> str:
    """Return one honest sentence: is the proposal better than the last N layers?"""
    first, second = plan["selections"]
    if first["layers"] == second["layers"]:
        return f"The proposal is the {second['name']} layers."
    found = plan["difference"]
    if found is None:
        return "Untrained, and one layer at a time: --verify measures the proposal against the last layers."
    sign = 1 if plan["metric"]["better"] == "lower" else -1
    distance = sign * found["value"]
    if abs(distance) <= 2 * found["stderr"]:
        word = "cannot be told from"
    else:
        word = "is better than" if distance < 0 else "is WORSE than"
    return (
        f"Measured, untrained: the proposal {word} the {second['name']} layers"
        f" (paired difference {found['value']:+.2g} ± {found['stderr']:.1g})."
    )


def _number(row: dict[str, Any]) -> str:
    return f"{row['value']:.3g} ± {row['stderr']:.1g}"  # KLs span orders of magnitude


def study_table(study: dict[str, Any]) -> str:
    """Return the table of `fcsd layers`: a row for each number of layers or single layer, with every metric."""
    names = [row["name"] for row in study["metrics"]]
    labels = {"none": "original", "first": "first {}", "last": "last {}", "single": "only {}"}
    rows = [
        [
            labels[point["side"]].format(
                point["layers"][0] if point["side"] == "single" else point["num_layers"]
            ),
            *[_number(point["values"][name]) for name in names],
        ]
        for point in study["points"]
    ]
    return markdown(["rewired layers", *[f"{row['name']} ({row['unit']})" for row in study["metrics"]]], rows)
