"""Tokens on the disk, which every rank maps: shards, each with the tokenized examples of
one piece of a source, and the rows of a mixture, which say what examples share a row.

    FOLDER/SOURCE/00000.safetensors …   a shard; end.json once the source has been read to its end
        ids          int32 (tokens,)    of all examples, one after another
        loss         bool  (tokens,)    whether to predict a token
        ends         int64 (examples,)  the end of each example in these
        first_loss   int32 (examples,)  its first token that can be predicted; NONE: there is none; BAD: not tokenized
    FOLDER/rows-KEY.safetensors         first: (rows + 1,) where in `examples` a row begins; examples: their numbers,
                                        counted through all shards; how many were read, cut, and left out

Examples that overlap with a test item are left out; the metadata of a shard record
them. `fcsd.data.write_rows` writes both.

A training reads rows in whole steps, in every epoch with different rows left out
(`EpochRows`). Before the first step the rows that are never read are reported, together
with the fate of the examples (`fcsd.data.counts`).
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch.utils.data import RandomSampler, Sampler, Subset

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import arrays_fingerprint, check_regular, file_state
from fcsd.base.writing import file_beside, writing
from fcsd.data.batches import row_of
from fcsd.data.counts import ExampleCounts
from fcsd.data.rendering import BEGAN
from fcsd.data.sources import Change

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from fcsd.data.decontaminate import Decontaminator


MEANING = 3  # version of the reading of examples; tokens of an earlier one are not used

NONE, BAD = -1, -2

_RECORD = "record"

Tokens = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Tokenizing:
    """How examples become tokens (`fcsd.data.tokens`): the tokenizer, the position of
    loss, and the test items that are kept out.

    vocab_size: number of tokens of the model, beyond which ids are refused; None:
    unknown. date: the day that a template writes as today's.
    """

    tokenizer: Any
    loss_on: str = "response"
    decontaminator: Decontaminator | Callable[[], Decontaminator | None] | None = None
    vocab_size: int | None = None
    date: datetime = BEGAN


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]
) -> None:
    """Write flat arrays and a JSON record into one file, which appears once it is
    complete.
    """
    # A single entry, because safetensors writes several in any order.
    text = json.dumps({"sha256": _fingerprint(path, arrays, record), "record": record})
    with writing(path), file_beside(path) as temporary:
        # Not save_file: safetensors 0.8 writes a file of its own naming first, which
        # nobody would remove after a kill.
        temporary.write_bytes(save({**arrays}, {_RECORD: text}))
        os.replace(temporary, path)
        _WHOLE.add(file_state(path))


def _fingerprint(
    path: Path, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]
) -> str:
    # With the name, which tells the file from those of other pieces, sources and runs:
    # that of rows is a hash, and that of a shard a number in the folder of its source.
    name = f"{path.parent.name}/{path.name}" if path.stem.isdigit() else path.name
    return arrays_fingerprint(arrays, {"name": name, "record": record})


# States of the files that this process has written or verified.
_WHOLE: set[tuple[int, ...]] = set()


def keep_whole(path: Path) -> bool:
    """Return whether a file of `write_arrays` exists undamaged; a damaged one, or one
    with another file's content, is removed, with a message.

    Each process verifies a file only once.
    """
    if not path.is_file():
        return False
    # Size, inode and time of change identify a file that was verified already.
    if (state := file_state(path)) in _WHOLE:
        return True
    try:
        with safe_open(path, "numpy") as file:
            text = json.loads(file.metadata()[_RECORD])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        is_whole = _fingerprint(path, arrays, text["record"]) == text["sha256"]
    except (OSError, ValueError, SafetensorError, KeyError, TypeError):
        is_whole = False
    if is_whole:
        _WHOLE.add(state)
    else:
        print(f"data: {path}: is damaged; fcsd writes it again", file=sys.stderr)
        path.unlink()
    return is_whole


class Shard:
    """One file of `write_arrays`, mapped into memory when it is first read."""

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def _file(self) -> Any:
        if not self.path.is_file():
            check_regular(self.path, "remove it")
        try:
            return safe_open(self.path, "numpy")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{self.path}: is damaged or gone ({one_line(error)}); run the same"
                " command again to write it again"
            ) from None

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """The record that was written with the arrays."""
        try:
            metadata = json.loads(self._file.metadata()[_RECORD])
            record: dict[str, Any] = metadata["record"]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{self.path}: holds no tokens of fcsd; remove it, and run again"
            ) from None
        return record

    def array(self, name: str) -> np.ndarray:
        array: np.ndarray = self._file.get_tensor(name)
        return array

    @functools.cached_property
    def _ends(self) -> np.ndarray:
        return self.array("ends")

    def example(self, number: int) -> Tokens:
        """Read the token ids and the loss mask of one example."""
        begin = int(self._ends[number - 1]) if number else 0
        end = int(self._ends[number])
        return tuple(self._file.get_slice(name)[begin:end] for name in ("ids", "loss"))  # type: ignore[return-value]


@dataclass(frozen=True)
class Counted:
    """What rows of some length hold of a shard.

    record: of the shard. lengths: the tokens that each example takes in a row, 0 where
    none of them would be predicted. is_bad: which examples could not be tokenized.
    """

    record: dict[str, Any]
    lengths: np.ndarray
    is_bad: np.ndarray
    counts: ExampleCounts


def count_shard(path: Path, max_length: int) -> Counted:
    """Count the examples of a shard by the part of them that rows of `max_length` hold."""
    shard = Shard(path)
    first, ends = shard.array("first_loss"), shard.array("ends")
    in_row = np.minimum(np.diff(ends, prepend=0), max_length)
    # Without a token to predict inside the row, an example is left out as empty.
    in_row[(first < 0) | (first >= max_length)] = 0
    counts = _outcomes(shard, first, ends, max_length)
    return Counted(shard.record, in_row, first == BAD, counts)


def _outcomes(
    shard: Shard, first: np.ndarray, ends: np.ndarray, max_length: int
) -> ExampleCounts:
    lengths = np.diff(ends, prepend=0)
    # Only examples that reach a row and are longer than it can be cut.
    longer = np.flatnonzero(
        (first >= 0) & (first < max_length) & (lengths > max_length)
    )
    num_cut = 0
    if len(longer):
        # Running totals tell whether an example has loss beyond `max_length`, without a
        # loop over its tokens.
        num_loss_before = np.concatenate([[0], np.cumsum(shard.array("loss"))])
        num_cut = int(
            (
                num_loss_before[ends[longer]]
                > num_loss_before[ends[longer] - lengths[longer] + max_length]
            ).sum()
        )
    return ExampleCounts(
        read=shard.record["num_rows"],
        cut=num_cut,
        without_loss=int(((first < 0) & (first != BAD)).sum()),
        cut_away=int((first >= max_length).sum()),
        bad=len(shard.record["bad"]),
        overlapping=len(shard.record["overlaps"]),
    )


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


@dataclass(frozen=True)
class Layout:
    """How examples are put into rows.

    num_rows: the rows that a training reads, where a source is too large to be
    tokenized as a whole; None: all.
    """

    max_length: int
    pad_token_id: int
    packing: bool = True
    seed: int = 0
    shuffle: bool = True
    num_rows: int | None = None


class PackedRows(torch.utils.data.Dataset):
    """Rows as `row_of` returns them, assembled from mapped shards when they are read."""

    def __init__(self, path: Path):
        index = Shard(path)
        self.path, self.record = path, index.record
        self.layout = Layout(**self.record["layout"])
        self._first, self._examples = index.array("first"), index.array("examples")
        self._shard_ends = index.array("shard_ends")
        self._shards = [Shard(path.parent / name) for name in self.record["shards"]]

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Return several rows, as torch's loader asks for those of a batch."""
        rows = [self._located(index) for index in indices]
        length, pad = self.layout.max_length, self.layout.pad_token_id
        read = [[shard.example(number) for shard, number in row] for row in rows]
        return [row_of(examples, length, pad) for examples in read]

    @property
    def counts(self) -> ExampleCounts:
        """The outcomes of the examples that were read."""
        return ExampleCounts(**self.record["examples"])

    def examples_of(self, index: int) -> list[Tokens]:
        """Return the examples of a row, token ids and loss masks; the last one may be
        longer than the row.
        """
        return [shard.example(number) for shard, number in self._located(index)]

    def usage(self, are_read: np.ndarray, lost: str | None) -> list[str]:
        """Describe in a line the fate of the examples when only the rows of a mask (N,)
        are read; add warnings.

        lost: why no epoch reads the others; None: the training merely ends before them.
        """
        counts, used = self.counts, self.num_examples(are_read)
        behind = 0 if lost is None else self.num_examples() - used
        sentence = counts.sentence(counts.usable - used)
        if counts.usable - used > behind:
            sentence += " (the training ends before them)"
        warnings = [*counts.warnings(self.layout.max_length)]
        if lost is not None and (warning := counts.warning(behind, lost)):
            warnings.append(warning)
        return [sentence, *warnings]

    def num_examples(self, chosen: np.ndarray | None = None) -> int:
        """Count the different examples in rows; chosen: (rows,) bool; None: all rows."""
        # An example that is drawn several times counts once.
        is_there = np.zeros(int(self._shard_ends[-1]), bool)
        in_chosen: Any = slice(None)
        if chosen is not None:
            in_chosen = np.repeat(chosen, np.diff(self._first))
        is_there[self._examples[in_chosen]] = True
        return int(is_there.sum())

    def add_to(self, digest: Any) -> None:
        """Add all that the rows are made of to a hash, without putting them together."""
        layout = [self.layout.max_length, self.layout.pad_token_id]
        digest.update(json.dumps(layout).encode())
        for array in (self._first, self._examples, self._shard_ends):
            digest.update(np.ascontiguousarray(array).tobytes())
        for shard in self._shards:
            for name in ("ids", "loss", "ends"):
                digest.update(np.ascontiguousarray(shard.array(name)).tobytes())

    def _located(self, index: int) -> list[tuple[Shard, int]]:
        """Return the shard of each example of a row, and its number there."""
        row = range(len(self))[index]
        located = []
        for example in self._examples[self._first[row] : self._first[row + 1]]:
            shard = int(np.searchsorted(self._shard_ends, example, "right"))
            # Numbers of examples are counted through all shards.
            begin = int(self._shard_ends[shard - 1]) if shard else 0
            located.append((self._shards[shard], int(example) - begin))
        return located


