"""Convert the original of a recipe to FarSkip connectivity, untrained."""

from fcsd.base.artifact import Stage
from fcsd.model.connectivity import convert_checkpoint
from fcsd.pipeline.context import Run


def convert(run: Run) -> Stage:
    """Leave the original with FarSkip connectivity, untrained."""
    recipe, launch, original = run.recipe, run.launch, run.original
    settings = {"connectivity": recipe.connectivity.model_dump(mode="json")}
    inputs = {"original": launch.ranks.from_first(lambda: original.weights)}
    stage = Stage(run.layout.convert, "convert", settings, inputs)
    if launch.begin(stage) == "finished":
        return stage
    model = run.layout.model("converted")
    if launch.first and not model.is_dir():
        convert_checkpoint(original.folder, model, recipe.connectivity.spec())
    launch.wait()
    launch.finish(stage, {"model": {"path": recipe.model_path, "revision": recipe.model.revision}}, model)
    return stage
