"""Calibrate the converted model of a recipe, or of one of its variants: the stage
between conversion and sweep.

    partial/              unfinished work (`fcsd.training.calibration.checkpoint`)
    partial/result.json   the manifest's results and the fingerprints of
                          `partial/model`, once that is complete
    model/                renamed from `partial/model` after that, before the
                          manifest is written

If the process is killed at any moment, the calibration can continue, or lacks only the
last renames.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fcsd.base.artifact import Stage, check_checkpoint, model_outputs, read_manifest
from fcsd.base.errors import UserError
from fcsd.base.files import read_sealed, write_sealed
from fcsd.base.text import calibration_kl_text
from fcsd.base.writing import (
    check_folder_place,
    check_is_new,
    discard_folder,
    replace_folder,
    sweep,
    write_json,
)
from fcsd.data.counts import tell_examples
from fcsd.data.rows import PackedRows
from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.own_text.measure import Original
from fcsd.evaluation.runner import prepare_evaluation
from fcsd.model.connectivity.export import tell_first_layers
from fcsd.model.connectivity.load import check_tensors, config_and_class
from fcsd.model.families import moe_mask
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import Launch, begin_stage, finish_stage
from fcsd.parallel.place import load_for_evaluation
from fcsd.pipeline.context import Run
from fcsd.pipeline.rows import data_inputs, exclusions, training_rows
from fcsd.recipe.layout import MAIN
from fcsd.recipe.recipe import Recipe
from fcsd.training.calibration.checkpoint import (
    calibratable,
    calibrate_checkpoint,
    holds_tokens,
    split_rows,
    wanted_tokens,
)

_RESULT = "result.json"


def calibrate(
    run: Run, variant: str | None = None, *, on_bad_row: str | None = "data.on_bad_row"
) -> Stage:
    """Write the converted model with calibrated weights; a variant with the same
    settings shares those of the main model.

    on_bad_row: see `fcsd.data.write_rows.BadRows`.
    """
    calibrated_run = run.variant(variant)
    # Equal settings give equal weights.
    if variant is not None and _settings(calibrated_run.recipe) == _settings(
        run.recipe
    ):
        variant, calibrated_run = None, run
    launch = calibrated_run.launch
    check_calibration(calibrated_run)
    stage = _stage(calibrated_run, run.layout.calibrate / (variant or MAIN))
    partial, model = stage.folder / "partial", stage.folder / "model"
    if begin_stage(stage, launch) != "finished":
        note = launch.ranks.from_first(lambda: _whole(partial, model))
        if note is None:
            results = _solve(calibrated_run, stage, on_bad_row)
            note = launch.ranks.from_first(lambda: _note_whole(partial, results))
        launch.ranks.from_first(lambda: _rename(partial, model))
        finish_stage(stage, launch, note["results"], outputs=note["outputs"])
        if launch.first:
            results = note["results"]
            extent = f"{results['tokens']:,} tokens, {len(results['layers'])} layers"
            measured = (
                calibration_kl_text(results["kl"])
                or "too few to hold some out and measure the KL on them"
            )
            print(f"calibrate: {extent}; {measured}", file=sys.stderr)
    # A killed process may have left this folder, even if the stage is finished.
    launch.ranks.from_first(lambda: discard_folder(partial))
    return stage


def check_calibration(run: Run) -> None:
    """Refuse, before the text is read, what the calibration of a run cannot do: a model
    or a connectivity that `calibratable` refuses, tensors that do not fit the config,
    and too few tokens.
    """
    recipe, section = run.recipe, run.recipe.calibration
    if section is None:
        raise UserError(
            f"recipe {recipe.name}: has no `calibration` section; add one (see"
            " docs/convert.md)"
        )
    checkpoint = calibratable(run.original, recipe.connectivity.spec)
    check_tensors(checkpoint, *config_and_class(checkpoint))
    width = _width(run)
    if section.tokens < 4 * width:
        raise UserError(
            f"calibration.tokens (--tokens): {section.tokens} are too few; give at"
            f" least {4 * width} (4 x hidden size), better {128 * width}"
        )


def _width(run: Run) -> int:
    width: int = run.original.load_config().get_text_config().hidden_size
    return width


def _stage(run: Run, folder: Path) -> Stage:
    """Return the calibration of a run, which may be a variant's, as a stage in a
    folder.
    """
    recipe = run.recipe
    inputs = run.launch.ranks.from_first(
        lambda: run.original.fingerprints("original") | data_inputs(recipe.data, run)
    )
    return Stage(folder, "calibrate", _settings(recipe), inputs)


def _solve(run: Run, stage: Stage, on_bad_row: str | None) -> dict[str, Any]:
    """Write the calibrated model to the stage's `partial/model`; return the results for
    the manifest.
    """
    recipe, section = run.recipe, run.recipe.calibration
    assert section is not None
    rows = _rows(run, wanted_tokens(section.tokens), on_bad_row)
    if run.launch.first:
        tell_examples(rows, "text")
    # Held-out rows measure the effect of the calibration.
    solved, left_out = split_rows(rows, section.tokens, _width(run))
    results = calibrate_checkpoint(
        run.original,
        stage.folder / "partial",
        recipe.connectivity.spec,
        solved,
        ridge=section.ridge,
        launch=run.launch,
        left_out=left_out,
    )
    model = {"path": recipe.model_path, "revision": recipe.model.revision}
    return {"model": model, **results, **exclusions(rows, stage.folder, run.launch)}


def _rows(run: Run, num_tokens: int, on_bad_row: str | None) -> PackedRows:
    """Return rows that hold so many tokens of text, or all rows of the data; a stream is
    read no further than that needs.
    """
    data, asked = run.recipe.data, num_tokens
    while True:
        rows = training_rows(
            data,
            run.tokenizer,
            run,
            num_tokens=asked,
            on_bad_row=on_bad_row,
            apart_in=run.original,
        )
        # A stream that has more gives just the number of rows that was asked for.
        has_more = len(rows) == math.ceil(asked / data.max_length)
        if not has_more or holds_tokens(rows, num_tokens):
            return rows
        asked *= 2  # rows are not full


def _note_whole(partial: Path, results: dict[str, Any]) -> dict[str, Any]:
    note = {"results": results, "outputs": model_outputs(partial / "model")}
    # The note is written last, when the model is complete.
    write_sealed(partial / _RESULT, note)
    return note


def _whole(partial: Path, model: Path) -> dict[str, Any] | None:
    """Return the note that `_note_whole` wrote if its model still exists, in `partial`
    or under its final name; else None.

    A note without its model is removed with the other partial work, and the calibration
    starts again.
    """
    if not (partial / _RESULT).is_file():
        return None
    folder = partial / "model" if (partial / "model").is_dir() else model
    with suppress(UserError):
        note = read_sealed(partial / _RESULT, "fcsd calibrates it again")
        if model_outputs(folder) == note["outputs"]:
            return note
    print(
        f"calibrate: {folder}: differs from the calibrated model; starting again",
        file=sys.stderr,
    )
    discard_folder(partial)
    return None


def _rename(partial: Path, model: Path) -> None:
    if (partial / "model").is_dir():
        replace_folder(partial / "model", model)
    sweep(model.parent, f".{model.name}.")


def calibrate_folder(recipe: Recipe, out: Path, launch: Launch) -> None:
    """Calibrate the model of a recipe that has no other stage, and write it to `out`,
    with the stage's manifest.

    The recipe's own folder holds unfinished work, and is removed at the end. UserError
    if `out` exists, unless it is this calibration, finished earlier.
    """
    run = Run(recipe, launch)
    # The same calibration may have been finished by an earlier command.
    if launch.ranks.from_first(lambda: (out / "manifest.json").is_file()) and _is_of(
        _stage(run, out)
    ):
        launch.ranks.from_first(lambda: check_checkpoint(out))
        if launch.first:
            print(f"calibrate: finished before, in {out}", file=sys.stderr)
        launch.ranks.from_first(lambda: _discard_work(run))
        return
    launch.ranks.from_first(lambda: check_is_new(out))
    check_folder_place(out)
    check_folder_place(
        Path(recipe.output_dir),
        run.layout.calibrate.name,
        "unfinished calibration",
    )
    check_calibration(run)
    if launch.first:
        connectivity, checkpoint = recipe.connectivity.spec, run.original.checkpoint
        assert checkpoint.family is not None
        mask = moe_mask(run.original.load_config(), checkpoint.family)
        tell_first_layers(connectivity, mask, checkpoint.family, recipe.model_path)
    stage = calibrate(run, on_bad_row=None)

    # The records move with the model, so that `out` is complete at the moment it
    # appears.
    def leave() -> None:
        record = read_manifest(stage.folder)
        for file in ("decontamination.json", "bad_rows.json"):
            if (stage.folder / file).is_file():
                os.replace(stage.folder / file, stage.folder / "model" / file)
        write_json(stage.folder / "model" / "manifest.json", record)
        replace_folder(stage.folder / "model", out)
        sweep(out.parent, f".{out.name}.")
        _discard_work(run)

    launch.ranks.from_first(leave)


def measure_calibrated(
    recipe: Recipe, out: Path, suite: SuiteConfig, launch: Launch
) -> dict[str, Any]:
    """Return the result of a calibrated model in `out` on tasks, of which those of own
    text compare it with the original.
    """
    run, launch = Run(recipe, launch), launch.for_evaluation()
    calibrated = ModelFolder(run.original.config, out)

    @contextmanager
    def loaded() -> Iterator[Any]:
        yield load_for_evaluation(run.original, launch)

    with prepare_evaluation(
        calibrated.load_tokenizer(),
        suite,
        recipe.evaluation,
        ranks=launch.ranks,
        original=Original(loaded),
    ) as evaluate:
        result, _ = evaluate(load_for_evaluation(calibrated, launch), str(out))
    return result


def _is_of(stage: Stage) -> bool:
    """Tell whether the manifest in a folder belongs to this stage, with the same
    settings and inputs.
    """
    # Any of these errors means that the manifest belongs to something else.
    with suppress(UserError, KeyError, TypeError, ValueError):
        stage.refuse_difference(read_manifest(stage.folder))
        return True
    return False


def _discard_work(run: Run) -> None:
    """Remove the folder of a calibration whose model has been moved out, and what
    killed ones left.
    """
    if run.layout.calibrate.is_dir() or not run.layout.root.exists():
        discard_folder(run.layout.root)


def _settings(recipe: Recipe) -> dict[str, Any]:
    if recipe.calibration is None:
        return {}
    return {
        **recipe.model_dump(mode="json", include={"model", "connectivity", "seed"}),
        # Whether trainings start from it does not change the calibration.
        "calibration": recipe.calibration.model_dump(
            mode="json", exclude={"starts_training"}
        ),
        "data": recipe.data.model_dump(
            mode="json", exclude={"heldout", "heldout_examples", "loss_on"}
        ),
    }
