"""The list of slow tests follows measured times, and marks what `make check` leaves out
(slow.py).
"""

from pathlib import Path

import pytest

from tests import slow

# Seconds of the cases of each function of tests/test_a.py.
TIMES = {
    "test_long": [0.6, 0.5], "test_many": [0.25] * 8, "test_first": [0.01], "test_quick": [0.01, 0.02],
    "test_quick_now": [0.1],
}  # fmt: skip


class Item:
    """What `mark_slow` needs of a test's case."""

    def __init__(self, name: str) -> None:
        self.nodeid = f"tests/test_a.py::{name}"
        self.marks: list[str] = []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.name)


def test_a_list_follows_the_times_of_a_report_and_keeps_what_was_not_measured(
    tmp_path: Path,
) -> None:
    cases = "".join(
        f'<testcase classname="tests.test_a" name="{name}[{case}]" time="{seconds}"/>'
        for name, times in TIMES.items()
        for case, seconds in enumerate(times)
    )
    report = tmp_path / "times.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    listed = {
        "tests/test_a.py::test_first[1:]",
        "tests/test_a.py::test_quick_now",
        "tests/test_b.py::test_not_measured",
        "tests/test_b.py::test_not_measured_either[1:]",
    }
    assert slow.update(listed, report) == {
        "tests/test_a.py::test_long",
        "tests/test_a.py::test_many[1:]",
        "tests/test_a.py::test_first[1:]",  # its other cases may have been left out
        "tests/test_b.py::test_not_measured",
        "tests/test_b.py::test_not_measured_either[1:]",
    }


def test_all_cases_of_a_listed_test_are_marked_or_all_but_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow, "LIST", tmp_path / "slow.txt")
    slow.LIST.write_text("tests/test_a.py::test_long\ntests/test_a.py::test_many[1:]\n")
    marked = ["test_long[x]", "test_long[y]", "test_many[y]", "test_many[z]"]
    names = [*marked[:2], "test_many[x]", *marked[2:], "test_quick", "test_longer"]
    items = [Item(name) for name in names]
    slow.mark_slow(items)  # type: ignore[arg-type]
    assert [item.nodeid.partition("::")[2] for item in items if item.marks] == marked
    assert all(item.marks in ([], ["slow"]) for item in items)
