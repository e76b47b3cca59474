"""What may import what: the folders of the package, and the one direction in which they know of each other."""

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from fcsd.base.strict import Strict, flag_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fcsd"

# Each folder imports only from those before it.
ORDER = [
    "base", "model", "data", "parallel", "training", "steering", "evaluation", "recipe", "planning", "report",
    "pipeline", "api", "cli", "__main__",
]  # fmt: skip

# Third parties that are slow to import, or that a user may not have: only what lies here imports them.
ONLY_IN = {
    "lm_eval": "evaluation/",
    "matplotlib": "report/",
    "detect_secrets": "report/publish/",
    "peft": "training/teachers/",
    "deepspeed": "parallel/",
    "httpx2": "evaluation/",
    "trl": "nowhere",
    "vllm": "nowhere",
    "sglang": "nowhere",
    "evalplus": "evaluation/code/",
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imported_names(path: Path) -> Iterator[str]:
    """The full names of what a file imports, inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, those of others by the names that are taken from them."""
    for name in imported_names(path):
        yield name if name in MODULES or not name.startswith("fcsd.") else name.rpartition(".")[0]


def folder(module: str) -> str:
    """The folder of a module; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def arrows() -> list[tuple[str, str]]:
    """Importing and imported module, for every import of one module of the package by another."""
    return [
        (module, name)
        for module, path in MODULES.items()
        for name in imports(path)
        if name.split(".")[0] == "fcsd" and name != module
    ]


def test_the_order_names_every_folder() -> None:
    assert {folder(module) for module in MODULES} - {""} == set(ORDER)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__"}


def test_a_folder_imports_only_from_those_before_it() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, name in arrows()
        # The package itself is the door: it may name everything, lazily, and gives its version to all.
        if module != "fcsd" and name != "fcsd" and folder(module) != folder(name)
        if ORDER.index(folder(module)) < ORDER.index(folder(name))
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
def test_a_third_party_is_imported_in_its_folder_alone(library: str) -> None:
    wrong = [
        path
        for path in (path.relative_to(PACKAGE).as_posix() for path in MODULES.values())
        if any(name.split(".")[0] == library for name in imports(PACKAGE / path))
        and not path.startswith(ONLY_IN[library])
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


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the package with its file."""
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield str(path.relative_to(ROOT)), node


def length(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_function_is_longer_than_eighty_lines() -> None:
    assert [f"{file}: {node.name}" for file, node in functions() if length(node) > 80] == []


def options_by_hand(path: Path) -> Iterator[tuple[str, str]]:
    """The options that a module of the command line declares itself, with their help."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flag = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if str(flag).startswith("--"):
                yield (
                    str(flag),
                    "".join(ast.unparse(each.value) for each in node.keywords if each.arg == "help"),
                )


COMMAND_LINE = sorted((PACKAGE / "cli").glob("*.py"))


def test_no_option_is_declared_twice() -> None:
    declared = [option for path in COMMAND_LINE for option in options_by_hand(path)]
    assert [option for option in set(declared) if declared.count(option) > 1] == []


@pytest.mark.parametrize("path", COMMAND_LINE, ids=lambda path: path.stem)
def test_an_option_that_a_record_has_is_declared_in_the_record_alone(path: Path) -> None:
    names = (name.rpartition(".") for name in imported_names(path) if name.startswith("fcsd."))
    records = [getattr(importlib.import_module(module), name, None) for module, _, name in names]
    fields = {
        flag_of(record, name)
        for record in records
        if isinstance(record, type) and issubclass(record, Strict)
        for name, field in record.model_fields.items()
        if field.description is not None
    }
    assert {flag for flag, _ in options_by_hand(path)} & fields == set()
