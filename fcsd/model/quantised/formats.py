"""Decode weights that files hold in fewer bits, by the published formulas.

| form | tensors in the files | value, in float32 |
|---|---|---|
| block, row and tensor FP8 | `weight`; `weight_scale_inv` or `weight_scale` | weight × scale of its block, row or all |
| INT8 | `weight`; `weight_scale`, `weight_zero_point` | (weight − zero point) × scale |
| MXFP8 | `weight`; `weight_scale` in uint8 | weight × 2^(scale − 127) |
| packed INT2, INT4, INT8 | `weight_packed` in int32; `weight_scale`, `_shape`, `_zero_point`, `_g_idx` | the same |
| NVFP4 (compressed-tensors) | `weight_packed`; `weight_scale`, `weight_global_scale` | E2M1 × (scale ÷ global scale) |
| NVFP4 (ModelOpt) | `weight` in uint8; `weight_scale`, `weight_scale_2` | E2M1 × (scale × scale 2) |
| MXFP4 (compressed-tensors) | `weight_packed`; `weight_scale` in uint8 | E2M1 × 2^(scale − 127) |
| MXFP4 (gpt-oss) | `…_blocks`, `…_scales` in uint8 | the same; rows and columns change places |

Two E2M1 values lie in a byte, the first in its low half. Every function here takes rows
`begin` to `end` of the first dimension, so that a large weight need not be in memory.

Sources: DeepSeek-V3's `weight_dequant`; the OCP Microscaling specification 1.0;
compressed-tensors; NVIDIA ModelOpt.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fcsd.base.errors import UserError

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
FP8 = {"F8_E4M3", "F8_E5M2"}
_PACKED_BITS = 32
_INTEGERS = (2, 4, 8)
"""Bits of packed integers. Others lie across two int32, or do not, by the version that
packed them.
"""

Slices = Mapping[str, Any]
"""Part of a weight -> its tensor in a file, read as `[begin:end]`."""


Block = tuple[int, int] | None
"""Rows and columns that share a scale, as the config of a checkpoint says; None where
it says nothing.
"""


def scaled(parts: Slices, begin: int, end: int, block: Block) -> Tensor:
    """Return rows of FP8 or integer values times their scales: one scale for all, per
    row, per group of columns, or per block.
    """
    weight = parts["weight"][begin:end].to(torch.float32)
    if "zero_point" in parts:
        weight = weight - _spread(
            parts["zero_point"], parts["weight"].get_shape(), begin, end, None
        )
    return weight * _spread(
        parts["scale"], parts["weight"].get_shape(), begin, end, block, is_scale=True
    )


def packed_integers(parts: Slices, begin: int, end: int, block: Block) -> Tensor:
    """Return rows of integers, several of them in each int32, the first in its lowest
    bits, times their scales.
    """
    num_columns = int(parts["shape"][:][1])
    bits = bits_of(parts["weight"].get_shape()[1], num_columns)
    values = _unpacked(parts["weight"][begin:end], bits)[:, :num_columns]
    scale = parts["scale"][begin:end].to(torch.float32)
    num_groups = scale.shape[1]
    # Columns may be grouped in another order than their own (GPTQ's activation order).
    if "g_idx" in parts:
        group = parts["g_idx"][:].long()
    else:
        group = torch.arange(num_columns) // math.ceil(num_columns / num_groups)
    if "zero_point" in parts:  # packed along the rows
        # The int32 with the point of row `begin` may hold points of rows before it.
        first = begin * bits // _PACKED_BITS
        rows = parts["zero_point"][first : math.ceil(end * bits / _PACKED_BITS)]
        points = _unpacked(rows.T, bits).T
        offset = begin - first * _PACKED_BITS // bits
        values = values - points[offset : offset + end - begin][:, group]
    return values * scale[:, group]


def nvfp4(parts: Slices, begin: int, end: int, block: Block) -> Tensor:
    """Return rows of E2M1 values times the E4M3 scale of each group of columns and the
    tensor's scale.
    """
    # compressed-tensors divides by its second scale, ModelOpt multiplies by its own.
    scale = parts["scale"][begin:end].to(torch.float32)
    if "global_scale" in parts:
        scale = scale / _scalar(parts["global_scale"])
    else:
        scale = scale * _scalar(parts["scale_2"])
    return _grouped(e2m1(parts["weight"][begin:end]), scale)


def mxfp4(parts: Slices, begin: int, end: int, block: Block) -> Tensor:
    """Return rows of E2M1 values times the power of two of each group of columns."""
    return _grouped(e2m1(parts["weight"][begin:end]), _power(parts["scale"][begin:end]))


def mxfp4_experts(parts: Slices, begin: int, end: int, block: Block) -> Tensor:
    """Return experts (N, in, out) of blocks (N, out, groups, bytes), as gpt-oss
    multiplies by them.
    """
    values = (
        e2m1(parts["weight"][begin:end]) * _power(parts["scale"][begin:end])[..., None]
    )
    return values.flatten(-2).transpose(-1, -2).contiguous()


def e2m1(packed: Tensor) -> Tensor:
    """Return the values of bytes (…, N) as (…, 2N)."""
    table = torch.tensor(E2M1)
    packed = packed.view(torch.uint8)
    halves = torch.stack([packed & 0xF, packed >> 4], dim=-1)
    return table[halves.long()].flatten(-2)


def bits_of(num_packed: int, num_columns: int) -> int:
    """Return the bits of an integer if `num_columns` of them lie in `num_packed` int32.

    Raises:
        UserError: none of the numbers of bits that are known.
    """
    for bits in _INTEGERS:
        if math.ceil(num_columns * bits / _PACKED_BITS) == num_packed:
            return bits
    known_bits = ", ".join(map(str, _INTEGERS))
    raise UserError(
        f"{num_columns} integers in {num_packed} int32 fit none of {known_bits} bits"
    )


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Return the signed integers of int32 (R, N) as float32 (R, N · 32 / bits)."""
    # A right shift of int32 repeats the sign, which the mask cuts off. Stored integers
    # are offset, so that none is negative.
    shifts = torch.arange(_PACKED_BITS // bits, dtype=torch.int32) * bits
    values = (packed[..., None] >> shifts) & (2**bits - 1)
    return (values.flatten(-2) - 2 ** (bits - 1)).to(torch.float32)


def _power(exponent: Tensor) -> Tensor:
    """Return 2^(exponent − 127) of bytes."""
    power = exponent.view(torch.uint8).to(torch.int32) - 127
    return torch.ldexp(torch.ones_like(power, dtype=torch.float32), power)


def _grouped(values: Tensor, scale: Tensor) -> Tensor:
    groups = values.unflatten(-1, (scale.shape[-1], -1))
    return (groups * scale[..., None]).flatten(-2)


def _scalar(part: Any) -> Tensor:
    value: Tensor = part[:]
    return value.to(torch.float32).reshape(-1)[0]


def _spread(
    part: Any,
    shape: list[int],
    begin: int,
    end: int,
    block: Block,
    *,
    is_scale: bool = False,
) -> Tensor:
    """Return a scale, or a zero point, for each value of rows `begin` to `end`, in a
    shape that broadcasts.
    """

    def numbers(rows: Tensor) -> Tensor:
        is_exponent = is_scale and rows.dtype == torch.uint8
        return _power(rows) if is_exponent else rows.to(torch.float32)

    part_shape = part.get_shape()
    if math.prod(part_shape) == 1:
        return numbers(part[:]).reshape(-1)[0]
    if len(part_shape) == 1:  # one for a row
        return numbers(part[begin:end]).reshape(-1, *[1] * (len(shape) - 1))
    height, width = block_of(part_shape, shape, block)
    columns = torch.arange(shape[-1]) // width
    if len(shape) > 2:  # experts: rows are the second dimension
        grid = numbers(part[begin:end])
        return grid[..., torch.arange(shape[-2]) // height, :][..., columns]
    # All blocks of which these rows have a part.
    first = begin // height
    grid = numbers(part[first : (end - 1) // height + 1])
    return grid[torch.arange(begin, end) // height - first][:, columns]


def block_of(scales: list[int], shape: list[int], block: Block) -> tuple[int, int]:
    """Return the rows and columns that share a scale; the last block of a dimension may
    be smaller.

    scales, shape: of the scales and of the weight. block: as the config says; None: the
    size that divides the weight evenly.

    Raises:
        UserError: blocks of this size do not make up these scales.
    """
    # The last block of a dimension may be smaller, so the numbers of blocks are rounded
    # up.
    if block is not None and scales[-2:] == [
        math.ceil(n / b) for n, b in zip(shape[-2:], block, strict=True)
    ]:
        return block
    # One scale for all rows or all columns is no block of the config's size.
    if block is None or 1 in scales[-2:]:
        even = [n // s for n, s in zip(shape[-2:], scales[-2:], strict=True)]
        if [e * s for e, s in zip(even, scales[-2:], strict=True)] == shape[-2:]:
            return even[0], even[1]
    if block is None:
        settings = "no block size in the config"
    else:
        settings = f"blocks of {block[0]} x {block[1]}"
    raise UserError(
        f"scales of shape {scales} do not fit a weight of shape {shape} ({settings})"
    )
