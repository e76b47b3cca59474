"""Write a quantised checkpoint again in bfloat16, a few rows of a weight in memory at a
time.

Shards are written one after another below `OUT.partial`, brought to the disk and
renamed; a copy that was cut off continues with the next shard, to the same bytes.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fcsd.base.errors import UserError
from fcsd.base.files import (
    check_folder_place,
    file_state,
    is_empty,
    make_folder,
    read_json,
    safetensors_header,
    write_json,
    writing,
)
from fcsd.base.text import progress_bar
from fcsd.base.weights import Stored, copy_bytes, write_safetensors
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Checkpoint,
    check_weights_path,
    find_folder,
    read_checkpoint,
    read_checkpoint_json,
)
from fcsd.model.connectivity.export import carry_over, write_code
from fcsd.model.connectivity.load import check_tensors, config_and_class
from fcsd.model.dtypes import PLAIN
from fcsd.model.quantised.formats import Block, Slices, bits_of
from fcsd.model.quantised.methods import without_quantisation
from fcsd.model.quantised.stored import Contents, PackedWeight, read_contents

SHARD_BYTES = 5 * 10**9
_CHUNK_VALUES = 1 << 23  # decoded at once
_RECORD = "dequantize.json"
_DTYPES = PLAIN | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


def dequantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    revision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint with the weights of a quantised one in bfloat16, and without
    its quantisation config.

    Other tensors keep their dtype and bytes; scales of activations and of the key and
    value cache are left out. Tensor names are those of an unquantised checkpoint of the
    family.

    Raises:
        UserError: what `read_contents` refuses; `destination` exists and is not an
            empty folder; `OUT.partial` is of another checkpoint; tensors that are not
            those of the config.
    """
    destination = Path(destination)
    check_weights_path(destination)
    if destination.exists() and not (destination.is_dir() and is_empty(destination)):
        raise UserError(
            f"{destination}: exists and is not empty; choose another destination or"
            " remove it first"
        )
    checkpoint = read_checkpoint(find_folder(source, revision), any_family=True)
    contents = read_contents(checkpoint)
    partial = destination.with_name(f"{destination.name}.partial")
    check_folder_place(partial, _RECORD, "copy that `fcsd dequantize` began")
    make_folder(partial)
    folder = partial / "model"
    with writing(partial):
        _begin(checkpoint, partial)
        folder.mkdir(exist_ok=True)
        _write_shards(checkpoint, contents, folder, shard_bytes)
        _write_rest(source, checkpoint, folder)
        _check_result(folder)
        os.rename(folder, destination)  # which may be an empty folder
        shutil.rmtree(partial)


def _begin(checkpoint: Checkpoint, partial: Path) -> None:
    """Note what is copied, or compare it with what an earlier call noted."""
    facts = {
        name: [checkpoint.dtypes[name], list(shape)]
        for name, shape in sorted(checkpoint.shapes.items())
    }
    states = [file_state(checkpoint.folder / name) for name in checkpoint.weight_files]
    text = json.dumps([facts, states, checkpoint.config], sort_keys=True)
    record = {"source": hashlib.sha256(text.encode()).hexdigest()}
    if (partial / _RECORD).is_file():
        if read_json(partial / _RECORD) != record:
            raise UserError(
                f"{partial}: holds the begun copy of another checkpoint; remove it, or"
                " name another destination"
            )
        return
    write_json(partial / _RECORD, record)


class _Rows:
    """A tensor in a file, of which rows are read: not mapped, so that they do not stay
    in memory.
    """

    def __init__(self, file: Path, entry: Mapping[str, Any], begin: int) -> None:
        self.file, self.shape, self.dtype = (
            file,
            list(entry["shape"]),
            _DTYPES[entry["dtype"]],
        )
        self.begin, self.num_bytes = (
            begin + entry["data_offsets"][0],
            entry["data_offsets"][1],
        )
        self.num_bytes -= entry["data_offsets"][0]

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, rows: slice) -> Tensor:
        """Return rows of the first dimension; of a scalar itself."""
        if not self.shape:
            return self._read(self.begin, self.num_bytes).reshape(())
        first, last, _ = rows.indices(self.shape[0])
        row = self.num_bytes // self.shape[0]
        return self._read(self.begin + first * row, (last - first) * row).view(
            -1, *self.shape[1:]
        )

    def _read(self, begin: int, num_bytes: int) -> Tensor:
        with self.file.open("rb") as stream:
            stream.seek(begin)
            data = bytearray(stream.read(num_bytes))
        if len(data) != num_bytes:
            raise UserError(
                f"{self.file}: ends before its header says so; fetch it again"
            )
        return torch.frombuffer(data, dtype=self.dtype)


