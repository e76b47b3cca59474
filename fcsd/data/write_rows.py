"""Write the tokens of a mixture's sources, and the rows that they fill: every source is
read once, file by file, in pieces that become shards (`fcsd.data.rows`).

The order of a source's examples is a permutation that the seed decides, that of a
mixture the draws of the same seed; rows are filled in this order, and a training
permutes the rows by its own seed and epoch. All of it is as in `datasets` 5.2
(`shuffle`, `interleave_datasets` with `all_exhausted`), computed from the examples'
numbers alone.

The first example that cannot be tokenized ends the run, or such examples are left out
up to a limit (`BadRows`).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import multiprocessing
import os
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import read_json
from fcsd.base.helper import obey_only_parent
from fcsd.base.memory import check_shared_memory
from fcsd.base.text import progress_bar
from fcsd.base.writing import write_json
from fcsd.data.counts import ExampleCounts, no_rows
from fcsd.data.rows import (
    Counted,
    Layout,
    Piece,
    Shard,
    Tokenizing,
    count_shard,
    keep_whole,
    write_arrays,
)
from fcsd.data.sources import Opened, Source, broken_line, columns_of, open_source

_DRAWN = 1000  # random numbers at a time
_FORMAT = 2  # of what is written
_OPEN_ROWS = 64


def first_fit(
    lengths: Iterable[int],
    max_length: int,
    *,
    packing: bool = True,
    num_open_rows: int = _OPEN_ROWS,
) -> Iterator[list[int]]:
    """Yield, for each row of `max_length` tokens, the numbers of the examples in it.

    An example goes into the first open row that has room, else into a new one; when
    more than `num_open_rows` are open, the oldest is closed. With packing=False each
    example has its own row. Examples of length 0 are left out.
    """
    open_rows: list[list[int]] = []
    room: list[int] = []
    for number, length in enumerate(lengths):
        if length == 0:
            continue
        if not packing:
            yield [number]
            continue
        # The search is linear in the open rows, hence their bounded number.
        index = next((i for i, free in enumerate(room) if free >= length), None)
        if index is None:
            index = len(open_rows)
            open_rows.append([])
            room.append(max_length)
        open_rows[index].append(number)
        room[index] -= length
        # A full row can take no more; of the others the oldest has waited longest.
        if room[index] == 0 or len(open_rows) > num_open_rows:
            closed = index if room[index] == 0 else 0
            room.pop(closed)
            yield open_rows.pop(closed)
    yield from open_rows


class _SourceTokens:
    """The shards of one source: those that exist, and those that are still to be
    written.

    num_read: examples of the shards that were handed out; shards: those that are
    written, in order; lengths: the tokens that each of their examples takes in a row,
    0 where none of them would be predicted; num_kept: their tokens, or examples where
    rows are not packed; counts: what became of them, by shard.
    """

    def __init__(self, index: int, source: Source, folder: Path):
        self.index, self.source, self.folder = index, source, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._end = folder / "end.json"
        self._total = self._num_shards()
        # A source that was read to its end need not be opened again.
        self.ended = self.whole = self._total is not None
        self.opened = None if self.ended else open_source(source)
        if self.opened is not None:
            self.source, self.whole = self.opened.settings, self.opened.whole
        self.num_read, self.num_kept = 0, 0
        self.counts: list[ExampleCounts] = []
        self.shards: list[Path] = []
        self.lengths: list[np.ndarray] = []
        self.is_bad: list[np.ndarray] = []

    def _num_shards(self) -> int | None:
        """Return how many shards the source has; None: more of it must be read, from
        after the shards that are whole.
        """
        number = next(
            number for number in itertools.count() if not keep_whole(self._path(number))
        )
        if not self._end.is_file():
            return None
        with contextlib.suppress(UserError):
            if read_json(self._end, keys=["shards"])["shards"] == number:
                return number
        # A shard was removed or damaged since; the end is recorded again when it
        # exists.
        self._end.unlink(missing_ok=True)
        return None

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:05}.safetensors"

    def jobs(self) -> Iterator[_Job]:
        """Yield every shard in order, with the piece to make it of if it is missing."""
        records: list[dict[str, Any]] = []
        while keep_whole(path := self._path(len(records))):
            records.append(Shard(path).record)
            self.num_read += records[-1]["num_rows"]
            yield self.index, path, None
        # The records of earlier shards tell the reader how far each file has been read.
        number = len(records)
        pieces = () if self.opened is None else read_pieces(self.opened, records)
        for piece in pieces:
            self.num_read += piece.num_rows
            yield self.index, self._path(number), piece
            number += 1
        self._total = number

    def add(self, path: Path, counted: Counted, layout: Layout) -> None:
        """Take note of a written shard, and of what rows hold of it."""
        lengths = counted.lengths
        self.shards.append(path)
        self.lengths.append(lengths)
        self.is_bad.append(counted.is_bad)
        self.counts.append(counted.counts)
        # Packed rows are counted by their tokens, unpacked rows by their examples.
        self.num_kept += int(
            lengths.sum() if layout.packing else np.count_nonzero(lengths)
        )

    def note_end(self) -> None:
        """Note in the folder that the source has been read to its end, if it has."""
        if len(self.shards) == self._total and not self._end.is_file():
            write_json(self._end, {"shards": self._total})


# index of the source, path of the shard, and its examples; None: the shard exists
_Job = tuple[int, Path, Piece | None]


def write_rows(
    sources: Sequence[tuple[Source, str]],
    folder: Path,
    tokenizing: Tokenizing,
    layout: Layout,
    bad_rows: BadRows,
    num_workers: int | None = None,
) -> Path:
    """Write the rows of sources, and any tokens that are missing; return the file,
    which may exist already.

    sources: each with the name of its folder, which identifies everything that its
    tokens depend on. num_workers: processes that tokenize; None: one per core, eight at
    most.

    Raises:
        UserError: sources that cannot be read; too many examples that cannot be
            tokenized; no row.
    """
    # The name identifies everything that the rows depend on, so an existing file is
    # used as it is.
    parts = [[name, source.weight] for source, name in sources]
    identity = json.dumps([_FORMAT, parts, asdict(layout)]).encode()
    key = hashlib.sha256(identity).hexdigest()[:16]
    path = folder / f"rows-{key}.safetensors"
    if _rows_are_intact(path):
        # The limit on bad rows is this run's, and may be lower than the writer's.
        bad_record = Shard(path).record["bad_rows"]
        bad_rows.add(
            [
                (example["where"], example["reason"])
                for example in bad_record["left_out"]
            ],
            bad_record["num_examples"],
        )
        return path
    # Building the index of test items is costly, so it waits until it is needed.
    decontaminator = tokenizing.decontaminator
    if callable(decontaminator):
        tokenizing = replace(
            tokenizing, decontaminator=(decontaminator := decontaminator())
        )
    tokens = [
        _SourceTokens(index, source, folder / name)
        for index, (source, name) in enumerate(sources)
    ]
    order = _Order(tokens, layout)
    rows = _write_missing(
        order,
        tokenizing,
        bad_rows,
        default_workers() if num_workers is None else num_workers,
    )
    counts = sum(
        itertools.chain(*(source_tokens.counts for source_tokens in tokens)),
        ExampleCounts(),
    )
    if not rows:
        raise no_rows(
            [source_tokens.source for source_tokens in tokens],
            counts,
            layout.max_length,
        )
    shards = [path for source_tokens in tokens for path in source_tokens.shards]
    sizes = [
        len(lengths) for source_tokens in tokens for lengths in source_tokens.lengths
    ]
    arrays = {
        "first": np.cumsum([0, *map(len, rows)], dtype=np.int64),
        "examples": np.concatenate(rows, dtype=np.int64),
        "shard_ends": np.cumsum(sizes, dtype=np.int64),
    }
    record: dict[str, Any] = {
        "layout": asdict(layout),
        "shards": [str(shard.relative_to(folder)) for shard in shards],
        "examples": asdict(counts),
        "bad_rows": bad_rows.summary() | {"left_out": bad_rows.listed()},
        "decontamination": None,
    }
    if decontaminator is not None:
        record["decontamination"] = decontaminator.summary() | {
            "left_out": decontaminator.overlaps()
        }
    for source_tokens in tokens:
        source_tokens.note_end()
    # Last: a reader that finds this file does not check the sources again.
    write_arrays(path, arrays, record)
    return path


def _rows_are_intact(path: Path) -> bool:
    """Return whether rows and all their tokens are present and undamaged; damaged
    files are removed.
    """
    names = Shard(path).record["shards"] if keep_whole(path) else [path.name]
    is_whole = all(keep_whole(path.parent / name) for name in names)
    if not is_whole:
        path.unlink(missing_ok=True)
    return is_whole


def _write_missing(
    order: _Order, tokenizing: Tokenizing, bad_rows: BadRows, num_workers: int
) -> list[list[int]]:
    """Write missing shards until there are enough rows, and return the rows."""

    def work(job: _Job) -> Counted:
        # The workers' alone: whoever only reads tokens knows nothing of templates.
        from fcsd.data.tokens import write_tokens

        index, path, piece = job
        if piece is not None:
            write_tokens(tokenizing, order.tokens[index].source, piece, path)
        return count_shard(path, order.layout.max_length)

    # Shards come back in their order, however fast the workers are, so the rows do not
    # depend on the number of workers.
    jobs = in_order(work, order.jobs(), num_workers)
    with (
        contextlib.closing(jobs),
        progress_bar(desc="Tokenizing", unit=" examples", leave=False) as bar,
    ):
        for (index, path, _), counted in jobs:
            source_tokens, record = order.tokens[index], counted.record
            source_tokens.add(path, counted, order.layout)
            overlaps, num_rows = record["overlaps"], record["num_rows"]
            bad_rows.add(record["bad"], num_rows - len(overlaps))
            if (decontaminator := tokenizing.decontaminator) is not None:
                assert not callable(decontaminator)  # `write_rows` has called it
                decontaminator.note(source_tokens.source, num_rows, overlaps)
            bar.update(num_rows)
            if (rows := order.enough()) is not None:
                return rows
    for source_tokens in order.tokens:
        # Every source is exhausted now, so the mixture may repeat their examples.
        source_tokens.ended = True
    return order.rows()


MOST_WORKERS = 8

_work: Callable[[Any], Any]  # of a worker, which has one for its life


def default_workers() -> int:
    """Return the number of processes that tokenize: one per core, eight at most. The
    ranks are waiting meanwhile, so the cores are free.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(MOST_WORKERS, cores)


