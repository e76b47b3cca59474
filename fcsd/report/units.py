"""The units of figures: scores in per cent, and their differences in points; divergences
in nats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fcsd.evaluation.kinds import KINDS


@dataclass(frozen=True)
class Unit:
    """How the figures of a task are written. amount: the unit of a difference."""

    scale: float
    decimals: int
    amount: str

    def value(self, value: float | None) -> str:
        """Format `97.5`; `-` for none."""
        if value is None or not math.isfinite(value):
            return "-"
        return f"{self.scale * value:.{self.decimals}f}"

    def with_error(self, value: str, stderr: float | None) -> str:
        """Format `97.5 ± 1.1`; `97.5 ± –` for one item."""
        error = "–" if stderr is None else self.value(stderr)
        return f"{value} ± {error}"

    def signed(self, value: float) -> str:
        """Format a difference with its sign: `-3.1`, `+0.4`, `0.0`."""
        text = f"{self.scale * value:+.{self.decimals}f}"
        # A value that rounds to 0 is shown without a sign.
        return text if float(text) else text[1:]

    def interval(self, interval: Sequence[float] | None) -> str:
        """Format `-5.5 to -0.7`; `-` where there is none."""
        if interval is None:
            return "-"
        return f"{self.signed(interval[0])} to {self.signed(interval[1])}"


PER_CENT = Unit(100.0, 1, "points")
NATS = Unit(1.0, 3, "nats")


def is_distance(row: Mapping[str, Any]) -> bool:
    """Tell whether a task's figure is a divergence from the original (own text); that
    of the mean over tasks is none.
    """
    return "kind" in row and KINDS[row["kind"]].distance


def unit_of(row: Mapping[str, Any]) -> Unit:
    """Return the unit of a task's row; the mean's is that of scores."""
    return NATS if is_distance(row) else PER_CENT
