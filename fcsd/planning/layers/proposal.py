"""Propose the layers to rewire for a given share, from a finished layer study.

    proposal   N layers, chosen one after another: the one that adds least, by its cost alone
               and, where the study has them, by its pairs with those chosen before it
               (`fcsd.planning.layers.pairs`); of equals the later one
    last N     the paper's choice for partial conversion (Table 2), to compare with

What prices predict is not the quality of the selection. A single rewired layer reads
nothing in flight: only its MoE input is outdated. In a run of selected layers, every
one but the first also reads its attention input without the preceding routed output,
and an error of one layer changes the input of the next. Only `verify` measures a
selection.

`layers_within` answers from the same study how many layers can be rewired without any
training, for a given loss.

Not covered: the quality after distillation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import read_json
from fcsd.base.strict import refuse
from fcsd.base.text import markdown, nats
from fcsd.model.connectivity.selection import resolve_layers, selection_text
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.load import find_model
from fcsd.parallel.launch import Launch
from fcsd.planning.layers.first import special_layers, special_text
from fcsd.planning.layers.front import Pairs, changes, pairs_of, section_text
from fcsd.planning.layers.points import (
    base_loss,
    connectivity_overlap,
    deciding_metric,
    error_text,
    layers_with_mlp,
    loss_text,
    number_text,
    options_head,
    point_loss,
    point_text,
    selecting_option,
    selection_facts,
    study_connectivity,
    study_overlap,
    values_of,
    weights_of,
)
from fcsd.planning.layers.settings import KL, Study, attention_ahead, read_study
from fcsd.planning.layers.study import (
    Measured,
    difference,
    layers_stage,
    measuring,
)

OVERLAPPED = "collectives overlapped"


def plan_layers(
    folder: Path,
    budget: str,
    *,
    calibrated: bool = False,
    model: str | None = None,
    verify: Launch | None = None,
) -> dict[str, Any]:
    """Return the proposal for `budget` (`90%` or a number of layers) from the study in
    `folder`, as JSON data.

    Args:
        calibrated: rank the layers by their cost with calibrated weights.
        verify: measure the proposal and the last N layers on the study's own model and
            data, paired, in this launch.
        model: the current path of the study's model.

    Raises:
        UserError: no finished study with sides 'single', budget out of range,
            another model than the study's, a study without calibrated weights.
    """
    study = read_study(folder)
    num_layers = study["num_hidden_layers"]
    with_mlp = layers_with_mlp(study)
    count = parse_budget(budget, len(with_mlp))
    metric = deciding_metric(study)
    chosen = metric["name"]
    check_calibrated(folder, study, calibrated)
    # The greedy proposal begins with the layers' cost alone, so it needs the single
    # points.
    alone = single_points(folder, study)
    losses = [
        point_loss(study, alone[layer], chosen, calibrated)
        for layer in range(num_layers)
    ]
    pairs = pairs_of(study, chosen, calibrated)
    alone_losses = {layer: losses[layer][0] for layer in with_mlp}
    proposal = least_costly(alone_losses, count, pairs)
    base, base_error = base_loss(study, chosen, calibrated)
    selecting = selecting_option(study)
    sides = {name: study["study"][name] for name in ("attention", "mlp")}
    has_base = selecting == "mlp"
    result: dict[str, Any] = {
        "study": str(folder),
        "metric": metric,
        "calibrated": calibrated,
        "pairs": bool(pairs),
        "budget": budget,
        "num_layers": count,
        "num_hidden_layers": num_layers,
        "layers": proposal,
        "selection": selection_text(proposal),
        "connectivity": {"layers": "all", **sides, selecting: proposal},
        "base": {"value": base, "stderr": base_error} if has_base else None,
        "sensitivities": [
            {
                "layer": layer,
                "value": value,
                "stderr": error,
                "rewired": layer in proposal,
            }
            for layer, (value, error) in enumerate(losses)
        ],
        "special_layers": special_layers(study, chosen),
    }
    rows = result["selections"] = list(_selections(study, result))
    for row in rows:
        # What each layer adds: attention alone is part of every point of such a study.
        added = sum(losses[layer][0] - base for layer in row["layers"])
        if pairs:
            added += sum(pairs[i][j] for i, j in combinations(row["layers"], 2))
        row["predicted"] = base + added
    # The paired difference needs both selections measured again: the study keeps means,
    # not the values of single rows and items.
    result["difference"] = None
    if verify is not None:
        specs = [study_connectivity(study, row["layers"]) for row in rows]
        measured = measure_selections(folder, specs, chosen, calibrated, model, verify)
        for row, measurement in zip(rows, measured, strict=True):
            row["measured"] = measurement.values[chosen]
        result["difference"] = difference(measured[0], measured[1], chosen)
    return result


def check_calibrated(folder: Path, study: dict[str, Any], calibrated: bool) -> None:
    """Refuse calibrated weights where a study has none."""
    if calibrated not in weights_of(study):
        raise UserError(
            f"{folder}: this study has copied weights only; run `fcsd layers` with"
            " --calibrated TEXT"
        )


def single_points(folder: Path, study: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the points of a study that rewire one layer, by layer; UserError if it has
    none.
    """
    layers, settings = range(study["num_hidden_layers"]), study["study"]
    if not any(_rewires(study, [k]) for k in layers):
        raise UserError(
            f"{folder}: a study with attention: {settings['attention']}, mlp:"
            f" {settings['mlp']} of this family has no sensitivities: a single rewired"
            " layer computes what a regular one does; use --max-loss, or run `fcsd"
            " layers` with --mlp selected"
        )
    alone = {p["layers"][0]: p for p in study["points"] if p["side"] == "single"}
    if not alone:
        raise UserError(
            f"{folder}: this study has no sensitivities; run `fcsd layers` with --sides"
            " single"
        )
    return alone