def in_order(
    work: Callable[[Any], Any], pieces: Iterator[Any], num_workers: int
) -> Generator[tuple[Any, Any]]:
    """Yield each piece with `work(piece)`, in the order of the pieces.

    The workers are forks: `work` may be any function, and has access to the current
    state of this process. This process does the work itself if there is a single piece,
    or fewer than two workers. Raises UserError: a worker has ended, or `work` raised
    it.
    """
    first = [
        piece for piece in (next(pieces, None), next(pieces, None)) if piece is not None
    ]
    # A daemon process must not have children.
    alone = multiprocessing.current_process().daemon or not hasattr(os, "fork")
    if num_workers < 2 or len(first) < 2 or alone:
        for piece in itertools.chain(first, pieces):
            yield piece, work(piece)
        return
    check_shared_memory()
    # Forks inherit the tokenizer, which need not be pickled.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        num_workers, context, initializer=_begin_worker, initargs=(work, os.getpid())
    )
    waiting: deque[tuple[Any, Future[Any]]] = deque()
    try:
        # A bounded queue keeps the pieces in memory few.
        for piece in itertools.chain(first, pieces):
            waiting.append((piece, _submit(pool, piece)))
            if len(waiting) > num_workers:
                earliest, future = waiting.popleft()
                yield earliest, future.result()
        while waiting:
            earliest, future = waiting.popleft()
            yield earliest, future.result()
    except BrokenProcessPool:
        raise UserError(
            "data: a tokenizing process has ended; the system may have killed it"
            " because memory ran out. Run the same command again to continue from the"
            " last shard"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, piece: Any) -> Future[Any]:
    with warnings.catch_warnings():
        # Python 3.12 warns about forks of processes with threads; the child runs no
        # code that takes their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pool.submit(_call_work, piece)