_WARNED = 0.05  # share of the rows


def step_rows(args: TrainingArguments, num_ranks: int) -> int:
    """Return the rows of one optimiser step, over all ranks."""
    return (
        args.per_device_train_batch_size * args.gradient_accumulation_steps * num_ranks
    )


class EpochRows(Sampler[int]):
    """The numbers of an epoch's rows, as many as fill whole optimiser steps.

    N rows give N // S steps of S rows; R = N % S are left out. Epoch 0 leaves out the
    last R, each later one the R before those (before row 0 comes row N - 1): R < N / 2,
    so two epochs read every row. The other rows are numbered from 0, and `order`
    permutes these numbers: where S divides N, an epoch reads in the order of `order`.

    rows_of_a_step: over all ranks and accumulation steps. UserError where there are
    fewer rows.
    """

    def __init__(self, num_rows: int, rows_of_a_step: int, max_length: int):
        if num_rows < rows_of_a_step:
            raise UserError(
                f"data.train: has {num_rows} rows of {max_length} tokens, but one batch"
                f" of {rows_of_a_step * max_length} tokens needs {rows_of_a_step}; use"
                " more data or a smaller batch"
            )
        self.num_rows, self.rows_of_a_step = num_rows, rows_of_a_step
        self.num_left_out = num_rows % rows_of_a_step
        self.epoch = 0
        self.order: Any = range(len(self))  # a sampler, or numbers

    @classmethod
    def of(cls, rows: Any, rows_of_a_step: int, max_length: int) -> EpochRows | None:
        """Return the order of rows; None where there are no rows to train on."""
        return None if rows is None else cls(len(rows), rows_of_a_step, max_length)

    def __len__(self) -> int:
        return self.num_rows - self.num_left_out

    @property
    def steps_of_an_epoch(self) -> int:
        return len(self) // self.rows_of_a_step

    def ordered_by(self, sampler: Any, data_seed: int | None) -> EpochRows:
        """Permute by `sampler`. A random one is seeded by `data_seed`, or else torch's
        seed, and the epoch, as accelerate does it.
        """
        if type(sampler) is RandomSampler:
            sampler = SeedableRandomSampler(sampler.data_source, data_seed=data_seed)
        self.order = sampler
        return self

    def part(self, rows: Any) -> Subset:
        """Return the rows that the permuted numbers index: the rows of epoch 0."""
        return Subset(rows, range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers(self.epoch).tolist())

    def _numbers(self, epoch: int) -> np.ndarray:
        # A seeded sampler gives another permutation in each epoch; numbers do not.
        if hasattr(self.order, "set_epoch"):
            self.order.set_epoch(epoch)
        return (
            np.fromiter(self.order, np.int64) - epoch * self.num_left_out
        ) % self.num_rows

    def are_read(self, num_steps: int) -> np.ndarray:
        """Return a mask (N,) of the rows that this many steps read."""
        # Two epochs read every row; with fewer, the rows of the first one or two count.
        are_read = np.full(self.num_rows, num_steps >= 2 * self.steps_of_an_epoch)
        for epoch in range(2 if not are_read.any() else 0):
            num_rows = (
                max(0, num_steps - epoch * self.steps_of_an_epoch) * self.rows_of_a_step
            )
            with torch.random.fork_rng(devices=[]):  # a sampler may draw from it
                are_read[self._numbers(epoch)[:num_rows]] = True
        return are_read


def data_lines(rows: Any, order: EpochRows, num_steps: int) -> list[str]:
    """Describe in a line the fate of the examples in a training of this many steps; add
    warnings.

    rows: `PackedRows` know the examples that they were made from (`usage`); of others
    the rows themselves are counted.
    """
    are_read, lost = order.are_read(num_steps), None
    # Rows that no epoch reaches are a loss of data; those that this training merely
    # ends before are not.
    if num_steps >= order.steps_of_an_epoch:
        lost = (
            f"are never used: {order.num_left_out} of {order.num_rows} rows do not fill"
            f" a step of {order.rows_of_a_step}; train for two epochs, or with a"
            " smaller batch"
        )
    if hasattr(rows, "usage"):
        lines: list[str] = rows.usage(are_read, lost)
        return lines
    unread = int((~are_read).sum())
    line = f"{order.num_rows:,} rows that were packed already: {unread:,} never used"
    if lost is None:
        return [line + (" (the training ends before them)" if unread else "")]
    share = f"{unread:,} of {order.num_rows:,} rows"
    is_much = unread > _WARNED * order.num_rows
    percent = f"{100 * unread / order.num_rows:.0f} %"
    return [line, *([f"warning: {share} ({percent}) {lost}"] if is_much else [])]
