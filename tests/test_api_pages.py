"""The pages of docs/api: the names on them exist, and the exports of a package can be
read without importing it.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def documented() -> list[str]:
    """List the packages that a page of docs/api documents: its lines `::: package`."""
    pages = sorted((DOCS / "api").glob("*.md"))
    return [
        name
        for page in pages
        for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.M)
    ]


def bound_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module binds at its top level, also under `if
    TYPE_CHECKING`, where lazy names are imported.
    """
    for node in body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (name.asname or name.name for name in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.If):
            yield from bound_names(node.body)


def test_the_public_package_and_the_connectivity_have_pages() -> None:
    assert {"fcsd", "fcsd.model.connectivity"} <= set(documented())


@pytest.mark.parametrize("name", documented())
def test_what_a_package_exports_is_seen_by_the_documentation_and_has_a_docstring(
    name: str,
) -> None:
    """mkdocstrings reads the source: a name that only `__getattr__` knows would be
    missing from the page.
    """
    module = importlib.import_module(name)
    assert module.__doc__ and module.__file__
    exported = getattr(module, "__all__", [])
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    unseen = set(exported) - set(bound_names(tree.body))
    assert not unseen, f"{name}: import {sorted(unseen)} under `if TYPE_CHECKING:`, too"
    values = {one: getattr(module, one) for one in exported}
    undocumented = [
        one
        for one, value in values.items()
        if inspect.isroutine(value) or inspect.isclass(value)
    ]
    assert not [one for one in undocumented if not inspect.getdoc(values[one])]


@pytest.mark.parametrize("name", documented())
def test_every_line_of_an_args_section_names_one_parameter(name: str) -> None:
    """griffe, which reads the docstrings for `make docs`, does not accept a line that
    names two.
    """
    module = importlib.import_module(name)
    for one in getattr(module, "__all__", []):
        value = getattr(module, one)
        if not (inspect.isroutine(value) or inspect.isclass(value)):
            continue
        if section := re.search(
            r"^Args:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(value)}\n", flags=re.M
        ):
            named = re.findall(r"^    (\S[^:]*):", section[1], flags=re.M)
            assert set(named) <= set(inspect.signature(value).parameters), one


def test_the_site_and_its_first_page_have_every_page_of_docs() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(part)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = list(pages(site["nav"]))
    assert len(listed) == len(set(listed))
    every = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(listed) == every
    linked = set(
        re.findall(
            r"\]\(([^)#]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8")
        )
    )
    # api/index.md leads to these
    assert every - linked == {"index.md", "api/connectivity.md", "api/families.md"}
