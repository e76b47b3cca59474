"""Which tests `make check` leaves out: those that take long, by a measurement.

    make test PYTEST_ARGS=--junitxml=times.xml
    python -m tests.slow times.xml
    make check PYTEST_ARGS=--junitxml=times.xml       a module's fixtures may cost its next test now
    python -m tests.slow times.xml

The second command updates `tests/slow.txt` for the tests that the report has. A line is
a test function:

    tests/model/test_a.py::test_b          all of its cases are slow
    tests/model/test_a.py::test_c[1:]      only its cases together are: the first stays
"""

import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

LIST = Path(__file__).with_suffix(".txt")
CASE_S, CASES_S = 0.3, 0.7
"""Seconds of a slow case, on average, and of many quick cases together."""


def function_name(item_id: str) -> str:
    """Return the name of a test without its case: `tests/test_a.py::test_b[c]` ->
    `tests/test_a.py::test_b`.
    """
    return item_id.partition("[")[0]


def slow_tests() -> set[str]:
    """Return the lines of the list."""
    return set(LIST.read_text(encoding="utf-8").split())


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the tests in the list as slow; `items` have the cases in their order."""
    listed = slow_tests()
    functions: set[str] = set()
    for item in items:
        function = function_name(item.nodeid)
        is_first = function not in functions
        functions.add(function)
        if function in listed or (not is_first and f"{function}[1:]" in listed):
            item.add_marker(pytest.mark.slow)


def update(listed: set[str], report: Path) -> set[str]:
    """Return the lines of the list after the times of a JUnit report."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        name = function_name(f"{file}::{case.attrib['name']}")
        seconds[name].append(float(case.attrib["time"]))
    lines = {line for line in listed if function_name(line) not in seconds}
    for name, times in seconds.items():
        if sum(times) / len(times) >= CASE_S:
            lines.add(name)
        # One case may be the first of a function whose others are left out.
        elif sum(times) >= CASES_S or (len(times) == 1 and f"{name}[1:]" in listed):
            lines.add(f"{name}[1:]")
    return lines


if __name__ == "__main__":
    lines = update(slow_tests(), Path(sys.argv[1]))
    LIST.write_text("".join(f"{line}\n" for line in sorted(lines)), encoding="utf-8")
