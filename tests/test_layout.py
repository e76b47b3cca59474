"""Allowed imports: between distributions and between the folders and modules of their
packages, in one direction only.
"""

import ast
import functools
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fcsd.base.strict import flag_of
from tests.slow import function_name, slow_tests

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fcsd"

# The packages of all distributions. Each folder of a package, and each module outside
# of folders, imports only from those before it.
ORDER = {
    "fcsd": [
        "base", "model", "data", "parallel", "training", "evaluation", "recipe", "planning", "report",
        "pipeline", "api", "cli", "__main__",
    ],
    "serving/fcsd_vllm": [
        "families", "field", "settings", "refusals", "weights", "sources", "versions", "configs", "kernels",
        "communication", "transports", "cpu_experts", "cpu_exchange", "ops", "gate", "exchange", "schedule",
        "exchange_schedule", "normed_schedule", "rewire", "models", "registration", "write_sources",
    ],
    "serving/fcsd_sglang": [
        "families", "settings", "versions", "configs", "communication", "cpu_experts", "refusals", "rewire", "models",
    ],
    "serving/fcsd_bench": [
        "guard", "times", "engines", "rows", "settings", "plan", "server", "trace", "summary", "gains", "plots",
        "serve", "cli", "__main__",
    ],
    "megatron/fcsd_megatron": [
        "versions", "plans", "settings", "names", "refusals", "layer", "source", "spec", "weights", "model",
    ],
    "steering/fcsd_steering": [
        "config", "network", "routing", "plots", "report", "evaluate", "sweep", "study", "cli", "__main__",
    ],
}  # fmt: skip
ORDER_OF = {place.rpartition("/")[2]: order for place, order in ORDER.items()}

# What a package imports from the others; the packages for engines run where fcsd is not
# installed.
OTHERS = {
    "fcsd_sglang": {"fcsd_vllm"}, "fcsd_bench": {"fcsd"}, "fcsd_megatron": {"fcsd"}, "fcsd_steering": {"fcsd"},
}  # fmt: skip

