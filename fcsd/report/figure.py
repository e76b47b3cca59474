"""What all figures share: sizes and colours, titles, and how a figure is written."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fcsd.base.errors import UserError

SIZE = (6.4, 3.8)
GREY = "0.6"
Colours = Mapping[str, str]


def model_colours(names: Sequence[str], original: str = "original") -> dict[str, str]:
    """Give every model of a report its colour, by its place among them; the original is
    dark grey.
    """
    others = [name for name in names if name != original]
    return {original: "0.25"} | {
        name: f"C{index % 10}" for index, name in enumerate(others)
    }


def set_title(axis: Any, title: str, note: str = "") -> None:
    """Write a title, and in red below it the mark of a quick look."""
    axis.set_title(title, fontsize="medium", pad=20 if note else None)
    if note:
        place = {
            "xy": (0.5, 1.0),
            "xycoords": "axes fraction",
            "xytext": (0, 6),
            "textcoords": "offset points",
        }
        axis.annotate(note, ha="center", fontsize="small", color="tab:red", **place)


def legend_beside(axis: Any) -> None:
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def save_figure(figure: Figure, path: Path, *, around: bool = False) -> None:
    """Write the figure; around: names and legend stand around axes of the size they
    were given, not inside it.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    if not around:
        figure.tight_layout()
    figure.savefig(
        temporary,
        dpi=130,
        format="png",
        bbox_inches="tight",
        metadata={"Software": "fcsd"},
    )
    plt.close(figure)
    temporary.replace(path)


def check_figure(path: Path) -> None:
    """Raise UserError for a file that `save_figure` did not write, for
    `fcsd.base.files.check_file_place`.
    """
    with path.open("rb") as file:
        # PNG's words stand before the picture
        if b"tEXtSoftware\0fcsd" not in file.read(1024):
            raise UserError(f"{path}: no figure of fcsd")
