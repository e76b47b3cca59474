"""Put examples into a packed row, and collate rows into a batch: ids, positions,
next-token targets.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

Batch = dict[str, Tensor]
"""A micro-batch by column, each (B, T), with columns that later steps add."""

NO_LOSS = -100


ROW_FEATURES = {
    name: datasets.List(datasets.Value("int32"))
    for name in ("input_ids", "position_ids", "labels")
}


def row_of(
    examples: Iterable[tuple[Any, Any]], max_length: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Put examples (token ids and loss masks) into one row.

    Returns: {"input_ids", "position_ids", "labels"}, int32 (max_length,). Position ids
        restart at 0 at every example and at the padding. Padding carries no loss, nor
        does the first token of an example, which nothing predicts.
    """
    input_ids = np.full(max_length, pad_token_id, np.int32)
    position_ids = np.zeros(max_length, np.int32)
    labels = np.full(max_length, NO_LOSS, np.int32)
    # Examples follow each other without a gap; the last one may be cut.
    end = 0
    for ids, mask in examples:
        begin, end = end, min(max_length, end + len(ids))
        length = end - begin
        input_ids[begin:end] = ids[:length]
        position_ids[begin:end] = np.arange(length)
        # A label stands at its own token; an example's first token has no predecessor.
        labels[begin + 1 : end] = np.where(mask[1:length], ids[1:length], NO_LOSS)
    position_ids[end:] = np.arange(max_length - end)
    return {"input_ids": input_ids, "position_ids": position_ids, "labels": labels}


_TAIL_MULTIPLE = 64


class Collator:
    """Turns rows into int64 tensors (B, T): input_ids, position_ids, labels. There is
    no attention mask, because position ids separate the examples.

    ahead: is called with each batch; if a worker process collates, this is well before
    the batch is used.
    """

    def __init__(self, ahead: Callable[[dict[str, Tensor]], None] | None = None):
        self.ahead = ahead

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        batch = {}
        for name in ROW_FEATURES:
            values = [
                torch.as_tensor(np.asarray(row[name]), dtype=torch.int64)
                for row in rows
            ]
            batch[name] = torch.stack(values)
        if self.ahead is not None:
            self.ahead(batch)
        return batch


def in_batches(rows: Sequence[Mapping[str, Any]], size: int) -> list[Batch]:
    """Collate rows, `size` at a time, in order."""
    collate = Collator()
    return [
        collate([rows[index] for index in range(start, min(start + size, len(rows)))])
        for start in range(0, len(rows), size)
    ]


def next_token_targets(labels: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token that each position must predict.

    Position t predicts the label at t+1, if that carries loss and belongs to the same
    example.

    Args: labels, position_ids (B, T). Returns: keep, (B, T) bool, True where a position
    has a target; targets (N,) token ids of those positions, in the order of
    `hidden[keep]`.
    """
    # The last position has no next token, and the first of an example no predecessor.
    keep = torch.zeros_like(labels, dtype=torch.bool)
    keep[:, :-1] = (labels[:, 1:] != NO_LOSS) & (position_ids[:, 1:] != 0)
    return keep, labels.roll(-1, dims=1)[keep]


def real_tokens(batch: Batch) -> Tensor:
    """Return a mask (B, T) of the tokens that are text: all but the padding of a row."""
    labels, positions = batch["labels"], batch["position_ids"]
    # The number of tokens after the last one with loss.
    last = (labels != NO_LOSS).int().flip(1).argmax(1)
    position = torch.arange(labels.shape[1]).expand_as(labels)
    behind = position >= labels.shape[1] - last[:, None]
    # An example may end without loss; padding begins at position 0.
    begins = ((positions == 0) & behind).int().cumsum(1) > 0
    return ~begins


def counted_tokens(batch: Batch) -> Tensor:
    """Return a mask (B, T) of the tokens that count: in each row all up to the last one
    with loss.
    """
    with_loss = batch["labels"] != NO_LOSS
    return with_loss.flip(1).cumsum(1).flip(1) > 0


def trim_padding(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut the batch after the last position with loss in any of its rows; most of the
    remainder is padding.

    No remaining position attends to the part that is cut off. The length becomes a
    multiple of 64, if the rows are as long, so that shapes recur; this matters where
    rows are not packed.
    """
    # All rows of a batch are cut at the same length.
    with_loss = (batch["labels"] != NO_LOSS).any(dim=0).nonzero()
    length = int(with_loss.max()) + 1 if len(with_loss) else 1
    length = -(-length // _TAIL_MULTIPLE) * _TAIL_MULTIPLE
    return {
        name: batch[name][:, :length] if name in ROW_FEATURES else batch[name]
        for name in batch
    }