class _Source:
    """The tensors of a checkpoint's files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder
        self.entries: dict[str, tuple[str, dict[str, Any], int]] = {}
        for file in checkpoint.weight_files:
            header, begin = safetensors_header(checkpoint.folder / file)
            self.entries |= {
                name: (file, entry, begin) for name, entry in header.items()
            }

    def slices(self, parts: Mapping[str, str]) -> Slices:
        return {part: self._rows(name) for part, name in parts.items()}

    def _rows(self, name: str) -> _Rows:
        file, entry, begin = self.entries[name]
        return _Rows(self.folder / file, entry, begin)

    def copy(self, name: str, target: BinaryIO) -> None:
        """Write the bytes of a tensor."""
        file, entry, begin = self.entries[name]
        first, last = entry["data_offsets"]
        with (self.folder / file).open("rb") as stream:
            copy_bytes(stream, begin + first, last - first, target)

    def shape_of(self, weight: PackedWeight) -> tuple[int, ...]:
        """Return the shape of a weight; of packed integers a tensor says it, and
        UserError where it cannot be.
        """
        if "shape" not in weight.parts:
            return weight.shape
        packed, num_columns = (
            self._rows(weight.parts["weight"]),
            int(self._rows(weight.parts["shape"])[:][1]),
        )
        try:
            bits_of(packed.get_shape()[1], num_columns)
        except UserError as error:
            raise UserError(
                f"{self.folder}: tensor '{weight.parts['weight']}': {error}"
            ) from None
        return weight.shape[0], num_columns


def _tensors(contents: Contents, source: _Source) -> dict[str, Stored]:
    """Return what the copy holds."""
    tensors = {}
    for name, weight in contents.weights.items():
        shape = source.shape_of(weight)
        tensors[name] = Stored("BF16", shape, 2 * math.prod(shape))
    for name in contents.plain:
        entry = source.entries[name][1]
        begin, end = entry["data_offsets"]
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), end - begin)
    return tensors


def _write_shards(
    checkpoint: Checkpoint, contents: Contents, folder: Path, shard_bytes: int
) -> None:
    """Write the shards that are not there yet, and the index of all."""
    source = _Source(checkpoint)
    tensors = _tensors(contents, source)
    shards = _shards(tensors, shard_bytes)
    with progress_bar(total=len(tensors), desc="dequantize", unit="tensor") as bar:

        def write(name: str, target: BinaryIO) -> None:
            if (weight := contents.weights.get(name)) is None:
                source.copy(name, target)
            else:
                parts = source.slices(weight.parts)
                for rows in decoded(weight, tensors[name].shape, parts, contents.block):
                    target.write(rows.view(torch.uint8).numpy().data)
            bar.update()

        for file, names in shards.items():
            if (folder / file).is_file():
                bar.update(len(names))
                continue
            temporary = folder / f".{file}.tmp"
            write_safetensors(temporary, {name: tensors[name] for name in names}, write)
            os.replace(temporary, folder / file)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.num_bytes for tensor in tensors.values())}
        weight_map = {name: file for file, names in shards.items() for name in names}
        write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def _shards(tensors: Mapping[str, Stored], shard_bytes: int) -> dict[str, list[str]]:
    """Return file -> names of its tensors."""
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].num_bytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    total = len(shards)
    return {
        f"model-{k:05}-of-{total:05}.safetensors": names
        for k, names in enumerate(shards, start=1)
    }


def decoded(
    weight: PackedWeight, shape: tuple[int, ...], parts: Slices, block: Block
) -> Iterator[Tensor]:
    """Yield a weight in bfloat16, a few rows of its first dimension at a time."""
    row = max(1, math.prod(shape[1:]))
    step = max(1, _CHUNK_VALUES // row)
    for begin in range(0, shape[0], step):
        values = weight.decode(parts, begin, min(begin + step, shape[0]), block)
        yield values.to(torch.bfloat16).contiguous()


def _write_rest(source: str | Path, checkpoint: Checkpoint, folder: Path) -> None:
    """Write config, tokenizer and code beside the weights."""
    config = without_quantisation(read_checkpoint_json(checkpoint.folder / CONFIG))
    for section in (
        config,
        *(value for value in config.values() if isinstance(value, dict)),
    ):
        for key in ("dtype", "torch_dtype"):
            if key in section:
                section[key] = "bfloat16"
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = "bfloat16"
    if checkpoint.connectivity is not None and checkpoint.family is not None:
        write_code(checkpoint.folder, checkpoint.family, folder)
    is_on_hub = not Path(source).expanduser().is_dir()
    carry_over(checkpoint.folder, folder, repository=str(source) if is_on_hub else None)
    write_json(folder / CONFIG, config)


def _check_result(folder: Path) -> None:
    """Compare the copy's tensors with what its config needs, where the family is known."""
    checkpoint = read_checkpoint(folder, any_family=True)
    if checkpoint.family is not None:
        check_tensors(checkpoint, *config_and_class(checkpoint))
