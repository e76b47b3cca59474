"""The words that the table of docs/vocabulary.md excludes do not occur in pages, code,
messages and help.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = ROOT / "docs" / "vocabulary.md"
PAGES = [
    page for page in sorted((ROOT / "docs").rglob("*.md")) if page != VOCABULARY
] + [ROOT / "README.md"]
CODE = ("fcsd", "tests", "serving", "benchmarks", "examples")


def kept_out(mark: str) -> list[str]:
    """List the words in the table's last column between `mark`s: `**` bold, `*`
    italic.
    """
    rows = re.findall(r"^\| .* \| .* \| (.+) \|$", VOCABULARY.read_text(), flags=re.M)
    mark = re.escape(mark)
    return [
        word
        for row in rows
        for word in re.findall(rf"(?<!\*){mark}([^*]+){mark}(?!\*)", row)
    ]


def uses(words: list[str], text: str) -> list[str]:
    """Find words in a text, nouns in singular and plural, verbs in all forms."""
    stems = "|".join(
        sorted(re.sub(r"^go\b", "(?:go|goes|went)", word) for word in words)
    )
    return re.findall(rf"(?i)\b(?:{stems})s?\b", " ".join(text.split()))


def prose(source: str) -> str:
    """Join text that code splits: comments of several lines, and messages of several
    literals.
    """
    return re.sub(r'\n\s*# |"\n\s*f?"', " ", source)


def test_the_table_says_which_words_are_kept_out_of_what() -> None:
    assert len(kept_out("**")) >= 8 and len(kept_out("*")) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_pages_have_none_of_the_words_that_the_vocabulary_takes_others_for(
    page: Path,
) -> None:
    text = " ".join(page.read_text().split())
    assert uses([*kept_out("**"), *kept_out("*")], text) == []


@pytest.mark.parametrize("folder", CODE)
def test_no_docstring_comment_message_or_help_has_them_either(folder: str) -> None:
    words, wrong = kept_out("**"), []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = prose(path.read_text(encoding="utf-8"))
        wrong += [f"{path.relative_to(ROOT)}: {one}" for one in uses(words, text)]
    assert wrong == []
