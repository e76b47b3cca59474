"""Figures of a text by its tokens alone. Pure functions."""

from collections.abc import Sequence

LENGTHS = (16, 64, 256)
"""The divergence is also told for the first tokens of a text: errors that feed on
themselves show as growth.
"""


def repeated_4grams(tokens: Sequence[int]) -> float:
    """Return the share of the 4-grams of tokens that have occurred before in the text;
    0 for a text of fewer than four.
    """
    grams = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def equal_beginning(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Count the tokens at the beginning of two texts that are equal."""
    pairs = enumerate(zip(tokens, others, strict=False))
    first = (index for index, (token, other) in pairs if token != other)
    return next(first, min(len(tokens), len(others)))


def lengths_up_to(limit: int) -> list[int]:
    """Return the lengths of `LENGTHS` that texts of at most `limit` tokens can have."""
    return [length for length in LENGTHS if length <= limit]
