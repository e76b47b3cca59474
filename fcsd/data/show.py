"""Show the text that is trained on: rows, with the tokens that carry loss marked.

    row 1 of 24: 3 examples, 62 of 64 tokens, 21 with loss
    -- example 1 of 3: 20 tokens, 7 with loss
    <|user|>0 + 1<|end|><|assistant|>[[1 is it<|end|>]]

Text in double brackets has loss; on a terminal it is in reverse video instead. Special
tokens are shown, padding is not.

Not covered: examples that were left out of the rows (`fcsd.data.counts`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import groupby, pairwise, takewhile
from typing import Any

import numpy as np

from fcsd.base.errors import UserError
from fcsd.data.batches import Collator, next_token_targets, real_tokens

_BRACKETS, _REVERSE = ("[[", "]]"), ("\x1b[7m", "\x1b[0m")


def check_number(number: int, name: str) -> None:
    """Raise UserError unless a number of rows is at least 1; name: of the setting."""
    if number < 1:
        raise UserError(f"{name}: {number}: a number of rows from 1 is needed")


def print_rows(rows: Any, tokenizer: Any, number: int) -> None:
    """Print the first `number` rows of a data set on stdout, or all if there are fewer."""
    marks = _BRACKETS
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        marks = _REVERSE
    for index in range(min(number, len(rows))):
        for line in row_lines(rows, index, tokenizer, marks):
            print(line)
        print()


def row_lines(
    rows: Any, index: int, tokenizer: Any, marks: tuple[str, str] = _BRACKETS
) -> Iterator[str]:
    """Yield the lines that show a row: a summary, and each of its examples.

    marks: the texts around tokens with loss.
    """
    batch = Collator()([rows[index]])
    ids, positions = batch["input_ids"][0].numpy(), batch["position_ids"][0].numpy()
    # Targets are at the position before the token that they predict, hence the shift.
    has_loss = np.zeros(len(ids), bool)
    has_loss[1:] = next_token_targets(batch["labels"], batch["position_ids"])[0][
        0, :-1
    ].numpy()
    num_tokens = int(real_tokens(batch).sum())
    begins = [*np.flatnonzero(positions[:num_tokens] == 0).tolist(), num_tokens]
    yield (
        f"row {index + 1} of {len(rows)}: {_counted(len(begins) - 1, 'example')},"
        f" {num_tokens} of {len(ids)} tokens, {has_loss.sum()} with loss"
    )
    full_lengths = []
    if hasattr(rows, "examples_of"):
        full_lengths = [len(tokens) for tokens, _ in rows.examples_of(index)]
    # A cut example is shorter in the row than in its shard.
    for example, (begin, end) in enumerate(pairwise(begins)):
        length = end - begin
        cut = ""
        if full_lengths and full_lengths[example] > length:
            cut = f", cut from {full_lengths[example]}"
        yield (
            f"-- example {example + 1} of {len(begins) - 1}:"
            f" {_counted(length, 'token')}{cut}, {has_loss[begin:end].sum()} with loss"
        )
        yield _marked(
            ids[begin:end].tolist(), has_loss[begin:end].tolist(), tokenizer, marks
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _marked(
    ids: list[int], has_loss: list[bool], tokenizer: Any, marks: tuple[str, str]
) -> str:
    """Decode the tokens of an example, with marks around each run of tokens with loss."""
    text, end, earlier_text = "", 0, ""
    for marked, run in groupby(has_loss):
        end += len(list(run))
        # A tokenizer may drop the space at the beginning of a decoded text, so all
        # tokens so far are decoded, and the new part is cut off.
        so_far = tokenizer.decode(
            ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        pairs = zip(earlier_text, so_far, strict=False)
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        new = so_far[num_equal:]
        earlier_text = so_far
        # Control characters would change the terminal, so they are written as escapes.
        visible = "".join(
            char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1]
            for char in new
        )
        text += f"{marks[0]}{visible}{marks[1]}" if marked else visible
    return text
