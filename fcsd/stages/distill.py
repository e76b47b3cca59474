"""Sweep, distil and fill the teacher cache: the training stages of a recipe that have a teacher."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.artifact import Stage
from fcsd.config.layout import MAIN, _connectivity
from fcsd.config.recipe import Recipe
from fcsd.config.training import TrainConfig
from fcsd.connectivity.checkpoint import find_folder
from fcsd.distill.arguments import TrainingRun
from fcsd.distill.run import train
from fcsd.distill.sweep import Candidate, run_sweep, with_choice
from fcsd.distill.teachers.base import Teacher
from fcsd.distill.teachers.load import fill_teacher_cache, load_teacher
from fcsd.distill.teachers.lora import AdapterOffTeacher, add_adapters
from fcsd.distributed.engine import distributed_config, holds_weights, launched_engine
from fcsd.distributed.launch import begin, finish, processes
from fcsd.errors import UserError
from fcsd.files import read_json, weights_fingerprint
from fcsd.models.load import dtype_of, load_tokenizer, original_model, to_dtype
from fcsd.stages.rows import data_inputs, left_out, training_rows
from fcsd.stages.scoring import early_stopping, score_settings, scored_data


def sweep(recipe: Recipe, *, fill_cache: bool = False) -> Stage:
    """Choose batch size, then learning rate; fill_cache as in `distill`."""
    from fcsd.report.plots import plot_sweep

    if recipe.sweep is None:
        raise UserError(f"recipe {recipe.name}: has no `sweep` section; add one (see docs/recipes.md)")
    folder = recipe.folder / "sweep"
    settings = _training_settings(recipe) | {"sweep": recipe.sweep.model_dump(mode="json")}
    stage = Stage(folder, "sweep", settings, _training_inputs(recipe))
    if begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(recipe.model_path, recipe.model)
    rows, record = training_rows(recipe.data, tokenizer, recipe)
    _check_launch(recipe)
    teacher = load_teacher(recipe, rows, tokenizer, _teacher_weights(recipe), fill=fill_cache)

    def candidate_run(candidate: Candidate, settings: TrainConfig, place: Path) -> None:
        description = f"sweep {candidate.batch_size_tokens} tok, lr {candidate.learning_rate:g}"
        plan = _training_run(recipe, place, description, teacher, tokenizer, rows)
        train(replace(plan, train=settings, save_model=False))

    result = run_sweep(recipe, folder, candidate_run)
    if processes().is_main_process:
        plot_sweep(result, folder)
    finish(stage, result | left_out(record, folder))
    return stage


def distill(recipe: Recipe, variant: str | None = None, *, fill_cache: bool = False) -> Stage:
    """Distil the main model of a recipe, or one of its variants; uses the choice of the sweep when there is one.

    fill_cache: compute what a teacher cache lacks, where the recipe has one.
    """
    _variant(recipe, variant)
    plan = _variant(_with_sweep(recipe), variant)
    folder = recipe.folder / "variants" / variant if variant else recipe.folder / "distill"
    stage = Stage(folder, "distill", _training_settings(plan), _training_inputs(plan))
    if begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(plan.model_path, plan.model)
    rows, record = training_rows(plan.data, tokenizer, plan)
    _check_launch(plan)
    teacher = load_teacher(plan, rows, tokenizer, _teacher_weights(plan), fill=fill_cache)
    run_ = _training_run(plan, folder, f"distil {variant or MAIN}", teacher, tokenizer, rows)
    with early_stopping(plan, tokenizer) as (stopper, score):
        results = train(replace(run_, stopper=stopper, score=score))
    finish(stage, results | left_out(record, folder), model=folder / "model")
    return stage


def _with_sweep(recipe: Recipe) -> Recipe:
    if recipe.sweep is None:
        return recipe
    manifest = recipe.folder / "sweep" / "manifest.json"
    if not manifest.is_file():
        raise UserError(
            f"{manifest.parent}: the sweep is not finished; run `fcsd sweep` first, or set sweep to null"
        )
    return with_choice(recipe, read_json(manifest)["results"])


def _training_run(
    recipe: Recipe,
    folder: Path,
    description: str,
    teacher: PreTrainedModel | Teacher | None,
    tokenizer: PreTrainedTokenizerBase,
    rows: Any,
) -> TrainingRun:
    """A run with a fresh student; `teacher` as `fcsd.distill.teachers.load.load_teacher` gives it."""
    student, save_dtype = _student(recipe)
    adapters = None
    if recipe.lora is not None:
        adapters = add_adapters(student, recipe.lora, recipe.seed, dtype_of(recipe.train.dtype))
        if recipe.teacher is not None and recipe.teacher.backend == "adapter_off":
            teacher = AdapterOffTeacher(student)
    return TrainingRun(
        folder=folder,
        description=description,
        student=student,
        teacher=teacher,
        tokenizer=tokenizer,
        rows=rows,
        max_length=recipe.data.max_length,
        objective=recipe.objective,
        train=recipe.train,
        seed=recipe.seed,
        save_dtype=save_dtype,
        safety=recipe.safety,
        adapters=adapters,
    )


def _check_launch(recipe: Recipe) -> None:
    if recipe.lora is not None and launched_engine().shards:
        raise UserError(
            "lora: adapters on weights that are spread over ranks are not supported; launch data parallel copies"
        )


def _student(recipe: Recipe) -> tuple[PreTrainedModel, torch.dtype]:
    """The rewired model, and the dtype of the checkpoint it came from.

    In the training dtype; in its own under adapters, for then it is not trained and may be the teacher, too, and with
    FSDP2 and ZeRO-3, where it gets the training dtype when it is spread.
    """
    engine = launched_engine()
    student = original_model(
        recipe.model,
        recipe.model_path,
        _connectivity(recipe.connectivity),
        weights=holds_weights(engine),
        distributed_config=distributed_config(engine, bf16=recipe.train.bf16),
    )
    save_dtype = student.dtype
    if recipe.lora is None and engine.name not in ("fsdp2", "zero3"):
        to_dtype(student, dtype_of(recipe.train.dtype))
    return student, save_dtype


def cache_teacher(recipe: Recipe, variant: str | None, output: Path | None, *, verify: bool = False) -> Path:
    """Fill the teacher cache of a recipe's sweep and main distillation, or of one of its variants; where it lies.

    verify: then read all of it and compare it with its checksums.
    """
    plan = _variant(recipe, variant)
    if plan.teacher is None:
        raise UserError(
            f"objective {plan.objective.name!r} compares with no teacher; there is nothing to cache"
        )
    folder = output or Path(plan.teacher.cache or recipe.folder / "teacher-cache")
    tokenizer = load_tokenizer(plan.model_path, plan.model)
    rows, _ = training_rows(plan.data, tokenizer, plan)
    fill_teacher_cache(plan, rows, tokenizer, _teacher_weights(plan), folder, verify=verify)
    return folder


def _variant(recipe: Recipe, variant: str | None) -> Recipe:
    if variant is None:
        return recipe
    if variant not in recipe.variants:
        raise UserError(
            f"recipe {recipe.name}: has no variant '{variant}'; allowed: {', '.join(recipe.variants) or 'none'}"
        )
    return recipe.variant(variant)


def _training_settings(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that the result of a training depends on."""
    keep = recipe.dump()
    data = {key: value for key, value in keep["data"].items() if key not in ("heldout", "heldout_examples")}
    # How often something is logged or saved changes nothing in the result.
    train_ = {
        key: value
        for key, value in keep["train"].items()
        if key not in ("logging_steps", "save_steps", "save_total_limit", "report_to")
    }
    names = ("connectivity", "objective", "lora", "seed")
    # All back-ends of a teacher give the same numbers: a run may go on with another one. Its checkpoint is an input.
    return {
        "model": keep["model"], "data": data, "train": train_, **{name: keep[name] for name in names},
        "early_stopping": score_settings(recipe.early_stopping),
    }  # fmt: skip


def _training_inputs(recipe: Recipe) -> dict[str, str]:
    source = find_folder(recipe.model_path, recipe.model.revision)
    inputs = {"original": weights_fingerprint(source), **data_inputs(recipe.data, recipe)}
    if recipe.teacher is not None and recipe.teacher.path is not None:
        inputs["teacher"] = _teacher_weights(recipe)
    return inputs | scored_data(recipe)


def _teacher_weights(recipe: Recipe) -> str:
    path, model = recipe.teacher_model
    return weights_fingerprint(find_folder(path, model.revision))
