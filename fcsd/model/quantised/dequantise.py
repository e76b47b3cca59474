"""Write a quantised checkpoint again in bfloat16."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fcsd.base.errors import errors_begin
from fcsd.base.files import read_checkpoint_json
from fcsd.base.weights import Stored
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    find_folder,
    read_checkpoint,
)
from fcsd.model.quantised.copy import (
    CHUNK_VALUES,
    Copy,
    Source,
    check_destination,
    check_rows,
    write_copy,
    write_rows,
)
from fcsd.model.quantised.formats import Block, Slices, bits_of
from fcsd.model.quantised.methods import without_quantisation
from fcsd.model.quantised.stored import PackedWeight, read_contents


def dequantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    revision: str | None = None,
) -> None:
    """Write a checkpoint with the weights of a quantised one in bfloat16, and without
    its quantisation config.

    Other tensors keep their dtype and bytes; scales of activations and of the key and
    value cache are left out. Tensor names are those of an unquantised checkpoint of the
    family.

    Raises:
        UserError: as in `read_contents` and `write_copy`; a weight is NaN or infinite;
            `destination` exists and is not an empty folder.
    """
    destination = Path(destination)
    check_destination(destination)
    checkpoint = read_checkpoint(find_folder(source, revision), any_family=True)
    contents = read_contents(checkpoint)
    files = Source(checkpoint)
    # Shapes before values: they decide how the tensors are dealt out to shards, so that
    # a copy that was cut off finds the shards that it has written.
    shapes = {name: _shape(weight, files) for name, weight in contents.weights.items()}
    tensors = {
        name: Stored("BF16", shape, 2 * math.prod(shape))
        for name, shape in shapes.items()
    }

    def write(name: str, target: BinaryIO) -> None:
        if (weight := contents.weights.get(name)) is None:
            files.copy(name, target)
            return
        parts = {part: files.rows(tensor) for part, tensor in weight.parts.items()}
        for rows in _decoded(weight, shapes[name], parts, contents.block):
            check_rows(rows, files.folder, name)
            write_rows(rows, target)

    copy = Copy(
        "dequantize",
        _in_bfloat16(read_checkpoint_json(checkpoint.folder / CONFIG)),
        tensors | {name: files.stored(name) for name in contents.plain},
        write,
    )
    write_copy(source, checkpoint, destination, copy)


def _shape(weight: PackedWeight, files: Source) -> tuple[int, ...]:
    """Return the shape of a weight; of packed integers a tensor says it, and UserError
    where it cannot be.
    """
    if "shape" not in weight.parts:
        return weight.shape
    packed = files.rows(weight.parts["weight"])
    num_columns = int(files.rows(weight.parts["shape"])[:][1])
    with errors_begin(f"{files.folder}: tensor '{weight.parts['weight']}': "):
        bits_of(packed.get_shape()[1], num_columns)
    return weight.shape[0], num_columns


def _decoded(
    weight: PackedWeight, shape: tuple[int, ...], parts: Slices, block: Block
) -> Iterator[Tensor]:
    """Yield a weight in bfloat16, a few rows of its first dimension at a time."""
    row = max(1, math.prod(shape[1:]))
    step = max(1, CHUNK_VALUES // row)
    for begin in range(0, shape[0], step):
        values = weight.decode(parts, begin, min(begin + step, shape[0]), block)
        yield values.to(torch.bfloat16)


def _in_bfloat16(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the copy."""
    config = without_quantisation(config)
    # transformers 4 wrote `torch_dtype`, 5 writes `dtype`, and a section of a
    # multimodal model may have its own.
    sections = (value for value in config.values() if isinstance(value, dict))
    for section in (config, *sections):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = "bfloat16"
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = "bfloat16"
    return config
