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
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fcsd.base.errors import UserError, one_line
from fcsd.base.files import check_regular, file_state, writing
from fcsd.base.fingerprints import arrays_fingerprint
from fcsd.base.temporary import file_beside
from fcsd.data.chat import tokenize_examples
from fcsd.data.dates import BEGAN
from fcsd.data.decontaminate import Decontaminator, Overlap
from fcsd.data.messages import BadExample
from fcsd.data.reading import Piece
from fcsd.data.sources import Source, columns_of

MEANING = 3  # version of the reading of examples; tokens of an earlier one are not used
NONE, BAD = -1, -2
_MOST_TOKENS = 1 << 31
_RECORD = "record"

Tokens = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Tokenizing:
    """Turns examples into tokens: the tokenizer, the position of loss, and the test
    items that are kept out.

    vocab_size: number of tokens of the model, beyond which ids are refused; None:
    unknown. date: the day that a template writes as today's.
    """

    tokenizer: Any
    loss_on: str = "response"
    decontaminator: Decontaminator | Callable[[], Decontaminator | None] | None = None
    vocab_size: int | None = None
    date: datetime = BEGAN

    def write(self, source: Source, piece: Piece, path: Path) -> None:
        """Tokenize a piece into a file, which appears only once it is complete.

        Raises:
            UserError: the tokenizer does not fit the data; the disk is full.
        """
        ids: list[Any] = [np.zeros(0, np.int32)]
        loss: list[Any] = [np.zeros(0, bool)]
        first_loss: list[int] = []
        bad: list[tuple[str, str]] = []
        overlaps: list[dict[str, str]] = []
        # Rows are numbered as in the file, so that messages can name them.
        row = piece.first
        for block in piece.blocks:
            columns = piece.columns(block)
            examples = [
                dict(zip(columns, values, strict=True))
                for values in zip(*columns.values(), strict=True)
            ]
            outputs = self._tokens(source, examples)
            for output in outputs:
                # Overlaps are only in the record, not in the arrays.
                if isinstance(output, Overlap):
                    overlaps.append(asdict(output))
                elif isinstance(output, BadExample):
                    bad.append((f"{piece.place}, row {row}", str(output)))
                    first_loss.append(BAD)
                    # A bad example stays as an empty one, which keeps the numbers of
                    # the others.
                    ids.append(ids[0])
                    loss.append(loss[0])
                else:
                    ids.append(np.array(output["input_ids"], np.int32))
                    loss.append(np.array(output["loss_mask"], bool))
                    first_loss.append(_first_loss(loss[-1]))
                row += 1
        record = {
            "file": piece.file, "num_rows": piece.num_rows, "last": piece.last, "bad": bad, "overlaps": overlaps,
        }  # fmt: skip
        arrays = {
            "ids": np.concatenate(ids, dtype=np.int32),
            "loss": np.concatenate(loss, dtype=bool),
            "ends": np.cumsum(
                [len(example_ids) for example_ids in ids[1:]], dtype=np.int64
            ),
            "first_loss": np.array(first_loss, np.int32),
        }
        write_arrays(path, arrays, record)

    def _tokens(self, source: Source, examples: list[dict[str, Any]]) -> list[Any]:
        """Return, for each example, its tokens, its `Overlap`, or its `BadExample`."""
        # Test items are looked for first, so that overlapping examples are not
        # tokenized.
        overlaps: list[Any] = [
            self._find_overlap(source, example) for example in examples
        ]
        clean = [
            example
            for example, overlap in zip(examples, overlaps, strict=True)
            if overlap is None
        ]
        columns = columns_of(source)
        tokens = iter(
            tokenize_examples(clean, columns, self.tokenizer, self.loss_on, self.date)
        )
        # Other token ids come from the tokenizer, which is compared with the model
        # elsewhere.
        if "input_ids" in columns:
            tokens = map(self._check_ids, tokens)
        return [next(tokens) if overlap is None else overlap for overlap in overlaps]

    def _check_ids(self, output: Any) -> Any:
        """Return tokens with ids in the stored form, or the `BadExample` if one is
        unknown.
        """
        if isinstance(output, BadExample):
            return output
        try:
            ids = token_ids(output["input_ids"], self.vocab_size)
        except BadExample as error:
            return error
        return {**output, "input_ids": ids}

    def _find_overlap(
        self, source: Source, example: Mapping[str, Any]
    ) -> Overlap | None:
        try:
            decontaminator = self.decontaminator
            if isinstance(decontaminator, Decontaminator):
                return decontaminator.find(source, example)
            return None
        except BadExample:  # it is reported when the example is tokenized
            return None


def token_ids(values: Any, vocab_size: int | None) -> np.ndarray:
    """Return token ids in the stored form; BadExample if they are not whole numbers, or
    not in the vocabulary.
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
    # Without a known vocabulary, any id that an int32 can hold is accepted.
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
    """Find the first token with loss, except the example's first, which nothing
    predicts.
    """
    return int(mask[1:].argmax()) + 1 if mask[1:].any() else NONE


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
