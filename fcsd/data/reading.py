"""Read the examples of one source in an order that a seed and an epoch decide, from any position.

A position is small: which file, how far in it, and the examples that the shuffling buffer held when it was last filled.
The order is that of `datasets` 5.2 (`IterableDataset.shuffle`): the files in a random order, ten at a time, a thousand
rows of each in turn, then a buffer that is shuffled when it is full and of which one half stays. It is made here,
because the buffer's content is not in the `state_dict` of `datasets`.

Not covered: several sources (`fcsd.data.mixture`).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np

from fcsd.config.data import SourceConfig
from fcsd.data.sources import Source, columns_of, open_source, shard_file
from fcsd.errors import UserError, one_line

BUFFER = 10_000
_FILES_AT_A_TIME = 10
_UNSHUFFLED = 1000  # examples read at a time where they are not shuffled


Row = tuple[int, int, Any]  # file (-1: unknown), row in it from 1, example


class Item(NamedTuple):
    """An example as JSON, and where it comes from: source, file (-1: unknown) and row in it, from 1."""

    source: int
    shard: int
    row: int
    json: str


@dataclass(frozen=True)
class StreamSource:
    """One source of a stream. examples: all it has, in order; limit: that only the first ones count."""

    settings: Source
    examples: datasets.IterableDataset
    limit: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether `examples` are files, or a generator, and nothing else, so that their `state_dict` is exact."""
        return _kind(self.examples) in ("ArrowExamplesIterable", "ExamplesIterable")

    def where(self, item: Item) -> str:
        """Say where an example is, for people."""
        return place(
            self.settings.path, shard_file(self.examples, item.shard) if item.shard >= 0 else None, item.row
        )


def _kind(examples: datasets.IterableDataset) -> str:
    """Name what a stream reads from; `datasets` (5.2) says nowhere else whether there is a buffer in it."""
    return type(getattr(examples, "_ex_iterable", None)).__name__


def place(path: str, file: str | None, row: int) -> str:
    """Say where an example is: data set, file in it, row from 1."""
    if file is None or Path(path).expanduser().is_file():
        return f"data set {path}, row {row}"
    folder = Path(path).expanduser()
    name = os.path.relpath(file, folder.resolve()) if folder.is_dir() and os.path.isabs(file) else file
    return f"data set {path}, file {name}, row {row}"


def places(source: Source, indices: Sequence[int]) -> list[str]:
    """Say where examples of a data set in memory are, by their indices in ascending order; reads its files again."""
    stream = _as_stream(source)
    if stream is None:
        return [place(source.path, None, index + 1) for index in indices]
    found: list[str] = []
    shards = range(stream.num_shards)
    begin = 0
    for shard in shards:
        length = _length(stream, shard) if shard + 1 < len(shards) else None
        mine = [index for index in indices if index >= begin and (length is None or index < begin + length)]
        found += [place(source.path, shard_file(stream, shard), index - begin + 1) for index in mine]
        if len(found) == len(indices) or length is None:
            break
        begin += length
    return found


def _as_stream(source: Source) -> datasets.IterableDataset | None:
    """Open the files of a source as a stream; None where it has none, or cannot be streamed (a slice of a split)."""
    if not isinstance(source, SourceConfig):
        return None
    try:
        _, opened = open_source(source.model_copy(update={"streaming": True}))
    except UserError:
        return None
    return opened if isinstance(opened, datasets.IterableDataset) else None


def _length(stream: datasets.IterableDataset, shard: int) -> int:
    tables = stream.shard(stream.num_shards, shard).with_format("arrow")
    return sum(len(table) for table in tables.iter(batch_size=10_000))


