"""Text is laid out for a terminal, and nothing is lost."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

from fcsd.base.text import fit, markdown, terminal_columns
from tests.terminal import tables_of

WORDS = "tensor-parallel ranks sum it with the routed experts before they go on"


def test_a_table_that_is_wide_has_cells_of_several_lines_under_one_rule() -> None:
    wide = markdown(
        ["schedule", "what it assumes", "times as fast as the best exact"],
        [["two half batches", WORDS, "1.056 to 1.154"], ["regular", "", "1.000"]],
        left=2,
    )
    assert fit(wide, 60).splitlines() == [
        "| schedule         | what it assumes   |  times as fast as |",
        "|                  |                   |    the best exact |",
        "|------------------|-------------------|------------------:|",
        "| two half batches | tensor-parallel   |    1.056 to 1.154 |",
        "|                  | ranks sum it with |                   |",
        "|                  | the routed        |                   |",
        "|                  | experts before    |                   |",
        "|                  | they go on        |                   |",
        "| regular          |                   |             1.000 |",
    ]
    assert fit(wide, 200) == fit(wide, None) == wide


def cells_of(text: str, names: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return (row, column) -> cell of a table, or of its blocks; folded cells whole."""
    found: dict[tuple[str, str], str] = {}
    for table in text.split("\n\n"):
        header, rows = tables_of(table)[0]
        for row in rows:
            found |= {
                (row[0], name): cell for name, cell in zip(header, row, strict=True)
            }
    return found


@pytest.mark.parametrize("columns", [40, 60, 80, 100])
def test_a_table_of_many_numbers_is_split_and_every_number_keeps_its_row_and_column(
    columns: int,
) -> None:
    names = ["nodes", *(f"column {letter} of some length" for letter in "abcdefghij")]
    rows = [
        [str(row), *(f"{1000 * row + k:,} ± {k}.{row}" for k in range(10))]
        for row in range(3)
    ]
    text = fit(markdown(names, rows), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert cells_of(text, names) == {
        (row[0], name): cell
        for row in rows
        for name, cell in zip(names, row, strict=True)
    }
    # Numbers on the right, below their header.
    assert all(line.endswith(":|") for line in text.splitlines() if line[:3] == "|--")


def test_lists_of_layers_are_folded_after_commas_and_numbers_are_not() -> None:
    layers = ",".join(map(str, range(0, 90, 2)))
    text = fit(markdown(["layers", "parameters"], [[layers, "653,908,770,816"]]), 50)
    assert max(map(len, text.splitlines())) <= 50
    assert "653,908,770,816 |" in text
    folded = "".join(line.split("|")[1].strip() for line in text.splitlines()[2:])
    assert folded == layers


@pytest.mark.parametrize(
    ("line", "begins"),
    [
        (f"plain {WORDS}", ""),
        (f"model      {WORDS}", " " * 11),
        (f"- {WORDS}", "  "),
        (f"  - {WORDS}", "    "),
        (f"              {WORDS}", " " * 14),
        (f"  layers: [{', '.join(map(str, range(40)))}]", "    "),
    ],
)
def test_prose_is_folded_between_words_and_continues_below_its_text(
    line: str, begins: str
) -> None:
    first, *others = fit(line, 40).splitlines()
    assert others and max(map(len, (first, *others))) <= 40
    assert all(re.match(rf"{begins}\S", other) for other in others)
    assert " ".join([first, *(other.strip() for other in others)]) == line


def test_a_width_that_is_none_is_taken_as_a_small_one() -> None:
    text = f"model      {WORDS}\n\n{markdown(['a b', 'c'], [[WORDS, '1']])}\n--layers 1"
    assert fit(text, 1) == fit(text, 20)


def test_what_is_to_be_copied_or_cannot_be_broken_stays_whole() -> None:
    layers = ",".join(map(str, range(0, 99, 2)))
    option = f"--attention full --layers {layers}"
    assert fit(option, 80) == f"--attention full --layers \\\n    {layers}"
    assert fit("    fcsd plan MODEL --phase decode", 25).splitlines() == [
        "    fcsd plan MODEL \\", "    --phase decode",
    ]  # fmt: skip
    path = f"/{'folder/' * 20}report.html"
    assert path in fit(f"report: {path}", 80).split("\n")
    name = "V" * 50
    assert name in fit(markdown(["class", "n"], [[name, "1"]]), 40)


def test_a_pipe_gets_whole_lines_unless_columns_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert terminal_columns() is None
    for value, expected in (("72", 72), ("", None), ("0", None), ("wide", None)):
        monkeypatch.setenv("COLUMNS", value)
        assert terminal_columns() == expected


def test_a_terminal_gets_its_own_width() -> None:
    """A terminal of 80 columns in another process, whose output is read from here."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-m", "fcsd", "families"]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    process = subprocess.Popen(words, stdout=theirs, env=environment)
    os.close(theirs)
    read = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
        read += part
    os.close(ours)
    assert process.wait() == 0
    lines = read.decode().replace("\r\n", "\n").splitlines()
    assert 70 < max(map(len, lines)) <= 80
    piped = subprocess.run(words, capture_output=True, env=environment, check=True)
    assert max(map(len, piped.stdout.decode().splitlines())) > 150
