"""The layers that cost far more than a typical one: the first few, where it was
measured (docs/convert.md).

    typical    the median of what the layers cost when each is rewired alone, with copied weights
    special    a layer that costs more than `FAR_MORE` times as much, beyond twice its standard error

How many they are differs: one in models trained on little text, two first ones in
SmolLM2 (1.8 and 0.5 nats). `special_layers` finds them in a study, with what all layers
but them cost, and what those overlap; before anything is measured, `tell_first_layers`
can only say that there are such layers.

Not covered: what training recovers.
"""

import shlex
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from fcsd.base.text import nats
from fcsd.model.connectivity.spec import Connectivity, resolve_layers
from fcsd.model.families import Family, moe_mask
from fcsd.model.inspect.table import ranges
from fcsd.planning.layers.points import (
    has_calibrated,
    number_text,
    point_loss,
    selection_facts,
    selection_text,
    study_overlap,
    values_of,
)
from fcsd.planning.layers.settings import KL

FAR_MORE = 5.0
"""SmolLM2 as a MoE of copies: layers 0 and 1 cost 47 and 14 times as much as a typical
one, the next 2.7 times. With a shared expert 0, 1, 29 (the last) and 19 cost 65, 18, 8
and 6 times as much, the next 3.6 times."""


def tell_first_layers(
    connectivity: Connectivity, config: Any, family: Family, option: str, model: Any
) -> None:
    """Print in one line that layer 0 is to be rewired, how to find out which layers to
    leave, and what leaves it out.

    Nothing is printed where it is not selected, or alone, or computes what a regular
    layer does. option: how a selection is given there: `--layers`. model: what `fcsd
    layers` is to be given.
    """
    mask = moe_mask(config, family)
    layers = resolve_layers(connectivity.layers, mask)
    others = [layer for layer in layers if layer]
    outdated = connectivity.outdated_layers(mask)
    regular = 0 not in outdated or family.layout == "parallel"
    if regular or len(others) in (0, len(layers)):
        return
    print(
        "in the models measured layer 0 costs the most; how many first layers to leave"
        f" as they are is measured by `fcsd layers {shlex.quote(str(model))}`; {option}"
        f" {_selection(others, len(mask))} leaves out layer 0 (docs/convert.md)",
        file=sys.stderr,
    )


def _selection(layers: Sequence[int], num_layers: int) -> str:
    last = list(range(num_layers - len(layers), num_layers))
    return f"last:{len(layers)}" if layers == last else selection_text(layers)


def special_layers(study: dict[str, Any], metric: str) -> dict[str, Any] | None:
    """Find the layers that alone cost far more than a typical one, with copied weights.

    Returns:
        layers, their indices, and what each costs (`alone`); `typical`, what the median
        layer costs; `all`, what all layers do, None where that was not measured;
        `num_first`, how many layers from the first one on are special
        without a gap. `without`: all layers but those, or where layer 0 is not special,
        but all that are: what to call them (`name`), their indices, how they are
        selected, what was measured of them with each kind of weights, the collectives
        that they overlap. None where no layer is special, or the layers alone were not
        measured.
    """
    total, points = (
        study["num_hidden_layers"],
        {tuple(point["layers"]): point for point in study["points"]},
    )
    alone = {
        k: point_loss(study, points[k,], metric, False)
        for k in range(total)
        if (k,) in points
    }
    if len(alone) < total or total == 1:
        return None
    typical = statistics.median_low(loss for loss, _ in alone.values())
    special = [
        layer
        for layer, (loss, error) in alone.items()
        if loss > FAR_MORE * max(typical, 0) and loss - typical > 2 * (error or 0)
    ]
    if not special:
        return None
    num_first = next(k for k in range(total) if k not in special)
    left = list(range(num_first)) or special
    whole = points.get(tuple(range(total)))
    others = [layer for layer in range(total) if layer not in left]
    weights = {"copied": False} | (
        {"calibrated": True} if has_calibrated(study) else {}
    )
    rest = points.get(tuple(others))
    without = {
        "name": f"all but {_left_text(left, num_first)}",
        "selection": _selection(others, total),
        "measured": (
            rest
            and {
                name: values_of(rest, which)[metric] for name, which in weights.items()
            }
        ),
        "overlapped_by_all": study_overlap(study, range(total))[0],
    }
    return {
        "layers": special,
        "num_first": num_first,
        "alone": [alone[layer][0] for layer in special],
        "typical": typical,
        "all": whole and point_loss(study, whole, metric, False)[0],
        "without": {"layers": others} | selection_facts(study, others) | without,
    }


def _left_text(left: Sequence[int], num_first: int) -> str:
    if num_first:
        return "the first layer" if num_first == 1 else f"the first {num_first} layers"
    return f"layer{'s' if len(left) > 1 else ''} {ranges(left)}"


def special_text(facts: dict[str, Any]) -> list[str]:
    """Return `special_layers` in lines for people; none where there are none."""
    special, name = facts["special_layers"], facts["metric"]["name"]
    if special is None:
        return []
    without = special["without"]
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
    whole = "" if special["all"] is None else f", and all layers {nats(special['all'])}"
    number, plural = len(costs), "s" if len(costs) > 1 else ""
    return [
        "",
        (
            f"{number} layer{plural} cost{'' if plural else 's'} far more alone than a"
            f" typical one ({nats(special['typical'])}): {', '.join(costs)}{whole}."
            f" {without['name'].capitalize()} (--{without['option']} {without['selection']}):"
            f" {measured}; {without['overlapped_collectives']} of"
            f" {without['collectives']} collectives overlapped,"
            f" {without['overlapped_by_all']} by all layers."
        ),
    ]