def _selections(
    study: dict[str, Any], result: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each selection to compare: its exchanges, and its measured value
    if the study has that selection.
    """
    count, special = result["num_layers"], result["special_layers"]
    metric = result["metric"]["name"]
    last = layers_with_mlp(study)[-count:]
    compared = {"proposal": result["layers"], f"last {count}": last}
    # The proposal may contain a special layer; leaving those out is the alternative to
    # show beside it.
    if special is not None and not {*special["layers"]}.isdisjoint(result["layers"]):
        compared[special["without"]["name"]] = special["without"]["layers"]
    for name, layers in compared.items():
        row = {"name": name, "layers": layers} | selection_facts(study, layers)
        # The study measured this selection only if one of its points has these very
        # layers.
        same = (point for point in study["points"] if point["layers"] == layers)
        row["measured"] = next(
            (values_of(point, result["calibrated"])[metric] for point in same), None
        )
        yield row


def parse_budget(text: str, num_layers: int) -> int:
    """Convert a share such as `90%`, or a number, to a number of decoder layers, as
    `last:TEXT` does.
    """
    try:
        return len(resolve_layers(f"last:{text}", [True] * num_layers))
    except UserError:
        raise UserError(
            f"budget {text!r}: must be a share of the layers (at most 100%, at least one"
            f" of the {num_layers} layers), or a number from 1 to {num_layers}"
        ) from None


def least_costly(losses: Mapping[int, float], count: int, pairs: Pairs) -> list[int]:
    """Return the indices of `count` layers, chosen one after another: the smallest loss
    alone and in pairs with those chosen before it; of equal layers the later one comes
    first (paper Fig. 3).

    losses: of each layer alone that can be chosen. pairs: {}: none.
    """
    price = dict(losses)
    chosen: list[int] = []
    for _ in range(count):
        best = min(price, key=lambda layer: (price[layer], -layer))
        chosen.append(best)
        del price[best]
        for layer in price:
            price[layer] += pairs[best][layer] if pairs else 0.0
    return sorted(chosen)


def layers_within(folder: Path, max_loss: float) -> dict[str, Any]:
    """Return how many layers from either end can be rewired without any training,
    according to the study in `folder`.

    Each row has, for one end and one kind of weights (copied, and calibrated where
    measured), the largest number of layers whose loss is at most `max_loss`, that loss
    and its standard error. 0 layers lose nothing, or, where the study selects MLP
    sides, what attention alone loses; if that is more, `within` is False. max_loss: in
    KL, or in lost score of the task against the original.

    Raises:
        UserError: a negative loss, a study of single layers only.
    """
    study = read_study(folder)
    check_max_loss(max_loss)
    metric, rows = deciding_metric(study), []
    chosen = metric["name"]
    ends = [
        end
        for end in ("first", "last")
        if any(p["side"] == end for p in study["points"])
    ]
    if not ends:
        raise UserError(
            f"{folder}: single layers only; run `fcsd layers` with --sides first,last"
        )
    for calibrated in weights_of(study):
        for end in ends:
            points = [point for point in study["points"] if point["side"] == end]
            losses = [
                (point["layers"], *point_loss(study, point, chosen, calibrated))
                for point in points
            ]
            nothing: Any = ([], *base_loss(study, chosen, calibrated))
            # A selection that changes nothing loses nothing, and cannot be converted to.
            real = [row for row in losses if _rewires(study, row[0])]
            # Take the largest selection within the loss, not the last before the first
            # that exceeds it: noise can make a smaller one exceed it.
            within = [row for row in [nothing, *real] if row[1] <= max_loss]
            layers, value, error = max(
                within, key=lambda row: len(row[0]), default=nothing
            )
            row: dict[str, Any] = {
                "side": end,
                "calibrated": calibrated,
                "num_layers": len(layers),
                "within": bool(within),
            }
            row["loss"] = {"value": value, "stderr": error}
            rows.append(row | selection_facts(study, layers))
    return {
        "study": str(folder),
        "metric": metric,
        "max_loss": max_loss,
        "num_hidden_layers": study["num_hidden_layers"],
        "within": rows,
        "special_layers": special_layers(study, chosen),
    }


def _rewires(study: dict[str, Any], layers: Sequence[int]) -> bool:
    return changes(study, study_connectivity(study, layers))


def check_max_loss(max_loss: float) -> None:
    """Refuse a loss that is negative or no number."""
    if not 0 <= max_loss < math.inf:
        raise UserError(
            f"--max-loss {max_loss:g}: needs a number from 0, in the unit of the metric"
        )


def within_text(answer: dict[str, Any]) -> str:
    """Format the answer of `layers_within` as a table."""
    total, lost = answer["num_hidden_layers"], loss_text(answer["metric"])
    rows = [
        [
            "calibrated" if row["calibrated"] else "copied",
            _most_text(row, total),
            row["selection"] if row["within"] else "-",
            number_text(row["loss"]),
            f"{row['overlapped_collectives']} of {row['collectives']}",
        ]
        for row in answer["within"]
    ]
    first = answer["within"][0]
    header = [
        "weights",
        f"most with {lost} <= {answer['max_loss']:g}",
        first["options"].removesuffix(first["selection"]).strip(),
        lost,
        OVERLAPPED,
    ]
    return "\n".join([markdown(header, rows), *special_text(answer)])


def _most_text(row: dict[str, Any], total: int) -> str:
    """Return the largest selection of a row of `layers_within`: `last 5 of 8`."""
    if row["option"] == "layers" or row["num_layers"]:
        return f"{row['side']} {row['num_layers']} of {total}"
    return f"{'' if row['within'] else 'none: '}attention alone"


def measure_selections(
    folder: Path,
    selections: Sequence[Connectivity],
    metric: str,
    calibrated: bool,
    model: str | None,
    launch: Launch,
) -> list[Measured]:
    """Measure these connectivities with the settings of the study in `folder`.

    model: the current path of the study's model.
    """
    study = read_study(folder)
    spec = Study.model_validate(study["study"])
    if model is not None:
        moved = spec.model.model_copy(update={"path": model, "revision": None})
        spec = spec.model_copy(update={"model": moved})
    source = find_model(spec.model)
    # A difference is only comparable with the study on the very same weights and data.
    study_inputs = read_json(folder / "manifest.json")["inputs"]
    current_inputs = layers_stage(spec, source, folder).inputs
    refuse(
        (
            study_inputs["original"] != current_inputs["original"],
            f"{spec.model.path}: is not the model of the study in {folder} (its weights"
            " differ); give the original with --model, or run `fcsd layers` on"
            " this one",
        ),
        (
            changed := sorted(
                name
                for name in study_inputs
                if study_inputs[name] != current_inputs.get(name)
            ),
            lambda: (
                f"{folder}: {', '.join(changed)}: has changed since the study; run `fcsd"
                " layers` again"
            ),
        ),
    )
    _refuse_without_error(folder, spec, study, metric)
    # Calibration text is not needed for copied weights; without it none is loaded.
    if not calibrated:
        spec = spec.model_copy(update={"calibrated": None})
    with measuring(spec, source, launch) as (measure, _):
        return [measure(selection, calibrated, None) for selection in selections]


def _refuse_without_error(
    folder: Path, spec: Study, study: dict[str, Any], metric: str
) -> None:
    """Raise UserError where the study measured a single row or item, because a
    difference would have no standard error.
    """
    if all(point["values"][metric]["stderr"] is not None for point in study["points"]):
        return
    unit, remedy = "item", "--limit, or tasks of more items"
    if metric == KL:
        assert spec.text is not None
        unit = "example"
        remedy = f"--text-examples, or a text with more examples than {spec.text.path}"
    raise UserError(
        f"{folder}: --verify: the study measured {metric} on a single {unit}, which has"
        " no standard error, so fcsd cannot tell a difference from chance; run `fcsd"
        f" layers` again into another folder with a larger {remedy}"
    )


def plan_text(proposal: dict[str, Any]) -> str:
    """Format the proposal: table, comparison, `--layers` text, YAML of a recipe."""
    metric = proposal["metric"]
    unit = loss_text(metric)
    base = proposal["base"]
    words = ("rewired", "regular") if base is None else ("MLP side, too", "attention")
    rows = [["none", number_text(base), ""]] if base is not None else []
    rows += [
        [str(row["layer"]), number_text(row), words[0 if row["rewired"] else 1]]
        for row in proposal["sensitivities"]
    ]
    compared = [
        [
            row["name"],
            row["selection"],
            nats(row["predicted"]),
            number_text(row["measured"]) if row["measured"] else "-",
            f"{row['overlapped_collectives']} of {row['collectives']}",
        ]
        for row in proposal["selections"]
    ]
    # The last lines can be copied as they are: the option, and the recipe's section.
    taken, section = proposal["selections"][0], proposal["connectivity"]
    instead = []
    margin = proposal["difference"]
    if margin is not None and better_by(margin, metric) < 0:
        taken = proposal["selections"][1]
        section = {**section, taken["option"]: taken["layers"]}
        instead = [f"Take the {taken['name']} layers instead: measured better."]
    measured = "KL" if metric["name"] == KL else metric["name"]
    if proposal["calibrated"]:
        unit, measured = f"{unit}, calibrated,", f"{measured}, calibrated,"
    alone, total = f"{unit} alone", f"sum of {unit} alone"
    if base is not None:
        alone = f"{unit} with attention in all layers"
        total = f"{unit} of attention, and what each adds"
    if proposal["pairs"]:
        total = f"{unit} predicted from pairs"
    header = [
        "selection",
        "layers",
        total,
        f"{measured} measured",
        OVERLAPPED,
    ]
    return "\n".join(
        [
            markdown(["layer", alone, ""], rows),
            "",
            markdown(header, compared),
            "",
            _verdict(proposal),
            *instead,
            "Every collective counts the same here. With --gpu or --cluster, and the"
            " other options of a plan, layers are chosen by planned time saved per loss.",
            *special_text(proposal),
            "",
            taken["options"],
            "",
            *section_text(section),
        ]
    )


def _verdict(proposal: dict[str, Any]) -> str:
    """State in one sentence whether the proposal is better than the last N layers."""
    first, second = proposal["selections"][:2]
    if first["layers"] == second["layers"]:
        return f"The proposal is the {second['name']} layers."
    margin = proposal["difference"]
    if margin is None:
        return (
            "Untrained, and one layer at a time: --verify measures the proposal against"
            " the last layers."
        )
    return verdict(margin, proposal["metric"], f"the {second['name']} layers")


def verdict(margin: Mapping[str, Any], metric: Mapping[str, Any], other: str) -> str:
    """State in one sentence whether a proposal is better than another selection, from
    their paired difference.
    """
    word = {1: "is better than", 0: "cannot be told from", -1: "is WORSE than"}[
        better_by(margin, metric)
    ]
    return (
        f"Measured, untrained: the proposal {word} {other}"
        f" (paired difference {margin['value']:+.2g} ± {error_text(margin['stderr'])})."
    )


def better_by(margin: Mapping[str, Any], metric: Mapping[str, Any]) -> int:
    """Return 1 where a proposal is better than another selection by their paired
    difference, -1 where it is worse, and 0 within two standard errors, where the sign of
    a difference says nothing.
    """
    if margin["stderr"] is None or abs(margin["value"]) <= 2 * margin["stderr"]:
        return 0
    return 1 if (margin["value"] < 0) == (metric["better"] == "lower") else -1


def study_table(study: dict[str, Any]) -> str:
    """Format the table of `fcsd layers`: a row for each number of layers or single
    layer, with every metric.
    """
    metric, names = deciding_metric(study), [row["name"] for row in study["metrics"]]
    # Calibrated values, if any, are columns beside the copied ones.
    weight_kinds = weights_of(study)

    def cells(name: str, point: dict[str, Any], overlap: tuple[int, int]) -> list[str]:
        values = [
            number_text(values_of(point, calibrated)[metric_name])
            for calibrated in weight_kinds
            for metric_name in names
        ]
        return [name, *values, "{} of {}".format(*overlap)]

    total = study["num_hidden_layers"]
    rows = [
        cells(point_text(point, total), point, study_overlap(study, point["layers"]))
        for point in study["points"]
    ]
    for entry in study.get("attention", []):
        overlap = connectivity_overlap(study, attention_ahead(entry["layer"]))
        rows.append(cells(f"only attention {entry['layer']}", entry, overlap))
    heads = [
        f"{row['name']} ({row['unit']}){', calibrated' if calibrated else ''}"
        for calibrated in weight_kinds
        for row in study["metrics"]
    ]
    selected = f"rewired layers ({options_head(study)})"
    if selecting_option(study) == "mlp":
        selected = "layers with an outdated MLP side (--mlp)"
    table = markdown([selected, *heads, OVERLAPPED], rows)
    facts = {
        "metric": metric,
        "special_layers": special_layers(study, metric["name"]),
    }
    return "\n".join([table, *special_text(facts)])
