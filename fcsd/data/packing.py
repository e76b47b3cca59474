"""Pack tokenized examples into rows of a fixed length, first fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from fcsd.data.batches import NO_LOSS

_OPEN_ROWS = 64


def first_fit(
    lengths: Iterable[int], max_length: int, *, packing: bool = True, num_open_rows: int = _OPEN_ROWS
) -> Iterator[list[int]]:
    """Yield for each row of `max_length` tokens the numbers of the examples in it, by their lengths.

    An example goes into the first open row that has room, else into a new one; when more than `num_open_rows`
    are open the oldest is closed. With packing=False each has a row of its own. One of length 0 is left out.
    """
    open_rows: list[list[int]] = []
    room: list[int] = []
    for number, length in enumerate(lengths):
        if length == 0:
            continue
        if not packing:
            yield [number]
            continue
        index = next((i for i, free in enumerate(room) if free >= length), None)
        if index is None:
            index = len(open_rows)
            open_rows.append([])
            room.append(max_length)
        open_rows[index].append(number)
        room[index] -= length
        if room[index] == 0 or len(open_rows) > num_open_rows:
            closed = index if room[index] == 0 else 0
            room.pop(closed)
            yield open_rows.pop(closed)
    yield from open_rows


def row_of(examples: Iterable[tuple[Any, Any]], max_length: int, pad_token_id: int) -> dict[str, np.ndarray]:
    """Put examples, token ids and loss masks, into one row.

    Returns: {"input_ids", "position_ids", "labels"}, int32 (max_length,). Position ids restart at 0 at every
        example and at the padding. No loss on padding, nor on the first token of an example, which nothing predicts.
    """
    input_ids = np.full(max_length, pad_token_id, np.int32)
    position_ids = np.zeros(max_length, np.int32)
    labels = np.full(max_length, NO_LOSS, np.int32)
    end = 0
    for ids, mask in examples:
        begin, end = end, min(max_length, end + len(ids))
        length = end - begin
        input_ids[begin:end] = ids[:length]
        position_ids[begin:end] = np.arange(length)
        labels[begin + 1 : end] = np.where(mask[1:length], ids[1:length], NO_LOSS)
    position_ids[end:] = np.arange(max_length - end)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}
