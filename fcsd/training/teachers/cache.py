"""A teacher's final hidden states on disk: exact, in the teacher's own dtype, of the
positions with loss only.

    folder/teacher.json              the identity of the teacher; written first
    folder/hidden-KEY.safetensors    one shard: rows of hidden states, their keys, checksums; never half-written
    folder/cache.json                the list of shards; written when every requested row is there

A row is identified by the hash of its tokens, positions and positions with loss, so
neither the order of the rows, nor the batch size, nor the number of processes matters,
and every run whose data give the same rows shares the folder. D numbers a token are
exact, unlike a token's top logits, and 40 to 80 times less than all logits.
"""

import functools
import hashlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fcsd.base.artifact import differences, versions
from fcsd.base.errors import UserError, one_line
from fcsd.base.files import (
    check_regular,
    parse_json,
    read_json,
    read_sealed,
    safetensors_header,
    write_sealed,
)
from fcsd.base.writing import beside, writing
from fcsd.data.batches import next_token_targets
from fcsd.training.teachers.base import Batch, Teacher

FORMAT = "fcsd-teacher-cache-2"  # 1 had no checksum for each row
# the command that fills a cache, for messages
REPAIR = "fcsd run RECIPE --only cache-teacher"
TEACHER, MANIFEST = "teacher.json", "cache.json"
COMPUTING_DTYPE = "computing_dtype"
"""A fact of a teacher's identity, where it computes in another dtype than `dtype`, in
which its weights are loaded.
"""
_KEY_BYTES = 16
_OPEN_SHARDS = 256  # memory-mapped at a time

_RECORD = "record"

# shard, first and last + 1 of its hidden states, their checksum
Place = tuple[str, int, int, int]