def _begin_worker(work: Callable[[Any], Any], parent: int) -> None:
    global _work
    _work = work
    # The collector need not scan the parent's objects again and again.
    gc.freeze()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    obey_only_parent(parent)


def _call_work(piece: Any) -> Any:
    return _work(piece)


class _Order:
    """The shards that are needed, and the order of their examples."""

    def __init__(self, tokens: Sequence[_SourceTokens], layout: Layout):
        self.tokens, self.layout = tokens, layout
        self._tried = 0.0  # full rows by token count, at the last attempt

    def jobs(self) -> Iterator[_Job]:
        """Yield the shards of whole sources, then those of the others in turn, by weight."""
        # Whole sources come first, since all of their shards are needed in any case.
        for source_tokens in self.tokens:
            if source_tokens.whole:
                yield from source_tokens.jobs()
        waiting = {
            source_tokens: source_tokens.jobs()
            for source_tokens in self.tokens
            if not source_tokens.whole
        }
        while waiting:
            source_tokens = min(
                waiting,
                key=lambda source_tokens: (
                    source_tokens.num_read / source_tokens.source.weight
                ),
            )
            job = next(waiting[source_tokens], None)
            if job is None:
                del waiting[source_tokens]
            else:
                yield job

    def enough(self) -> list[list[int]] | None:
        """Return the rows that the layout asks for, once there are enough; None while
        there are not, or where all sources are taken whole.
        """
        num_rows, layout = self.layout.num_rows, self.layout
        if num_rows is None or all(
            source_tokens.whole for source_tokens in self.tokens
        ):
            return None
        full = sum(
            source_tokens.num_kept // (layout.max_length if layout.packing else 1)
            for source_tokens in self.tokens
        )
        # Each attempt packs all examples again, so the next waits for 1% more rows.
        if full < max(num_rows, self._tried * 1.01):
            return None
        self._tried = full
        rows = self.rows()
        return rows[:num_rows] if len(rows) >= num_rows else None

    def rows(self) -> list[list[int]]:
        numbers, layout = self.numbers(), self.layout
        lengths = np.concatenate(
            [
                shard_lengths
                for source_tokens in self.tokens
                for shard_lengths in source_tokens.lengths
            ]
            or [np.zeros(0, int)]
        )
        rows = first_fit(
            lengths[numbers].tolist(), layout.max_length, packing=layout.packing
        )
        return [numbers[row].tolist() for row in rows]

    def numbers(self) -> np.ndarray:
        """Return the numbers of the examples in the order in which they are put into rows."""
        orders, begin, seed = [], 0, self.layout.seed
        for source_tokens in self.tokens:
            is_bad = np.concatenate([*source_tokens.is_bad, np.zeros(0, bool)])
            if self.layout.shuffle:
                order = np.random.default_rng(seed).permutation(len(is_bad))
            else:
                order = np.arange(len(is_bad))
            # Left out after the shuffle, so that a bad example moves no other.
            orders.append(begin + order[~is_bad[order]])
            begin += len(is_bad)
        # A single source is read once, without drawing.
        if len(orders) == 1:
            return orders[0]
        total = sum(source_tokens.source.weight for source_tokens in self.tokens)
        shares = [source_tokens.source.weight / total for source_tokens in self.tokens]
        return _mix(
            orders,
            [
                not (source_tokens.whole or source_tokens.ended)
                for source_tokens in self.tokens
            ],
            shares,
            seed,
        )


