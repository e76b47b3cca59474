"""Fill a teacher cache: one pass of the teacher over the rows that a recipe trains on,
on any number of processes.

A row is assigned to a process by its key, so that processes need not communicate.
Finished shards stay, however the pass ends, and a second call computes only rows that
no shard has.
"""

import itertools
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.base.errors import UserError
from fcsd.base.text import progress_bar, size
from fcsd.base.writing import check_folder_place, sweep, write_json
from fcsd.data.batches import Collator, next_token_targets
from fcsd.parallel.launch import Launch
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.cache import (
    MANIFEST,
    TEACHER,
    HiddenCache,
    Place,
    check_teacher,
    hidden_dtype,
    read_shard,
    row_keys,
    write_manifest,
    write_shard,
)

SHARD_BYTES = 1 << 30
_FREE_BYTES = 1 << 28  # stays free on the disk
# |cached - live| / |live| of a row. Other kernels move a state by some 1e-3 in bfloat16, and a token whose router
# decides otherwise by more; another teacher by about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.05

Row = dict[str, Any]


def keyed(rows: Iterable[Row]) -> Iterator[tuple[bytes, Row]]:
    """Yield each row with its key; rows are collated and hashed in blocks."""
    collate, iterator = Collator(), iter(rows)
    while block := list(itertools.islice(iterator, 256)):
        yield from zip(row_keys(collate(block)), block, strict=True)


def finished_places(folder: Path, identity: dict[str, Any]) -> dict[bytes, Place]:
    """Return the rows of all shards in `folder`, listed in a manifest or not; remove
    damaged shards.
    """
    locations: dict[bytes, Place] = {}
    for path in sorted(folder.glob("hidden-*.safetensors")):
        try:
            locations |= read_shard(path, identity)
        except UserError as error:
            if "another teacher" in str(error):
                raise
            print(f"{error}; fcsd computes its rows again", file=sys.stderr)
            path.unlink(missing_ok=True)
    return locations


def fill_cache(
    folder: Path,
    identity: dict[str, Any],
    rows: Iterable[Row],
    launch: Launch,
    *,
    batch_size: int,
    load_teacher: Callable[[], Teacher],
) -> dict[str, Any]:
    """Add the missing ones of `rows` to the cache in `folder`, and return its manifest.

    load_teacher(): returns the `Teacher`; called only when rows are missing.
    batch_size: rows in one forward pass.

    Raises:
        UserError: the folder holds another teacher's cache, or other files; the disk
            is too small, or fills up while the cache is written; nodes do not share
            the folder.
    """
    ranks = launch.ranks
    _begin(folder, identity, launch)
    done = finished_places(folder, identity) if launch.first else {}
    launch.wait()
    # The first rank has removed damaged shards before the others read the folder.
    done = done or finished_places(folder, identity)
    # A key of random bits spreads the rows evenly over the ranks. `spare` is any row,
    # for the dummy forwards below.
    requested_keys: set[bytes] = set()
    own_rows: list[tuple[bytes, Row]] = []
    spare: list[tuple[bytes, Row]] = []
    for key, row in keyed(rows):
        if key not in requested_keys:
            spare = spare or [(key, row)]
            requested_keys.add(key)
            if (
                key not in done
                and int.from_bytes(key[:4], "big") % ranks.size == ranks.rank
            ):
                own_rows.append((key, row))
    tokens = sum(ranks.share(lambda: sum(_num_kept(row) for _, row in own_rows)))
    missing = sum(ranks.share(lambda: len(own_rows)))
    if missing:
        need = tokens * identity["hidden_size"] * hidden_dtype(identity).itemsize
        if launch.first:
            _check_room(folder, need, missing, tokens)
        # All ranks have checked before the first rank writes, and continue when it has
        # written.
        launch.wait()
        batches = [
            own_rows[begin : begin + batch_size]
            for begin in range(0, len(own_rows), batch_size)
        ]
        # In lockstep all ranks run equally many passes; results of dummy batches are
        # dropped.
        if ranks.lockstep:
            rounds = max(ranks.share(lambda: len(batches)))
            batches += [spare] * (rounds - len(batches))
        _compute(folder, identity, batches, len(own_rows), load_teacher(), launch)
        launch.wait()
    if launch.first:
        # Also catches a folder that is local to each node.
        locations = finished_places(folder, identity)
        if num_absent := len(requested_keys - locations.keys()):
            raise UserError(
                f"{folder}: {num_absent} of {len(requested_keys)} rows are missing"
                " after all processes have written theirs; use a folder that all nodes"
                " share"
            )
        if missing or not (folder / MANIFEST).is_file():
            write_manifest(folder, locations.values())
    launch.wait()
    return HiddenCache(folder, identity).manifest