def hidden_dtype(identity: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the hidden states of a teacher."""
    dtype: torch.dtype = getattr(
        torch, identity.get(COMPUTING_DTYPE, identity["dtype"])
    )
    return dtype


def row_keys(batch: Batch) -> list[bytes]:
    """Return the key of each row of a batch: a hash of its token ids, position ids and
    positions with loss.
    """
    keep, _ = next_token_targets(batch["labels"], batch["position_ids"])
    columns = [
        batch[name].to("cpu", torch.int32) for name in ("input_ids", "position_ids")
    ]
    # Not the labels: their values play no part in the teacher's pass.
    columns.append(keep.to("cpu", torch.uint8))
    keys = []
    for row in zip(*columns, strict=True):
        digest = hashlib.blake2b(digest_size=_KEY_BYTES)
        for column in row:
            digest.update(column.contiguous().numpy().data)
        keys.append(digest.digest())
    return keys


def write_shard(
    folder: Path, identity: dict[str, Any], rows: Sequence[tuple[bytes, Tensor]]
) -> Path:
    """Write a shard of rows, key and (n, D) hidden states, under a temporary name and
    rename it; its name is a hash of its keys.
    """
    keys = torch.frombuffer(
        bytearray(b"".join(key for key, _ in rows)), dtype=torch.uint8
    )
    tensors = {
        "hidden": torch.cat([hidden for _, hidden in rows]).contiguous(),
        "keys": keys.reshape(-1, _KEY_BYTES),
        "ends": torch.tensor([len(hidden) for _, hidden in rows]).cumsum(0),
        "sums": torch.tensor(
            [_row_sum(hidden) for _, hidden in rows], dtype=torch.int64
        ),
    }
    metadata = {
        "format": FORMAT,
        "teacher": _hash_of(identity),
    }
    path = (
        folder
        / f"hidden-{hashlib.blake2b(keys.numpy().data, digest_size=8).hexdigest()}.safetensors"
    )
    with writing(path), beside(path) as temporary:
        # Metadata in one entry: safetensors writes several in an arbitrary order, and
        # the same rows would give different bytes.
        save_file(
            tensors, temporary / "shard", metadata={_RECORD: json.dumps(metadata)}
        )
        # safetensors 0.8 creates files with mode 0600, ignoring the umask, but other
        # users may share a cache.
        (temporary / "shard").chmod(temporary.stat().st_mode & 0o666)
        os.replace(temporary / "shard", path)
    return path


def _row_sum(hidden: Tensor) -> int:
    """Compute the CRC-32 of a row's hidden states, which a training checks on reading."""
    data = hidden.contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(data.data if data.size else b"")


def _hash_of(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def read_shard(path: Path, identity: dict[str, Any]) -> dict[bytes, Place]:
    """Return the place of each row in a shard, reading only its index.

    UserError: the shard is damaged, or belongs to another teacher.
    """
    check_regular(path, "remove it")
    try:
        # Opening also checks that the file has the length that its header states.
        with safe_open(path, framework="pt") as file:
            metadata = _metadata(file)
            keys, ends = file.get_tensor("keys"), file.get_tensor("ends").tolist()
            sums = file.get_tensor("sums").tolist()
            length = file.get_slice("hidden").get_shape()[0]
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size if path.is_file() else 0
        raise UserError(
            f"{path}: damaged or incomplete shard ({size} bytes; {one_line(error)})"
        ) from None
    if (
        metadata.get("format") != FORMAT
        or not len(keys) == len(ends) == len(sums)
        or ends[-1:] != [length]
    ):
        raise UserError(
            f"{path}: not a shard of a teacher cache of this version ({FORMAT})"
        )
    if metadata.get("teacher") != _hash_of(identity):
        raise UserError(
            f"{path}: holds hidden states of another teacher than the rest of the cache"
        )
    spans = itertools.pairwise([0, *ends])
    return {
        key.tobytes(): (path.name, begin, end, checksum)
        for key, (begin, end), checksum in zip(keys.numpy(), spans, sums, strict=True)
    }


def _metadata(file: Any) -> dict[str, Any]:
    """Return the metadata of `write_shard`; {} for a file of another kind."""
    record = parse_json((file.metadata() or {}).get(_RECORD, "{}"))
    return record if isinstance(record, dict) else {}


def _layout(path: Path) -> tuple[int, int]:
    """Return the offset of the hidden states in a shard, and the bytes of each."""
    header, start = safetensors_header(path)
    hidden = header["hidden"]
    begin, end = hidden["data_offsets"]
    return start + begin, (end - begin) // max(hidden["shape"][0], 1)


def check_teacher(folder: Path, identity: dict[str, Any]) -> None:
    """Raise UserError, with the differences, when the cache in `folder` was made from
    another teacher.
    """
    cache_identity = read_json(folder / TEACHER)
    if changes := differences(cache_identity, json.loads(json.dumps(identity))):
        raise UserError(
            f"{folder}: holds the hidden states of another teacher"
            f" ({'; '.join(changes)}; cache -> recipe); fill a cache in another folder,"
            " or use the cache's settings in the recipe"
        )


def write_manifest(folder: Path, locations: Iterable[Place]) -> dict[str, Any]:
    """Mark the cache as complete: list its shards, and the versions that made them."""
    places = list(locations)
    # Only shards with a row are listed.
    names = sorted({name for name, *_ in places})
    manifest = {
        "format": FORMAT,
        "teacher": read_json(folder / TEACHER),
        "rows": len(places),
        "tokens": sum(end - begin for _, begin, end, _ in places),
        "bytes": sum((folder / name).stat().st_size for name in names),
        "shards": names,
        "versions": versions(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_sealed(folder / MANIFEST, manifest)
    return manifest


class HiddenCache:
    """A complete cache, opened for reading rows; its files are memory-mapped.

    identity: the required teacher's (`fcsd.training.teachers.load.identity`).
    UserError: there is no cache, it is not complete or of another teacher, or a shard
    is missing or damaged.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder = folder
        if not (folder / TEACHER).is_file():
            raise UserError(
                f"{folder}: holds no teacher cache; fill it with `{REPAIR}`"
            )
        check_teacher(folder, identity)
        if not (folder / MANIFEST).is_file():
            raise UserError(
                f"{folder}: the teacher cache is not finished; run `{REPAIR}` to"
                " continue"
            )
        self.manifest = read_sealed(
            folder / MANIFEST, f"remove it, and run `{REPAIR}` to write it again"
        )
        self.places: dict[bytes, Place] = {}
        for name in self.manifest["shards"]:
            self.places |= self._index(folder / name, identity)
        # A cache may have more shards than a process may map at a time.
        self._open = functools.lru_cache(_OPEN_SHARDS)(
            lambda name: safe_open(folder / name, framework="pt").get_slice("hidden")
        )
        self._layout = functools.lru_cache(None)(lambda name: _layout(folder / name))

    def _index(self, path: Path, identity: dict[str, Any]) -> dict[bytes, Place]:
        advice = f"; run `{REPAIR}` to compute its rows again"
        if not path.is_file():
            raise UserError(
                f"{path}: no such file, but {MANIFEST} names this shard{advice}"
            )
        # Its rows are compared with their checksums when they are read: to compare all
        # would read the whole cache before the first step.
        try:
            return read_shard(path, identity)
        except UserError as error:
            raise UserError(f"{error}{advice}") from None

    def require(self, keys: Sequence[bytes]) -> None:
        """Raise UserError, with their number, when rows are missing from the cache."""
        missing = sum(key not in self.places for key in keys)
        if missing:
            raise UserError(
                f"{self.folder}: {missing} of {len(keys)} rows of the training data are"
                " not in the teacher cache: other data, tokenizer, seed, max_length,"
                f" packing or loss_on than when it was filled; run `{REPAIR}` to add"
                " the missing rows"
            )

    def will_need(self, keys: Sequence[bytes]) -> None:
        """Ask the system to read these rows from disk into its page cache; return
        immediately.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        for key in keys:
            name, begin, end, _ = self.places.get(key, ("", 0, 0, 0))
            if begin == end:
                continue
            # WILLNEED returns before the pages are read; the file may be closed then.
            offset, size = self._layout(name)
            file = os.open(self.folder / name, os.O_RDONLY)
            try:
                os.posix_fadvise(
                    file,
                    offset + begin * size,
                    (end - begin) * size,
                    os.POSIX_FADV_WILLNEED,
                )
            finally:
                os.close(file)

    def read(self, keys: Sequence[bytes]) -> Tensor:
        """Return the concatenated (N, D) hidden states of these rows.

        Raises:
            UserError: a row is not in the cache, or differs from the one written.
        """
        self.require(keys)
        return torch.cat([self._row(*self.places[key]) for key in keys])

    def _row(self, name: str, begin: int, end: int, checksum: int) -> Tensor:
        hidden: Tensor = self._open(name)[begin:end]
        if _row_sum(hidden) != checksum:
            raise UserError(
                f"{self.folder / name}: is damaged: a row's hidden states differ from"
                f" what was written; remove the file, and run `{REPAIR}` to compute its"
                " rows again"
            )
        return hidden


class CachedTeacher(Teacher):
    """A teacher that reads hidden states from a cache; only its head is in memory."""

    def __init__(self, cache: HiddenCache, head: nn.Module):
        self.cache, self.head = cache, head.requires_grad_(False)

    def ahead(self, batch: Batch) -> None:
        """Start reading the rows of this micro-batch from the disk."""
        self.cache.will_need(row_keys(batch))

    def prepare(self, batches: list[Batch]) -> None:
        for batch in batches:
            hidden = self.cache.read(row_keys(batch))
            batch["teacher_hidden"] = hidden.to(batch["input_ids"].device)
