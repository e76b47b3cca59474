"""Sizes, colours and titles that all figures share, and how they are saved."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # files only; no display is needed

from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fcsd.base.errors import UserError

SIZE = (6.4, 3.8)
GREY = "0.6"
Colours = Mapping[str, str]


def model_colours(names: Sequence[str], original: str = "original") -> dict[str, str]:
    """Return a colour for every model of a report, by its position; the original is
    dark grey.
    """
    converted = [name for name in names if name != original]
    return {original: "0.25"} | {
        name: f"C{index % 10}" for index, name in enumerate(converted)
    }


def set_title(axis: Any, title: str, note: str = "") -> None:
    """Set a title and, in red below it, the mark of a quick look."""
    axis.set_title(title, fontsize="medium", pad=20 if note else None)
    if note:
        position = {
            "xy": (0.5, 1.0),
            "xycoords": "axes fraction",
            "xytext": (0, 6),
            "textcoords": "offset points",
        }
        axis.annotate(note, ha="center", fontsize="small", color="tab:red", **position)


def set_log_scale(axis: Any) -> None:
    """Make the value axis logarithmic, with ticks as plain numbers, unless no value is
    above 0; call it when all values are drawn.
    """
    if not axis.dataLim.ymax > 0:
        return
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    # Three ticks per decade are too dense over many decades, and one is too few over
    # two.
    ticks = (1, 2, 5) if high < 200 * low else (1,)
    axis.yaxis.set_major_locator(LogLocator(subs=ticks))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def draw(axis: Any, x: Sequence[float], y: Sequence[float], **style: Any) -> None:
    """Draw points with their errors (`xerr`, `yerr`), joined in their order unless
    `linestyle` is "none".
    """
    axis.errorbar(x, y, **({"marker": "o", "markersize": 4, "capsize": 2} | style))


def finish(axis: Any, grid: Literal["both", "y"] = "both") -> None:
    """Add grid and legend, when all values are drawn."""
    axis.grid(alpha=0.3, axis=grid)
    axis.legend()


def legend_beside(axis: Any) -> None:
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def save_figure(figure: Figure, path: Path, *, around: bool = False) -> None:
    """Save and close the figure.

    around: labels and legend extend the picture around axes that keep their size;
    otherwise the axes shrink to make room for them.
    """
    # Renamed at the end, so that a reader never sees half a picture.
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
    `fcsd.base.writing.check_file_place`.
    """
    with path.open("rb") as file:
        # PNG stores its text chunks before the pixels.
        if b"tEXtSoftware\0fcsd" not in file.read(1024):
            raise UserError(f"{path}: not a figure of fcsd")