def _mix(
    parts: Sequence[np.ndarray],
    unfinished: Sequence[bool],
    shares: Sequence[float],
    seed: int,
) -> np.ndarray:
    """Mix examples: each comes from a source that is drawn by its share, until every
    source has been read to its end.

    Sources that end early begin again. unfinished: the sources with examples that are
    not among `parts` yet; the order ends where one of those would be next.
    """
    ends = np.array([len(part) for part in parts])
    if (empty := np.flatnonzero((ends == 0) & ~np.array(unfinished))).size:
        raise UserError(
            f"data.train.{empty[0]}: no example is left; remove this source from the"
            " mixture"
        )
    generator, open_ = np.random.default_rng(seed), np.array(unfinished)
    blocks: list[np.ndarray] = []
    counts = np.zeros(len(parts), np.int64)
    # Draw until the end is certain: a draw beyond what an unfinished source has, or,
    # with all sources finished, as many draws of each source as it has examples.
    while not ((counts > ends)[open_].any() if open_.any() else (counts >= ends).all()):
        blocks.append(generator.choice(len(parts), size=_DRAWN, p=shares))
        counts += np.bincount(blocks[-1], minlength=len(parts))
    drawn = np.concatenate(blocks)
    numbers, stops = np.empty_like(drawn), []
    for index, part in enumerate(parts):
        positions = np.flatnonzero(drawn == index)
        # The -1 of a source without examples yet is beyond the order's end.
        if len(part):
            numbers[positions] = part[np.arange(len(positions)) % max(1, len(part))]
        else:
            numbers[positions] = -1
        if unfinished[index] and len(positions) > len(part):
            stops.append(positions[len(part)])
        elif not open_.any():
            stops.append(positions[len(part) - 1] + 1)
    return numbers[: min(stops) if open_.any() else max(stops)]


