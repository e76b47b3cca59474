"""Shards of tokens: what the examples of one piece of a source become, in flat arrays
in one file.

    ids          int32 (tokens,)   of all examples, one after the other
    loss         bool  (tokens,)   which of them are to be predicted
    ends         int64 (examples,) where in them each example ends
    first_loss   int32 (examples,) its first token that can be predicted; NONE: there is none; BAD: not tokenized

An example that overlaps with a test item is not among them; the file's metadata have
what was left out, and why.
"""

import functools
import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import writing
from fcsd.base.temporary import file_beside
from fcsd.data.chat import tokenize_examples
from fcsd.data.dates import BEGAN
from fcsd.data.decontaminate import Decontaminator, Overlap
from fcsd.data.messages import BadExample
from fcsd.data.reading import Piece
from fcsd.data.sources import Source, columns_of

MEANING = 2  # of examples: tokens that were written under an earlier one are not read
NONE, BAD = -1, -2
_MOST_TOKENS = 1 << 31
_RECORD = "record"

Tokens = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Tokenizing:
    """How examples become tokens: the tokenizer, where loss is, and the test items that
    are kept out.

    vocab_size: tokens that the model knows, so that examples with others are seen;
    None: not known. date: what a template writes for today's.
    """

    tokenizer: Any
    loss_on: str = "response"
    decontaminator: Decontaminator | Callable[[], Decontaminator | None] | None = None
    vocab_size: int | None = None
    date: datetime = BEGAN

    def write(self, source: Source, piece: Piece, path: Path) -> None:
        """Tokenize a piece into a file, which is there when it is whole.

        Raises:
            UserError: no tokenizer for such data; a disk that is full.
        """
        ids: list[Any] = [np.zeros(0, np.int32)]
        loss: list[Any] = [np.zeros(0, bool)]
        first_loss: list[int] = []
        bad: list[tuple[str, str]] = []
        overlaps: list[dict[str, str]] = []
        row = piece.first
        for block in piece.blocks:
            columns: Mapping[str, list] = pickle.loads(block)
            examples = [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
            outputs = self._tokens(source, examples)
            for one in outputs:
                if isinstance(one, Overlap):
                    overlaps.append(asdict(one))
                elif isinstance(one, BadExample):
                    bad.append((f"{piece.place}, row {row}", str(one)))
                    first_loss.append(BAD)
                    ids.append(ids[0])
                    loss.append(loss[0])
                else:
                    ids.append(np.array(one["input_ids"], np.int32))
                    loss.append(np.array(one["loss_mask"], bool))
                    first_loss.append(_first_loss(loss[-1]))
                row += 1
        record = {
            "file": piece.file, "num_rows": piece.num_rows, "last": piece.last, "bad": bad, "overlaps": overlaps,
        }  # fmt: skip
        arrays = {
            "ids": np.concatenate(ids, dtype=np.int32),
            "loss": np.concatenate(loss, dtype=bool),
            "ends": np.cumsum([len(one) for one in ids[1:]], dtype=np.int64),
            "first_loss": np.array(first_loss, np.int32),
        }
        write_arrays(path, arrays, record)

    def _tokens(self, source: Source, examples: list[dict[str, Any]]) -> list[Any]:
        """Return for each example its tokens, or the `Overlap` that it has, or why it
        is a `BadExample`.
        """
        overlaps: list[Any] = [self._overlap(source, example) for example in examples]
        clean = [
            example
            for example, overlap in zip(examples, overlaps, strict=True)
            if overlap is None
        ]
        columns = columns_of(source)
        tokens = iter(
            tokenize_examples(clean, columns, self.tokenizer, self.loss_on, self.date)
        )
        if (
            "input_ids" in columns
            # any others are the tokenizer's, which is compared with the model as a
            # whole
        ):
            tokens = map(self._checked, tokens)
        return [next(tokens) if overlap is None else overlap for overlap in overlaps]

    def _checked(self, output: Any) -> Any:
        """Return tokens with their ids as they are stored, or why they are none of the model's."""
        if isinstance(output, BadExample):
            return output
        try:
            ids = token_ids(output["input_ids"], self.vocab_size)
        except BadExample as error:
            return error
        return {**output, "input_ids": ids}

    def _overlap(self, source: Source, example: Mapping[str, Any]) -> Overlap | None:
        try:
            decontaminator = self.decontaminator
            return (
                decontaminator.find(source, example)
                if isinstance(decontaminator, Decontaminator)
                else None
            )
        except BadExample:  # reported when it is tokenized
            return None


def token_ids(values: Any, vocab_size: int | None) -> np.ndarray:
    """Return token ids as they are stored; BadExample where they are no whole numbers,
    or none of the vocabulary's.
    """
    try:
        ids = np.asarray(values)
    except ValueError:  # lists of several lengths
        ids = np.asarray(values, object)
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BadExample(
            f"token ids: a list of whole numbers is needed, got {_short(values)}"
        )
    outside = (ids < 0) | (ids >= (_MOST_TOKENS if vocab_size is None else vocab_size))
    if outside.any():
        position = int(outside.argmax())
        has = "" if vocab_size is None else f", which has {vocab_size} tokens"
        raise BadExample(
            f"token id {ids[position]} at position {position} is not in the model's"
            f" vocabulary{has}; use the tokenizer that belongs to the model"
        )
    return ids.astype(np.int32)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _first_loss(mask: np.ndarray) -> int:
    """Find the first token with loss; nothing predicts the first of an example."""
    return int(mask[1:].argmax()) + 1 if mask[1:].any() else NONE


def write_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]
) -> None:
    """Write flat arrays and a record of JSON into one file, under its name when it is whole."""
    # One entry: safetensors writes several in any order.
    text = json.dumps({"sha256": _checksum(arrays, record), "record": record})
    with writing(path), file_beside(path) as temporary:
        # Not save_file: safetensors 0.8 writes under a name of its own first, and
        # nobody sweeps what a kill leaves.
        temporary.write_bytes(save({**arrays}, {_RECORD: text}))
        os.replace(temporary, path)
        _WHOLE.add(_state(path))


