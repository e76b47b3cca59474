"""Copy a checkpoint with other tensors, a few rows of a weight in memory at a time.

Shards are written one after another below `OUT.partial`, brought to the disk and
renamed; a copy that was cut off continues with the next shard, to the same bytes. One
whose hash is not the noted one is written again.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fcsd.base.artifact import check_checkpoint, command_record, model_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import (
    file_sha256,
    file_state,
    read_sealed,
    safetensors_header,
    write_sealed,
)
from fcsd.base.text import progress_bar
from fcsd.base.weights import (
    Stored,
    copy_bytes,
    fingerprint_of,
    shard_names,
    weight_files,
    write_safetensors,
)
from fcsd.base.writing import (
    check_folder_place,
    is_empty,
    make_folder,
    write_json,
    writing,
)
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    INDEX,
    WEIGHTS,
    Checkpoint,
    check_weights_path,
    read_checkpoint,
)
from fcsd.model.connectivity.export import carry_over, write_code
from fcsd.model.connectivity.load import check_tensors, config_and_class
from fcsd.model.dtypes import PLAIN

SHARD_BYTES = 5 * 10**9
CHUNK_VALUES = 1 << 23  # bytes of a weight in memory at once
_DTYPES = PLAIN | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Copy:
    """The contents of a checkpoint's copy.

    command: of `fcsd`, which writes it. config: of the copy. tensors: of its files.
    write: writes the bytes of the tensor of this name.
    """

    command: str
    config: dict[str, Any]
    tensors: dict[str, Stored]
    write: Callable[[str, BinaryIO], None]


def check_destination(destination: Path) -> None:
    """Raise UserError if the destination exists."""
    check_weights_path(destination)
    if destination.exists() and not (destination.is_dir() and is_empty(destination)):
        raise UserError(
            f"{destination}: exists and is not empty; choose another destination or"
            " remove it first"
        )


def write_copy(
    source: str | Path,
    checkpoint: Checkpoint,
    destination: Path,
    copy: Copy,
    shard_bytes: int,
) -> None:
    """Write a copy, or continue one that was cut off.

    Raises:
        UserError: `OUT.partial` belongs to another checkpoint or command; the source
            has changed since its stage or command; the tensors do not fit the copy's
            config.
    """
    partial = destination.with_name(f"{destination.name}.partial")
    record = f"{copy.command}.json"
    check_folder_place(partial, record, f"copy that `fcsd {copy.command}` began")
    check_checkpoint(checkpoint.folder)
    make_folder(partial)
    folder = partial / "model"
    with writing(partial):
        begun = _begin(checkpoint, partial / record)
        folder.mkdir(exist_ok=True)
        _write_shards(copy, partial / record, begun, shard_bytes)
        _write_rest(source, checkpoint, folder, copy.config)
        # Before the rename: a folder of the destination's name is whole and right.
        _check_result(folder)
        _leave_manifest(copy.command, folder, begun["shards"])
        os.rename(folder, destination)  # which may be an empty folder
        shutil.rmtree(partial)


def _begin(checkpoint: Checkpoint, path: Path) -> dict[str, Any]:
    """Record what is copied, or compare it with an earlier call's record; return the
    record, with the hashes of the finished `shards`.
    """
    facts = {
        tensor: [checkpoint.dtypes[tensor], list(shape)]
        for tensor, shape in sorted(checkpoint.shapes.items())
    }
    # Headers and states of the files, not their bytes: hashing these would take as long
    # as the copy.
    states = [file_state(checkpoint.folder / file) for file in checkpoint.weight_files]
    text = json.dumps([facts, states, checkpoint.config], sort_keys=True)
    source = hashlib.sha256(text.encode()).hexdigest()
    if path.is_file():
        record = read_sealed(path, f"remove {path.parent} to begin again")
        if record["source"] != source:
            raise UserError(
                f"{path.parent}: holds the unfinished copy of another checkpoint;"
                " remove it, or choose another destination"
            )
        return record
    record = {"source": source, "shards": {}}
    write_sealed(path, record)
    return record


class Rows:
    """A tensor in a file that is read by rows: not mapped, so that they do not stay
    in memory.
    """

    def __init__(self, file: Path, entry: Mapping[str, Any], begin: int) -> None:
        first, last = entry["data_offsets"]
        self.file, self.shape = file, list(entry["shape"])
        self.dtype = _DTYPES[entry["dtype"]]
        self.begin, self.num_bytes = begin + first, last - first

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, rows: slice) -> Tensor:
        """Return rows of the first dimension; of a scalar itself."""
        if not self.shape:
            return self._read(self.begin, self.num_bytes).reshape(())
        first, last, _ = rows.indices(self.shape[0])
        # Rows lie one after another, so any of them are one run of bytes.
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


class Source:
    """The tensors of a checkpoint's files."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.folder = checkpoint.folder
        self.entries: dict[str, tuple[str, dict[str, Any], int]] = {}
        for file in checkpoint.weight_files:
            header, begin = safetensors_header(checkpoint.folder / file)
            self.entries |= {
                name: (file, entry, begin) for name, entry in header.items()
            }

    def rows(self, name: str) -> Rows:
        file, entry, begin = self.entries[name]
        return Rows(self.folder / file, entry, begin)

    def stored(self, name: str) -> Stored:
        entry = self.entries[name][1]
        begin, end = entry["data_offsets"]
        return Stored(entry["dtype"], tuple(entry["shape"]), end - begin)

    def copy(self, name: str, target: BinaryIO) -> None:
        """Write the bytes of a tensor."""
        file, entry, begin = self.entries[name]
        first, last = entry["data_offsets"]
        with (self.folder / file).open("rb") as stream:
            copy_bytes(stream, begin + first, last - first, target)