PIECE_EXAMPLES = 4096
PIECE_BYTES = 1 << 24  # of examples
_BLOCK = 256  # examples that are read, and tokenized, at a time


def place_of(path: str, file: str | None) -> str:
    """Name the location of examples in errors: the data set, and the file if it has
    several.
    """
    if file is None or Path(os.path.expanduser(path)).is_file():
        return f"data set {path}"
    folder = Path(os.path.expanduser(path))
    name = file
    if folder.is_dir() and os.path.isabs(file):
        name = os.path.relpath(file, folder.resolve())
    return f"data set {path}, file {name}"


def read_pieces(opened: Opened, done: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    """Yield the pieces after those that were read before (`done`), with the same
    boundaries every time.

    A source that is taken whole is read in its own order. The files of other sources
    are read in a fixed random order, so that the part that is read resembles the whole.
    Raises UserError for a file that cannot be read.
    """
    num_files = opened.num_files
    if opened.whole:
        files = range(num_files)
    else:
        files = np.random.default_rng(0).permutation(num_files).tolist()
    # The limit counts examples over all files, in the order of reading.
    remaining = opened.settings.max_examples
    for file in files:
        earlier = [record for record in done if record["file"] == file]
        rows = sum(record["num_rows"] for record in earlier)
        # A file whose last piece exists has been read to its end.
        if not (earlier and earlier[-1]["last"]):
            limit = None if remaining is None else remaining - rows
            for piece in _pieces_of_file(opened, file, rows, limit):
                rows += piece.num_rows
                yield piece
        if remaining is not None:
            remaining -= rows
            if remaining <= 0:
                return


def _pieces_of_file(
    opened: Opened, file: int, done: int, limit: int | None
) -> Iterator[Piece]:
    name = opened.files[file] if opened.files else None
    location = place_of(opened.settings.path, name)
    blocks: list[bytes] = []
    size = count = 0
    first = done + 1

    def piece(last: bool) -> Piece:
        return Piece(blocks, location, file, first, count, last, opened.change)

    for block, num_rows in _blocks(opened, file, done, limit, location):
        # Pieces are cut at fixed numbers of examples or bytes, so every run cuts them
        # alike.
        if count >= PIECE_EXAMPLES or size >= PIECE_BYTES:
            yield piece(last=False)
            first, blocks, size, count = first + count, [], 0, 0
        blocks.append(block)
        size, count = size + len(block), count + num_rows
    if blocks:
        yield piece(last=True)


def _blocks(
    opened: Opened, file: int, done: int, limit: int | None, location: str
) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of examples, as pickled columns, with the number of examples in
    each.
    """
    names = list(columns_of(opened.settings).values())
    row = done
    try:
        examples: Any = opened.stored
        if opened.num_files > 1:
            examples = examples.shard(opened.num_files, file)
        examples = examples.skip(done) if done else examples
        examples = examples if limit is None else examples.take(limit)
        for block in examples.iter(batch_size=_BLOCK):
            num_rows = len(next(iter(block.values())))
            columns = {name: block[name] for name in names if name in block}
            yield pickle.dumps(columns, pickle.HIGHEST_PROTOCOL), num_rows
            row += num_rows
    # File formats, compression and the network raise errors of many types.
    except Exception as error:
        path = opened.files[file] if opened.files else opened.settings.path
        reason = broken_line(Path(os.path.expanduser(path))) or (
            f", row {row + 1}, or soon after it: cannot be read ({one_line(error)})"
        )
        raise UserError(f"{location}{reason}") from error


CAP = 0.01  # share of the examples read that may be left out
_ALWAYS_ALLOWED = 10
_LISTED = 10_000
_SHOWN = 10

Policy = Literal["error", "skip"]


class BadRows:
    """The record of bad examples, and the policy for them.

    policy: error: the first one ends the run; skip: they are left out, up to 1 % of the
    examples that were read, and ten in any case. setting: name of the setting that
    chooses the policy, for errors; None: there is none.
    """

    def __init__(
        self, policy: Policy = "error", setting: str | None = "data.on_bad_row"
    ):
        self.policy, self.setting = policy, setting
        self.num_examples = 0
        self.num_bad = 0
        self._listed: dict[str, str] = {}  # where -> the fault

    def __repr__(self) -> str:
        listed = [
            f"{where}: {reason}"
            for where, reason in list(self._listed.items())[:_SHOWN]
        ]
        lines = [f"{self.num_bad} of {self.num_examples} examples left out", *listed]
        if self.num_bad > len(listed):
            lines.append(f"and {self.num_bad - len(listed)} more")
        return "\n".join(lines)

    def add(self, examples: Sequence[tuple[str, str]], num_read: int = 0) -> None:
        """Record bad examples, as (location, reason), among `num_read` that were read;
        UserError if the policy does not allow them, or there are too many.
        """
        self.num_examples += num_read
        # A shard that is read again must not count its bad examples twice.
        for where, reason in examples:
            if where not in self._listed:
                self.num_bad += 1
                if len(self._listed) < _LISTED:
                    self._listed[where] = reason
        if examples:
            self._refuse(examples)

    def _refuse(self, examples: Sequence[tuple[str, str]]) -> None:
        where, reason = examples[0]
        if self.policy == "error":
            num_others = len(examples) - 1
            other_rows = ""
            if num_others:
                rows = "row" if num_others == 1 else "rows"
                other_rows = f" ({num_others} more {rows} cannot be tokenized either)"
            skip = ""
            if self.setting:
                skip = f", or set {self.setting}: skip to leave out such rows"
            raise UserError(f"{where}: {reason}{other_rows}; correct it{skip}")
        # A few bad rows pass in any case: 1 % of a small data set may be less than one.
        if self.num_bad > max(_ALWAYS_ALLOWED, CAP * self.num_examples):
            raise UserError(
                f"{self.num_bad} of {self.num_examples} examples cannot be tokenized,"
                f" and {self.setting}: skip leaves out at most {CAP:.0%}; one of them:"
                f" {where}: {reason}; correct the data, or `columns`"
            )

    def listed(self) -> list[dict[str, str]]:
        """List the bad examples, the first ten thousand of them."""
        return [
            {"where": where, "reason": reason} for where, reason in self._listed.items()
        ]

    def summary(self) -> dict[str, int]:
        """Sum up for a manifest: examples read, and left out."""
        return {"num_examples": self.num_examples, "num_left_out": self.num_bad}
