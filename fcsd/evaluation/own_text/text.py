"""Figures of a text, and of a task's samples. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

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


def figures_of(sample: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of one sample whose means a result has, by name.

    own_text_kl_16, forward_kl_16: of the first 16 tokens. nats_above: nats less those
    of the original's own sample. greedy_equal: share of the greedy text that equals the
    original's, from its beginning.
    """
    kept = ["nats", "original_nats", "repeated_4grams", "greedy_repeated_4grams", "ended"]  # fmt: skip
    by_length = sample["by_length"].values()
    # A server tells nothing of the original's likeliest tokens, at no length.
    if "forward_kl" in sample or any("forward_kl" in values for values in by_length):
        kept.append("forward_kl")
    return {
        **{
            f"{name}_{length}": value
            for length, values in sample["by_length"].items()
            for name, value in values.items()
        },
        **{name: float(sample[name]) for name in kept},
        "nats_above": sample["nats"] - sample["original_nats"],
        "num_tokens": float(len(sample["tokens"])),
        "greedy_equal_tokens": float(sample["greedy_equal"]),
        "greedy_equal": sample["greedy_equal"] / sample["greedy_longest"],
    }


def facts_of(samples: Sequence[Mapping[str, Any]], *, served: bool) -> dict[str, Any]:
    """Return the facts of a result about its texts: how many the token limit ended, and
    whether their divergence is a lower bound, as behind a server.
    """
    return {
        "answers_at_limit": sum(not sample["ended"] for sample in samples),
        "lower_bound": served,
    }
