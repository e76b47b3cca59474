"""The page on plans has the kernels that the benchmark compares with published traces."""

import re
from unittest.mock import patch

import pytest

from benchmarks.plan_kernels import (
    CLASSES,
    IMPLIED,
    TRACES,
    Trace,
    Traced,
    compared_classes,
    implied,
    priced,
    within,
)
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.times import plan_times
from tests.support import ROOT


@pytest.mark.breadth
def test_the_page_has_the_planned_milliseconds_of_each_class() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    for trace in TRACES:
        cells = compared_classes(trace)
        digits = 0 if trace.settings.get("phase") is None else 1
        shown = [
            ""
            if name not in cells
            else "/".join(f"{x:.{digits}f}" for x in cells[name])
            for name in CLASSES[:-1]  # the page leaves out gaps
        ]
        row = "".join(f" {cell} |" if cell else " |" for cell in shown)
        assert any(line.endswith(row) for line in lines), (trace.title, row)


@pytest.mark.breadth
def test_the_page_says_how_many_classes_are_met() -> None:
    page = " ".join((ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split())
    (close, number), (twice, _), (thrice, _) = (within(x) for x in (1.5, 2.0, 3.0))
    said = f"{close} of {number} are within a factor of 1.5, {twice} within 2, {thrice} within 3"
    assert said in page


def gain(trace: Trace, **times: float) -> tuple[float, float]:
    """Return the speed-ups of a plan and of one whose classes take longer."""
    plan = priced(trace)
    traced = Traced(plan.roofline, plan, dict.fromkeys(CLASSES, 1.0) | times)
    own = plan_times(plan)["speed_up"]
    with patch.object(Planned, "roofline", property(lambda _: traced)):
        return own, plan_times(plan)["speed_up"]


@pytest.mark.parametrize("trace", IMPLIED, ids=lambda trace: trace.title)
def test_planned_kernels_imply_the_planned_gain(trace: Trace) -> None:
    own, with_kernels = gain(trace)
    assert with_kernels == pytest.approx(own)


def test_a_trace_of_a_tensor_parallel_server_implies_what_its_all_reduces_leave():
    """In line they take twice as long; beside computation, as long as planned."""
    (trace,) = (trace for trace in IMPLIED if "Mistral" in trace.title)
    own, longer = gain(trace, exchanges=2.0)
    times = plan_times(priced(trace))
    more_s = times["communication_s"]
    # What nothing hides is in line in both: the last layer's sums.
    exposed_s = 2 * times["exchange_s"]["all_reduce"]
    regular_s, overlapped_s = times["regular_s"], times["overlapped_s"]
    assert own == pytest.approx(regular_s / overlapped_s)
    assert longer == pytest.approx(
        (regular_s + more_s) / (overlapped_s + exposed_s), rel=0.01
    )


@pytest.mark.breadth
def test_nine_of_ten_traces_imply_a_gain_in_the_range_that_a_plan_prints() -> None:
    gains = {trace.title: implied(trace) for trace in IMPLIED}
    inside = [
        title for title, (own, ends) in gains.items() if ends[0] <= own <= ends[1]
    ]
    assert len(gains) >= 10
    assert len(inside) / len(gains) >= 0.9
    page = " ".join((ROOT / "docs" / "plan.md").read_text(encoding="utf-8").split())
    assert (
        f"{len(inside)} of {len(gains)} lie in the range that the plan prints" in page
    )
    (out,) = gains.keys() - set(inside)
    own, (least, most) = gains[out]
    said = re.search(r"\((\S+)'s (\d+) % above (\d+) to (\d+) %", page)
    assert said is not None and said[1] in out
    assert [int(said[k]) for k in (2, 3, 4)] == [
        round(100 * x) for x in (own, least, most)
    ]


def test_the_traces_are_eight_of_five_sources() -> None:
    sources = {re.split(r"[ ,]", trace.source)[0].split("/")[0] for trace in TRACES}
    assert len(TRACES) >= 8
    assert len(sources) >= 5
