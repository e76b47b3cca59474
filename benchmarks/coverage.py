"""Simulate how often the 95 % interval of the mean contains the true mean of the
differences.

    python benchmarks/coverage.py [--draws 4000] [--json OUT]

A case is a number of tasks, their numbers of items, and the shares of items gained and
lost; an item is gained, lost or unchanged independently of the others. Grid: 1 to 30
tasks of 1 to 2,000 items, equally large or of all sizes at once, true differences of 0
to -95 points, 0 to 20 % of items gained beside those lost. For each size it prints the
least coverage, the case that has it, and half the width of the interval in points, at
-5 points without gains.

A case below 94 % is simulated again with ten times the draws, so that the least of
thousands is not just the unluckiest.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from fcsd.base.stats import Interval, interval, mean_interval  # noqa: E402

TARGET = 0.93
SIZES = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
MIXED = (1, 2, 5, 20, 100, 500, 2000)
NUM_TASKS = (1, 2, 3, 5, 11, 30)
LOSSES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)
GAINED = (0.0, 0.005, 0.02, 0.05, 0.2)


@cache
def _known(gained: int, lost: int, count: int) -> Interval:
    bounds = interval([1.0] * gained + [-1.0] * lost + [0.0] * (count - gained - lost))
    assert bounds is not None
    return bounds


def coverage(
    sizes: Sequence[int], gained: float, lost: float, draws: int, seed: int = 0
) -> tuple[float, float]:
    """Return the share of draws whose interval contains lost - gained, and half its
    mean width.
    """
    rng = numpy.random.default_rng(seed)
    unchanged = max(0.0, 1 - gained - lost)
    drawn = [
        rng.multinomial(size, [gained, lost, unchanged], size=draws).tolist()
        for size in sizes
    ]
    held, half = 0, 0.0
    for rows in zip(*drawn, strict=True):
        deltas = [
            (up - down) / size for (up, down, _), size in zip(rows, sizes, strict=True)
        ]
        limits = [
            _known(up, down, size)
            for (up, down, _), size in zip(rows, sizes, strict=True)
        ]
        low, high = mean_interval(deltas, limits)
        held += low - 1e-12 <= gained - lost <= high + 1e-12
        half += (high - low) / 2
    return held / draws, half / draws


def cases() -> list[tuple[str, tuple[int, ...], float, float]]:
    """List the name of the sizes, the sizes, and the shares gained and lost."""
    shapes = [
        (str(size), (size,) * number) for size in SIZES for number in NUM_TASKS
    ] + [("mixed", MIXED)]
    return [
        (name, sizes, gained, gained + loss)
        for (name, sizes), loss, gained in itertools.product(shapes, LOSSES, GAINED)
        if loss + 2 * gained <= 1
    ]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    rows: dict[str, dict[str, Any]] = {}
    for name, sizes, gained, lost in cases():
        held, half = coverage(sizes, gained, lost, options.draws)
        if held < 0.94:
            held, half = coverage(sizes, gained, lost, 10 * options.draws, seed=1)
        row = rows.setdefault(name, {"cases": 0, "coverage": math.inf})
        row["cases"] += 1
        if held < row["coverage"]:
            row |= {
                "coverage": held,
                "tasks": len(sizes),
                "gained": gained,
                "lost": lost,
            }
        if (gained, lost) == (0.0, 0.05) and len(sizes) in (7, 11):
            row["half_width"] = half
    print(
        "items  cases  least coverage  (tasks, gained, lost)   half width at -5, 11"
        " tasks"
    )
    for name, row in rows.items():
        case = (
            f"({row['tasks']}, {100 * row['gained']:.1f} %, {100 * row['lost']:.1f} %)"
        )
        print(
            f"{name:>5}  {row['cases']:5}  {row['coverage']:14.3f}  {case:22} "
            f" {100 * row['half_width']:.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return int(min(row["coverage"] for row in rows.values()) < TARGET)


if __name__ == "__main__":
    sys.exit(main())
