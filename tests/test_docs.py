"""README and docs: the commands that they print work, and their lists are complete."""

import json
import re
import shlex
from pathlib import Path

import pytest

from fcsd.cli.main import build_parser, main
from fcsd.recipe.load_recipe import recipe_file

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


SOURCES = {".py", ".yaml", ".md", ".toml", ".json"}
MAKEFILE_TARGETS = set(
    re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
)


def make_targets(text: str) -> set[str]:
    """Find the targets of `make …` in code of a page: a span, or a line of a block."""
    return set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, flags=re.M))


def anchors(page: Path) -> set[str]:
    """List the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def commands() -> list[tuple[str, str]]:
    """Return every `fcsd …` line of an indented or fenced block, without comments and
    launchers.
    """
    lines = []
    for page in PAGES:
        for line in page.read_text().splitlines():
            text = line.strip()
            text = re.sub(r"^accelerate launch .*-m fcsd", "fcsd", text)
            if line.startswith("    ") and text.startswith("fcsd "):
                lines.append((page.name, text))
    return lines


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize(("page", "text"), commands(), ids=lambda value: value)
def test_every_command_is_understood(page: str, text: str) -> None:
    words = shlex.split(text, comments=True)[1:]
    arguments = build_parser().parse_args(words)
    assert arguments.command == words[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_make_target_exists(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
    assert make_targets(text) <= MAKEFILE_TARGETS


def test_a_make_target_with_a_hyphen_is_a_target() -> None:
    assert make_targets("`make test-network`, and\n    make test-nothing  # why") == {
        "test-network",
        "test-nothing",
    }
    assert "test-network" in MAKEFILE_TARGETS and "test-nothing" not in MAKEFILE_TARGETS


@pytest.mark.parametrize("path", [".ci/run", ".github/workflows/ci.yml"])
def test_continuous_integration_runs_targets_that_exist_and_builds_the_site(
    path: str,
) -> None:
    text = (ROOT / path).read_text()
    named = {
        *re.findall(r"\bmake (?:--[a-z-]+ )?([a-z][a-z-]*)(?=\s|$)", text, flags=re.M)
    }
    named |= {*re.findall(r"\btest-[a-z]+\b", text)}  # of a list of parts
    assert {"test", "docs"} <= named <= MAKEFILE_TARGETS


def test_an_article_is_named_by_its_title_not_by_a_number() -> None:
    sources = [
        *(ROOT / "fcsd").rglob("*.py"),
        *(ROOT / "recipes").rglob("*.yaml"),
        *PAGES,
    ]
    assert not [
        path.name
        for path in sources
        if re.search(r"\barticle \d", path.read_text(), flags=re.I)
    ]


def test_recipes_paths_in_the_docs_exist() -> None:
    for page in PAGES:
        for path in re.findall(
            r"\b(?:steering/)?(?:recipes|configs|eval)/[a-z0-9_./-]+\.ya?ml",
            page.read_text(),
        ):
            assert (ROOT / path).is_file(), f"{page.name}: {path}"


def test_recipes_in_commands_are_named_as_they_ship(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # as with a wheel, there is no checkout
    for page, text in commands():
        assert not re.search(r"\brecipes/", text), f"{page}: {text}"
        arguments = vars(
            build_parser().parse_args(shlex.split(text, comments=True)[1:])
        )
        if "/" in str(recipe := arguments.get("recipe", "")) and not str(
            recipe
        ).startswith("runs/"):
            assert recipe_file(recipe).is_file(), f"{page}: {text}"
    assert main(["configs"]) == 0 and capsys.readouterr().out == "configs\n"
    assert main(["configs"]) == 2  # a user who edited them keeps them
    assert "configs: exists already; choose a new folder" in capsys.readouterr().err
    for page in PAGES:
        for path in re.findall(r"--config_file (configs/\S+)", page.read_text()):
            assert path.endswith("…") or (tmp_path / path).is_file(), (
                f"{page.name}: {path}"
            )


def test_every_file_of_the_package_that_a_page_names_exists() -> None:
    for page in PAGES:
        for path in re.findall(r"`(?:fcsd/)?([a-z_]+/[a-z_/]+\.py)`", page.read_text()):
            known = (ROOT / "fcsd" / path, ROOT / path)
            assert any(each.is_file() for each in known), f"{page.name}: {path}"


@pytest.mark.parametrize(
    ("page", "words"),
    [("scale.md", "`model.zero_grad()`"), ("serve.md", "default RoPE")],
)
def test_what_other_libraries_get_wrong_is_said_where_a_user_meets_it(
    page: str, words: str
) -> None:
    assert words in " ".join((ROOT / "docs" / page).read_text().split())


DOCS = sorted((ROOT / "docs").rglob("*.md"))


def test_the_readme_is_short() -> None:
    """Words as `wc -w` counts them, so that a table's bars count, too."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120 and len(readme.split()) <= 900


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_a_page_is_read_in_a_quarter_of_an_hour(page: Path) -> None:
    """A page that grows beyond 3,000 words (as `wc -w` counts them) is split by topic."""
    assert len(page.read_text().split()) <= 3_000


