"""The order in which a training reads its rows: whole steps in every epoch, with
different rows left out each time.

Before the first step the rows that are never read are reported, together with the fate
of the examples (`fcsd.data.counts`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import RandomSampler, Sampler, Subset

from fcsd.base.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainingArguments

_WARNED = 0.05  # share of the rows


def step_rows(args: "TrainingArguments", num_ranks: int) -> int:
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
    def of(cls, rows: Any, rows_of_a_step: int, max_length: int) -> "EpochRows | None":
        """Return the order of rows; None where there are no rows to train on."""
        return None if rows is None else cls(len(rows), rows_of_a_step, max_length)

    def __len__(self) -> int:
        return self.num_rows - self.num_left_out

    @property
    def steps_of_an_epoch(self) -> int:
        return len(self) // self.rows_of_a_step

    def ordered_by(self, sampler: Any, data_seed: int | None) -> "EpochRows":
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
