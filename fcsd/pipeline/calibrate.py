"""Calibrate the converted model of a recipe, or of one of its variants: the stage between conversion and sweep."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from fcsd.base.artifact import Stage, read_manifest
from fcsd.base.errors import UserError
from fcsd.base.files import check_folder_place, write_json
from fcsd.data.counts import tell_examples
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import Launch
from fcsd.pipeline.context import Run
from fcsd.pipeline.rows import data_inputs, exclusions, training_rows
from fcsd.planning.layers.first import tell_first_layer
from fcsd.recipe.layout import MAIN
from fcsd.recipe.recipe import Recipe
from fcsd.training.calibration.checkpoint import calibratable, calibrate_checkpoint, take_rows


def calibrate(run: Run, variant: str | None = None, *, on_bad_row: str | None = "data.on_bad_row") -> Stage:
    """Leave the converted model with calibrated weights; a variant with the same settings shares the main one's.

    on_bad_row: see `fcsd.data.bad_rows.BadRows`.
    """
    one = run.variant(variant)
    if variant is not None and _settings(one.recipe) == _settings(run.recipe):
        variant, one = None, run
    recipe, launch = one.recipe, one.launch
    section = recipe.calibration
    if section is None:
        raise UserError(f"recipe {recipe.name}: has no `calibration` section; add one (see docs/convert.md)")
    data, folder = recipe.data, run.layout.calibration(variant or MAIN)
    inputs = launch.ranks.from_first(lambda: one.original.fingerprints("original") | data_inputs(data, one))
    stage = Stage(folder, "calibrate", _settings(recipe), inputs)
    if launch.begin(stage) == "finished":
        return stage
    rows = training_rows(data, one.tokenizer, one, on_bad_row=on_bad_row, apart_in=one.original)
    if launch.first:
        tell_examples(rows, "text")
    results = calibrate_checkpoint(
        one.original,
        folder / "model",
        folder / "partial",
        recipe.connectivity.spec(),
        take_rows(rows, section.tokens),
        ridge=section.ridge,
        launch=launch,
    )
    model = {"path": recipe.model_path, "revision": recipe.model.revision}
    launch.finish(stage, {"model": model, **results, **exclusions(rows, folder, launch)}, folder / "model")
    if launch.first:
        print(f"calibrate: {results['tokens']:,} tokens, {len(results['layers'])} layers", file=sys.stderr)
    return stage


def calibrated_start(run: Run, variant: str | None) -> ModelFolder | None:
    """Return the calibrated checkpoint that a distillation starts from, made if need be; None where it does not."""
    one = run.variant(variant)
    if not one.recipe.starts_calibrated:
        return None
    return ModelFolder(one.original.config, calibrate(run, variant).folder / "model")


def calibrate_folder(recipe: Recipe, out: Path, launch: Launch) -> None:
    """Calibrate the model of a recipe that has nothing else to do, and leave it in `out`, with the stage's manifest.

    The recipe's own folder holds what is not finished; it is removed at the end. UserError where `out` exists.
    """
    run = Run(recipe, launch)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: exists and is not empty; choose another destination or remove it first")
    check_folder_place(out)
    check_folder_place(recipe.folder, run.layout.calibration(MAIN).parent.name, "unfinished calibration")
    checkpoint = calibratable(run.original)
    if launch.first:
        assert checkpoint.family is not None
        wired = recipe.connectivity.spec()
        tell_first_layer(wired, run.original.load_config(), checkpoint.family, "--layers")
    stage = calibrate(run, on_bad_row=None)

    def leave() -> None:
        record = read_manifest(stage.folder)
        for file in ("decontamination.json", "bad_rows.json"):
            if (stage.folder / file).is_file():
                os.replace(stage.folder / file, stage.folder / "model" / file)
        write_json(stage.folder / "model" / "manifest.json", record)
        os.replace(stage.folder / "model", out)
        shutil.rmtree(recipe.folder)

    launch.ranks.from_first(leave)


def _settings(recipe: Recipe) -> dict[str, Any]:
    if recipe.calibration is None:
        return {}
    return {
        **recipe.model_dump(mode="json", include={"model", "connectivity", "seed"}),
        "calibration": recipe.calibration.model_dump(mode="json", exclude={"starts_training"}),
        "data": recipe.data.model_dump(mode="json", exclude={"heldout", "heldout_examples", "loss_on"}),
    }
