"""The headline figures of README and docs: each has one source, and all quotations
agree with it (figures.yaml).
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FIGURES: list[dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests" / "figures.yaml").read_text(encoding="utf-8")
)
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
DECISIONS = "docs/decisions.md"

every_figure = pytest.mark.parametrize(
    "figure", FIGURES, ids=lambda figure: figure["figure"]
)


def sections(text: str) -> list[str]:
    """Cut a page into its introduction and its sections, each on one line."""
    return [flat(section) for section in re.split(r"^(?=## )", text, flags=re.M)]


def flat(text: str) -> str:
    """Replace each run of white space by one space, so that a page's line breaks and
    padded tables do not matter.
    """
    return " ".join(text.split())


def numbers(text: str) -> set[float]:
    """Find the numbers of a text that are not part of a name such as `p2p`."""
    return {
        float(number) for number in re.findall(r"(?<![\w.,-])\d+(?:\.\d+)?(?!\w)", text)
    }


@every_figure
def test_a_figure_stands_in_its_page_with_date_machine_and_setting(
    figure: dict[str, Any],
) -> None:
    introduction, *others = sections(PAGES[figure["home"]])
    (section,) = [one for one in (introduction, *others) if figure["text"] in one]
    assert [
        words for words in figure["with"] if words not in introduction + section
    ] == []


@every_figure
def test_what_quotes_a_figure_has_its_numbers(figure: dict[str, Any]) -> None:
    for page, words in figure.get("quoted", {}).items():
        assert words in flat(PAGES[page]), f"{page} should say: {words}"
        assert numbers(words) <= numbers(figure["text"]) | set(
            figure.get("numbers", [])
        )


@every_figure
def test_a_figure_stands_nowhere_else_and_its_kinder_versions_in_the_decisions_alone(
    figure: dict[str, Any],
) -> None:
    seek = figure.get("seek", re.escape(figure["text"]))
    stands = {page for page, text in PAGES.items() if re.search(seek, flat(text))}
    assert stands <= {figure["home"], *figure.get("quoted", {})}
    kinder = [
        words
        for page, text in PAGES.items()
        if page != DECISIONS
        for words in figure.get("kinder", [])
        if words in flat(text)
    ]
    assert kinder == []


@pytest.mark.parametrize(
    "figure",
    [one for one in FIGURES if "log" in one],
    ids=lambda figure: figure["figure"],
)
def test_a_figure_is_that_of_the_last_entry_of_the_decisions_on_its_benchmark(
    figure: dict[str, Any],
) -> None:
    (date,) = [
        start[0]
        for words in figure["with"]
        if (start := re.match(r"\d{4}-\d\d-\d\d", words))
    ]
    entries = re.findall(
        r"^- (\d{4}-\d\d-\d\d): (.*(?:\n  .*)*)", PAGES[DECISIONS], flags=re.M
    )
    assert len(entries) > 50
    assert [
        (day, text) for day, text in entries if figure["log"] in text and day > date
    ] == []


def demo_table(page: str, start: str, end: str) -> dict[str, list[str]]:
    """Read a table of models: name -> cells."""
    lines = PAGES[page].partition(start)[2].partition(end)[0].splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("|")
    ]
    return {cells[0]: cells for cells in rows[2:]}


def test_the_page_says_of_the_demo_what_its_table_says() -> None:
    text = PAGES["docs/get-started.md"]
    demo = demo_table(
        "docs/get-started.md", "<!-- demo-table -->", "<!-- /demo-table -->"
    )
    assert len(demo) == 7
    original, fcsd, sft = (float(demo[name][6]) for name in ("original", "fcsd", "sft"))
    for name, column in (("tiny_code", 3), ("tiny_choice", 4), ("tiny_answers", 5)):
        row = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
        assert f"| {demo['original'][column]} | {demo['fcsd'][column]} |" in row
    assert re.search(rf"mean \| +\| {original} ± \S+ \| {fcsd} ±", text)
    assert f"changed by {sft - original:.1f}"[:-1] in text


def test_readme_says_of_real_weights_what_their_table_says() -> None:
    real = demo_table("docs/real.md", "<!-- real-table -->", "<!-- /real-table -->")
    assert [*real] == [
        "original", "converted", "calibrated", "fcsd", "sft", "attention-half",
    ]  # fmt: skip
    own = demo_table("docs/real.md", "<!-- own-table -->", "<!-- /own-table -->")
    assert {*own} == {*real}
    assert "for 48 steps" in PAGES["README.md"] and "48 steps" in real["fcsd"][2]
    original, fcsd = (float(real[name][6]) for name in ("original", "fcsd"))
    assert f"the mean score falls from {original} to {fcsd}" in flat(PAGES["README.md"])
    untrained, trained = (own[name][1].split()[0] for name in ("converted", "fcsd"))
    assert f"own-text KL falls from {untrained} to {trained}" in flat(
        PAGES["README.md"]
    )


def test_readme_quotes_the_front() -> None:
    """Each row of README's table is one of docs/front.md."""

    def rows(page: str, begin: str, end: str) -> list[list[str]]:
        text = PAGES[page].partition(begin)[2].partition(end)[0]
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    front = rows("docs/front.md", "<!-- front-table -->", "<!-- /front-table -->")
    names = ("ahead", "weights", "of 60", "choice tasks", "own-text KL")
    columns = [front[0].index(name) for name in names]
    known = {tuple(row[column] for column in columns) for row in front[1:]}
    short = rows("README.md", "## What it costs", "## In Python")
    for ahead, weights, overlapped, choice, own_text, _ in short[1:]:
        assert any(
            row[:4] == (ahead, weights, overlapped, choice)
            and row[4].partition(" ")[0] == own_text
            for row in known
        ), (ahead, weights)
