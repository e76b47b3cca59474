"""Figures and cells of tables in the style of fcsd's reports."""

from fcsd.report.figure import (
    GREY,
    SIZE,
    legend_beside,
    model_colours,
    save_figure,
    set_title,
)
from fcsd.report.study_plots import plot_timelines
from fcsd.report.table import percent, with_error
from fcsd.report.verdict import quick_look

__all__ = [
    "GREY",
    "SIZE",
    "legend_beside",
    "model_colours",
    "percent",
    "plot_timelines",
    "quick_look",
    "save_figure",
    "set_title",
    "with_error",
]
