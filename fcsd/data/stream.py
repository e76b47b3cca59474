"""Packed rows of streaming sources, from any position: read, mix, leave out, tokenize in worker processes, pack.

A thousand examples are packed at a time. Each such pack knows the position in the stream from which it can be made
again, so that a run goes on there and reads and tokenizes nothing that lies before it.

Not covered: which row of a run comes from which pack (`fcsd.distill.endless_rows`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fcsd.data import reading
from fcsd.data.bad_rows import BadRows
from fcsd.data.chat import BadExample
from fcsd.data.decontaminate import Decontaminator, Overlap
from fcsd.data.mixture import Mixture
from fcsd.data.packing import pack
from fcsd.data.reading import Item, StreamSource
from fcsd.data.sources import columns_of
from fcsd.data.workers import default_workers, in_order

_PIECE = 1000  # examples that are tokenized at a time
_PACK = 1000  # examples that are packed at a time
_SAMPLE = 100  # examples of the first and of the last file of a source that are checked before anything else

Tokens = tuple[np.ndarray, np.ndarray]  # ids int32, loss mask bool
Found = Tokens | Overlap | str  # an example's tokens; what it overlaps with; what is bad about it


@dataclass(frozen=True)
class Mark:
    """A position in one epoch of a stream: the mixture's, and how many of the examples behind it are done with.

    Also what was on record of bad and of overlapping examples at it.
    """

    mixture: Mapping[str, Any]
    done: int
    bad: Any
    overlapping: Any


@dataclass(frozen=True)
class Pack:
    """Rows that were packed together; mark: from where the stream gives them again."""

    rows: list[dict[str, np.ndarray]]
    mark: Mark


class RowStream(torch.utils.data.IterableDataset):
    """Rows of {"input_ids", "position_ids", "labels"}, int32 (max_length,), of the epoch that `set_epoch` chose.

    Args:
        tokenize: `tokenize_example` with everything but example and columns.
        packed: what `pack` gets beside examples.
        num_workers: processes that look for test items and tokenize; None: as many as there are free cores.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        tokenize: Callable[..., dict[str, list]],
        packed: Mapping[str, Any],
        *,
        seed: int,
        shuffle: bool,
        bad_rows: BadRows,
        decontaminator: Decontaminator | None = None,
        num_workers: int | None = None,
    ):
        self.sources, self.tokenize, self.packed = sources, tokenize, packed
        self.seed, self.shuffle = seed, shuffle
        self.bad_rows, self.decontaminator = bad_rows, decontaminator
        self.num_workers = default_workers() if num_workers is None else num_workers
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that is read next; each has an order of its own."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for found in self.packs(self.epoch):
            yield from found.rows

    def packs(self, epoch: int, state: Mapping[str, Any] | None = None) -> Iterator[Pack]:
        """Yield the rows of an epoch, a thousand examples a time, and record what is left out.

        state: of the pack to begin with, as `state` gives it.
        """
        if state is not None:
            self.bad_rows.load(state["bad"])
            if self.decontaminator is not None:
                self.decontaminator.load(state["overlapping"])
        mixture = Mixture(
            self.sources,
            seed=self.seed,
            epoch=epoch,
            shuffle=self.shuffle,
            buffer_size=reading.BUFFER,
            state=state["mixture"] if state else None,
        )
        done = state["done"] if state else 0
        examples: list[dict[str, np.ndarray]] = []
        mark: Mark | None = None
        for at, items, results in in_order(self._work, self._pieces(mixture), self.num_workers):
            for index in range(done, len(items)):
                mark = mark or self._mark(at, index)
                tokens = self._record(items[index], results[index])
                if tokens is None:
                    continue
                examples.append({"input_ids": tokens[0], "loss_mask": tokens[1]})
                if len(examples) == _PACK:
                    yield Pack(list(pack(examples, **self.packed)), mark)
                    examples, mark = [], None
            done = max(0, done - len(items))
        if mark is not None:
            yield Pack(list(pack(examples, **self.packed)), mark)

    def _pieces(self, mixture: Mixture) -> Iterator[tuple[Mapping[str, Any], list[Item]]]:
        while True:
            at = mixture.state()
            items: list[Item] = []
            while len(items) < _PIECE and (item := mixture.next()) is not None:
                items.append(item)
            if not items:
                return
            yield at, items

    def _work(self, items: list[Item]) -> list[Found]:
        """Look for test items and tokenize; in a worker, so that nothing is recorded."""
        return [self._found(item) for item in items]

    def _found(self, item: Item) -> Found:
        source, example = self.sources[item.source].settings, json.loads(item.json)
        try:
            if self.decontaminator is not None:
                overlap = self.decontaminator.find(source, example)
                if overlap is not None:
                    return overlap
            tokens = self.tokenize(example, columns=source.columns)
        except BadExample as error:
            return str(error)
        return np.array(tokens["input_ids"], np.int32), np.array(tokens["loss_mask"], bool)

    def _record(self, item: Item, found: Found) -> Tokens | None:
        source = self.sources[item.source]
        if isinstance(found, str):
            self.bad_rows.add([(source.where(item), found)], 1)
            return None
        self.bad_rows.add([], 1)
        overlap = found if isinstance(found, Overlap) else None
        if self.decontaminator is not None:
            self.decontaminator.note(source.settings, overlap)
        return None if isinstance(found, Overlap) else found

    # ---- positions

    def _mark(self, at: Mapping[str, Any], index: int) -> Mark:
        overlapping = self.decontaminator.mark() if self.decontaminator is not None else None
        return Mark(at, index, self.bad_rows.mark(), overlapping)

    def state(self, mark: Mark) -> dict[str, Any]:
        """Return what `packs` goes on from; values of JSON, but for the examples (`Item`) under `kept`."""
        overlapping = (
            self.decontaminator.record(mark.overlapping) if self.decontaminator is not None else None
        )
        bad = self.bad_rows.record(mark.bad)
        return {"mixture": mark.mixture, "done": mark.done, "bad": bad, "overlapping": overlapping}

    def identity(self) -> dict[str, Any]:
        """Return what must be the same for a position to mean the same rows."""
        return {
            "sources": [
                {
                    "path": source.settings.path,
                    "columns": dict(columns_of(source.settings)),
                    "files": source.examples.num_shards,
                    "weight": source.settings.weight,
                    "limit": source.limit,
                }
                for source in self.sources
            ],
            "seed": self.seed,
            "shuffle": self.shuffle,
            "packed": dict(self.packed),
            "decontaminated": self.decontaminator is not None,
        }

    # ---- before the first step

    def check_sample(self) -> None:
        """Tokenize the first rows of the first and of the last file of each source, and see that they can be.

        Raises:
            UserError: one cannot, or with on_bad_row: skip too many cannot.
        """
        for index, source in enumerate(self.sources):
            check = BadRows(self.bad_rows.policy, self.bad_rows.setting)
            for item in reading.first_rows(source, index, _SAMPLE):
                try:
                    self.tokenize(json.loads(item.json), columns=source.settings.columns)
                except BadExample as error:
                    check.add([(source.where(item), str(error))], 1)
                else:
                    check.add([], 1)
