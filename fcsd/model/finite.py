"""Refuse a model in memory with values that are NaN or infinite.

Not covered: files (`fcsd.base.weights.check_finite`); integers of a quantisation
method.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fcsd.base.weights import is_added_to_scores, not_finite
from fcsd.model.dtypes import real_tensors

_CHUNK_VALUES = 1 << 24


def refuse_not_finite(model: nn.Module, name: str | Path) -> None:
    """Raise UserError where a parameter or buffer of a model has values that are NaN or
    infinite, and name the first ones.

    It reads each tensor once, as fast as memory allows. A rank looks at its own shards;
    tensors without storage pass, and so does minus infinity in buffers (masks) and
    where `is_added_to_scores`.

    name: of the model in the error.
    """
    counts: dict[str, tuple[int, int]] = {}
    seen: set[int] = set()
    for tensor_name, tensor in [*real_tensors(model)]:
        # A tied tensor comes under several names.
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        parts = [part for part in _parts(tensor.detach()) if not _is_finite(part)]
        if not parts:
            continue
        is_weight = isinstance(tensor, nn.Parameter) and not is_added_to_scores(
            tensor_name
        )
        if count := sum(_count(part, is_weight) for part in parts):
            counts[tensor_name] = count, tensor.numel()
    if counts:
        raise not_finite(name, counts)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the values of a tensor: shards, or the scales of
    a quantised one.
    """
    if is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, attribute)
            if isinstance(part, Tensor):  # and not the mesh of its ranks
                yield from _parts(part)
    elif tensor.is_floating_point() and not tensor.is_meta and tensor.numel():
        yield tensor


def _is_finite(tensor: Tensor) -> bool:
    """Tell from the least and the largest value whether all are finite: many times
    faster than `isfinite`, which makes a tensor of its own. torch has neither for
    float8, which is left to `_count`.
    """
    return tensor.dtype.itemsize > 1 and all(
        bool(value.isfinite()) for value in torch.aminmax(tensor)
    )


def _count(tensor: Tensor, is_weight: bool) -> int:
    """Count the values that are NaN or infinite; outside of weights, without minus
    infinity.
    """
    if tensor.dtype.itemsize == 1:
        values = tensor.flatten().split(_CHUNK_VALUES)
        return sum(int((~chunk.float().isfinite()).sum()) for chunk in values)
    found = ~tensor.isfinite()
    return int((found if is_weight else found & ~tensor.isneginf()).sum())
