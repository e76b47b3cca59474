"""The connectivity of a checkpoint, layer by layer. Does not import Megatron."""

from collections.abc import Sequence
from dataclasses import dataclass

from fcsd.model.connectivity.selection import resolve_layers
from fcsd.model.connectivity.spec import Connectivity


@dataclass(frozen=True)
class LayerPlan:
    """The inputs of one rewired layer; `fcsd.model.connectivity.spec.Connectivity` has
    the equations.
    """

    outdated: bool
    """The MLP side reads the stream without this layer's attention; otherwise with it."""
    carry: bool
    """The next layer's attention reads the stream without this layer's routed output,
    so both are passed on.
    """


def layer_plans(
    connectivity: Connectivity | None, mask: Sequence[bool]
) -> list[LayerPlan | None]:
    """Return one plan per layer; None for a layer that remains Megatron's.

    Args:
        connectivity: the checkpoint's; None for a regular checkpoint.
        mask: one entry per layer, True for an MoE layer.
    """
    plans: list[LayerPlan | None] = [None] * len(mask)
    if connectivity is None:
        return plans
    selected = set(resolve_layers(connectivity.layers, mask))
    outdated = connectivity.outdated_layers(mask)
    for k in selected:
        carry = connectivity.attention == "partial" and mask[k] and k + 1 in selected
        plans[k] = LayerPlan(outdated=k in outdated, carry=carry)
    return plans
