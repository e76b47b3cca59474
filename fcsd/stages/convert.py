"""Convert the original of a recipe to FarSkip connectivity, untrained."""

from fcsd.artifact import Stage
from fcsd.config.layout import _connectivity
from fcsd.config.recipe import Recipe
from fcsd.connectivity import convert_checkpoint
from fcsd.connectivity.checkpoint import find_folder
from fcsd.distributed.launch import begin, finish, processes
from fcsd.files import weights_fingerprint


def convert(recipe: Recipe) -> Stage:
    """The original with FarSkip connectivity, untrained."""
    source = find_folder(recipe.model_path, recipe.model.revision)
    folder = recipe.folder / "convert"
    settings = {"connectivity": recipe.connectivity.model_dump(mode="json")}
    stage = Stage(folder, "convert", settings, {"original": weights_fingerprint(source)})
    if begin(stage) == "finished":
        return stage
    if processes().is_main_process and not (folder / "model").is_dir():
        convert_checkpoint(
            source,
            folder / "model",
            _connectivity(recipe.connectivity),
        )
    processes().wait_for_everyone()
    finish(
        stage,
        {"model": {"path": recipe.model_path, "revision": recipe.model.revision}},
        model=folder / "model",
    )
    return stage
