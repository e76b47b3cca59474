"""Load a recipe from its file, with all checks that need no model."""

import copy
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.files import data_dir
from fcsd.base.strict import did_you_mean, parse_yaml, read_yaml, validate
from fcsd.evaluation.config import is_suite_file
from fcsd.recipe.graded import refuse_graded
from fcsd.recipe.overrides import set_dotted
from fcsd.recipe.recipe import Recipe

_FILES_BESIDE = (
    "evaluation.suite", "evaluation.router_bias.links", "data.decontaminate.suite", "pretrain.data.decontaminate.suite",
)  # fmt: skip


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read and check a recipe: a file, or the name of a shipped one (`tiny/demo`).

    overrides: `dotted.key=value` texts, the value in YAML.

    Raises:
        UserError: unreadable file, invalid YAML, unknown key (with a suggestion), a value out of range, no such suite,
            training data that is a graded split.
    """
    path = recipe_file(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, a recipe file is needed (for example {path}/recipe.yaml)")
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise UserError(
            f"{path}: a recipe is a mapping of keys to values, this file holds {type(raw).__name__}"
        )
    for override in overrides or []:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UserError(f"--set {override}: must look like train.learning_rate=4e-5")
        set_dotted(raw, key, parse_yaml(text, f"--set {override}"), f"--set {override}")
    return check_recipe(_beside(raw, path.parent), str(path))


def _beside(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Replace the paths of suites and links that are not below the working directory but beside the recipe."""
    raw = copy.deepcopy(raw)
    for key in _FILES_BESIDE:
        *sections, last = key.split(".")
        place: Any = raw
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        name = place.get(last) if isinstance(place, dict) else None
        if not isinstance(name, str) or (last == "suite" and not is_suite_file(name)):
            continue
        if not Path(name).exists() and (folder / name).is_file():
            place[last] = str(folder / name)
    return raw


def check_recipe(raw: Any, where: str) -> Recipe:
    """Make a recipe of plain data, with all checks that need no model; `where` is what errors call it.

    Raises:
        UserError: as `load_recipe`.
    """
    recipe = validate(Recipe, raw, where)
    refuse_graded(recipe, where)  # makes the variants: a mistake inside one is found now, not hours later
    return recipe


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with fcsd, such as `tiny/demo`."""
    root = data_dir("recipes")
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/*.yaml"))


def recipe_file(name: str | Path) -> Path:
    """Return the file of a recipe: `name` itself, or that of the shipped recipe of this name.

    Where there is no file, `recipes/tiny/demo.yaml`, its path in a checkout, names what `tiny/demo` does.

    Raises:
        UserError: neither a file nor the name of a shipped recipe.
    """
    path = Path(name)
    shipped = (
        str(path.with_suffix("")).removeprefix("recipes/") if path.parts[:1] == ("recipes",) else str(name)
    )
    names = recipe_names()
    if path.exists() or (path.suffix in (".yaml", ".yml") and shipped == str(name)):
        return path
    if shipped in names:
        return data_dir("recipes") / f"{shipped}.yaml"
    raise UserError(
        f"{name}: no such file, and no recipe of this name ships with fcsd{did_you_mean(shipped, names)}"
    )
