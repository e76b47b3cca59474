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
    pretrain = raw.get("pretrain")
    data = [part.get("data") for part in (raw, pretrain) if isinstance(part, dict)]
    sections = [
        raw.get("evaluation"),
        *(part.get("decontaminate") for part in data if isinstance(part, dict)),
    ]
    for section in sections:
        if not isinstance(section, dict) or not isinstance(name := section.get("suite"), str):
            continue
        if is_suite_file(name) and not Path(name).exists() and (folder / name).is_file():
            section["suite"] = str(folder / name)
    evaluation = raw.get("evaluation")
    bias = evaluation.get("router_bias") if isinstance(evaluation, dict) else None
    if isinstance(bias, dict) and isinstance(links := bias.get("links"), str):
        beside = folder / links
        bias["links"] = str(beside) if beside.is_file() and not Path(links).exists() else links
    return raw


def check_recipe(raw: Any, where: str) -> Recipe:
    """Make a recipe of plain data, with all checks that need no model; `where` is what errors call it.

    Raises:
        UserError: as `load_recipe`.
    """
    recipe = validate(Recipe, raw, where)
    for name in recipe.variants:
        recipe.variant(name)  # a mistake inside a variant is found now, not hours later
    refuse_graded(recipe, where)
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
