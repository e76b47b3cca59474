"""The page on plans has the kernels that the benchmark compares with published traces."""

from benchmarks.plan_kernels import CLASSES, TRACES, compared_classes, within
from tests.support import ROOT


def test_the_page_has_the_planned_milliseconds_of_each_class() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for trace in TRACES:
        cells = compared_classes(trace)
        digits = 0 if trace.settings.get("phase") is None else 1
        shown = [
            ""
            if name not in cells
            else " / ".join(f"{x:.{digits}f}" for x in cells[name])
            for name in CLASSES[:-1]  # the page leaves out gaps
        ]
        row = "".join(f" {cell} |" if cell else " |" for cell in shown)
        assert any(line.endswith(row) for line in lines), (trace.title, row)


def test_the_page_says_how_many_classes_are_met() -> None:
    page = " ".join((ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split())
    (close, number), (twice, _), (thrice, _) = (within(x) for x in (1.5, 2.0, 3.0))
    said = f"{close} of {number} are within a factor of 1.5, {twice} within 2, {thrice} within 3"
    assert said in page
