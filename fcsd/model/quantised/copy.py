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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from fcsd.base.artifact import check_checkpoint, command_record, model_outputs
from fcsd.base.errors import UserError
from fcsd.base.files import (
    file_sha256,
    file_state,
    read_sealed,
    write_sealed,
)
from fcsd.base.text import progress_bar
from fcsd.base.weights import (
    Stored,
    copy_bytes,
    fingerprint_of,
    weight_files,
    write_safetensors,
)
from fcsd.base.writing import (
    check_folder_place,
    check_is_new,
    make_folder,
    write_json,
    writing,
)
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    INDEX,
    Checkpoint,
    check_weights_path,
    read_checkpoint,
    read_header,
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
    check_is_new(destination)


def write_copy(
    source: str | Path,
    checkpoint: Checkpoint,
    destination: Path,
    copy: Copy,
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
        _write_shards(copy, partial / record, begun)
        if checkpoint.connectivity is not None and checkpoint.family is not None:
            write_code(checkpoint.folder, checkpoint.family, folder)
        carry_over(checkpoint.folder, folder, source)
        write_json(folder / CONFIG, copy.config)
        # Before the rename: a folder of the destination's name is whole and right.
        result = read_checkpoint(folder, any_family=True)
        if result.family is not None:
            check_tensors(result, *config_and_class(result))
        # With these hashes readers notice later changes.
        names = [file.name for file in weight_files(folder)]
        weights = fingerprint_of({name: begun["shards"][name] for name in names})
        manifest = command_record(copy.command, outputs=model_outputs(folder, weights))
        write_sealed(folder / "manifest.json", manifest)
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

    def __init__(self, file: Path, stored: Stored, begin: int) -> None:
        self.file, self.shape = file, list(stored.shape)
        self.dtype = _DTYPES[stored.dtype]
        self.begin, self.num_bytes = begin, stored.num_bytes

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
        self.tensors: dict[str, tuple[Path, Stored, int]] = {}
        for name in checkpoint.weight_files:
            file = checkpoint.folder / name
            for tensor, entry in read_header(file).items():
                self.tensors[tensor] = file, *entry

    def rows(self, name: str) -> Rows:
        return Rows(*self.tensors[name])

    def stored(self, name: str) -> Stored:
        return self.tensors[name][1]

    def copy(self, name: str, target: BinaryIO) -> None:
        """Write the bytes of a tensor."""
        file, stored, begin = self.tensors[name]
        with file.open("rb") as stream:
            copy_bytes(stream, begin, stored.num_bytes, target)


def _write_shards(copy: Copy, path: Path, record: dict[str, Any]) -> None:
    """Write the shards that are not there yet, and the index of all.

    record: of the file `path`, to which the hash of each new shard is added.
    """
    tensors, folder, hashes = copy.tensors, path.parent / "model", record["shards"]
    split = split_state_dict_into_shards_factory(
        # The same order in every call: a continued copy relies on the same shards.
        dict(sorted(tensors.items())),
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    with progress_bar(total=len(tensors), desc=copy.command, unit="tensor") as bar:

        def write(name: str, target: BinaryIO) -> None:
            copy.write(name, target)
            bar.update()

        for file, names in split.filename_to_tensors.items():
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
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)


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
