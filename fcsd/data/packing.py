"""Pack tokenized examples into rows of a fixed length, best fit first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fcsd.data.batches import NO_LOSS, ROW_FEATURES

_OPEN_ROWS = 64


@dataclass
class PackingStats:
    """Counts of what became of the examples."""

    num_examples: int = 0
    num_truncated: int = 0  # were longer than a row
    num_without_loss: int = 0  # left out: not one token of theirs would be predicted
    num_rows: int = 0
    num_tokens: int = 0  # of examples, in rows; the rest of num_rows * max_length is padding
    num_loss_tokens: int = 0


def pack(
    examples: Iterable[Mapping[str, Any]],
    max_length: int,
    *,
    pad_token_id: int,
    packing: bool = True,
    num_open_rows: int = _OPEN_ROWS,
    stats: PackingStats | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Pack whole examples into rows of exactly `max_length` tokens, first fit.

    An example goes into the first open row that has room, else into a new one; when more than `num_open_rows`
    are open the oldest is closed. An example longer than a row is truncated. With packing=False each has a
    row of its own.

    Yields: {"input_ids", "position_ids", "labels"}, int32 (max_length,). Position ids restart at 0 at every
    example and at the padding. No loss on padding, nor on the first token of an example, which nothing
    predicts.
    """
    stats = stats if stats is not None else PackingStats()
    open_rows: list[list[tuple[list[int], list[bool]]]] = []
    room: list[int] = []

    def close(index: int) -> dict[str, np.ndarray]:
        room.pop(index)
        stats.num_rows += 1
        return _row(open_rows.pop(index), max_length, pad_token_id, stats)

    for example in examples:
        stats.num_examples += 1
        stats.num_truncated += len(example["input_ids"]) > max_length
        ids, mask = example["input_ids"][:max_length], example["loss_mask"][:max_length]
        if not np.any(mask[1:]):
            stats.num_without_loss += 1
            continue
        index = next((i for i, free in enumerate(room) if free >= len(ids)), None) if packing else None
        if index is None:
            index = len(open_rows)
            open_rows.append([])
            room.append(max_length)
        open_rows[index].append((ids, mask))
        room[index] -= len(ids)
        if not packing or room[index] == 0:
            yield close(index)
        elif len(open_rows) > num_open_rows:
            yield close(0)
    while open_rows:
        yield close(0)


def _row(
    examples: list[tuple[list[int], list[bool]]], max_length: int, pad_token_id: int, stats: PackingStats
) -> dict[str, np.ndarray]:
    input_ids = np.full(max_length, pad_token_id, np.int32)
    position_ids = np.zeros(max_length, np.int32)
    labels = np.full(max_length, NO_LOSS, np.int32)
    end = 0
    for ids, mask in examples:
        begin, end = end, end + len(ids)
        input_ids[begin:end] = ids
        position_ids[begin:end] = np.arange(len(ids))
        labels[begin + 1 : end] = np.where(mask[1:], ids[1:], NO_LOSS)
    position_ids[end:] = np.arange(max_length - end)
    stats.num_tokens += end
    stats.num_loss_tokens += int((labels != NO_LOSS).sum())
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


class PackedRows(torch.utils.data.Dataset):
    """Packed rows in memory: (rows, max_length) int32 arrays, and `stats` of their making."""

    def __init__(self, rows: Iterable[dict[str, np.ndarray]], stats: PackingStats):
        held = list(rows)
        self.columns = {name: np.array([row[name] for row in held]) for name in ROW_FEATURES}
        self.stats = stats

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: column[index] for name, column in self.columns.items()}
