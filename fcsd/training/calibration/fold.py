"""Fold a map into weights: they then read x A in the place of x, or write u B in the place of u."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from fcsd.training.calibration.roles import Place


@torch.no_grad()
def fold_map(
    layer: nn.Module,
    places: Iterable[Place],
    found: Tensor,
    side: Literal["reads", "writes"],
    expert: int | None = None,
) -> None:
    """Change the weights of a layer in place, each in its own dtype.

    Args:
        found: (D, D), rows are what is mapped: x A, u B.
        places: names of parameters in the layer, and the axis of each that the map is multiplied with.
        expert: change this slice of the parameters only, whose first axis is the experts.
    """
    for name, axis in places:
        weight = layer.get_parameter(name)
        # In float32 at least: what is rounded is the product, to the weight's dtype.
        matrix = (found.T if side == "reads" else found).to(
            weight.device, torch.promote_types(weight.dtype, torch.float32)
        )
        if expert is not None:
            _fold(weight[expert], axis - 1, matrix)
        elif weight.ndim == 3 and axis:  # an expert at a time: copies of all of them are large
            for part in weight:
                _fold(part, axis - 1, matrix)
        else:
            _fold(weight, axis, matrix)


def _fold(weight: Tensor, axis: int, matrix: Tensor) -> None:
    moved = weight.movedim(axis, -1)
    moved.copy_((moved.to(matrix.dtype) @ matrix).to(weight.dtype))
