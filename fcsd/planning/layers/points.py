"""Read the values that a layer study measured for a selection of layers, and count the
exchanges that the selection overlaps.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.text import nats
from fcsd.model.connectivity.selection import selection_text
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import FAMILIES
from fcsd.model.families.overlap import kept_inside
from fcsd.parallel.overlap.schedule import ATTENTION_A, ATTENTION_B, beside, layer_facts
from fcsd.planning.layers.settings import KL, measured_connectivity


def deciding_metric(study: dict[str, Any]) -> dict[str, str]:
    """Return the metric of a study by which layers are chosen: the KL, or, where none
    was measured, the first task.
    """
    row: dict[str, str] = study["metrics"][0]
    return row


def loss_text(metric: Mapping[str, Any]) -> str:
    """Return what a loss in a metric of a study is called: `KL`, `hellaswag lost`, or,
    where lower is better, `own_text added`.
    """
    if metric["name"] == KL:
        return "KL"
    return f"{metric['name']} {'added' if metric['better'] == 'lower' else 'lost'}"


def weights_of(study: dict[str, Any]) -> tuple[bool, ...]:
    """Return whether each kind of weights of a study is calibrated: copied ones come
    first, and may be all.
    """
    is_calibrated = all("calibrated" in point for point in study["points"])
    return (False, True) if is_calibrated else (False,)


def values_of(point: dict[str, Any], calibrated: bool) -> dict[str, Any]:
    """Return the values measured for a selection with copied or with calibrated
    weights.
    """
    values: dict[str, Any] = point["calibrated" if calibrated else "values"]
    return values


def point_loss(
    study: dict[str, Any], point: dict[str, Any], metric: str, calibrated: bool
) -> tuple[float, float | None]:
    """Return the cost of a selection and its standard error: its KL, or how much worse
    the task's score is than the original's.
    """
    row = values_of(point, calibrated)[metric]
    if metric == KL:
        return row["value"], row["stderr"]
    (better,) = (m["better"] for m in study["metrics"] if m["name"] == metric)
    # A study with tasks has exactly one point without rewired layers, their reference.
    (original,) = (
        p["values"][metric]["value"] for p in study["points"] if p["side"] == "none"
    )
    sign = 1 if better == "lower" else -1
    return sign * (row["value"] - original), row["stderr"]


def attention_losses(
    study: dict[str, Any], metric: str, calibrated: bool
) -> dict[int, float]:
    """Return the cost of attention ahead in one layer alone, by layer; {} where a study
    did not measure it.
    """
    return {
        entry["layer"]: point_loss(study, entry, metric, calibrated)[0]
        for entry in study.get("attention", [])
    }


def base_loss(
    study: dict[str, Any], metric: str, calibrated: bool
) -> tuple[float, float | None]:
    """Return the cost of an empty selection and its standard error: of attention alone,
    in all layers, where the study selects MLP sides; otherwise of the original, 0.
    """
    if selecting_option(study) == "layers":
        return 0.0, 0.0
    for point in study["points"]:
        if point["side"] == "attention":
            return point_loss(study, point, metric, calibrated)
    raise UserError(
        "the layer study has mlp: selected, but no point for attention alone, which is"
        " part of every other point; run `fcsd layers` again"
    )


def overlapped_collectives(
    layers: Sequence[int],
    moe_layers: Sequence[int],
    attention: str,
    mlp: str | Collection[int],
    model_type: str | None = None,
) -> tuple[int, int]:
    """Return the number of collectives that no longer block, and the number of all:
    dispatch and combine of each MoE layer under expert parallelism.

    A collective counts where attention is computed while it is in flight
    (`fcsd.parallel.overlap.schedule`); a shared expert alone could hide one in a
    regular layer as well. model_type: the family; some families keep each combine in
    its layer; None: not known. Where a layer is one branch, an exchange counts where the
    mixer before or behind its MoE layer is computed meanwhile.
    """
    # Layers beyond the last rewired or MoE layer have no exchange, so the model's depth
    # is not needed.
    num_layers = 1 + max((*layers, *moe_layers), default=0)
    rewired, moe = (
        [k in chosen for k in range(num_layers)]
        for chosen in (set(layers), set(moe_layers))
    )
    if model_type is not None and is_one_branch(model_type):
        spec = Connectivity(list(layers) or "none", attention, mlp)  # type: ignore[arg-type]
        outdated = [k for k in spec.outdated_layers(moe) if moe[k]]
        dispatches = sum(k - 1 in layers for k in outdated)
        following = {*spec.attention_layers(moe)} - {*moe_layers} | {*outdated}
        combines = sum(moe[k] and k + 1 in following for k in layers)
        return dispatches + combines, 2 * len(moe_layers)
    inside = model_type is not None and kept_inside(FAMILIES[model_type]) is not None
    # One entry per collective, with the steps that are computed while it is in flight.
    exchanges = [
        computed
        for layer in beside(layer_facts(rewired, moe, attention, mlp, inside=inside))
        for computed in layer.values()
    ]
    attention_steps = {step.name for step in (ATTENTION_A, ATTENTION_B)}
    overlapped = sum(
        any(name in attention_steps for _, name in computed) for computed in exchanges
    )
    return overlapped, 2 * len(moe_layers)


def is_one_branch(model_type: str | None) -> bool:
    """Tell whether each layer of a family is one branch: attention, Mamba or MLP."""
    family = FAMILIES.get(model_type or "")
    return family is not None and family.layout == "blocks"


def layers_with_mlp(study: dict[str, Any]) -> list[int]:
    """Return the layers whose MLP side can be ahead: all, or, where a layer is one
    branch, the MoE layers behind a mixer.
    """
    mask = moe_mask(study)
    if not is_one_branch(study.get("model_type")):
        return list(range(len(mask)))
    return [k for k in range(1, len(mask)) if mask[k] and not mask[k - 1]]


def study_connectivity(study: dict[str, Any], layers: Sequence[int]) -> Connectivity:
    """Return the connectivity that a study measured for a selection of layers."""
    settings = study["study"]
    return measured_connectivity(settings["attention"], settings["mlp"], layers)


def study_overlap(study: dict[str, Any], layers: Sequence[int]) -> tuple[int, int]:
    """Return `overlapped_collectives` of a selection of a study's model, with its connectivity."""
    return connectivity_overlap(study, study_connectivity(study, layers))


