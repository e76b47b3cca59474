"""Lay out the results of commands for a terminal: prose is folded between words; a
Markdown table that is too wide gets cells of several lines, or is split by columns.

Not covered: messages and progress on standard error.
"""

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

from fcsd.base.text import table_line, table_rule

_SHORT = 20
"""Characters up to which a cell is not folded unless nothing else helps: a number with
its error, a name.
"""


def terminal_columns() -> int | None:
    """Return the width of the terminal that standard output is, or the one that COLUMNS
    sets for any output; None for a file or a pipe, whose lines stay whole.
    """
    named = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty() or (named.isdecimal() and int(named) > 0):
        return shutil.get_terminal_size().columns
    return None


def show(text: str) -> None:
    """Print a result, laid out for the terminal."""
    print(fit(text, terminal_columns()))


def fit(text: str, columns: int | None) -> str:
    """Lay a text out for a width; None: as it is."""
    if columns is None:
        return text
    columns = max(columns, 20)
    parts: list[str] = []
    for is_table, lines in groupby(text.split("\n"), lambda line: line[:1] == "|"):
        if is_table:
            parts.append(_table([*lines], columns))
        else:
            parts += [_prose(line, columns) for line in lines]
    return "\n".join(parts)


def _prose(line: str, columns: int) -> str:
    if len(line) <= columns:
        return line
    # Options, and a command in Markdown, can still be copied into a shell.
    if re.match(r"(?:    )?(?:--)?\w", line) and line[:1] in " -":
        return _fill(line, columns - 2, "    ").replace("\n", " \\\n")
    # Continued below the text of `name   text` and `- text`, or inside its own indent.
    named = re.match(r"(?:\S.{0,17}? {2,}| *- )(?=\S)", line)
    spaces = len(line) - len(line.lstrip())
    indent = len(named[0]) if named else spaces + 2 * (0 < spaces < 4)
    return _fill(line, columns, " " * indent)


def _fill(line: str, columns: int, indent: str) -> str:
    return textwrap.fill(
        line,
        columns,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _table(lines: Sequence[str], columns: int) -> str:
    """Lay out a table of `markdown`, as blocks of columns below each other where all do
    not fit side by side; each block begins with the first column.
    """
    header, rule, *rows = (
        [cell.strip() for cell in line[1:-1].split("|")] for line in lines
    )
    fits = max(map(len, lines)) <= columns
    if fits or any(len(row) != len(header) for row in (rule, *rows)):
        return "\n".join(lines)
    table = [header, *rows]
    left = [not cell.endswith(":") for cell in rule]
    # Side by side, numbers are not folded, but text is.
    least = [
        _least(column, 0 if text else _SHORT)
        for column, text in zip(zip(*table, strict=True), left, strict=True)
    ]
    blocks = [[0]]
    for column in range(1, len(header)):
        beside = [least[k] for k in (*blocks[-1], column)]
        if len(blocks[-1]) > 1 and _width(beside) > columns:
            blocks.append([0])
        blocks[-1].append(column)
    return "\n\n".join(
        _folded(
            [[row[k] for k in block] for row in table],
            sum(left[k] for k in block),
            columns,
        )
        for block in blocks
    )


def _folded(table: Sequence[Sequence[str]], left: int, columns: int) -> str:
    """Fold the cells of a table until it fits, as far as its words allow."""
    cells = [*zip(*table, strict=True)]
    widths = [max(map(len, column)) for column in cells]
    for short in (_SHORT, 0):
        least = [_least(column, short) for column in cells]
        while _width(widths) > columns and any(map(int.__gt__, widths, least)):
            widest = max(
                (k for k, width in enumerate(widths) if width > least[k]),
                key=lambda k: widths[k],
            )
            widths[widest] -= 1
    header, *rows = ([*_lines(row, widths)] for row in table)
    shown = [table_line(line, widths, left) for line in header]
    shown.append(table_rule(widths, left))
    shown += [table_line(line, widths, left) for row in rows for line in row]
    return "\n".join(shown)


def _width(widths: Sequence[int]) -> int:
    """Return the width of a table whose columns have these widths."""
    return sum(widths) + 3 * len(widths) + 1


def _least(column: Iterable[str], short: int) -> int:
    """Return the least width of a column. short: as `_SHORT`, for cells below the
    header.
    """

    def least(row: int, cell: str) -> int:
        if row and len(cell) <= short:
            return len(cell)
        return max(len(word.rstrip()) for word in _words(cell))

    return max(least(row, cell) for row, cell in enumerate(column))


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a row whose cells are folded."""
    folded = []
    for cell, width in zip(row, widths, strict=True):
        lines = [""]
        for word in _words(cell):
            if lines[-1] and len((lines[-1] + word).rstrip()) > width:
                lines.append("")
            lines[-1] += word
        folded.append([line.rstrip() for line in lines])
    return zip_longest(*folded, fillvalue="")


def _words(cell: str) -> list[str]:
    """Split a cell where it may be folded: after spaces, and after the commas of a list
    of layers, not of a number such as 12,345.
    """
    return re.split(r"(?<= )|(?<=,)(?! |\d{3}\b)", cell)
