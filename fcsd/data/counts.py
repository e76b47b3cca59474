"""Count the examples of a data set that reach the rows, whole or cut, and report those
that do not.

Not covered: the list of examples that were left out, with reasons
(`fcsd.data.write_rows`, `fcsd.data.decontaminate`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.batches import NO_LOSS
from fcsd.data.sources import Source

WARNED = 0.05  # share of the examples that were read


@dataclass(frozen=True)
class ExampleCounts:
    """Counts of the examples of sources by outcome; an example in none of them is
    whole.

    read: all examples; cut: some tokens with loss are beyond `max_length`, others
    before it; without_loss: no token has loss; cut_away: all tokens with loss lie
    behind `max_length`; bad: cannot be tokenized; overlapping: share words with a test
    item.
    """

    read: int = 0
    cut: int = 0
    without_loss: int = 0
    cut_away: int = 0
    bad: int = 0
    overlapping: int = 0

    def __add__(self, other_counts: ExampleCounts) -> ExampleCounts:
        return ExampleCounts(
            *(a + b for a, b in zip(astuple(self), astuple(other_counts), strict=True))
        )

    @property
    def left_out(self) -> int:
        return self.bad + self.overlapping

    @property
    def usable(self) -> int:
        return self.read - self.left_out - self.without_loss - self.cut_away

    def sentence(self, num_never_used: int | None = None) -> str:
        """Return `100 examples read: 45 cut, 45 without loss, 0 left out, 36 never
        used`.
        """
        parts = {
            "cut": self.cut,
            "without loss": self.without_loss + self.cut_away,
            "left out": self.left_out,
            "never used": num_never_used,
        }
        text = ", ".join(
            f"{number:,} {name}" for name, number in parts.items() if number is not None
        )
        return f"{self.read:,} example{'' if self.read == 1 else 's'} read: {text}"

    def warnings(self, max_length: int) -> Iterator[str]:
        """Yield a warning for each outcome of more than 5 % of the examples, with
        advice.
        """
        behind = f"tokens with loss are beyond max_length {max_length}; raise it"
        unanswered = "they have no answer; check the data, or `columns`"
        outcomes = [
            (self.cut, f"are truncated: some of their {behind}"),
            (self.cut_away, f"are without loss: all of their {behind}"),
            (self.without_loss, f"are without loss: {unanswered}"),
            (self.bad, "are left out: they cannot be tokenized"),
            (self.overlapping, "are left out: they overlap with test items"),
        ]
        for number, reason in outcomes:
            if warning := self.warning(number, reason):
                yield warning

    def warning(self, number: int, reason: str) -> str:
        """Return a warning if `number` is more than 5 % of the examples read, else ""."""
        if number <= WARNED * self.read:
            return ""
        share = (
            f"{number:,} of {self.read:,} examples ({100 * number / self.read:.0f} %)"
        )
        return f"warning: {share} {reason}"


def no_rows(
    sources: Sequence[Source], counts: ExampleCounts, max_length: int
) -> UserError:
    """Return the error for examples that fill no row: every answer is cut away, none
    has an answer, or no example is left.
    """
    names = ", ".join(source.path for source in sources)
    # The likeliest cause first: one example with a response beyond `max_length` shows
    # that the columns are right.
    if counts.cut_away:
        reason = (
            f"not one of {counts.read} examples has a response token within max_length:"
            f" {max_length}; raise max_length or check `columns`"
        )
    elif counts.without_loss:
        missing = ", or ".join(
            dict.fromkeys(_answer_of(source.columns or {}) for source in sources)
        )
        reason = (
            f"not one of {counts.read} examples has a token with loss: {missing}; check"
            " the data, or name other columns under `columns`"
        )
    else:
        reason = (
            f"none of {counts.read} examples is left: {counts.bad} cannot be tokenized,"
            f" {counts.overlapping} overlap with test items; use other data"
        )
    return UserError(f"data set {names}: {reason}")


def _answer_of(columns: Mapping[Any, str]) -> str:
    """Return a clause about the answer that examples with these columns lack."""
    if "messages" in columns:
        return (
            f"column {columns['messages']!r} has no message of an assistant that has"
            f" text and loss (one with `weight: 0`, `train: false` or the like has"
            " none)"
        )
    if "response" in columns:
        return f"column {columns['response']!r} has no response with text"
    if "text" in columns:
        return f"column {columns['text']!r} has no text of two tokens"
    if "labels" in columns:
        return (
            f"column {columns['labels']!r} has only the label {NO_LOSS} after an"
            " example's first token"
        )
    from fcsd.data.examples import MASKS

    if masks := [columns[name] for name in MASKS if name in columns]:
        return (
            f"{' and '.join(map(repr, masks))} mark no token after an example's first"
        )
    if "input_ids" in columns:
        return f"column {columns['input_ids']!r} has no example of two tokens"
    return "there is no answer in it"


def tell_examples(rows: Any, name: str, *, always: bool = True) -> None:
    """Print the counts of the examples of rows, and warnings, on stderr; nothing for
    rows that were packed elsewhere.

    name: of the data. always: print the counts even if all examples are in the rows,
    and whole.
    """
    # Rows that a caller has packed have no record of their examples.
    counts = getattr(rows, "counts", None)
    if counts is not None and (always or counts.cut or counts.usable < counts.read):
        for text in (counts.sentence(), *counts.warnings(rows.layout.max_length)):
            print(f"{name}: {text}", file=sys.stderr)
