"""Name the folders of a run: where each stage of a recipe leaves its model."""

from pathlib import Path
from typing import Any

from fcsd.config.recipe import Recipe
from fcsd.connectivity import Connectivity
from fcsd.connectivity.checkpoint import find_folder

MAIN = "fcsd"  # name of the main distillation in results and report


def models(recipe: Recipe) -> dict[str, Path]:
    """Every model of the run that exists, by its name in the report: original, converted, main, variants."""
    folder = recipe.folder
    found = {
        "original": find_folder(recipe.model_path, recipe.model.revision),
        "converted": folder / "convert" / "model",
        MAIN: folder / "distill" / "model",
        **{name: folder / "variants" / name / "model" for name in recipe.variants},
    }
    return {name: path for name, path in found.items() if path.is_dir()}


def _connectivity(section: Any) -> Connectivity:
    return Connectivity(section.layers, section.attention, section.mlp)
