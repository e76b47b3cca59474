"""Find the layers that cost far more than a typical one: the first few, in the models
that were measured (docs/convert.md).

    typical    the median cost of a layer that is rewired alone, with copied weights
    special    a layer that costs more than `FAR_MORE` times as much, beyond twice its standard error

Where a study selects MLP sides, attention is rewired in all layers: its cost alone, the
base, is part of every point, and the cost of a layer is what it adds.

Their number varies: one in models trained on little text, the first two in SmolLM2 (1.8
and 0.5 nats). `special_layers` finds them in a study, together with the cost and the
overlap of all other layers; before anything is measured, `tell_first_layers`
(`fcsd.model.connectivity.export`) can only say that such layers exist.

Not covered: the quality that training recovers.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from fcsd.base.text import nats
from fcsd.model.connectivity.selection import ranges
from fcsd.planning.layers.points import (
    base_loss,
    layers_with_mlp,
    number_text,
    point_loss,
    selection_facts,
    study_overlap,
    values_of,
    weights_of,
)
from fcsd.planning.layers.settings import KL

FAR_MORE = 5.0
"""In SmolLM2 as an MoE of copies, layers 0 and 1 cost 47 and 14 times as much as a
typical one, the next 2.7 times as much. With a shared expert, layers 0, 1, 29 (the
last) and 19 cost 65, 18, 8 and 6 times as much, the next 3.6 times.
"""


def special_layers(study: dict[str, Any], metric: str) -> dict[str, Any] | None:
    """Find the layers that cost far more than a typical one when each is rewired alone,
    with copied weights.

    Returns:
        `layers`, their indices, and the cost of each (`alone`); `typical`, the median
        layer's cost; `base`, to which a layer's cost is added (0 unless the study
        selects MLP sides); `all`, the cost of all layers with the base, None where it
        was not measured; `num_first`, the number of special layers from layer 0 on without a
        gap. `without`: all layers but those first ones, or, where layer 0 is not
        special, all but every special one: their `name`, indices and selection, the
        values measured with each kind of weights, and the collectives that they
        overlap. None where no layer is special, or the single layers were not measured.
    """
    num_layers = study["num_hidden_layers"]
    points = {tuple(point["layers"]): point for point in study["points"]}
    measured = {
        k: point_loss(study, points[k,], metric, False)
        for k in range(num_layers)
        if (k,) in points
    }
    # A typical cost needs every layer alone; one layer has nothing to compare with.
    with_mlp = layers_with_mlp(study)
    if len(measured) < num_layers or num_layers == 1 or not with_mlp:
        return None
    base, _ = base_loss(study, metric, False)
    alone = {layer: loss - base for layer, (loss, _) in measured.items()}
    # The lower median is the cost of an actual layer.
    typical = statistics.median_low(alone[layer] for layer in with_mlp)
    special = [
        layer
        for layer, loss in alone.items()
        if layer in with_mlp
        and loss > FAR_MORE * max(typical, 0)
        and loss - typical > 2 * (measured[layer][1] or 0)
    ]
    if not special:
        return None
    # Only a run that starts at layer 0 can be left out by `last:N`; special layers
    # elsewhere are listed by index.
    num_first = next(k for k in range(num_layers) if k not in special)
    left_out = list(range(num_first)) or special
    all_layers_point = points.get(tuple(range(num_layers)))
    remaining_layers = [layer for layer in range(num_layers) if layer not in left_out]
    # A study measures this selection last, so an unfinished or older one lacks it.
    remaining_point = points.get(tuple(remaining_layers))
    without = {
        "name": f"all but {_left_text(left_out, num_first)}",
        "measured": (
            remaining_point
            and {
                "calibrated" if calibrated else "copied": values_of(
                    remaining_point, calibrated
                )[metric]
                for calibrated in weights_of(study)
            }
        ),
        "overlapped_by_all": study_overlap(study, range(num_layers))[0],
    }
    return {
        "layers": special,
        "num_first": num_first,
        "alone": [alone[layer] for layer in special],
        "typical": typical,
        "base": base,
        "all": all_layers_point
        and point_loss(study, all_layers_point, metric, False)[0],
        "without": {"layers": remaining_layers}
        | selection_facts(study, remaining_layers, num_layers)
        | without,
    }


def _left_text(left_out: Sequence[int], num_first: int) -> str:
    if num_first:
        return "the first layer" if num_first == 1 else f"the first {num_first} layers"
    return f"layer{'s' if len(left_out) > 1 else ''} {ranges(left_out)}"


def special_text(facts: dict[str, Any]) -> list[str]:
    """Format the result of `special_layers` as lines of text; an empty list without
    special layers.
    """
    special, name = facts["special_layers"], facts["metric"]["name"]
    if special is None:
        return []
    without = special["without"]
    # With explicit counts a study does not measure this selection.
    measured = "not measured"
    if without["measured"] is not None:
        values = [
            f"{number_text(value)} {weights}"
            for weights, value in without["measured"].items()
        ]
        measured = f"{'KL' if name == KL else name} {', '.join(values)}"
    costs = [
        f"layer {k} {nats(loss)}"
        for k, loss in zip(special["layers"], special["alone"], strict=True)
    ]
    number, plural = len(costs), "s" if len(costs) > 1 else ""
    ending = "" if plural else "s"
    costly, with_all = f"cost{ending} far more alone than", "and all layers"
    if without["option"] == "mlp":
        costly = (
            f"add{ending} far more to attention alone ({nats(special['base'])}) than"
        )
        with_all = "and all layers cost with attention"
    all_layers_text = (
        "" if special["all"] is None else f", {with_all} {nats(special['all'])}"
    )
    return [
        "",
        (
            f"{number} layer{plural} {costly} a"
            f" typical one ({nats(special['typical'])}):"
            f" {', '.join(costs)}{all_layers_text}."
            f" {without['name'].capitalize()}"
            f" ({without['options']}):"
            f" {measured}; {without['overlapped_collectives']} of"
            f" {without['collectives']} collectives overlapped,"
            f" {without['overlapped_by_all']} by all layers."
        ),
    ]
