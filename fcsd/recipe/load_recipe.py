"""Load a recipe from its file, with all checks that need no model.

Loading refuses a recipe that trains on a split on which models are graded. Not covered:
the same items in another data set, which `data.decontaminate` finds by their words.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.base.errors import CREDENTIALS, UserError, holds_credentials
from fcsd.base.files import data_dir, parse_yaml, read_yaml
from fcsd.base.strict import did_you_mean, places, validate
from fcsd.data.config import SourceConfig, TrainingDataConfig
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.datasets import local_place
from fcsd.evaluation.suites import is_suite_file, load_suite
from fcsd.recipe.recipe import Recipe, TaskStoppingConfig, drop_inherited, set_dotted

_FILES_BESIDE = (
    "evaluation.suite",
    "early_stopping.suite",
    "data.decontaminate.suite",
    "pretrain.data.decontaminate.suite",
)


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read and check a recipe: a file, or the name of a shipped one (`tiny/demo`).

    overrides: `dotted.key=value` texts, the values in YAML. A file may extend another
    recipe (`extends: base.yaml`): its keys replace those of the other one, lists as a
    whole, and what is returned has all of them.

    Raises:
        UserError: unreadable file, invalid YAML, unknown key (with a suggestion), value
            out of range, unknown suite, or training data that is a graded split.
    """
    path = recipe_file(path)
    raw, files = _resolved(path, ())
    for override in overrides or []:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UserError(
                f"--set {override}: must have the form KEY=VALUE, such as"
                " train.learning_rate=4e-5"
            )
        where = f"--set {' '.join(override.split())}"
        where = where if len(where) <= 200 else f"{where[:199]}…"
        set_dotted(raw, key, parse_yaml(text, where), where)
        files[key] = path
    try:
        return check_recipe(_beside(raw, path.parent), str(path))
    except UserError as error:
        raise UserError(_with_file(str(error), path, files)) from None


def _resolved(
    path: Path, extending: tuple[Path, ...]
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Read a recipe file with the one that it extends, if it does; return its plain
    data, and the file of each dotted key.

    extending: the files that extend this one.
    """
    raw = _read_mapping(path)
    name = raw.pop("extends", None)
    raw = _beside(raw, path.parent)
    keys = list(_leaves(raw))
    if name is None:
        return raw, dict.fromkeys(keys, path)
    where = f"{path}: extends"
    if not isinstance(name, str) or not name.strip():
        raise UserError(
            f"{where}: the path of a recipe, relative to this file, or the name of a"
            f" shipped one is needed, as in `extends: tiny/demo`; got {name!r}"
        )
    if holds_credentials(name):
        raise UserError(f"{where}: {CREDENTIALS}")
    base = path.parent / os.path.expanduser(name)
    if not os.path.exists(base) and name in recipe_names():
        base = recipe_file(name)
    if not os.path.exists(base):
        raise UserError(
            f"{where}: {base}: no such file, and no recipe of this name ships with"
            f" fcsd{did_you_mean(name, recipe_names())}"
        )
    chain = (*extending, path)
    if any(os.path.samefile(base, file) for file in chain):
        circle = " -> ".join(map(str, (*chain, base)))
        raise UserError(f"{where}: a recipe extends itself: {circle}")
    raw_of_base, files = _resolved(base, chain)
    merged = _merged(raw_of_base, raw)
    drop_inherited(merged, keys)
    return merged, files | dict.fromkeys(keys, path)


def _merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Return plain data with changes: sections of a recipe, and its variants, key by
    key; lists and all other values as a whole.
    """
    merged = dict(base)
    for key, value in changes.items():
        old, dotted = base.get(key), f"{prefix}{key}"
        is_section = (
            dotted == "variants"
            or prefix == "variants."
            or any(place.startswith(f"{dotted}.") for place in places(Recipe))
        )
        if is_section and isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value, f"{dotted}.")
        merged[key] = value
        # A section is null where it is switched off; a variant is left out.
        if value is None and key in base and f"{dotted}.".startswith("variants."):
            del merged[key]
    return merged


