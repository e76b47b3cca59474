"""Distil and fill the teacher cache: the stages of a recipe that have a teacher."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fcsd.base.artifact import Stage, differences, read_manifest
from fcsd.base.errors import UserError
from fcsd.base.strict import validate
from fcsd.base.writing import discard_folder, new_folder
from fcsd.data.counts import tell_examples
from fcsd.data.dataset import heldout_fingerprint
from fcsd.evaluation.datasets import test_set_fingerprints
from fcsd.model.connectivity.checkpoint import all_files
from fcsd.model.connectivity.export import convert_checkpoint, link_or_copy
from fcsd.model.dtypes import dtype_of
from fcsd.model.load import ModelFolder
from fcsd.parallel.launch import begin_stage, finish_stage
from fcsd.parallel.place import load_for_launch
from fcsd.pipeline.checks import check_teacher, check_training, settle_overlap
from fcsd.pipeline.context import Run
from fcsd.pipeline.rows import data_inputs, exclusions, training_rows
from fcsd.recipe.layout import MAIN
from fcsd.recipe.recipe import HeldoutKLStoppingConfig, Recipe
from fcsd.training.arguments import Job
from fcsd.training.config import may_change
from fcsd.training.prepare import TrainingInputs
from fcsd.training.run import remove_checkpoints, train
from fcsd.training.teachers.base import Teacher
from fcsd.training.teachers.load import TeacherSource, fill_teacher_cache, load_teacher


def distill(run: Run, variant: str | None = None, *, fill_cache: bool = False) -> Stage:
    """Distil the main model of a recipe, or one of its variants, with the choice of the
    sweep if there is one.

    fill_cache: compute the missing part of the teacher cache, if the recipe has one.
    """
    if run.recipe.only_pretrains:
        raise UserError(
            f"recipe {run.recipe.name}: has no `train` section, so it only pre-trains;"
            " add one, or use `fcsd pretrain`"
        )
    # A wrong name should be reported before a missing sweep.
    run.variant(variant)
    main_run, run = run, _with_sweep(run).variant(variant)
    recipe, launch, folder = run.recipe, run.launch, run.layout.stage(variant or MAIN)
    # This hashes all weights and data, so one rank does it.
    inputs = launch.ranks.from_first(lambda: input_fingerprints(run))
    stage = Stage(
        folder, "distill", training_settings(recipe), inputs, may_change(recipe.train)
    )
    if begin_stage(stage, launch) == "finished":
        remove_checkpoints(folder, launch)
        return stage
    check_training(run)
    settle_overlap(run)
    start = calibrated_folder(main_run, variant)
    # Zero steps leave the weights that a training would start from, for comparison.
    if not recipe.train.max_steps:
        finish_stage(
            stage, launch, _leave_start(run, start, folder / "model"), folder / "model"
        )
        return stage
    rows = training_rows(recipe.data, run.tokenizer, run)
    teacher = load_run_teacher(run, rows, fill=fill_cache)
    models = training_inputs(run, teacher, rows, start)
    job = Job(
        folder,
        f"distil {variant or MAIN}",
        recipe.seed,
        stage.identity,
        remaining=run.remaining,
    )
    if recipe.early_stopping is None:
        results = train(models, recipe.sections, job, launch)
    else:
        from fcsd.pipeline.scoring import early_stopping

        with early_stopping(run) as (stopper, score):
            job = replace(job, stopper=stopper, score=score)
            results = train(models, recipe.sections, job, launch)
    finish_stage(
        stage, launch, results | exclusions(rows, folder, launch), folder / "model"
    )
    remove_checkpoints(folder, launch)
    return stage


def _leave_start(run: Run, start: ModelFolder | None, folder: Path) -> dict[str, Any]:
    """Write the weights that a training of this recipe would start from, calibrated or
    copied.
    """

    def leave() -> dict[str, Any]:
        if start is None:
            # Of a run that was killed before the manifest: nothing tells whether it is
            # whole.
            discard_folder(folder)
            convert_checkpoint(
                run.original.folder, folder, run.recipe.connectivity.spec
            )
            return {"steps": 0}
        all_files(start.folder)  # refuses links to other users' files
        with new_folder(folder) as new:
            shutil.copytree(
                start.folder, new, copy_function=_copy_or_link, dirs_exist_ok=True
            )
        return {
            "steps": 0,
            "tokens": read_manifest(start.folder.parent)["results"]["tokens"],
        }

    return run.launch.ranks.from_first(leave)


def _copy_or_link(source: str, destination: str) -> None:
    # The weights no longer change, so they may share storage with the start.
    copy = link_or_copy if source.endswith(".safetensors") else shutil.copyfile
    copy(Path(source), Path(destination))


def cache_teacher(
    run: Run, variant: str | None = None, *, verify: bool = False
) -> Path:
    """Fill the teacher cache of a recipe's sweep and main distillation, or of one of
    its variants; return its folder.

    verify: read the whole cache afterwards, and compare it with its checksums.
    """
    run = run.variant(variant)
    recipe = run.recipe
    if recipe.teacher is None:
        raise UserError(
            f"objective {recipe.objective.name!r} has no teacher; there is nothing to"
            " cache"
        )
    folder = Path(recipe.teacher.cache or run.layout.teacher_cache)
    check_teacher(run)
    rows = training_rows(recipe.data, run.tokenizer, run)
    if run.launch.first:
        tell_examples(rows, "data")
    fill_teacher_cache(_teacher_source(run, rows), folder, verify=verify)
    return folder


def _with_sweep(run: Run) -> Run:
    if run.recipe.sweep is None:
        return run
    if not (manifest := read_manifest(run.layout.sweep)):
        raise UserError(
            f"{run.layout.sweep}: the sweep is not finished; run `fcsd sweep` first, or"
            " set sweep to null"
        )
    # The choice holds only for the data and weights on which it was made.
    inputs = run.launch.ranks.from_first(lambda: input_fingerprints(run))
    if changes := differences(manifest["inputs"], inputs):
        raise UserError(
            f"{run.layout.sweep}: the sweep used different inputs than this training"
            f" would ({'; '.join(changes[:3])}); choose another output folder, or"
            " remove this folder to run the sweep again"
        )
    return replace(
        run, recipe=with_choice(run.recipe, manifest["results"]), before=run.whole
    )


def with_choice(recipe: Recipe, result: dict[str, Any]) -> Recipe:
    """Return the recipe with the batch size and learning rate that its sweep chose, and
    the steps that follow.
    """
    raw = recipe.dump()
    batch = result["batch_size_tokens"]
    raw["train"] |= {
        "batch_size_tokens": batch,
        "learning_rate": result["learning_rate"],
    }
    raw["train"]["max_steps"] = recipe.steps_with(batch)
    return validate(
        Recipe, raw, f"recipe {recipe.name}, with the values that its sweep chose"
    )


# ---- the parts of a training


def calibrated_folder(run: Run, variant: str | None) -> ModelFolder | None:
    """Return the calibrated checkpoint that a distillation starts from, calibrating it
    if necessary; None: it starts from copied weights.
    """
    if not run.variant(variant).recipe.starts_calibrated:
        return None
    from fcsd.pipeline.calibrate import calibrate

    folder = calibrate(run, variant).folder / "model"
    return ModelFolder(run.original.config, folder)


def load_run_teacher(
    run: Run, rows: Any, *, fill: bool
) -> PreTrainedModel | Teacher | None:
    """Load the teacher of a recipe, if it has one; fill: as of `load_teacher`."""
    if run.recipe.teacher is None:
        return None
    return load_teacher(_teacher_source(run, rows), fill=fill)


def _teacher_source(run: Run, rows: Any) -> TeacherSource:
    recipe, train = run.recipe, run.recipe.train
    assert recipe.teacher is not None
    # A LoRA student computes in the dtype in which it is loaded. For one that is trained
    # under autocast a cache is filled without.
    dtype = None
    if recipe.lora is None and not (train.bf16 and train.dtype == "float32"):
        dtype = dtype_of(train.dtype)
    return TeacherSource(
        dtype=dtype,
        settings=recipe.teacher,
        model=run.teacher,
        rows=rows,
        batch_size=recipe.train.per_device_train_batch_size,
        seed=recipe.seed,
        launch=run.launch,
    )


def training_inputs(
    run: Run,
    teacher: PreTrainedModel | Teacher | None,
    rows: Any,
    start: ModelFolder | None,
) -> TrainingInputs:
    """Return the inputs of a training with a new student; `teacher` comes from
    `load_run_teacher`, `start` from `calibrated_folder`.
    """
    recipe = run.recipe
    # The student starts from copied weights, unless the recipe starts calibrated.
    student = load_for_launch(
        start or run.original,
        run.launch,
        recipe.connectivity.spec,
        bf16=recipe.train.bf16,
    )
    adapters = None
    if recipe.lora is not None:
        from fcsd.training.teachers.lora import AdapterOffTeacher, add_adapters

        adapters = add_adapters(
            student, recipe.lora, recipe.seed, dtype_of(recipe.train.dtype)
        )
        # Without its adapters, the student is the teacher, so no second model is
        # loaded.
        if recipe.teacher is not None and recipe.teacher.backend == "adapter_off":
            teacher = AdapterOffTeacher(student)
    return TrainingInputs(student, teacher, run.tokenizer, rows, adapters=adapters)


def training_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the part of the recipe that the result of a training depends on."""
    # All backends of a teacher give the same numbers, so a run may continue with
    # another one. The teacher's checkpoint is among the inputs.
    settings = recipe.model_dump(
        mode="json",
        include={"model", "data", "train", "connectivity", "objective", "lora", "seed"},
        exclude={"data": {"heldout", "heldout_examples"}},
    )
    if recipe.starts_calibrated and recipe.calibration is not None:
        settings["calibration"] = recipe.calibration.model_dump(mode="json")
    rule = recipe.early_stopping
    return settings | {"early_stopping": rule.settings if rule is not None else None}


def input_fingerprints(run: Run) -> dict[str, Any]:
    recipe = run.recipe
    inputs = run.original.fingerprints("original") | data_inputs(recipe.data, run)
    if recipe.teacher is not None and recipe.teacher.path is not None:
        # Its tokenizer is not an input: it is compared with the student's elsewhere.
        fingerprints = run.teacher.fingerprints("teacher")
        inputs |= {
            name: fingerprints[name] for name in ("teacher", "teacher/config.json")
        }
    return inputs | _scored_data(run)


def _scored_data(run: Run) -> dict[str, str]:
    """Return fingerprints of the items that early stopping scores."""
    recipe, rule = run.recipe, run.recipe.early_stopping
    if rule is None:
        return {}
    if isinstance(rule, HeldoutKLStoppingConfig):
        assert recipe.data.heldout is not None  # the recipe has checked it
        return heldout_fingerprint(recipe.data.heldout)
    return test_set_fingerprints(rule.scored, run.data_root)
