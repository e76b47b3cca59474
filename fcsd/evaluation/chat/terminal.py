"""Text on a terminal: safe characters, widths, and two growing texts side by side."""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

GAP = " │ "
_DIRECTIONS = frozenset(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))


def printable(text: str) -> str:
    """Strip control characters and changes of direction, with which a model could write
    over the terminal.
    """
    return "".join(
        c
        for c in text
        if c in "\n\t" or (unicodedata.category(c) != "Cc" and c not in _DIRECTIONS)
    )


def side_by_side(columns: Sequence[Any], width: int) -> Iterator[str]:
    """Return rows of two texts that arrive in pieces, each wrapped to `width` cells.

    A row is given as soon as both columns have theirs, or one has ended. The columns
    are read in turns, a piece each.
    """
    width = max(width, 10)
    sources = [iter(column) for column in columns]
    pending, ended = [""] * len(sources), [False] * len(sources)
    while True:
        for index, source in enumerate(sources):
            if not ended[index] and not complete(pending[index], width):
                piece = next(source, None)
                ended[index] = piece is None
                pending[index] += (piece or "").expandtabs(4)
        # Give rows as long as every column has one that cannot change any more.
        while all(
            is_done or complete(text, width)
            for text, is_done in zip(pending, ended, strict=True)
        ):
            if not any(pending):
                break
            rows = []
            for index, text in enumerate(pending):
                row, pending[index] = first_row(text, width)
                rows.append(row + " " * (width - cells(row)))
            yield GAP.join(rows).rstrip()
        if all(ended) and not any(pending):
            return


def complete(text: str, width: int) -> bool:
    """Tell whether the first row of a text that still grows cannot change any more."""
    return "\n" in text or cells(text) > width


def first_row(text: str, width: int) -> tuple[str, str]:
    """Split `text` into its first wrapped row, broken at a space if possible, and the
    rest.
    """
    line, newline, following = text.partition("\n")
    if cells(line) <= width:
        return line, following
    # Without a space that fits, the row is broken after the last cell.
    end = used = 0
    while used + cells(line[end]) <= width:
        used += cells(line[end])
        end += 1
    space = line.rfind(" ", 0, end + 1)
    if space > 0:
        return line[:space], line[space + 1 :] + newline + following
    return line[:end], line[end:] + newline + following


def cells(text: str) -> int:
    """Count the cells of a terminal: 2 for wide characters, 0 for combining and joining
    ones.
    """
    count = 0
    for character in text:
        if unicodedata.category(character) in ("Mn", "Me", "Cf"):
            continue
        count += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return count


def ending(name: str, width: int) -> str:
    """Shorten a long path to its end, which tells more than its beginning."""
    return name if cells(name) <= width else "…" + name[1 - width :]
