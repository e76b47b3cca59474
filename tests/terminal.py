"""Read what commands print for a terminal of 80 columns."""

import re


def tables_of(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Return the header and the rows of every table in a text, with cells of several
    lines joined. A line whose first cell is empty continues the row above it.
    """
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.M):
        lines = [
            [cell.strip() for cell in line[1:-1].split("|")]
            for line in block.splitlines()
        ]
        rule = next(k for k, line in enumerate(lines) if re.fullmatch(r"-+:?", line[0]))
        header = [
            " ".join(filter(None, cells)) for cells in zip(*lines[:rule], strict=True)
        ]
        rows: list[list[str]] = []
        for line in lines[rule + 1 :]:
            if line[0] or not rows:
                rows.append(line)
            else:
                rows[-1] = [
                    f"{a} {b}".strip() for a, b in zip(rows[-1], line, strict=True)
                ]
        found.append((header, rows))
    return found


def assert_readable(text: str, columns: int = 80) -> None:
    """Require that a printed text fits a terminal, except for words that cannot be
    broken and options to copy, and that no two columns of a table have one name.
    """
    for line in text.splitlines():
        assert len(line) <= columns or len(line.split()) <= 2 or line[:2] == "--", line
    for header, _ in tables_of(text):
        assert len({*header}) == len(header), header