def _leaves(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values that are no mappings."""
    for key, value in raw.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _with_file(text: str, path: Path, files: Mapping[str, Path]) -> str:
    """Name, in an error of a recipe, the file in which its key stands."""
    key, prefix = text.removeprefix(f"{path}: ").partition(":")[0], f"{path}: "
    while key and key not in files and text.startswith(prefix):
        key = key.rpartition(".")[0]
    if key not in files or not text.startswith(prefix):
        return text
    return f"{files[key]}: {text.removeprefix(prefix)}"


def _read_mapping(path: Path) -> dict[str, Any]:
    # Unlike `Path.is_dir`, this does not raise for a name that is too long.
    if os.path.isdir(path):
        raise UserError(
            f"{path}: is a folder; give a recipe file (for example {path}/recipe.yaml)"
        )
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        found = "is empty" if raw is None else f"holds a {type(raw).__name__}"
        raise UserError(
            f"{path}: a recipe is a mapping of keys to values, but this file {found};"
            " `fcsd run tiny/demo --show` prints a whole recipe"
        )
    return raw


def _beside(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace relative paths of suites and links that exist beside the recipe but not
    in the working directory.
    """
    raw = copy.deepcopy(raw)
    for key in _FILES_BESIDE:
        *sections, last = key.split(".")
        container: Any = raw
        for section in sections:
            container = container.get(section) if isinstance(container, dict) else None
        name = container.get(last) if isinstance(container, dict) else None
        if not isinstance(name, str) or (last == "suite" and not is_suite_file(name)):
            continue
        if not Path(name).exists() and (folder / name).is_file():
            container[last] = str(folder / name)
    return raw


def check_recipe(raw: Any, where: str) -> Recipe:
    """Build a recipe from plain data with the checks of `load_recipe`; errors name it
    by `where`.
    """
    recipe = validate(Recipe, raw, where)
    # This also builds the variants, so that a mistake in one shows now and not hours
    # later.
    refuse_graded(recipe, where)
    return recipe


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with fcsd, such as `tiny/demo`."""
    root = data_dir("recipes")
    return sorted(
        path.relative_to(root).with_suffix("").as_posix()
        for path in root.glob("*/*.yaml")
    )


def recipe_file(name: str | Path) -> Path:
    """Return the file of a recipe: `name` itself, or the shipped recipe of this name.

    A shipped recipe may also be named by its path in a checkout
    (`recipes/tiny/demo.yaml`). Raises UserError where there is neither.
    """
    path = Path(name)
    shipped = str(name)
    if path.parts[:1] == ("recipes",):
        shipped = str(path.with_suffix("")).removeprefix("recipes/")
    # A file of this name comes first. A YAML path outside recipes/ never means a
    # shipped recipe: reading it gives the plain error 'no such file', unless it differs
    # from the name of one by its ending only.
    names = recipe_names()
    if os.path.exists(path) or (
        path.suffix in (".yaml", ".yml")
        and shipped == str(name)
        and str(path.with_suffix("")) not in names
    ):
        return path
    if shipped in names:
        return data_dir("recipes") / f"{shipped}.yaml"
    raise UserError(
        f"{name}: no such file, and no recipe of this name ships with"
        f" fcsd{did_you_mean(shipped, names)}"
    )


@dataclass(frozen=True)
class Graded:
    """A split on which models are graded; `name` or `split` is None where only
    lm-eval's task knows it.
    """

    by: str
    path: str
    name: str | None
    split: str | None


def refuse_graded(recipe: Recipe, where: str) -> None:
    """Refuse graded splits as training data of a recipe, its variants or its
    pre-training.

    Raises:
        UserError: a source is a split of the recipe's suite, its early stopping, or its
            list of test sets; or there is no such suite.
    """
    root = None
    if recipe.evaluation.data_root is not None:
        root = Path(recipe.evaluation.data_root)
    # All variants name the same few suites.
    read_suite = functools.cache(load_suite)
    for section, data in recipe.data_sections.items():
        for graded in graded_splits(recipe, data, where, read_suite):
            for index, source in enumerate(data.train):
                if _is_graded(source, graded, root):
                    raise UserError(
                        f"{where}: {section}.train.{index}: {source.path}, split"
                        f" {source.split!r}, is the graded split of {graded.by}; never"
                        " train on a graded split, choose another one"
                    )


def graded_splits(
    recipe: Recipe,
    data: TrainingDataConfig,
    where: str,
    read_suite: Callable[[str], SuiteConfig] = load_suite,
) -> Iterator[Graded]:
    """Yield the splits on which the models of a recipe are graded, and those that one
    of its `data` sections excludes.
    """
    stopping = recipe.early_stopping
    if isinstance(stopping, TaskStoppingConfig):
        yield Graded(
            "early_stopping",
            stopping.row.dataset,
            stopping.row.dataset_name,
            stopping.row.split,
        )
    # Suites by the key that names them, so that errors can point to it.
    suites = [("evaluation.suite", recipe.evaluation.suite)]
    if data.decontaminate is not None:
        suites.append(("data.decontaminate.suite", data.decontaminate.suite))
    for key, name in suites:
        try:
            suite = read_suite(name)
        except UserError as error:
            raise UserError(f"{where}: {key}: {error}") from None
        for row in suite.tasks:
            yield Graded(
                f"task {row.task} of suite {suite.name}",
                row.dataset,
                row.dataset_name,
                row.split,
            )


def _is_graded(source: SourceConfig, graded: Graded, data_root: Path | None) -> bool:
    names = {source.name, graded.name}
    if len(names) == 2 and not names & {None, "all"}:
        return False  # two different configurations of one data set
    splits = split_names(source.split)
    if source.path.lower() != graded.path.lower():
        # The same data may be named by its folder on disk, or by a file in it.
        path = Path(os.path.expanduser(source.path)).resolve()
        folder = local_place(graded.path, data_root).resolve()
        if path.is_file() and folder in path.parents:
            splits = [path.stem]  # `openai/gsm8k/main/test.jsonl`
        elif path != folder or not path.exists():
            return False
    # Where the split is unknown, every split that is not for training may be the graded
    # one.
    if graded.split is None:
        return any("train" not in split for split in splits)
    return "all" in splits or any(
        graded.split in (split, split.split("-")[0]) for split in splits
    )


def split_names(split: str) -> list[str]:
    """Return the names of the splits in a text such as `train[:5%]+test`."""
    return [part.split("[")[0].strip() for part in split.split("+")]
