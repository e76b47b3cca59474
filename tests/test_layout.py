"""What may import what: the rooms of the house, and the one direction in which they know of each other."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fcsd"

# Each room imports only from rooms above it in this list.
ORDER = [
    ["errors", "hooks", "stats", "temporary", "text"],
    ["files", "families"],
    ["artifact", "connectivity"],
    ["config", "inspect", "overlap"],
    ["distributed"],
    ["models", "data", "tiny", "network"],
    ["routing", "losses"],
    ["distill", "evaluate", "calibration"],  # side by side: none knows of another
    ["layers", "cost", "chat"],
    ["bench"],
    ["report"],
    ["publish"],
    ["stages"],
    ["cli", "api"],  # the two doors: a terminal's, and Python's; `import fcsd` names what `api` has, lazily
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

# Third parties that are slow to import, or that a user may not have: only these files import them.
ONLY_IN = {
    "lm_eval": ["evaluate/lm_eval/*", "evaluate/results.py", "evaluate/store.py"],
    "matplotlib": ["report/figure.py", "report/plots.py", "report/study_plots.py"],
    "detect_secrets": ["publish/secrets.py"],
    "peft": ["distill/teachers/lora.py"],
    "deepspeed": ["distributed/*"],
    "httpx2": ["evaluate/server.py"],
    "trl": [],
    "vllm": [],
    "sglang": [],
    "evalplus": ["evaluate/code/*"],
    "tqdm": [
        "text.py",
        "distill/guarded.py",
    ],  # bars are made in one place, so that TQDM_DISABLE=1 holds for all
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """The full names of what a file imports, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room(module: str) -> str:
    """The folder or top-level file of a module; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def arrows() -> list[tuple[str, str]]:
    """Importing and imported module, for every import of one module of the package by another."""
    return [
        (module, name)
        for module, path in MODULES.items()
        for name in imports(path)
        if name.split(".")[0] == "fcsd" and name != module
    ]


def test_every_room_has_a_level_and_every_level_its_rooms() -> None:
    assert {room(module) for module in MODULES} - {""} == set(LEVEL)


def test_rooms_import_only_from_rooms_below_them() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, name in arrows()
        # The package itself is the door: it may name everything, lazily, and gives its version to all.
        if module != "fcsd" and name != "fcsd" and room(module) != room(name)
        if LEVEL[room(module)] <= LEVEL[room(name)]
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    graph = defaultdict(set)
    for module, name in arrows():
        if "fcsd" not in (module, name):  # the door, see above
            graph[module].add(name)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph[waiting.pop()] - seen:
                seen.add(name)
                waiting.append(name)
        return seen

    assert [module for module in list(graph) if module in reached(module)] == []


@pytest.mark.parametrize("library", ONLY_IN)
def test_a_third_party_is_imported_in_the_files_that_are_named(library: str) -> None:
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in MODULES.values()
        if any(name.split(".")[0] == library for name in imports(path))
        and not any(path.relative_to(PACKAGE).match(pattern) for pattern in ONLY_IN[library])
    ]
    assert wrong == []


def test_a_private_name_stays_in_its_module() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {alias.name} of {node.module}"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fcsd")
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert wrong == []


def test_a_whole_recipe_is_taken_only_by_what_is_about_all_of_it() -> None:
    rooms = {
        room(module) for module, path in MODULES.items() if "fcsd.config.recipe.Recipe" in whole_names(path)
    }
    assert rooms == {"config", "stages", "api", "cli", "tiny", "cost", "report", "publish"}


def whole_names(path: Path) -> set[str]:
    """Module and name of everything that a file imports from the package."""
    return {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_no_function_is_longer_than_eighty_lines() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > 80
    ]
    assert wrong == []


def test_only_these_modules_lie_beside_the_rooms() -> None:
    beside = {path.stem for path in PACKAGE.glob("*.py")}
    assert beside == {
        "__init__",
        "__main__",
        "errors",
        "files",
        "hooks",
        "stats",
        "temporary",
        "text",
        "artifact",
    }
