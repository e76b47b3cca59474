"""Examples that are tokenized one by one, and packed in memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fcsd.data.batches import row_of
from fcsd.data.chat import tokenize_examples
from fcsd.data.messages import BadExample
from fcsd.data.write_rows import first_fit


def tokenize_example(
    example: Mapping[str, Any],
    columns: Mapping[Any, str],
    tokenizer: Any,
    loss_on: str = "response",
) -> dict[str, Any]:
    """Tokenize one example, or raise its fault."""
    (result,) = tokenize_examples([example], columns, tokenizer, loss_on)
    if isinstance(result, BadExample):
        raise result
    return result


def pack(
    examples: Sequence[Mapping[str, Any]],
    max_length: int,
    *,
    pad_token_id: int,
    **options: Any,
) -> Iterator[dict[str, np.ndarray]]:
    """Pack tokenized examples into rows of exactly `max_length` tokens; options as
    `first_fit`.

    An example that is longer than a row is truncated; one in which no token would be
    predicted is left out.
    """
    lengths = [
        len(one["input_ids"][:max_length])
        if np.any(one["loss_mask"][1:max_length])
        else 0
        for one in examples
    ]
    for numbers in first_fit(lengths, max_length, **options):
        parts = [
            (examples[number]["input_ids"], examples[number]["loss_mask"])
            for number in numbers
        ]
        yield row_of(parts, max_length, pad_token_id)
