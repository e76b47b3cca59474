"""The rows of a stream as a training reads them: epoch after epoch, from the row where a checkpoint was written.

Not covered: how a stream finds a place in itself (`fcsd.data.stream`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from fcsd.data.stream import Mark, RowStream
from fcsd.data.stream_file import as_json, read_head, read_position, write_position
from fcsd.errors import UserError


def too_little_data(name: str, found: int, needed: int, max_length: int) -> UserError:
    """Return the error of data that are less than one batch."""
    return UserError(
        f"{name}: gives {found} rows of {max_length} tokens, one batch of"
        f" {'train.' if name.startswith('data.') else ''}batch_size_tokens {needed * max_length} needs {needed};"
        " use more data or a smaller batch"
    )


@dataclass(frozen=True)
class _Place:
    """Where a pack begins: rows before it in all, and in its epoch."""

    rows: int
    epoch: int
    found: int
    mark: Mark


class EndlessRows(IterableDataset):
    """A stream that begins again, in another order, where it ends.

    The Trainer would end an epoch there, with part of a step whose gradient would leak into the next one.

    Args:
        rows: a RowStream, or a `datasets.IterableDataset` of packed rows, whose places are reached by reading.
        needed: rows of one batch, over all ranks and accumulation steps.
        name: what errors call the rows.

    ahead: is shown each row `needed` rows before it is used, and earlier.
    """

    def __init__(self, rows: Any, needed: int, max_length: int, name: str):
        self.rows, self.needed, self.max_length, self.name = rows, needed, max_length, name
        self.ahead: Callable[[Any], None] | None = None
        self._first = 0
        self._checkpoint: Path | None = None
        self._places: deque[_Place] = deque()
        self._read: Generator[Any] | None = None

    def seek(self, first: int, checkpoint: Path | None = None) -> str | None:
        """Begin behind `first` rows at the next iteration, near which `checkpoint` has a place.

        Returns:
            Why the rows before have to be read and tokenized again; None where they have not.
        """
        self._first, self._checkpoint = first, None
        if not first or not isinstance(self.rows, RowStream) or checkpoint is None:
            return None
        head = read_head(checkpoint)
        if head is None:
            why = "holds no place in the stream (an older fcsd wrote it)"
        elif head["identity"] != as_json(self.rows.identity()):
            why = "its place is in a stream of other data"
        else:
            self._checkpoint = checkpoint
            return None
        return f"{checkpoint.name}: {why}; the stream is read and tokenized again from its beginning to row {first}"

    def save(self, folder: Path, rows: int) -> None:
        """Write the last place that lies at most behind `rows` rows; nothing where there is none."""
        places = [place for place in self._places if place.rows <= rows]
        if places:
            last = places[-1]
            write_position(
                folder,
                {
                    "rows": last.rows,
                    "epoch": last.epoch,
                    "found": last.found,
                    "identity": self.rows.identity(),
                    "state": self.rows.state(last.mark),
                },
            )

    def close(self) -> None:
        """End the iteration, and the processes that tokenize for it."""
        if self._read is not None:
            self._read.close()
            self._read = None

    def __iter__(self) -> Iterator[Any]:
        """Rows without end.

        Raises:
            UserError: the whole stream is shorter than one batch.
        """
        self.close()
        self._read = self._rows()
        if self.ahead is None:
            yield from self._read
            return
        waiting: deque[Any] = deque()
        for row in self._read:
            self.ahead(row)
            waiting.append(row)
            if len(waiting) > 2 * self.needed:
                yield waiting.popleft()

    def _rows(self) -> Generator[Any]:
        position = read_position(self._checkpoint) if self._checkpoint is not None else None
        number = begin = found = 0
        if position is not None:
            number, begin, found = position["rows"], position["epoch"], position["found"]
        state = position["state"] if position else None
        self._places.clear()
        for epoch in itertools.count(begin):
            for mark, rows in self._packs(epoch, state):
                if mark is not None:
                    self._places.append(_Place(number, epoch, found, mark))
                    self._forget(number)
                for row in rows:
                    number, found = number + 1, found + 1
                    if number > self._first:
                        yield row
            if found < self.needed:
                raise too_little_data(self.name, found, self.needed, self.max_length)
            found, state = 0, None

    def _packs(self, epoch: int, state: Any) -> Iterator[tuple[Mark | None, Any]]:
        if isinstance(self.rows, RowStream):
            for pack in self.rows.packs(epoch, state):
                yield pack.mark, pack.rows
        else:
            self.rows.set_epoch(epoch)
            yield None, self.rows

    def _forget(self, number: int) -> None:
        """Drop the places that no checkpoint will want: one is written of rows that were read a batch or so ago."""
        while len(self._places) > 1 and self._places[1].rows <= number - 4 * self.needed:
            self._places.popleft()
