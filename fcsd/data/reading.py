"""Read the examples of one source once, file by file, in pieces that become shards of tokens."""

import os
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fcsd.base.errors import UserError, one_line
from fcsd.base.writing import home
from fcsd.data.sources import Opened, broken_line, columns_of
from fcsd.data.values import Change

PIECE_EXAMPLES = 4096
PIECE_BYTES = 1 << 24  # of examples
_BLOCK = 256  # examples that are read, and tokenized, at a time


class Piece(NamedTuple):
    """Consecutive examples of one file.

    blocks: columns of examples, pickled, before `change` (of `Opened`); place: as from `place_of`; file: number of the
    file in the source; first: row of the first example, from 1; last: whether the file
    ends with this piece.
    """

    blocks: list[bytes]
    place: str
    file: int
    first: int
    num_rows: int
    last: bool
    change: Change | None = None

    def columns(self, block: bytes) -> dict[str, list[Any]]:
        """Return the columns of a block with their values as they were written."""
        columns: dict[str, list[Any]] = pickle.loads(block)
        if (change := self.change) is None:
            return columns
        return {
            name: [change(name, value) for value in values]
            for name, values in columns.items()
        }


def place_of(path: str, file: str | None) -> str:
    """Name the location of examples in errors: the data set, and the file if it has
    several.
    """
    if file is None or home(path).is_file():
        return f"data set {path}"
    folder = home(path)
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
        reason = broken_line(home(path)) or (
            f", row {row + 1}, or soon after it: cannot be read ({one_line(error)})"
        )
        raise UserError(f"{location}{reason}") from error
