"""The layer that is most of the loss: the first one, wherever it was measured (docs/distil.md, docs/decisions.md).

Rewired alone and untrained it costs about as much as all layers together, with copied weights and with calibrated ones.
`tell_first_layer` says so before anything is measured; `worst_layer` finds such a layer in a study, with what all
layers but it cost, and what they overlap.

Not covered: what training recovers.
"""

import sys
from collections.abc import Sequence
from typing import Any

from fcsd.base.text import nats
from fcsd.model.connectivity.spec import Connectivity, resolve_layers
from fcsd.model.families import Family, moe_mask
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


def tell_first_layer(connectivity: Connectivity, config: Any, family: Family, option: str) -> None:
    """Print in one line that layer 0 is to be rewired, and which selection leaves it out.

    Nothing is printed where it is not selected, or alone, or computes what a regular layer does. option: how a
    selection is given there: `--layers`.
    """
    mask = moe_mask(config, family)
    layers = resolve_layers(connectivity.layers, mask)
    others = [layer for layer in layers if layer]
    regular = connectivity.mlp == "full" or family.layout == "parallel"
    if regular or len(others) in (0, len(layers)):
        return
    print(
        f"layer 0 alone is likely to be most of the loss; {option} {_without(others, len(mask))} leaves it as it"
        " is (docs/convert.md)",
        file=sys.stderr,
    )


def _without(others: Sequence[int], num_layers: int) -> str:
    last = list(range(num_layers - len(others), num_layers))
    return f"last:{len(others)}" if others == last else selection_text(others)


def worst_layer(study: dict[str, Any], metric: str) -> dict[str, Any] | None:
    """Return the layer that alone costs at least half of what all layers do, with copied weights.

    Returns:
        layer, what it costs (`alone`), what all do (`all`); `without`, all layers but it: their indices, how they are
        selected, what was measured of them with each kind of weights, the collectives that they overlap. None where no
        layer costs so much, or where the layers alone, or all of them, were not measured.
    """
    total, points = study["num_hidden_layers"], {tuple(point["layers"]): point for point in study["points"]}
    alone = {k: point_loss(study, points[k,], metric, False)[0] for k in range(total) if (k,) in points}
    whole = points.get(tuple(range(total)))
    if whole is None or not alone or total == 1:
        return None
    worst = max(alone, key=lambda layer: alone[layer])
    loss = point_loss(study, whole, metric, False)[0]
    if loss <= 0 or alone[worst] < loss / 2:
        return None
    others = [layer for layer in range(total) if layer != worst]
    weights = {"copied": False} | ({"calibrated": True} if has_calibrated(study) else {})
    rest = points.get(tuple(others))
    without = {
        "selection": _without(others, total),
        "measured": rest and {name: values_of(rest, which)[metric] for name, which in weights.items()},
        "overlapped_by_all": study_overlap(study, range(total))[0],
    }
    return {
        "layer": worst,
        "alone": alone[worst],
        "all": loss,
        "without": {"layers": others} | selection_facts(study, others) | without,
    }


def worst_text(facts: dict[str, Any]) -> list[str]:
    """Return `worst_layer` in lines for people; none where there is none."""
    worst, name = facts["worst_layer"], facts["metric"]["name"]
    if worst is None:
        return []
    without = worst["without"]
    measured = "not measured"
    if without["measured"] is not None:
        values = [f"{number_text(value)} {weights}" for weights, value in without["measured"].items()]
        measured = f"{'KL' if name == KL else name} {', '.join(values)}"
    return [
        "",
        f"Layer {worst['layer']} alone costs {nats(worst['alone'])} of the {nats(worst['all'])} of all layers. All but"
        f" it (--layers {without['selection']}): {measured}; {without['overlapped_collectives']} of"
        f" {without['collectives']} collectives overlapped, {without['overlapped_by_all']} by all layers.",
    ]