@dataclass(frozen=True)
class Order:
    """What decides the order of a source. mixed_with_limited: one of the sources beside it has a limit."""

    seed: int
    epoch: int
    shuffle: bool
    mixed_with_limited: bool
    buffer_size: int = BUFFER

    def files(self, number: int, *, limited: bool) -> list[list[int]]:
        """Return groups of files; they are read row by row in turn, the files of one group after each other."""
        order = list(range(number))
        if limited:
            return [order]
        if self.shuffle:
            np.random.default_rng(self.seed).shuffle(order)
        if self.epoch and not self.mixed_with_limited:
            again = list(range(number))
            np.random.default_rng(self.epoch).shuffle(again)
            order = [order[index] for index in again]
        groups = min(number, _FILES_AT_A_TIME) if self.shuffle else 1
        each, more = divmod(number, groups)
        ends = list(itertools.accumulate(each + (group < more) for group in range(groups)))
        return [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def rows_in_turn(self, source: StreamSource) -> int:
        """Return how many rows of one group are read before those of the next."""
        if not self.shuffle:
            return _UNSHUFFLED
        if source.examples.features is None or _kind(source.examples) == "ExamplesIterable":
            return 1
        return max(1, self.buffer_size // (_FILES_AT_A_TIME if source.limit is None else 1))

    def generator(self, seed: int) -> np.random.Generator:
        """Return the random numbers of this epoch."""
        generator = np.random.default_rng(seed)
        return np.random.default_rng(generator.integers(0, 1 << 63) - self.epoch) if self.epoch else generator


class _Files:
    """Rows of groups of files in turn, so many of each."""

    def __init__(self, source: StreamSource, order: Order, state: Mapping[str, Any] | None):
        examples = source.examples
        self.limit = source.limit
        self.chunk = order.rows_in_turn(source)
        groups = order.files(examples.num_shards, limited=source.limit is not None)
        states = state["files"] if state else [None] * len(groups)
        self.groups = [_Group(source, files, at) for files, at in zip(groups, states, strict=True)]
        self.turn = state["turn"] if state else 0
        self.taken = state["taken"] if state else 0

    def state(self) -> dict[str, Any]:
        return {"turn": self.turn, "taken": self.taken, "files": [group.state() for group in self.groups]}

    def __iter__(self) -> Iterator[list[Row]]:
        while self.limit is None or self.taken < self.limit:
            chunk: list[Row] = []
            for _ in self.groups:
                group = self.groups[self.turn]
                self.turn = (self.turn + 1) % len(self.groups)
                wanted = self.chunk if self.limit is None else min(self.chunk, self.limit - self.taken)
                while len(chunk) < wanted and (row := group.next()) is not None:
                    chunk.append(row)
                if chunk:
                    break
            else:
                return
            self.taken += len(chunk)
            yield chunk


class _Group:
    """Rows of files one after the other."""

    def __init__(self, source: StreamSource, files: list[int], state: Mapping[str, Any] | None):
        self.source, self.files = source, files
        self.at, self.row, self._inside = 0, 0, None
        self._examples: Any = None
        self._rows: Iterator[Any] | None = None
        if state is not None:
            self.at, self.row = state["at"], state["row"]
            # The inside of a position is that of one version of `datasets`; the row is everybody's.
            self._inside = state["inside"] if state["datasets"] == datasets.__version__ else None

    def state(self) -> dict[str, Any]:
        inside = self._examples.state_dict() if self._rows is not None else self._inside
        return {"at": self.at, "row": self.row, "inside": inside, "datasets": datasets.__version__}

    def next(self) -> Row | None:
        while self.at < len(self.files):
            shard = self.files[self.at]
            try:
                if self._rows is None:
                    self._open(shard)
                assert self._rows is not None
                example = next(self._rows, None)
            except Exception as error:  # file formats, compression and the network have a kind each
                where = place(
                    self.source.settings.path, shard_file(self.source.examples, shard), self.row + 1
                )
                raise UserError(f"{where}, or soon after it: cannot be read ({one_line(error)})") from error
            if example is not None:
                self.row += 1
                return shard, self.row, example
            self.at, self.row, self._inside, self._rows = self.at + 1, 0, None, None
        return None

    def _open(self, shard: int) -> None:
        self._examples = self.source.examples.shard(self.source.examples.num_shards, shard)
        if self._inside is not None:
            self._examples.load_state_dict(self._inside)
            self._rows = iter(self._examples)
        else:
            self._rows = itertools.islice(iter(self._examples), self.row, None)


class _Reread:
    """Examples of a data set whose inside is unknown (it may shuffle); a position is reached by reading up to it."""

    def __init__(self, source: StreamSource, order: Order, state: Mapping[str, Any] | None):
        examples = source.examples if source.limit is None else source.examples.take(source.limit)
        if order.shuffle:
            examples = examples.shuffle(seed=order.seed, buffer_size=order.buffer_size)
        examples.set_epoch(order.epoch)
        self.examples, self.read = examples, state["read"] if state else 0

    def state(self) -> dict[str, Any]:
        return {"read": self.read}

    def __iter__(self) -> Iterator[list[Row]]:
        examples = itertools.islice(self.examples, self.read, None)
        while chunk := list(itertools.islice(examples, _UNSHUFFLED)):
            rows = [(-1, number, example) for number, example in enumerate(chunk, self.read + 1)]
            self.read += len(rows)
            yield rows


class Reader:
    """The examples of one source in the order of one pass over it."""

    def __init__(
        self, source: StreamSource, index: int, order: Order, state: Mapping[str, Any] | None = None
    ):
        self.source, self.index = source, index
        self._rows: Any = (_Files if source.is_plain else _Reread)(source, order, state and state["rows"])
        self._chunks: Iterator[list[Row]] = iter(self._rows)
        self._shuffles = order.shuffle and source.is_plain
        self._size = order.buffer_size if self._shuffles else _UNSHUFFLED
        self._generator = order.generator(order.seed)
        self._kept: list[Item] = []
        if state is not None:
            self._generator.bit_generator.state = state["random"]
            self._kept = state["kept"]
        self._given = state["given"] if state is not None else 0  # of the block that is read next
        self._start: dict[str, Any] | None = None
        self._block: list[Item] = []
        self._at, self._ended = 0, False

    def state(self) -> dict[str, Any]:
        """Return the position; `kept` are examples, everything else fits into a line of JSON."""
        if self._start is None:
            return self._position() | {"given": self._given}
        return self._start | {"given": self._at}

    def _position(self) -> dict[str, Any]:
        random = self._generator.bit_generator.state
        return {"rows": self._rows.state(), "random": random, "kept": self._kept}

    @property
    def ended(self) -> bool:
        """Whether there is no further example."""
        while self._at == len(self._block) and not self._ended:
            self._fill()
        return self._at == len(self._block)

    def next(self) -> Item | None:
        """Return the next example; None at the end."""
        if self.ended:
            return None
        self._at += 1
        return self._block[self._at - 1]

    def _fill(self) -> None:
        """Read until the buffer is full; then it gives one half away, in random order, and the other stays."""
        self._start = self._position()
        buffer = [*self._kept]
        while len(buffer) < self._size and (chunk := next(self._chunks, None)) is not None:
            for shard, row, example in chunk:
                buffer.append(Item(self.index, shard, row, _json(self.source, example)))
        full = len(buffer) >= self._size
        if self._shuffles and buffer:
            buffer = [buffer[index] for index in self._generator.permutation(len(buffer))]
        given = len(buffer) - self._size // 2 if self._shuffles and full else len(buffer)
        self._block, self._kept = buffer[:given], buffer[given:]
        self._at, self._given, self._ended = self._given, 0, not full


def first_rows(source: StreamSource, index: int, number: int) -> Iterator[Item]:
    """Yield the first rows of the first and of the last file of a source."""
    if not source.is_plain:
        for row, example in enumerate(source.examples.take(number), 1):
            yield Item(index, -1, row, _json(source, example))
        return
    last = source.examples.num_shards - 1 if source.limit is None else 0
    for shard in sorted({0, last}):
        group = _Group(source, [shard], None)
        for _ in range(min(number, source.limit or number)):
            found = group.next()
            if found is None:
                break
            yield Item(index, found[0], found[1], _json(source, found[2]))


def _json(source: StreamSource, example: Mapping[str, Any]) -> str:
    """Keep the columns that are read; sources of different columns are mixed as JSON."""
    values = {name: example.get(name) for name in columns_of(source.settings).values()}
    return json.dumps(values, ensure_ascii=False, default=str)
