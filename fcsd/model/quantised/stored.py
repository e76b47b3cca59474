"""Which tensors of a checkpoint's files make up which weight.

Not covered: the meaning of their values (`fcsd.model.quantised.formats`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fcsd.base.errors import UserError, errors_begin
from fcsd.model.connectivity.checkpoint import CONFIG, Checkpoint
from fcsd.model.quantised.formats import (
    FP8,
    Block,
    Slices,
    block_of,
    mxfp4,
    mxfp4_experts,
    nvfp4,
    packed_integers,
    scaled,
)
from fcsd.model.quantised.methods import DEQUANTISED, Quantisation
from fcsd.model.quantised.tensors import SCALES_OF_MODULES

_ACTIVATIONS = (
    "input_scale", "input_global_scale", "input_zero_point", "activation_scale", "activation_scale_inv",
    "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale",
)  # fmt: skip
_FP8_METHODS = ("fp8", "mxfp8")
_GROUPS = {nvfp4: 16, mxfp4: 32}
"""Form -> columns that share a scale. MXFP6, whose tensors have the names of MXFP4, has
another ratio.
"""
_PARTS = ("scale", "global_scale", "zero_point", "g_idx", "shape")


@dataclass(frozen=True)
class PackedWeight:
    """A weight as files hold it.

    shape: of the weight. parts: part -> name of its tensor. decode: see
    `fcsd.model.quantised.formats`.
    """

    shape: tuple[int, ...]
    parts: dict[str, str]
    decode: Callable[[Slices, int, int, Block], Tensor]


@dataclass(frozen=True)
class Contents:
    """All that a quantised checkpoint's files hold: `weights` in parts, `plain` tensors
    as they are.

    What belongs to quantised activations is in neither.
    """

    weights: dict[str, PackedWeight]
    plain: list[str]
    block: Block


def read_contents(checkpoint: Checkpoint) -> Contents:
    """Find the weights of a quantised checkpoint among its tensors.

    Raises:
        UserError: it is not quantised, or by a method that is not known; a tensor that
            no known form explains.
    """
    quantisation = checkpoint.quantisation
    if quantisation is None:
        raise UserError(
            f"{checkpoint.folder}: is not quantised (no quantization_config); nothing"
            " to do"
        )
    if unknown := _unknown_method(quantisation):
        raise UserError(
            f"{checkpoint.folder}: is quantised {unknown}, which fcsd cannot dequantise;"
            f" it supports {', '.join(DEQUANTISED)}; use the unquantised original, or"
            " the tool that quantised it"
        )
    block = _block(quantisation.settings)
    weights: dict[str, PackedWeight] = {}
    used: set[str] = set()
    for name, stored in _find(checkpoint):
        _check_fits(checkpoint, name, stored, block)
        weights[name] = stored
        used |= {*stored.parts.values()}
    plain = []
    for name in sorted(checkpoint.shapes.keys() - used):
        # Nothing reads them once weights are in bfloat16.
        if name.rpartition(".")[2] in _ACTIVATIONS or name.endswith("_input_scale"):
            continue
        # Copied unchanged, it would load as plain numbers and be silently wrong.
        if checkpoint.dtypes[name] in {*FP8, "F8_E8M0", "U8", "I8", "F4"}:
            raise UserError(
                f"{checkpoint.folder}: tensor '{name}' ({checkpoint.dtypes[name]}) has"
                " an unknown format: its scales are missing, or the method is another"
                " one; fetch the checkpoint again, or use its unquantised original"
            )
        plain.append(name)
    if not weights:
        raise UserError(
            f"{checkpoint.folder / CONFIG}: has a quantization_config, but no tensor is"
            " quantised; remove the field"
        )
    return Contents(weights, plain, block)


def why_misread(checkpoint: Checkpoint) -> str | None:
    """Return why transformers would dequantise a weight to other values than its formula
    gives; None: it does not.

    transformers divides a weight evenly among its scales, as if the last block of a
    dimension were as large as the others.

    Raises:
        UserError: scales that do not fit their weight.
    """
    quantisation = checkpoint.quantisation
    if quantisation is None or quantisation.method not in _FP8_METHODS:
        return None
    block = _block(quantisation.settings)
    for name, stored in _find(checkpoint):
        if stored.decode is not scaled:
            continue
        _check_fits(checkpoint, name, stored, block)
        scale = checkpoint.shapes[stored.parts["scale"]]
        if math.prod(scale) == 1:
            continue
        sizes = (1, 1)
        if len(scale) > 1:
            sizes = block_of([*scale], [*stored.shape], block)
        # One scale for a whole dimension belongs to all of it, whatever the block.
        if len(scale) < 2 or any(
            number != 1 and number * size != length
            for number, size, length in zip(
                scale[-2:], sizes, stored.shape[-2:], strict=True
            )
        ):
            return (
                f"tensor '{name}' of shape {[*stored.shape]} has scales of shape"
                f" {[*scale]}, which do not divide it evenly, and transformers"
                " dequantises such weights wrongly"
            )
    return None


def _unknown_method(quantisation: Quantisation) -> str | None:
    """Return what a quantisation that fcsd cannot undo was made with, or by."""
    config = quantisation.settings
    # Weights that were rotated or thinned out before they were quantised.
    changes = [
        key for key in ("transform_config", "sparsity_config") if config.get(key)
    ]
    sparsity = config.get("sparsity_config")
    # compressed-tensors also writes the section for dense weights.
    if isinstance(sparsity, dict) and sparsity.get("format") == "dense":
        changes.remove("sparsity_config")
    algorithm = str(config.get("quant_algo") or "")
    if changes:
        return f"with {changes[0]}"
    if "AWQ" in algorithm:
        return algorithm
    method = quantisation.method
    return None if method in DEQUANTISED else f"by {method!r}"


def _block(config: Mapping[str, Any]) -> Block:
    """Return the rows and columns that share a scale, of block FP8."""
    block = config.get("weight_block_size")
    # compressed-tensors has it in each group of layers, others once for all.
    groups = config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            block = weights.get("block_structure") or block
    if not isinstance(block, list | tuple) or len(block) != 2:
        return None
    return int(block[0]), int(block[1])


def _find(checkpoint: Checkpoint) -> Iterator[tuple[str, PackedWeight]]:
    """Yield each weight that is held in parts, and its name."""
    shapes, dtypes = checkpoint.shapes, checkpoint.dtypes
    for name in sorted(shapes):
        shape, dtype = shapes[name], dtypes[name]
        base = name.removesuffix("_blocks")
        if base != name and f"{base}_scales" in shapes:
            weight_shape = shape
            # (experts, out, groups, bytes) of two values a byte; `_check_fits` refuses
            # all others.
            if len(shape) == 4:
                weight_shape = (shape[0], shape[2] * shape[3] * 2, shape[1])
            parts = {"weight": name, "scale": f"{base}_scales"}
            yield base, PackedWeight(weight_shape, parts, mxfp4_experts)
        elif name.endswith("_packed"):
            yield _packed(checkpoint, name)
        elif dtype == "U8" and {f"{name}_scale", f"{name}_scale_2"} <= shapes.keys():
            parts = {
                "weight": name,
                "scale": f"{name}_scale",
                "scale_2": f"{name}_scale_2",
            }
            yield name, PackedWeight((*shape[:-1], 2 * shape[-1]), parts, nvfp4)
        elif dtype in {*FP8, "I8"}:
            # Without a scale nothing is yielded, and `read_contents` refuses the tensor.
            module = name.removesuffix(".weight")
            scale_names = (
                f"{name}_scale_inv",
                f"{name}_scale",
                *(module + end for end in SCALES_OF_MODULES),
            )
            scales = [scale for scale in scale_names if scale in shapes]
            if scales:
                parts = {"weight": name, "scale": scales[0]}
                if f"{name}_zero_point" in shapes:
                    parts["zero_point"] = f"{name}_zero_point"
                yield name, PackedWeight(shape, parts, scaled)


def _packed(checkpoint: Checkpoint, name: str) -> tuple[str, PackedWeight]:
    """Return the weight of a packed tensor of compressed-tensors."""
    base, shape = name.removesuffix("_packed"), checkpoint.shapes[name]
    parts = {"weight": name}
    for part in _PARTS:
        if f"{base}_{part}" in checkpoint.shapes:
            parts[part] = f"{base}_{part}"
    # The dtype tells integers from E2M1 values; both are called `_packed`. How many
    # integers a row has, only `_shape` says: the last int32 may be partly used.
    integers = checkpoint.dtypes[name] == "I32"
    for part in ("scale", "shape") if integers else ("scale",):
        if part not in parts:
            raise UserError(
                f"{checkpoint.folder}: tensor '{name}' has no '{base}_{part}'; fetch the"
                " checkpoint again"
            )
    if integers:
        return base, PackedWeight((shape[0], 0), parts, packed_integers)
    decode = nvfp4 if "global_scale" in parts else mxfp4
    return base, PackedWeight((*shape[:-1], 2 * shape[-1]), parts, decode)


def _fits(stored: PackedWeight, shapes: Mapping[str, list[int]], block: Block) -> bool:
    """Tell whether scales fit their weight; shapes: of the parts.

    Raises:
        UserError: blocks that do not divide the weight.
    """
    scale, weight = shapes["scale"], shapes["weight"]
    # Scales of another shape may broadcast, so the decoding itself would not notice.
    if stored.decode is mxfp4_experts:
        return len(weight) == 4 and scale == weight[:3]
    if stored.decode in (nvfp4, mxfp4):
        length = scale[-1] * _GROUPS[stored.decode]
        return scale[:-1] == weight[:-1] and stored.shape[-1] == length
    if stored.decode is packed_integers:
        return len(scale) == 2 and scale[0] == weight[0] and shapes["shape"] == [2]
    if len(scale) < 2 or math.prod(scale) == 1:
        return math.prod(scale) in (1, weight[0])
    block_of(scale, weight, block)
    return len(weight) >= 2 and scale[:-2] == weight[:-2]


def _check_fits(
    checkpoint: Checkpoint, name: str, stored: PackedWeight, block: Block
) -> None:
    """Refuse scales that do not fit their weight, before anything is written."""
    shapes = {
        part: list(checkpoint.shapes[tensor]) for part, tensor in stored.parts.items()
    }
    with errors_begin(f"{checkpoint.folder}: tensor '{name}': "):
        if not _fits(stored, shapes, block):
            raise UserError(
                f"scales of shape {shapes['scale']} do not fit {shapes['weight']} in the"
                " file; fetch the checkpoint again"
            )
