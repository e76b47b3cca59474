"""The stages of a recipe: each reads folders and leaves a folder with a manifest.

    output_dir/pretrain/            model from scratch (only with a `pretrain` section)
    output_dir/convert/             the original, rewired, untrained
    output_dir/sweep/               batch size and learning rate
    output_dir/distill/             the main distillation
    output_dir/variants/NAME/       further distillations
    output_dir/evaluate/NAME/       results of every model, on the same items
    output_dir/layers/              untrained KL against the rewired layers
    output_dir/report/              report.md, report.json, figures
    output_dir/publish/             the folder that goes to the Hub

Not covered: uploading it; that is `fcsd.publish.push`.
"""

from fcsd.artifact import Stage
from fcsd.config.layout import models
from fcsd.config.recipe import Recipe
from fcsd.distributed.engine import expert_parallel, launched_engine
from fcsd.distributed.ranks import launched_ranks
from fcsd.errors import UserError
from fcsd.evaluate.batch import check_batch_size
from fcsd.evaluate.stage import evaluate_stage
from fcsd.layers.study import Study, study_layers
from fcsd.models.place import judging_engine
from fcsd.stages.convert import convert
from fcsd.stages.distill import distill, sweep
from fcsd.stages.pretrain import pretrain
from fcsd.stages.publish import publish


def run(recipe: Recipe, *, as_json: bool = False) -> None:
    """All stages in a row; what is finished is not run again. Prints as `report` does. All ranks call this.

    Raises:
        UserError: a layer study, or an automatic batch size, in a launch that spreads the weights.
    """
    ranks = launched_ranks(in_step=judging_engine().shards)
    check_batch_size(recipe.evaluation.batch_size, ranks)
    if recipe.evaluation.layer_study and launched_engine().shards:
        raise UserError(
            "evaluation.layer_study: the study rewires whole copies of the model, and this launch spreads the weights;"
            " add --set evaluation.layer_study=false, and afterwards run the same recipe without it in one process or"
            " on copies: it does what is left"
        )
    if recipe.pretrain is not None:
        with expert_parallel(1):  # which reads its model from a checkpoint, and here is none yet
            pretrain(recipe)
    convert(recipe)
    if recipe.sweep is not None:
        sweep(recipe, fill_cache=True)
    distill(recipe, fill_cache=True)
    for name in recipe.variants:
        distill(recipe, name, fill_cache=True)
    for name, path in models(recipe).items():
        evaluate_stage(recipe, name, path)
    if recipe.evaluation.layer_study:
        layers(recipe)
    ranks.from_first(lambda: publish(recipe, as_json=as_json))


def layers(recipe: Recipe) -> Stage:
    """The layer study on the recipe's held-out text: untrained KL against the rewired layers (paper Fig. 3)."""
    data, sides = recipe.data, recipe.connectivity
    if data.heldout is None:
        raise UserError("evaluation.layer_study: needs data.heldout, the text on which KL is measured")
    study = Study(
        model=recipe.model.model_copy(update={"path": recipe.model_path}),
        attention=sides.attention,
        mlp=sides.mlp,
        sides=["first", "last"] if sides.mlp == "full" else ["first", "last", "single"],
        text=data.heldout,
        text_examples=data.heldout_examples,
        max_length=data.max_length,
        packing=data.packing,
        loss_on=data.loss_on,
    )
    from fcsd.report.plots import plot_layers

    return study_layers(study, recipe.folder / "layers", plot_layers)