def _begin(folder: Path, identity: dict[str, Any], launch: Launch) -> None:
    check_folder_place(folder, TEACHER, "teacher cache")
    if (folder / TEACHER).is_file():
        check_teacher(folder, identity)
    launch.wait()
    if launch.first:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, ".hidden-")
        if not (folder / TEACHER).is_file():
            write_json(folder / TEACHER, identity)
    launch.wait()


def _num_kept(row: Row) -> int:
    batch = Collator()([row])
    return int(next_token_targets(batch["labels"], batch["position_ids"])[0].sum())


def _check_room(folder: Path, need: int, rows: int, tokens: int) -> None:
    free = shutil.disk_usage(folder).free
    room_text = (
        f"{rows} rows with {tokens} tokens with loss need {size(need)}; {size(free)} are"
        f" free at {folder}"
    )
    if need + _FREE_BYTES > free:
        raise UserError(
            f"teacher cache: {room_text}; set teacher.cache to another"
            " folder, or use less data (data.train.N.max_examples)"
        )
    print(f"teacher cache: {room_text}", file=sys.stderr)


def _compute(
    folder: Path,
    identity: dict[str, Any],
    batches: Sequence[Sequence[tuple[bytes, Row]]],
    num_rows: int,
    teacher: Teacher,
    launch: Launch,
) -> None:
    """Run the teacher on all batches, and write the first `num_rows` rows to shards."""
    shard_rows: list[tuple[bytes, Tensor]] = []
    num_bytes, num_done = 0, 0
    with progress_bar(
        total=num_rows, desc="Teacher", unit="row", shown=launch.first
    ) as bar:
        for batch in batches:
            states = _hidden_of_rows(teacher, [row for _, row in batch], launch.device)
            # From here on the batches are dummies.
            if num_done == num_rows:
                continue
            for (key, _), hidden in zip(batch, states, strict=True):
                shard_rows.append((key, hidden))
                num_bytes += hidden.nbytes
            # A shard is finished immediately, so that an interrupted pass loses at most
            # one.
            if num_bytes >= SHARD_BYTES:
                write_shard(folder, identity, shard_rows)
                shard_rows, num_bytes = [], 0
            num_done += len(batch)
            bar.update(len(batch))
        if shard_rows:
            write_shard(folder, identity, shard_rows)


def _hidden_of_rows(
    teacher: Teacher, rows: Sequence[Row], device: torch.device
) -> list[Tensor]:
    """Return the (n, D) hidden states of each row, on the CPU, from a single pass."""
    batch = {name: value.to(device) for name, value in Collator()(rows).items()}
    teacher.prepare([batch])
    keep, _ = next_token_targets(batch["labels"], batch["position_ids"])
    return list(batch["teacher_hidden"].cpu().split(keep.sum(1).tolist()))


def verify_cache(cache: HiddenCache) -> None:
    """Read every row and compare it with its checksum; UserError names the first shard
    whose content has changed.
    """
    for key in progress_bar(cache.places, desc="Verifying", unit="row"):
        cache.read([key])


def spot_check(
    cache: HiddenCache, teacher: Teacher, rows: Sequence[Row], device: torch.device
) -> None:
    """Compare some rows of a cache with the teacher's present output; UserError when
    one differs by more than other kernels could explain.
    """
    for row in rows:
        live = _hidden_of_rows(teacher, [row], device)[0].double()
        stored = cache.read(row_keys(Collator()([row]))).double()
        distance = float((stored - live).norm() / live.norm().clamp_min(1e-30))
        dtype = hidden_dtype(cache.manifest["teacher"])
        limit = _TOLERANCE.get(dtype, _HALF_TOLERANCE)
        if not distance <= limit:  # also true for NaN
            raise UserError(
                f"{cache.folder}: the spot check found a row whose hidden states are"
                f" {distance:.2g} (relative) from the teacher's current ones, more than"
                f" {limit:g}; the cache is damaged or was made by other software: run"
                " `fcsd run RECIPE --only cache-teacher --verify` to find out, and fill"
                " a new one"
            )
