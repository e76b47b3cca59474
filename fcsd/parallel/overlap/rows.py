"""One row for each token and rank: what a token sends where several of its experts are
on one rank.

A rank gets the rows of the tokens that chose an expert of it, in their order, and
behind them the pairs of token and expert, two words each: which row and which expert
(row x E + expert), and the routing weight. The pairs fill up whole rows, so that one
exchange of equal rows carries both. Backward, gradients of rows and of weights go the
same way.

At the experts' rank a row is spread to its pairs, which follow each other, and what its
experts make of it is summed.

Not covered: one row for all ranks of a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PAIR_WORDS = 2


def word(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of a pair's words beside rows of a dtype: as an integer, and as
    a weight.
    """
    return (
        (torch.int64, torch.float64)
        if dtype == torch.float64
        else (torch.int32, torch.float32)
    )


@dataclass(frozen=True)
class Parcels:
    """What goes to each of S ranks, or comes from it.

    counts: (S, 2) rows and pairs, on the device of the rows. rows, pairs: the same on
    the host. row_words: in a row.
    """

    counts: Tensor
    rows: Sequence[int]
    pairs: Sequence[int]
    row_words: int

    @property
    def splits(self) -> list[int]:
        """Rows of each parcel, those that its pairs fill among them."""
        return [
            rows - (-PAIR_WORDS * pairs // self.row_words)
            for rows, pairs in zip(self.rows, self.pairs, strict=True)
        ]

    def places(self) -> tuple[Tensor, Tensor]:
        """Return the rows' numbers among the rows of all parcels, and those of the
        pairs' words among all words.
        """
        rows, words = self.counts[:, 0], PAIR_WORDS * self.counts[:, 1]
        sizes = rows + (words + self.row_words - 1) // self.row_words
        starts = sizes.cumsum(0) - sizes

        def spread(values: Tensor, counts: Tensor, size: int) -> Tensor:
            own = (values - counts.cumsum(0) + counts).repeat_interleave(
                counts, output_size=size
            )
            return own + torch.arange(size, device=own.device)

        of_rows = spread(starts, rows, sum(self.rows))
        return of_rows, spread(
            (starts + rows) * self.row_words, words, PAIR_WORDS * sum(self.pairs)
        )

    def pack(
        self, rows: Tensor, weights: Tensor, codes: Tensor | None = None
    ) -> Tensor:
        """Put rows (M, D), and weights and codes (P,) of their pairs, into the parcels."""
        integer, real = word(rows.dtype)
        # nobody reads what is behind the pairs
        parcels = rows.new_empty(sum(self.splits), rows.shape[1])
        of_rows, of_words = self.places()
        parcels[of_rows] = rows
        bits = weights.to(real).view(integer)
        pairs = torch.stack(
            [torch.zeros_like(bits) if codes is None else codes.to(integer), bits], 1
        )
        parcels.view(integer).view(-1)[of_words] = pairs.view(-1)
        return parcels

    def unpack(self, parcels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows' numbers (M,) among those of the parcels, and weights and codes (P,)."""
        integer, real = word(parcels.dtype)
        of_rows, of_words = self.places()
        codes, bits = (
            parcels.view(integer).view(-1)[of_words].view(-1, PAIR_WORDS).unbind(1)
        )
        return of_rows, bits.contiguous().view(real), codes.long()


@dataclass(frozen=True)
class Pairs:
    """The P pairs that M rows are spread to at the experts' rank, those of a row behind
    each other.

    weights: (P,). ids: (P,) the expert of this rank. row: (P,) of which row; lengths:
    (M,) pairs of each row.
    """

    weights: Tensor
    ids: Tensor
    row: Tensor
    lengths: Tensor


def pairs_of(
    codes: Tensor, received: Parcels, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, rows and lengths of the pairs that have come; num_experts: of this rank."""
    rows = received.counts[:, 0]
    before = (rows.cumsum(0) - rows).repeat_interleave(
        received.counts[:, 1], output_size=len(codes)
    )
    row = before + codes // num_experts
    lengths = torch.zeros(sum(received.rows), dtype=torch.long, device=codes.device)
    return codes % num_experts, row, lengths.index_add_(0, row, torch.ones_like(row))


def summed(pairs: Tensor, lengths: Tensor) -> Tensor:
    """Sum (P, D), of each row those behind each other, to (M, D) in float32 or wider;
    in one order, on a GPU, too.
    """
    wide = pairs.to(torch.promote_types(pairs.dtype, torch.float32))
    if not len(lengths):
        return wide[:0]
    return torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=True)


def gathered(
    rows: Tensor, tokens: Tensor, sizes: Sequence[int], num_tokens: int
) -> Tensor:
    """Sum rows (M, D) of tokens (M,) to (num_tokens, D), rank by rank, each of which
    has a token once.
    """
    total = rows.new_zeros(
        num_tokens, rows.shape[1], dtype=torch.promote_types(rows.dtype, torch.float32)
    )
    for part, own in zip(rows.split(sizes), tokens.split(sizes), strict=True):
        total.index_add_(0, own, part.to(total.dtype))
    return total.to(rows.dtype)
