"""Load a recipe from its file, with all checks that need no model."""

from pathlib import Path

from fcsd.config.overrides import set_dotted
from fcsd.config.recipe import Recipe
from fcsd.config.strict import parse_yaml, read_yaml, validate
from fcsd.errors import UserError


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read and check a recipe file; `overrides` are `dotted.key=value` texts, the value in YAML.

    Raises:
        UserError: unreadable file, invalid YAML, unknown key (with a suggestion), a value out of range, no such suite,
            training data that is a graded split.
    """
    path = Path(path)
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
    recipe = validate(Recipe, raw, str(path))
    for name in recipe.variants:
        recipe.variant(name)  # a mistake inside a variant is found now, not hours later
    from fcsd.config.graded import refuse_graded

    refuse_graded(recipe, str(path))
    return recipe
