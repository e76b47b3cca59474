"""Parcels of rows: a token sends one row to a rank, even if several of its experts are
there.

A rank receives the rows of the tokens that chose one of its experts, in their order,
and after them the pairs of token and expert, two words each: a code for row and expert
(row x E + expert), and the routing weight. The pairs are padded to whole rows, so that
one exchange of equal rows carries both. In the backward pass, the gradients of rows and
of weights travel in the same layout.

At the experts' rank a row is repeated for each of its pairs, which follow each other,
and the outputs of its experts are summed.

Not covered: one row for all ranks of a node.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAIR_WORDS = 2


def word(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of a pair's words, as an integer and as a weight, for rows of a
    dtype.
    """
    if dtype == torch.float64:
        return torch.int64, torch.float64
    return torch.int32, torch.float32


@dataclass(frozen=True)
class Parcels:
    """The sizes of the parcels that go to each of S ranks, or come from it.

    counts: (S, 2) rows and pairs, on the device of the rows. rows, pairs: the same
    numbers on the host. row_words: words in a row.
    """

    counts: Tensor
    rows: Sequence[int]
    pairs: Sequence[int]
    row_words: int

    @property
    def splits(self) -> list[int]:
        """Rows of each parcel, including those that its pairs fill."""
        # -(-a // b) rounds up.
        return [
            rows - (-PAIR_WORDS * pairs // self.row_words)
            for rows, pairs in zip(self.rows, self.pairs, strict=True)
        ]

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows among the rows of all parcels, and those of
        the pairs' words among all words.
        """
        rows, words = self.counts[:, 0], PAIR_WORDS * self.counts[:, 1]
        sizes = rows + (words + self.row_words - 1) // self.row_words
        starts = sizes.cumsum(0) - sizes

        # Count on from each rank's value; the size is known on the host, which so need
        # not wait for the device.
        def spread(values: Tensor, counts: Tensor, size: int) -> Tensor:
            shifts = (values - counts.cumsum(0) + counts).repeat_interleave(
                counts, output_size=size
            )
            return shifts + torch.arange(size, device=shifts.device)

        row_positions = spread(starts, rows, sum(self.rows))
        return row_positions, spread(
            (starts + rows) * self.row_words, words, PAIR_WORDS * sum(self.pairs)
        )

    def pack(
        self, rows: Tensor, weights: Tensor, codes: Tensor | None = None
    ) -> Tensor:
        """Put rows (M, D), and weights and codes (P,) of their pairs, into the parcels."""
        integer, real = word(rows.dtype)
        # The padding after the pairs is never read, so it stays uninitialised.
        parcels = rows.new_empty(sum(self.splits), rows.shape[1])
        row_positions, word_positions = self.places()
        parcels[row_positions] = rows
        # Weights are sent bit for bit, as integers after the codes.
        bits = weights.to(real).view(integer)
        pairs = torch.stack(
            [torch.zeros_like(bits) if codes is None else codes.to(integer), bits], 1
        )
        parcels.view(integer).view(-1)[word_positions] = pairs.view(-1)
        return parcels

    def unpack(self, parcels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' positions (M,) in the parcels, and weights and codes (P,)."""
        integer, real = word(parcels.dtype)
        row_positions, word_positions = self.places()
        codes, bits = (
            parcels.view(integer)
            .view(-1)[word_positions]
            .view(-1, PAIR_WORDS)
            .unbind(1)
        )
        return row_positions, bits.contiguous().view(real), codes.long()


@dataclass(frozen=True)
class Pairs:
    """The P pairs of M rows at the experts' rank; a row's pairs are consecutive.

    weights: (P,). ids: (P,) experts of this rank. row: (P,) the row of each pair;
    lengths: (M,) pairs of each row.
    """

    weights: Tensor
    ids: Tensor
    row: Tensor
    lengths: Tensor


def pairs_of(
    codes: Tensor, received: Parcels, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, rows and lengths of the pairs that have arrived.

    num_experts: experts of this rank.
    """
    rows = received.counts[:, 0]
    # A code counts rows from the first one of its source rank.
    first_row_of_rank = (rows.cumsum(0) - rows).repeat_interleave(
        received.counts[:, 1], output_size=len(codes)
    )
    row_of_pair = first_row_of_rank + codes // num_experts
    lengths = torch.zeros(sum(received.rows), dtype=torch.long, device=codes.device)
    return (
        codes % num_experts,
        row_of_pair,
        lengths.index_add_(0, row_of_pair, torch.ones_like(row_of_pair)),
    )


def summed(pairs: Tensor, lengths: Tensor) -> Tensor:
    """Sum the consecutive pairs (P, D) of each row to (M, D), in float32 or wider, and
    in a fixed order, also on a GPU.
    """
    # A row may have many pairs, whose sum loses digits in bfloat16.
    wide = pairs.to(torch.promote_types(pairs.dtype, torch.float32))
    if not len(lengths):
        return wide[:0]
    return torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=True)


def gathered(
    rows: Tensor, tokens: Tensor, sizes: Sequence[int], num_tokens: int
) -> Tensor:
    """Sum rows (M, D) of tokens (M,) to (num_tokens, D).

    Rank by rank, because a rank has each token at most once: the order of the sum is
    fixed.
    """
    total = rows.new_zeros(
        num_tokens, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32)
    )
    for part, part_tokens in zip(rows.split(sizes), tokens.split(sizes), strict=True):
        total.index_add_(0, part_tokens, part.to(total.dtype))
    return total.to(rows.dtype)
