"""Turn a piece of a source into tokens, in a process of its own: its examples are read,
written as their template says, and tokenized, or kept out.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fcsd.data.chat import tokenize_examples
from fcsd.data.decontaminate import Decontaminator, Overlap
from fcsd.data.messages import BadExample
from fcsd.data.rows import BAD, NONE, Piece, Tokenizing, write_arrays
from fcsd.data.sources import Source, columns_of

_MOST_TOKENS = 1 << 31


def write_tokens(
    tokenizing: Tokenizing, source: Source, piece: Piece, path: Path
) -> None:
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
        outputs = _tokens(tokenizing, source, examples)
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


def _tokens(
    tokenizing: Tokenizing, source: Source, examples: list[dict[str, Any]]
) -> list[Any]:
    """Return, for each example, its tokens, its `Overlap`, or its `BadExample`."""
    # Test items are looked for first, so that overlapping examples are not
    # tokenized.
    overlaps: list[Any] = [
        _find_overlap(tokenizing, source, example) for example in examples
    ]
    clean = [
        example
        for example, overlap in zip(examples, overlaps, strict=True)
        if overlap is None
    ]
    columns = columns_of(source)
    tokens = iter(
        tokenize_examples(
            clean, columns, tokenizing.tokenizer, tokenizing.loss_on, tokenizing.date
        )
    )
    # Other token ids come from the tokenizer, which is compared with the model
    # elsewhere.
    if "input_ids" in columns:
        tokens = (_checked_ids(output, tokenizing.vocab_size) for output in tokens)
    return [next(tokens) if overlap is None else overlap for overlap in overlaps]


def _checked_ids(output: Any, vocab_size: int | None) -> Any:
    """Return tokens with ids in the stored form, or the `BadExample` if one is
    unknown.
    """
    if isinstance(output, BadExample):
        return output
    try:
        ids = token_ids(output["input_ids"], vocab_size)
    except BadExample as error:
        return error
    return {**output, "input_ids": ids}


def _find_overlap(
    tokenizing: Tokenizing, source: Source, example: Mapping[str, Any]
) -> Overlap | None:
    try:
        decontaminator = tokenizing.decontaminator
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
