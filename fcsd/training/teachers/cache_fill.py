"""Filling a teacher cache: one pass of the teacher over the rows that a recipe trains
on, on any number of processes.

A row belongs to the process that its key names, so that processes need not talk;
finished shards stay, whatever ends the pass, and a second call computes only rows that
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
from fcsd.base.files import check_folder_place, is_empty, write_json
from fcsd.base.temporary import sweep
from fcsd.base.text import progress_bar
from fcsd.data.batches import Collator, next_token_targets
from fcsd.parallel.launch import Launch
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.cache import (
    MANIFEST,
    REPAIR,
    TEACHER,
    HiddenCache,
    Place,
    check_teacher,
    read_shard,
    row_keys,
    verify_shard,
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
    """Yield each row with its key, in blocks that are hashed at once."""
    collate, iterator = Collator(), iter(rows)
    while block := list(itertools.islice(iterator, 256)):
        yield from zip(row_keys(collate(block)), block, strict=True)


def finished_places(folder: Path, identity: dict[str, Any]) -> dict[bytes, Place]:
    """Return the rows that shards in `folder` have, named in a manifest or not; damaged
    shards are removed.
    """
    places: dict[bytes, Place] = {}
    for path in sorted(folder.glob("hidden-*.safetensors")):
        try:
            places |= read_shard(path, identity)
        except UserError as error:
            if "another teacher" in str(error):
                raise
            print(f"{error}; its rows are computed again", file=sys.stderr)
            path.unlink(missing_ok=True)
    return places


def fill_cache(
    folder: Path,
    identity: dict[str, Any],
    rows: Iterable[Row],
    launch: Launch,
    *,
    batch_size: int,
    load_teacher: Callable[[], Teacher],
) -> dict[str, Any]:
    """Put what is missing of `rows` into the cache in `folder`, and return its
    manifest.

    load_teacher(): the `Teacher`, called only when something is missing; batch_size:
    rows in one forward.

    Raises:
        UserError: the folder holds another teacher's cache, or something else; the disk
            has not the room, or is full while it is written; nodes that do not share
            the folder.
    """
    ranks = launch.ranks
    _begin(folder, identity, launch)
    done = finished_places(folder, identity) if launch.first else {}
    launch.wait()
    done = done or finished_places(folder, identity)
    wanted: set[bytes] = set()
    own: list[tuple[bytes, Row]] = []
    spare: list[tuple[bytes, Row]] = []
    for key, row in keyed(rows):
        if key not in wanted:
            spare = spare or [(key, row)]
            wanted.add(key)
            if (
                key not in done
                and int.from_bytes(key[:4], "big") % ranks.size == ranks.rank
            ):
                own.append((key, row))
    tokens = sum(ranks.share(lambda: sum(_num_kept(row) for _, row in own)))
    missing = sum(ranks.share(lambda: len(own)))
    if missing:
        size = (
            tokens
            * identity["hidden_size"]
            * getattr(torch, identity["dtype"]).itemsize
        )
        if launch.first:
            _check_room(folder, size, missing, tokens)
        launch.wait()
        batches = [
            own[begin : begin + batch_size] for begin in range(0, len(own), batch_size)
        ]
        if ranks.lockstep:  # what a spare batch gives is thrown away
            rounds = max(ranks.share(lambda: len(batches)))
            batches += [spare] * (rounds - len(batches))
        _compute(
            folder,
            identity,
            batches,
            len(own),
            load_teacher(),
            launch,
            show=launch.first,
        )
        launch.wait()
    if launch.first:
        places = finished_places(folder, identity)
        if absent := len(wanted - places.keys()):
            raise UserError(
                f"{folder}: {absent} of {len(wanted)} rows are not there after all"
                " processes have written theirs; the folder must be one that all nodes"
                " share"
            )
        if missing or not (folder / MANIFEST).is_file():
            write_manifest(folder, places.values())
    launch.wait()
    return HiddenCache(folder, identity).manifest


def _begin(folder: Path, identity: dict[str, Any], launch: Launch) -> None:
    check_folder_place(folder)
    if (folder / TEACHER).is_file():
        check_teacher(folder, identity)
    elif folder.exists() and not is_empty(folder):
        raise UserError(
            f"{folder}: is not empty and holds no teacher cache; choose another folder"
        )
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


def _check_room(folder: Path, size: int, rows: int, tokens: int) -> None:
    free = shutil.disk_usage(folder).free
    needed = (
        f"{rows} rows with {tokens} tokens with loss need {_gb(size)}, {_gb(free)} are"
        f" free at {folder}"
    )
    if size + _FREE_BYTES > free:
        raise UserError(
            f"teacher cache: {needed}; give another folder with --output, or less data"
            " (data.train.N.max_examples)"
        )
    print(f"teacher cache: {needed}", file=sys.stderr)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _compute(
    folder: Path,
    identity: dict[str, Any],
    batches: Sequence[Sequence[tuple[bytes, Row]]],
    num_rows: int,
    teacher: Teacher,
    launch: Launch,
    *,
    show: bool,
) -> None:
    """Run the teacher on all batches; the first `num_rows` rows are kept."""
    held: list[tuple[bytes, Tensor]] = []
    size, num_done = 0, 0
    with progress_bar(total=num_rows, desc="Teacher", unit="row", shown=show) as bar:
        for some in batches:
            states = _hidden_of_rows(teacher, [row for _, row in some], launch.device)
            if num_done == num_rows:
                continue
            for (key, _), hidden in zip(some, states, strict=True):
                held.append((key, hidden))
                size += hidden.numel() * hidden.element_size()
            if size >= SHARD_BYTES:
                write_shard(folder, identity, held)
                held, size = [], 0
            num_done += len(some)
            bar.update(len(some))
        if held:
            write_shard(folder, identity, held)


def _hidden_of_rows(
    teacher: Teacher, rows: Sequence[Row], device: torch.device
) -> list[Tensor]:
    """Return (n, D) on the CPU for each row, from one pass."""
    batch = {name: value.to(device) for name, value in Collator()(rows).items()}
    teacher.prepare([batch])
    keep, _ = next_token_targets(batch["labels"], batch["position_ids"])
    return list(batch["teacher_hidden"].cpu().split(keep.sum(1).tolist()))


def verify_cache(cache: HiddenCache) -> None:
    """Read every shard and compare it with its checksum; UserError names the first
    whose content has changed.
    """
    for name in progress_bar(cache.manifest["shards"], desc="Verifying", unit="shard"):
        try:
            verify_shard(cache.folder / name)
        except UserError as error:
            raise UserError(
                f"{error}; remove the file, and `{REPAIR}` computes its rows again"
            ) from None


def spot_check(
    cache: HiddenCache, teacher: Teacher, rows: Sequence[Row], device: torch.device
) -> None:
    """Compare some rows of a cache with what the teacher gives now; UserError when one
    is further away than other kernels could bring it.
    """
    for row in rows:
        live = _hidden_of_rows(teacher, [row], device)[0].double()
        stored = cache.read(row_keys(Collator()([row]))).double()
        distance = float((stored - live).norm() / live.norm().clamp_min(1e-30))
        limit = _TOLERANCE.get(
            getattr(torch, cache.manifest["teacher"]["dtype"]), _HALF_TOLERANCE
        )
        if not distance <= limit:
            raise UserError(
                f"{cache.folder}: the spot check found a row whose hidden states are"
                f" {distance:.2g} (relative) from what the teacher gives now, more than"
                f" {limit:g}; the cache is damaged or was made by other software: `fcsd"
                " cache-teacher RECIPE --verify` tells which; fill a new one"
            )
