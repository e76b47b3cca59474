"""Shards of tokens: the tokenized examples of one piece of a source, as flat arrays in
one file.

    ids          int32 (tokens,)   of all examples, one after another
    loss         bool  (tokens,)   whether to predict a token
    ends         int64 (examples,) the end of each example in these
    first_loss   int32 (examples,) its first token that can be predicted; NONE: there is none; BAD: not tokenized

Examples that overlap with a test item are left out; the file's metadata record them.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import arrays_fingerprint, check_regular, file_state
from fcsd.base.writing import file_beside, writing
from fcsd.data.counts import ExampleCounts
from fcsd.data.rendering import BEGAN

if TYPE_CHECKING:
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
    decontaminator: "Decontaminator | Callable[[], Decontaminator | None] | None" = None
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
