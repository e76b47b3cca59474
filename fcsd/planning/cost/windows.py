"""The file of windows that `fcsd plan --windows` writes: the time in which each
exchange is hidden.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeFloat, model_validator

from fcsd.base.files import read_editable, write_sealed
from fcsd.base.strict import Strict, validate


class Windows(Strict):
    """The file of `write_windows`, in seconds by MoE layer."""

    version: Literal[1] = 1
    model_type: str
    num_layers: int | None = None
    expert_parallel: int | None = None
    layers: list[int]
    dispatch_s: list[NonNegativeFloat]
    combine_s: list[NonNegativeFloat]

    @model_validator(mode="after")
    def _check_lengths(self) -> "Windows":
        if not len(self.layers) == len(self.dispatch_s) == len(self.combine_s):
            raise ValueError(
                "dispatch_s and combine_s need one number per layer of `layers`"
            )
        return self


def read_windows_file(path: str | Path) -> Windows:
    """Read a file of `fcsd plan --windows`."""
    value = read_editable(
        Path(path), "fcsd plan --windows", ["dispatch_s", "combine_s"]
    )
    return validate(Windows, value, str(path))


def write_windows(facts: Mapping[str, Any], path: Path) -> None:
    """Write the windows of the forward pass, in seconds by MoE layer, for
    `fcsd-steer bias`.
    """
    rows = facts["times"]["windows"]
    write_sealed(
        path,
        {
            "version": 1,
            "model_type": facts["model_type"],
            "num_layers": facts["settings"]["num_layers"],
            "expert_parallel": facts["settings"]["expert_parallel"],
            "layers": [row["layer"] for row in rows],
            "dispatch_s": [row["dispatch_s"] for row in rows],
            "combine_s": [row["combine_s"] for row in rows],
        },
    )
