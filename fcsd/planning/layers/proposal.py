"""Which layers to rewire for a given share, from a finished layer study.

    proposal   the N layers that hurt least when each is rewired alone (greedy; of equals the later one)
    last N     the paper's choice for partial conversion (Table 2), to compare with

A sum of sensitivities is not the quality of the selection. A layer alone reads nothing in flight: only its MoE input is
outdated. In a run of selected layers every one but the first also reads its attention input without the routed output
before it, and what one layer breaks changes what the next one reads. Only `verify` measures a selection.

How many layers can be rewired without any training, for a given loss, is read from the same study (`layers_within`).

Not covered: the quality after distillation.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.text import markdown, nats
from fcsd.model.connectivity.spec import resolve_layers
from fcsd.model.load import find_model
from fcsd.parallel.launch import Launch
from fcsd.planning.layers.first import worst_layer, worst_text
from fcsd.planning.layers.points import (
    has_calibrated,
    number_text,
    point_loss,
    selection_text,
    study_metric,
    study_overlap,
    values_of,
)
from fcsd.planning.layers.settings import KL, Study
from fcsd.planning.layers.study import difference, layers_stage, measuring, read_study

OVERLAPPED = "collectives overlapped"


def plan_layers(
    folder: Path,
    budget: str,
    *,
    metric: str | None = None,
    calibrated: bool = False,
    model: str | None = None,
    verify: Launch | None = None,
) -> dict[str, Any]:
    """Return the proposal for `budget` (`90%` or a number of layers) from the study in `folder`; all of it JSON-able.

    Args:
        metric: of the study; None: the KL, or else the first task.
        calibrated: go by what the layers cost with calibrated weights.
        verify: measure the proposal and the last N layers on the study's own model and data, paired, in this launch.
        model: where the study's model lies now.

    Raises:
        UserError: no finished study with sides 'single', budget out of range, unknown metric, another model than the
            study's, a study without calibrated weights.
    """
    study = read_study(folder)
    num_layers = study["num_hidden_layers"]
    count = parse_budget(budget, num_layers)
    chosen = study_metric(study, metric)
    if calibrated and not has_calibrated(study):
        raise UserError(
            f"{folder}: this study has copied weights only; run `fcsd layers` with --calibrated TEXT"
        )
    sensitivities, errors = _sensitivities(study, chosen, folder, calibrated)
    proposal = least_sensitive(sensitivities, count)
    last = resolve_layers({"last": count}, [True] * num_layers)
    settings = study["study"]
    result: dict[str, Any] = {
        "study": str(folder),
        "metric": next(row for row in study["metrics"] if row["name"] == chosen),
        "calibrated": calibrated,
        "budget": budget,
        "num_layers": count,
        "num_hidden_layers": num_layers,
        "layers": proposal,
        "selection": selection_text(proposal),
        "connectivity": {"layers": proposal} | {side: settings[side] for side in ("attention", "mlp")},
        "sensitivities": [
            {"layer": layer, "value": value, "stderr": error, "rewired": layer in proposal}
            for layer, (value, error) in enumerate(zip(sensitivities, errors, strict=True))
        ],
        "selections": [],
        "worst_layer": worst_layer(study, chosen),
    }
    compared = {"proposal": proposal, f"last {count}": last} | _without_worst(result)
    for name, layers in compared.items():
        facts = _selection(study, layers, chosen, calibrated)
        total = sum(sensitivities[layer] for layer in layers)
        result["selections"].append({"name": name, "sum_of_sensitivities": total} | facts)
    result["difference"] = (
        _verify(folder, study, result, chosen, model, verify) if verify is not None else None
    )
    return result


def _without_worst(result: dict[str, Any]) -> dict[str, list[int]]:
    worst = result["worst_layer"]
    if worst is None or worst["layer"] not in result["layers"]:
        return {}
    return {f"all but layer {worst['layer']}": worst["without"]["layers"]}


def _selection(study: dict[str, Any], layers: list[int], metric: str, calibrated: bool) -> dict[str, Any]:
    """Return what is known of a selection: its exchanges, and what the study itself has measured of it."""
    overlapped, total = study_overlap(study, layers)
    same = (point for point in study["points"] if point["layers"] == layers)
    return {
        "layers": layers,
        "selection": selection_text(layers),
        "overlapped_collectives": overlapped,
        "collectives": total,
        "measured": next((values_of(point, calibrated)[metric] for point in same), None),
    }


def parse_budget(text: str, num_layers: int) -> int:
    """Return a share such as `90%` or a number as a number of decoder layers, as `last:TEXT` selects them."""
    try:
        return len(resolve_layers(f"last:{text}", [True] * num_layers))
    except UserError:
        raise UserError(
            f"budget {text!r}: needs a share above 0% and at most 100% that is at least one of the {num_layers} layers,"
            f" or a number from 1 to {num_layers}"
        ) from None


def least_sensitive(sensitivities: Sequence[float], count: int) -> list[int]:
    """Return the `count` layers with the smallest sensitivity, by index; of equal ones the later (paper Fig. 3)."""
    ranked = sorted(range(len(sensitivities)), key=lambda layer: (sensitivities[layer], -layer))
    return sorted(ranked[:count])


def layers_within(folder: Path, max_loss: float, *, metric: str | None = None) -> dict[str, Any]:
    """Answer from the study in `folder` how many layers can be rewired, from either end, without any training.

    Args:
        max_loss: of the KL, or of what the task's score loses against the original.

    Returns:
        For each side, with copied and with calibrated weights where they were measured, the largest number of layers
        whose loss is at most `max_loss`, that loss and its standard error; 0 layers lose nothing.

    Raises:
        UserError: a negative loss, unknown metric, a study of single layers only.
    """
    study = read_study(folder)
    if not 0 <= max_loss < math.inf:
        raise UserError(f"--max-loss {max_loss:g}: needs a number from 0, in the unit of the metric")
    chosen, rows = study_metric(study, metric), []
    sides = [side for side in ("first", "last") if any(p["side"] == side for p in study["points"])]
    if not sides:
        raise UserError(f"{folder}: single layers only; run `fcsd layers` with --sides first,last")
    for calibrated in (False, True) if has_calibrated(study) else (False,):
        for side in sides:
            points = [point for point in study["points"] if point["side"] == side]
            losses = [(point, *point_loss(study, point, chosen, calibrated)) for point in points]
            within = [row for row in losses if row[1] <= max_loss]
            best = max(within, key=lambda row: row[0]["num_layers"], default=None)
            layers, value, error = (best[0]["layers"], *best[1:]) if best is not None else ([], 0.0, 0.0)
            overlapped, total = study_overlap(study, layers)
            rows.append(
                {
                    "side": side,
                    "calibrated": calibrated,
                    "num_layers": len(layers),
                    "selection": selection_text(layers),
                    "loss": {"value": value, "stderr": error},
                    "overlapped_collectives": overlapped,
                    "collectives": total,
                }
            )
    return {
        "study": str(folder),
        "metric": next(row for row in study["metrics"] if row["name"] == chosen),
        "max_loss": max_loss,
        "num_hidden_layers": study["num_hidden_layers"],
        "within": rows,
        "worst_layer": worst_layer(study, chosen),
    }


def within_text(found: dict[str, Any]) -> str:
    """Return the answer of `layers_within` for people."""
    total, name = found["num_hidden_layers"], found["metric"]["name"]
    lost = "KL" if name == KL else f"{name} lost"
    rows = [
        [
            "calibrated" if row["calibrated"] else "copied",
            f"{row['side']} {row['num_layers']} of {total}",
            row["selection"],
            number_text(row["loss"]),
            f"{row['overlapped_collectives']} of {row['collectives']}",
        ]
        for row in found["within"]
    ]
    header = ["weights", f"most with {lost} <= {found['max_loss']:g}", "--layers", lost, OVERLAPPED]
    return "\n".join([markdown(header, rows), *worst_text(found)])


def _sensitivities(
    study: dict[str, Any], metric: str, folder: Path, calibrated: bool
) -> tuple[list[float], list[float]]:
    """Return what each layer alone costs."""
    points = {p["layers"][0]: p for p in study["points"] if p["side"] == "single"}
    if not points:
        raise UserError(f"{folder}: this study has no sensitivities; run `fcsd layers` with --sides single")
    found = [
        point_loss(study, points[layer], metric, calibrated) for layer in range(study["num_hidden_layers"])
    ]
    return [value for value, _ in found], [error for _, error in found]


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
    if not result["calibrated"]:
        plan = plan.model_copy(update={"calibrated": None})
    with measuring(plan, source, launch) as measure:
        measured = [measure(row["layers"], calibrated=result["calibrated"]) for row in result["selections"]]
    for row, each in zip(result["selections"], measured, strict=True):
        row["measured"] = asdict(each.values[metric])
    return asdict(difference(measured[0], measured[1], metric))


def plan_text(plan: dict[str, Any]) -> str:
    """Return the proposal for people: table, comparison, `--layers` text, YAML of a recipe."""
    metric = plan["metric"]
    unit = "KL" if metric["name"] == KL else f"{metric['name']} lost"
    rows = [
        [str(row["layer"]), number_text(row), "rewired" if row["rewired"] else "regular"]
        for row in plan["sensitivities"]
    ]
    compared = [
        [
            row["name"],
            row["selection"],
            nats(row["sum_of_sensitivities"]),
            number_text(row["measured"]) if row["measured"] else "-",
            f"{row['overlapped_collectives']} of {row['collectives']}",
        ]
        for row in plan["selections"]
    ]
    measured = "KL" if metric["name"] == KL else metric["name"]
    if plan["calibrated"]:
        unit, measured = f"{unit}, calibrated,", f"{measured}, calibrated,"
    header = ["selection", "layers", f"sum of {unit} alone", f"{measured} measured", OVERLAPPED]
    return "\n".join(
        [
            markdown(["layer", f"{unit} alone", ""], rows),
            "",
            markdown(header, compared),
            "",
            _verdict(plan),
            *worst_text(plan),
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
    first, second = plan["selections"][:2]
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


def study_table(study: dict[str, Any]) -> str:
    """Return the table of `fcsd layers`: a row for each number of layers or single layer, with every metric."""
    names = [row["name"] for row in study["metrics"]]
    labels = {"none": "original", "first": "first {}", "last": "last {}", "single": "only {}"}
    which = [False, True] if has_calibrated(study) else [False]
    rows = [
        [
            labels[point["side"]].format(
                point["layers"][0] if point["side"] == "single" else point["num_layers"]
            ),
            *[number_text(values_of(point, calibrated)[name]) for calibrated in which for name in names],
            "{} of {}".format(*study_overlap(study, point["layers"])),
        ]
        for point in study["points"]
    ]
    heads = [
        f"{row['name']} ({row['unit']}){', calibrated' if calibrated else ''}"
        for calibrated in which
        for row in study["metrics"]
    ]
    table = markdown(["rewired layers", *heads, OVERLAPPED], rows)
    facts = {"metric": study["metrics"][0], "worst_layer": worst_layer(study, names[0])}
    return "\n".join([table, *worst_text(facts)])
