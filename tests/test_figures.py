"""The headline figures of README and docs: where each lives, and that what quotes it says the same (figures.yaml)."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FIGURES: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests" / "figures.yaml").read_text(encoding="utf-8"))
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
LOG = "docs/LOG.md"

every_figure = pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["figure"])


def sections(text: str) -> list[str]:
    """Cut a page into its introduction and its sections."""
    return re.split(r"^(?=## )", text, flags=re.M)


def numbers(text: str) -> set[float]:
    """Find the numbers of a text that are no part of a name, such as a `p2p`."""
    return {float(number) for number in re.findall(r"(?<![\w.,-])\d+(?:\.\d+)?(?!\w)", text)}


@every_figure
def test_a_figure_stands_in_its_page_with_date_machine_and_setting(figure: dict[str, Any]) -> None:
    introduction, *others = sections(PAGES[figure["home"]])
    (section,) = [one for one in (introduction, *others) if figure["text"] in one]
    assert [words for words in figure["with"] if words not in introduction + section] == []


@every_figure
def test_what_quotes_a_figure_has_its_numbers(figure: dict[str, Any]) -> None:
    for page, words in figure.get("quoted", {}).items():
        assert words in PAGES[page], f"{page} should say: {words}"
        assert numbers(words) <= numbers(figure["text"]) | set(figure.get("numbers", []))


@every_figure
def test_a_figure_stands_nowhere_else_and_its_kinder_versions_in_the_log_alone(
    figure: dict[str, Any],
) -> None:
    seek = figure.get("seek", re.escape(figure["text"]))
    stands = {page for page, text in PAGES.items() if re.search(seek, text)}
    assert stands <= {figure["home"], *figure.get("quoted", {})}
    kinder = [
        words
        for page, text in PAGES.items()
        if page != LOG
        for words in figure.get("kinder", [])
        if words in text
    ]
    assert kinder == []


@pytest.mark.parametrize(
    "figure", [one for one in FIGURES if "log" in one], ids=lambda figure: figure["figure"]
)
def test_a_figure_is_that_of_the_last_entry_of_the_log_on_its_benchmark(figure: dict[str, Any]) -> None:
    (date,) = [found[0] for words in figure["with"] if (found := re.match(r"\d{4}-\d\d-\d\d", words))]
    headings = [one.partition("\n")[0] for one in sections(PAGES[LOG])[1:] if figure["log"] in one]
    assert [heading for heading in headings if heading.removeprefix("## ")[:10] > date] == []


def test_the_readme_says_of_the_demo_what_its_tables_say() -> None:
    text = PAGES["README.md"]
    demo = {
        cells[1]: cells
        for line in text.partition("<!-- demo-table -->")[2].partition("<!-- /demo-table -->")[0].splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) > 8
    }
    original, fcsd, sft = (float(demo[name][7]) for name in ("original", "fcsd", "sft"))
    steps = re.search(r"(\d+) steps", demo["fcsd"][3])
    assert steps is not None
    said = (
        f"in {steps[1]} steps: {original - fcsd:.1f} points of {original} below the original,"
        f" SFT {original - sft:.1f} "
    )
    lost = re.search(r"SFT (\d+\.\d) ", text)
    assert lost is not None and abs(float(lost[1]) - (original - sft)) < 0.11  # means are rounded
    assert said.rpartition("SFT")[0] in text
    for name in ("tiny_code", "tiny_choice", "tiny_answers"):
        row = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
        column = {"tiny_code": 4, "tiny_choice": 5, "tiny_answers": 6}[name]
        assert f"| {demo['original'][column]} | {demo['fcsd'][column]} |" in row
    assert re.search(rf"mean +\| +\| {original} ± \S+ \| {fcsd} ±", text)
    assert f"changed by {sft - original:.1f}"[:-1] in text