@pytest.mark.parametrize(
    "page",
    [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda page: page.name,
)
def test_no_line_of_a_page_is_longer_than_120_characters(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if len(line) > 120] == []


def test_an_install_command_of_the_readme_has_no_placeholder() -> None:
    text = (ROOT / "README.md").read_text()
    installs = re.findall(r"^    .*\bpip install (.+)$", text, flags=re.M)
    assert "." in installs
    assert not re.search(r"git clone|[A-Z]{4,}", "\n".join(installs))


def test_every_page_that_code_names_exists() -> None:
    """In messages, help texts, comments and recipes: `docs/scale.md`, with its anchor
    where it has one.
    """
    folders = (
        "fcsd", "serving", "megatron", "benchmarks", "tests", "recipes", "eval", "configs", "examples",
    )  # fmt: skip
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SOURCES
    ]
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in (
            *files, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md",
        )
        for page in re.findall(
            r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8")
        )
    }  # fmt: skip
    assert len(named) > 50
    assert sorted(one for one in named if not (ROOT / one[1]).is_file()) == []


def test_the_newcomers_five_files_are_short_enough_to_be_read() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = page.partition("## Read first\n")[2].partition("\n## ")[0]
    files = re.findall(r"^\d\. `(fcsd/[\w/]+\.py)`", listed, flags=re.M)
    assert len(files) == 5
    assert all(len((ROOT / file).read_text().splitlines()) <= 800 for file in files)


def recipe_keys() -> list[tuple[str, str, str]]:
    """Return (section, key, default) of every key of a recipe."""
    surface = json.loads((ROOT / "tests" / "files" / "recipe_keys.json").read_text())[
        "Recipe"
    ]
    keys = []
    for dotted, kind in surface.items():
        plain = re.sub(r"\[[^]]*\]|\.0(?=\.)", "", dotted)
        section, _, rest = plain.partition(".")
        if re.match(r"pretrain\.(connectivity|data|train)\.", plain):
            continue  # the sections below
        default = kind.partition(" = ")[2]
        keys.append(
            (section if rest else "Top level", plain.rpartition(".")[2], default)
        )
    sections = {section for section, _, _ in keys}
    return [one for one in keys if one[1] not in sections]


def test_the_page_of_recipes_has_every_key_with_its_default() -> None:
    chapters = re.split(r"^## ", (ROOT / "docs" / "recipes.md").read_text(), flags=re.M)
    text = {
        chapter.partition("\n")[0]: " ".join(chapter.split()) for chapter in chapters
    }
    keys = recipe_keys()
    assert len(keys) > 120
    missing = []
    for section, key, default in keys:
        items = [
            item
            for item in text[section].split(" - ")
            if f"`{key}`" in item.partition("(")[0]
        ]
        if not items or (default and not any(default in item for item in items)):
            missing.append(f"{section}: {key} = {default}")
    assert missing == []


def test_the_page_of_evaluation_has_every_key_of_a_suite() -> None:
    surface = json.loads((ROOT / "tests" / "files" / "recipe_keys.json").read_text())[
        "SuiteConfig"
    ]
    page = (ROOT / "docs" / "evaluate.md").read_text()
    chapter = page.partition("## Write a suite\n")[2].partition("\n## ")[0]
    keys = {re.sub(r".*[.\]]", "", dotted) for dotted in surface} - {"name", "tasks"}
    assert len(keys) > 20
    assert sorted(key for key in keys if f"`{key}`" not in chapter) == []