def _write_shards(
    copy: Copy, path: Path, record: dict[str, Any], shard_bytes: int
) -> None:
    """Write the shards that are not there yet, and the index of all.

    record: of the file `path`, to which the hash of each new shard is added.
    """
    tensors, folder, hashes = copy.tensors, path.parent / "model", record["shards"]
    shards = _shards(tensors, shard_bytes)
    with progress_bar(total=len(tensors), desc=copy.command, unit="tensor") as bar:

        def write(name: str, target: BinaryIO) -> None:
            copy.write(name, target)
            bar.update()

        for file, names in shards.items():
            # A shard gets its name when it is complete, so an existing shard is
            # finished.
            if (folder / file).is_file():
                if file_sha256(folder / file) == hashes.get(file):
                    bar.update(len(names))
                    continue
                print(
                    f"{copy.command}: {folder / file}: is damaged; fcsd writes it"
                    " again",
                    file=sys.stderr,
                )
            temporary = folder / f".{file}.tmp"
            write_safetensors(temporary, {name: tensors[name] for name in names}, write)
            hashes[file] = file_sha256(temporary)
            write_sealed(path, record)
            os.replace(temporary, folder / file)
    if len(shards) > 1:
        total = {"total_size": sum(tensor.num_bytes for tensor in tensors.values())}
        weight_map = {name: file for file, names in shards.items() for name in names}
        write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def _shards(tensors: Mapping[str, Stored], shard_bytes: int) -> dict[str, list[str]]:
    """Return file -> names of its tensors."""
    shards: list[list[str]] = [[]]
    size = 0
    # The same order in every call: a continued copy relies on the same shards.
    for name in sorted(tensors):
        if shards[-1] and size + tensors[name].num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].num_bytes
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return dict(zip(shard_names(len(shards)), shards, strict=True))


def _write_rest(
    source: str | Path, checkpoint: Checkpoint, folder: Path, config: dict[str, Any]
) -> None:
    """Write config, tokenizer and code beside the weights."""
    if checkpoint.connectivity is not None and checkpoint.family is not None:
        write_code(checkpoint.folder, checkpoint.family, folder)
    is_on_hub = not Path(os.path.expanduser(source)).is_dir()
    carry_over(checkpoint.folder, folder, repository=str(source) if is_on_hub else None)
    write_json(folder / CONFIG, config)


def _leave_manifest(command: str, folder: Path, hashes: dict[str, str]) -> None:
    """Record the copy's hashes, with which readers notice later changes."""
    names = [file.name for file in weight_files(folder)]
    weights = fingerprint_of({name: hashes[name] for name in names})
    record = command_record(command, outputs=model_outputs(folder, weights))
    write_sealed(folder / "manifest.json", record)


def _check_result(folder: Path) -> None:
    """Compare the copy's tensors with those that its config needs, if the family is
    known.
    """
    checkpoint = read_checkpoint(folder, any_family=True)
    if checkpoint.family is not None:
        check_tensors(checkpoint, *config_and_class(checkpoint))


def check_rows(rows: Tensor, where: str | Path, name: str) -> None:
    """Raise UserError where a part of a tensor has values that are NaN or infinite."""
    if not rows.isfinite().all():
        raise UserError(
            f"{where}: tensor '{name}': has values that are NaN or infinite; fetch the"
            " checkpoint again, or use an earlier one"
        )


def write_rows(rows: Tensor, target: BinaryIO) -> None:
    """Write the bytes of a tensor in memory."""
    target.write(rows.contiguous().view(torch.uint8).numpy().data)