def _checksum(arrays: Mapping[str, np.ndarray], record: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(record).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()


# states of files that this process has written or compared
_WHOLE: set[tuple[int, ...]] = set()


def _state(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def keep_whole(path: Path) -> bool:
    """Tell whether a file of `write_arrays` is there and what was written; a damaged
    one is removed, with a line.

    A file is read once a process.
    """
    if not path.is_file():
        return False
    if (state := _state(path)) in _WHOLE:
        return True
    try:
        with safe_open(path, "numpy") as file:
            text = json.loads(file.metadata()[_RECORD])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        whole = _checksum(arrays, text["record"]) == text["sha256"]
    except (OSError, ValueError, SafetensorError, KeyError, TypeError):
        whole = False
    if whole:
        _WHOLE.add(state)
    else:
        print(f"data: {path}: is damaged, and is written again", file=sys.stderr)
        path.unlink()
    return whole


class Shard:
    """One file of `write_arrays`, mapped into memory when it is first read."""

    def __init__(self, path: Path):
        self.path = path

    @functools.cached_property
    def _file(self) -> Any:
        try:
            return safe_open(self.path, "numpy")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{self.path}: is damaged or gone ({one_line(error)}); run the same"
                " command again, which makes it anew"
            ) from None

    @functools.cached_property
    def record(self) -> dict[str, Any]:
        """What was written beside the arrays."""
        try:
            record: dict[str, Any] = json.loads(self._file.metadata()[_RECORD])[
                "record"
            ]
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
        begin, end = (
            int(self._ends[number - 1]) if number else 0,
            int(self._ends[number]),
        )
        return tuple(self._file.get_slice(name)[begin:end] for name in ("ids", "loss"))  # type: ignore[return-value]
