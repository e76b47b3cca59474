"""Format output for people: Markdown rows, sizes, durations, scores with their standard
errors, and the progress of an evaluation or of a run of several stages; lay out results
for a terminal: prose is folded between words; a Markdown table that is too wide gets
cells of several lines, or is split by columns.
"""

import math
import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, TextIO

# Metrics in nats, of which less is better and min_delta is a share of the score.
RELATIVE = ("heldout_kl", "own_text_kl")


def scored_row(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of an `early_stopping` section that names the score: its task, or
    the section itself for held-out KL.
    """
    task = section.get("task")
    return task if isinstance(task, Mapping) else section


def stopping_text(section: Mapping[str, Any]) -> str:
    """Name the score of an `early_stopping` section of a recipe or a manifest:
    "acc_norm of hellaswag on `Rowan/hellaswag`, split `train`".
    """
    row = scored_row(section)
    if row.get("metric") == "heldout_kl":
        return "KL to the original on held-out text"
    metric = str(row.get("metric")).partition(",")[0]
    of = f" of {row['task']}" if row.get("kind", "code") != "code" else ""
    split = f", split `{row['split']}`" if row.get("split") else ""
    return f"{metric}{of} on `{row.get('dataset')}`{split}"


_METRICS = {
    "acc": "accuracy",
    "acc_norm": "accuracy by length",
    "exact_match": "exact match",
    "em": "exact match",
}


def metric_words(metric: str) -> str:
    """Format lm-eval's `metric,filter` for people: `em,strict-match` -> `exact match
    (strict match)`.
    """
    name, _, rule = metric.partition(",")
    words = _METRICS.get(name, name.replace("_", " "))
    return words if rule in ("", "none") else f"{words} ({rule.replace('-', ' ')})"


def plus_minus(value: float, error: float | None, sign: str = "") -> str:
    """Format `0.4120 ± 0.0250`, with more digits for small values; the error is left
    out where it is None.
    """
    size = max(abs(value), error or 0.0)
    # Scores have equally many digits, so that columns align; small KLs need more.
    digits = 4 if size >= 0.01 else _decimals(size)
    text = f"{value:{sign}.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"


def calibration_kl_text(kl: Mapping[str, Any] | None) -> str:
    """Describe the KL that a calibration measured, `kl` in its manifest; "" where it
    held out no text.
    """
    if not kl or not kl["num_tokens"]:
        return ""
    calibrated, copied = (
        plus_minus(kl[name]["kl"], kl[name]["stderr"])
        for name in ("calibrated", "copied")
    )
    worse = kl["calibrated"]["kl"] >= kl["copied"]["kl"]
    return (
        f"KL to the original {calibrated} nats per token, with copied weights {copied},"
        f" on {kl['num_tokens']:,} tokens that no map was fitted"
        f" on{' (the calibration did not help: give more text)' if worse else ''}"
    )


def nats(value: float) -> str:
    """Format a KL or a loss with four significant digits, however small it is: `1.062`,
    `0.00001234`; 0 is `0`.
    """
    return f"{value:.{_decimals(value)}f}" if value else "0"


def _decimals(value: float) -> int:
    """Count the decimals that give a number four significant digits, 12 at most."""
    if value and math.isfinite(value):
        return min(12, max(0, 3 - math.floor(math.log10(abs(value)))))
    return 4


def items_text(metric: str, num_items: int | None, num_items_total: int | None) -> str:
    """Format `40 of 378 items`, or `256 rows` for held-out text."""
    if metric == "heldout_kl":
        return f"{num_items} rows"
    if num_items_total is None:
        return f"{num_items} items"
    return f"{num_items} of {num_items_total} items"


def duration(seconds: float) -> str:
    """Format `45 s`, `12 min`, `3 h 05 min`."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(value: int) -> str:
    """Format `31.4 GiB`, `512.0 KiB`."""
    number, unit = float(value), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


Rows = Sequence[Sequence[str]]


def markdown(header: Sequence[str], rows: Rows, left: int = 1) -> str:
    """Format a Markdown table that also reads well as plain text: columns are padded,
    and all but the first `left` of them are aligned to the right.
    """
    widths = [
        max(len(line[index]) for line in [header, *rows])
        for index in range(len(header))
    ]

    lines = [table_line(cells, widths, left) for cells in (header, *rows)]
    return "\n".join([lines[0], table_rule(widths, left), *lines[1:]])


def table_line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    """Format one line of a `markdown` table."""
    padded = [
        cell.ljust(width) if index < left else cell.rjust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def table_rule(widths: Sequence[int], left: int) -> str:
    """Format the line below the header of a `markdown` table: columns on the left are
    ruled `|----|`; the others `|---:|`, which aligns them to the right.
    """
    rule = "|".join(
        "-" * (width + 1) + ("-" if index < left else ":")
        for index, width in enumerate(widths)
    )
    return f"|{rule}|"


def named(name: str, text: str, width: int = 13) -> str:
    """Format one line of a list of facts, `name          text`: the texts of all lines
    with this width of names begin in one column.
    """
    return f"{name:<{width}} {text}"


def fold(summary: str, text: str) -> str:
    """Fold a part of a Markdown page under a summary line that opens it."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"


STEPS_BAR = "{desc} {n_fmt}/{total_fmt} |{bar}| [{remaining}]{postfix}"
"""Format of a bar whose postfix is long: shorter than tqdm's own, which leaves no room
for a bar at 80 columns and cuts the end of the postfix.
"""


def progress_bar(values: Any = None, *, shown: bool = True, **options: Any) -> Any:
    """Make a tqdm bar over `values`; it draws nothing where `shown` is False or
    TQDM_DISABLE=1 is set.

    tqdm reads its environment variables as defaults, which any explicit argument
    overrules, `disable=False` too: the argument is therefore passed only to disable.
    """
    from tqdm import tqdm

    return tqdm(values, **options) if shown else tqdm(values, disable=True, **options)


def draws_foreign_bars() -> bool:
    """Tell whether libraries may draw their many short bars: only on a terminal, and
    without TQDM_DISABLE=1.
    """
    return sys.stderr.isatty() and not os.environ.get("TQDM_DISABLE")


@dataclass(frozen=True)
class Work:
    """The work that one part asks of a model: an item of MMLU with five shots takes as
    long as ten of PIQA.

    unit: of `amount`, such as characters that the model reads, or tokens that it may
    write; each has its own pace.
    """

    items: int
    unit: str
    amount: float


class Progress:
    """Counts tasks, or stages; estimates the time left from the remaining work, at each
    kind's pace so far.

    tasks: name -> work of each remaining task, in order. kept: number of tasks that
    were finished before. label: (name, position, work) -> beginning of the line. ended:
    (name, duration) -> the line with a task's duration. noun: the word for a task.
    """

    def __init__(
        self,
        tasks: Mapping[str, Work],
        kept: int = 0,
        *,
        label: Callable[[str, str, Work], str] = "[{1}] {0}: {2.items} items".format,
        ended: Callable[[str, str], str] | None = None,
        noun: str = "task",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.tasks = dict(tasks)
        self.kept = kept
        self._stream = stream
        self._clock = clock
        self._label, self._ended, self._noun = label, ended, noun
        self._began = clock()
        # Unit -> seconds, and the amount of work that was done in them.
        self._spent: dict[str, tuple[float, float]] = {}
        self._current: tuple[str, float] | None = None

    def start(self, task: str) -> None:
        """Print that `task` begins and the previous task has ended."""
        self.end()
        self._current = task, self._clock()
        names = list(self.tasks)
        position = f"{self.kept + names.index(task) + 1}/{self.kept + len(names)}"
        line = self._label(task, position, self.tasks[task])
        if time_left := self.left():
            line += (
                f"; {duration(self._clock() - self._began)} so far, {time_left} left"
            )
        self._print(line)

    def end(self) -> None:
        """Count the time of the current task, which has ended, and say it where `ended`
        has words for it.
        """
        if self._current is not None and self._ended is not None:
            task, began = self._current
            self._print(self._ended(task, duration(self._clock() - began)))
        self._spent, self._current = self._with_current(1.0), None

    def _print(self, line: str) -> None:
        print(line, file=self._stream or sys.stderr, flush=True)

    def left(self, done: float = 0.0) -> str:
        """Estimate the time that remains once the share `done` of the current task is
        finished; "" while there is nothing to estimate from."""
        assert self._current is not None
        names, spent = list(self.tasks), self._with_current(done)
        # Each kind of work has its pace, in seconds per unit.
        pace = {
            unit: seconds / amount
            for unit, (seconds, amount) in spent.items()
            if amount
        }
        # The current task counts with the share that is still to do.
        coming = [self.tasks[name] for name in names[names.index(self._current[0]) :]]
        parts = [
            (work.unit, work.amount * (1 if index else 1 - done))
            for index, work in enumerate(coming)
        ]
        estimates = [pace[unit] * amount for unit, amount in parts if unit in pace]
        if sum(estimates) < 1:
            return ""
        # A kind of work that is still to come may have no pace yet. What is missing from
        # the sum is counted beside it: most of a run may lie there.
        missing = sum(unit not in pace and amount > 0 for unit, amount in parts)
        time_left = f"about {duration(sum(estimates))}"
        if not missing:
            return time_left
        return f"{time_left} + {missing} {self._noun}{'' if missing == 1 else 's'}"

    def _with_current(self, done: float) -> dict[str, tuple[float, float]]:
        """Return unit -> seconds and amount so far, with the share `done` of the
        current task.
        """
        if self._current is None or not done:
            return self._spent
        (task, began), spent = self._current, dict(self._spent)
        work = self.tasks[task]
        seconds, amount = spent.get(work.unit, (0.0, 0.0))
        return spent | {
            work.unit: (seconds + self._clock() - began, amount + done * work.amount)
        }


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