# Third-party packages that are slow to import, or that a user may not have: only the
# places listed here import them.
ONLY_IN = {
    "lm_eval": "evaluation/", "matplotlib": "report/", "detect_secrets": "report/publish/",
    "peft": "training/teachers/", "deepspeed": "parallel/", "httpx2": "evaluation/", "trl": "nowhere",
    "vllm": "nowhere", "sglang": "nowhere", "evalplus": "evaluation/code/",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Return every module of every package by its dotted name."""
    paths = {}
    for place in ORDER:
        for path in sorted((ROOT / place).rglob("*.py")):
            parts = path.relative_to((ROOT / place).parent).with_suffix("").parts
            paths[".".join(parts).removesuffix(".__init__")] = path
    return paths


MODULES = modules()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> Iterator[str]:
    """Return the full names that a file imports, also inside functions and for type
    checking.
    """
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@functools.cache
def imports(path: Path) -> list[str]:
    """Return the modules that a file imports, those of others by the names that are
    taken from them.
    """
    return [
        (
            name
            if name in MODULES or package(name) not in ORDER_OF
            else name.rpartition(".")[0]
        )
        for name in imported_names(path)
    ]


def package(module: str) -> str:
    return module.partition(".")[0]


def folder(module: str) -> str:
    """Return the folder of a module, or the module itself if it is in none; "" for the
    package itself.
    """
    return module.partition(".")[2].partition(".")[0]


def arrows() -> list[tuple[str, str]]:
    """Yield importing and imported module for every import of one module of a package
    by another.
    """
    return [
        (module, name)
        for module, path in MODULES.items()
        for name in imports(path)
        if package(name) in ORDER_OF and name != module
    ]


def test_every_distribution_has_its_order() -> None:
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for pattern in ("fcsd/__init__.py", "*/fcsd_*/__init__.py")
        for path in ROOT.glob(pattern)
        if not path.relative_to(ROOT).as_posix().startswith(".")
    }
    assert found == set(ORDER)


def test_the_order_names_every_folder() -> None:
    for name, order in ORDER_OF.items():
        folders = {folder(module) for module in MODULES if package(module) == name}
        assert folders - {""} == set(order), name
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__"}


def test_a_folder_imports_only_from_those_before_it() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, name in arrows()
        # The package itself is the entry point: it may name everything, lazily, and all
        # modules may import its version.
        if module not in ORDER_OF and name not in ORDER_OF
        if package(module) == package(name) and folder(module) != folder(name)
        if (order := ORDER_OF[package(module)]).index(folder(module))
        < order.index(folder(name))
    ]
    assert wrong == []


def test_a_package_imports_only_the_others_that_it_names() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, name in arrows()
        if package(name) not in {package(module), *OTHERS.get(package(module), ())}
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    graph = defaultdict(set)
    for module, name in arrows():
        if module not in ORDER_OF and name not in ORDER_OF:  # the doors, see above
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
        for path in (
            path.relative_to(PACKAGE).as_posix()
            for module, path in MODULES.items()
            if package(module) == "fcsd"
        )
        if any(name.split(".")[0] == library for name in imports(PACKAGE / path))
        and not path.startswith(ONLY_IN[library])
    ]
    assert wrong == []


# The modules of fcsd on which the distributions beside it build; a change of their
# names is a change for those, too.
OPEN = {
    "base": [
        "artifact", "errors", "files", "memory", "strict", "text", "weights", "writing",
    ],
    "model": [
        "config", "connectivity.checkpoint", "connectivity.export", "connectivity.load",
        "connectivity.modeling", "connectivity.selection", "connectivity.spec", "families", "families.capacity",
        "families.choices", "families.routers", "families.structure", "inspect.checkpoint", "load",
    ],
    "data": ["batches", "dataset", "local"],
    "parallel": ["launch", "overlap.measure", "overlap.transport", "place"],
    "training": ["calibration.checkpoint", "calibration.shards", "losses.heldout_kl"],
    "evaluation": ["backend", "config", "datasets", "items", "results", "study", "suites"],
    "recipe": ["layout", "load_recipe"],
    "planning": ["cost.measured", "cost.times", "cost.windows", "network.links", "network.simulate"],
    "report": ["figure", "study_plots", "table", "verdict"],
    "pipeline": ["context", "reference", "rows"],
    "cli": ["options", "program"],
}  # fmt: skip


def test_other_distributions_import_the_open_modules_and_no_others() -> None:
    guests = {name for name, others in OTHERS.items() if "fcsd" in others}
    imported = {
        name
        for module, name in arrows()
        if package(module) in guests and package(name) == "fcsd"
    }
    opened = {f"fcsd.{place}.{name}" for place, names in OPEN.items() for name in names}
    assert imported - {"fcsd"} == opened


def test_a_private_name_stays_in_its_module() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {alias.name} of {node.module}"
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fcsd")
        for alias in node.names
        if alias.name.startswith("_") and alias.name != "__version__"
    ]
    assert wrong == []


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

# Users of these pass keywords, each of which has one meaning.
MORE_PARAMETERS = {"FCSDTrainer.__init__", "evaluate_model"}


def definitions() -> Iterator[tuple[str, Definition]]:
    """Yield every function and class of the packages, methods with the name of their
    class.
    """
    for path in MODULES.values():
        tree = parsed(path)
        inside = {
            method: f"{node.name}."
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for method in node.body
        }
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                yield inside.get(node, "") + node.name, node


def longer_than(lines: int, kind: Any) -> list[str]:
    """Return the definitions of a kind that have more lines."""
    return [
        f"{name}: {length} lines"
        for name, node in definitions()
        if isinstance(node, kind)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > lines
    ]


def test_no_function_is_longer_than_100_lines_and_no_class_than_400() -> None:
    assert (
        longer_than(100, ast.FunctionDef | ast.AsyncFunctionDef)
        == longer_than(400, ast.ClassDef)
        == []
    )


def test_no_module_is_longer_than_800_lines() -> None:
    assert [
        name
        for name, path in MODULES.items()
        if len(path.read_text(encoding="utf-8").splitlines()) > 800
    ] == []


def test_no_function_has_more_than_eight_parameters() -> None:
    too_many = set()
    for name, node in definitions():
        if not isinstance(node, ast.ClassDef):
            names = [
                each.arg
                for each in (
                    *node.args.posonlyargs,
                    *node.args.args,
                    *node.args.kwonlyargs,
                )
            ]
            if len(names) - (names[:1] in (["self"], ["cls"])) > 8:
                too_many.add(name)
    assert too_many == MORE_PARAMETERS


COMMAND_LINE = sorted((PACKAGE / "cli").glob("*.py"))


def calls(node: ast.AST, name: str) -> Iterator[ast.Call]:
    """Yield the calls of a function or method of this name."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and name in (
            getattr(each.func, "attr", ""),
            getattr(each.func, "id", ""),
        ):
            yield each


def options_by_hand(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the options that a part of the command line declares itself, with their
    help.
    """
    for call in calls(node, "add_argument"):
        if isinstance(call.args[0], ast.Constant) and str(
            call.args[0].value
        ).startswith("--"):
            help = "".join(
                ast.unparse(each.value) for each in call.keywords if each.arg == "help"
            )
            yield str(call.args[0].value), help


def test_no_option_is_declared_twice() -> None:
    trees = [parsed(path) for path in COMMAND_LINE]
    declared = [option for tree in trees for option in options_by_hand(tree)]
    assert [option for option in set(declared) if declared.count(option) > 1] == []


@pytest.mark.parametrize("path", COMMAND_LINE, ids=lambda path: path.stem)
def test_an_option_that_a_record_has_is_declared_in_the_record_alone(
    path: Path,
) -> None:
    places = {
        name.rpartition(".")[2]: name.rpartition(".")[0]
        for name in imported_names(path)
    }
    for node in parsed(path).body:
        by_hand = {flag for flag, _ in options_by_hand(node)}
        for name in {
            call.args[1].id
            for call in calls(node, "field_options")
            if isinstance(call.args[1], ast.Name)
        }:
            if by_hand and name in places:
                record = getattr(importlib.import_module(places[name]), name)
                fields = [
                    key
                    for key, field in record.model_fields.items()
                    if field.description is not None
                ]
                assert by_hand.isdisjoint(flag_of(record, key) for key in fields), (
                    f"{ast.unparse(node)[:60]}"
                )


def test_the_list_of_slow_tests_names_tests_that_exist() -> None:
    for line in slow_tests():
        file, _, name = function_name(line).partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), flags=re.M), line