def connectivity_overlap(study: dict[str, Any], spec: Connectivity) -> tuple[int, int]:
    """Return `overlapped_collectives` of a study's model with a connectivity."""
    field = spec.field(moe_mask(study))
    return overlapped_collectives(
        field["layers"],
        study["moe_layers"],
        field["attention"],
        field["mlp"],
        study.get("model_type"),
    )


def moe_mask(study: dict[str, Any]) -> list[bool]:
    """Return one entry for each layer of a study's model, True for an MoE layer."""
    return [k in study["moe_layers"] for k in range(study["num_hidden_layers"])]


def selecting_option(study: dict[str, Any]) -> str:
    """Return the option and the key of a recipe that take the selections of a study."""
    return "mlp" if study["study"]["mlp"] == "selected" else "layers"


def options_head(study: dict[str, Any]) -> str:
    """Return the options of a study's connectivity, up to the selection: `--layers`,
    `--attention full --layers`, `--mlp full --layers`, `--mlp`.
    """
    settings, option = study["study"], selecting_option(study)
    sides = [
        f"--{side} full"
        for side in ("attention", "mlp")
        if settings[side] == "full" and side != option
    ]
    return " ".join([*sides, f"--{option}"])


def selection_facts(
    study: dict[str, Any], layers: Sequence[int], num_layers: int | None = None
) -> dict[str, Any]:
    """Return a selection as its option takes it, all options of its connectivity, and
    the number of exchanges that it overlaps. num_layers: as in `selection_text`.
    """
    overlapped, total = study_overlap(study, layers)
    selection = selection_text(layers, num_layers)
    return {
        "option": selecting_option(study),
        "selection": selection,
        "options": f"{options_head(study)} {selection}",
        "overlapped_collectives": overlapped,
        "collectives": total,
    }


def number_text(row: dict[str, Any]) -> str:
    """Format a value and its standard error; `0.5122 ± –` for a single row or item,
    which has no error.
    """
    return f"{nats(row['value'])} ± {error_text(row['stderr'])}"


def error_text(stderr: float | None) -> str:
    return "–" if stderr is None else f"{stderr:.1g}"  # KLs span orders of magnitude


def point_text(point: dict[str, Any], num_layers: int) -> str:
    """Return the name of a point: `original`, `first 3`, `last 3`, `only 2`, `all but
    0-1`.
    """
    layers = point["layers"]
    match point["side"]:
        case "none":
            return "original"
        case "attention":
            return "attention alone"
        case "single":
            return f"only {layers[0]}"
        case "without":
            return (
                "all but"
                f" {selection_text([k for k in range(num_layers) if k not in layers])}"
            )
    return f"{point['side']} {len(layers)}"
