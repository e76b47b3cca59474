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

Not covered: uploading it; that is `fcsd.push`.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from fcsd.artifact import Stage, read_json, weights_fingerprint
from fcsd.connectivity import Connectivity, convert_checkpoint, convert_model
from fcsd.connectivity.checkpoint import find_folder
from fcsd.distill.adapters import AdapterOffTeacher, add_adapters
from fcsd.distill.engines import distributed_config, expert_parallel, holds_weights, launched_engine
from fcsd.distill.run import TrainingRun, train
from fcsd.distill.sweep import Candidate, run_sweep, with_choice
from fcsd.distill.teacher import Teacher
from fcsd.errors import UserError
from fcsd.evaluate.batch import check_batch_size
from fcsd.evaluate.placed import judging_engine
from fcsd.evaluate.ranks import launched_ranks
from fcsd.evaluate.stage import evaluate_stage
from fcsd.families import family_of
from fcsd.layers import Study, study_layers
from fcsd.loading import dtype_of, load_tokenizer, original_model, to_dtype
from fcsd.processes import begin, finish, processes
from fcsd.recipe import Objective, Recipe
from fcsd.recipe import Train as TrainSettings
from fcsd.stopping import early_stopping, score_settings, scored_data
from fcsd.teachers import fill_teacher_cache, load_teacher
from fcsd.training_data import data_inputs, left_out, training_rows

MAIN = "fcsd"  # name of the main distillation in results and report


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


# ---- pretrain


def pretrain(recipe: Recipe) -> Stage:
    """Train `recipe.pretrain.config` from scratch with cross-entropy."""
    plan = recipe.pretrain
    if plan is None:
        raise UserError(f"recipe {recipe.name}: has no `pretrain` section; add one, or give model.path")
    folder = recipe.folder / "pretrain"
    settings = plan.model_dump(mode="json", exclude={"data": {"heldout", "heldout_examples"}}) | {
        "seed": recipe.seed
    }
    stage = Stage(folder, "pretrain", settings, data_inputs(plan.data, recipe))
    if begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(plan.tokenizer)
    set_seed(recipe.seed)
    # The first rank of a sharded run makes the weights, and sends the others their parts.
    with contextlib.nullcontext() if holds_weights(launched_engine()) else torch.device("meta"):
        model = new_model(plan.config | _token_ids(tokenizer, plan.config), _connectivity(plan.connectivity))
    to_dtype(model, dtype_of(plan.train.dtype))
    rows, record = training_rows(plan.data, tokenizer, recipe)
    run_ = TrainingRun(
        folder=folder,
        description="pretrain",
        student=model,
        teacher=None,
        tokenizer=tokenizer,
        rows=rows,
        max_length=plan.data.max_length,
        objective=Objective(name="ce"),
        train=plan.train,
        seed=recipe.seed,
        save_dtype=dtype_of(plan.train.dtype),
        safety=recipe.safety,
    )
    results = train(run_) | left_out(record, folder)
    finish(stage, results, model=folder / "model")
    return stage


def new_model(config: dict[str, Any], connectivity: Connectivity) -> PreTrainedModel:
    """A model with fresh random weights; the caller sets the seed.

    Raises:
        UserError: a model type that transformers or fcsd does not know, a dense model, a value that does not fit.
    """
    values = dict(config)
    model_type = values.pop("model_type")
    experts = values.pop("experts_implementation", None)
    try:
        family_of(
            {"model_type": model_type}
        )  # transformers would answer with a list of hundreds of model types
        built = AutoConfig.for_model(model_type, **values)
        family_of(built)
        model = AutoModelForCausalLM.from_config(
            built, **({"experts_implementation": experts} if experts else {})
        )
    except UserError as error:
        raise UserError(f"pretrain.config: {error}") from None
    except Exception as error:  # transformers' strict configs raise many kinds for a wrong field
        raise UserError(f"pretrain.config: {model_type}: {' '.join(str(error).split())}") from error
    if connectivity.layers != "none":
        convert_model(model, connectivity)
    return model


def _token_ids(tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]) -> dict[str, Any]:
    """What the tokenizer decides about a new model; the recipe may say it too, but not differently."""
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for key, value in ids.items():
        if config.get(key, value) != value and not (key == "vocab_size" and config[key] > value):
            raise UserError(
                f"pretrain.config.{key}: {config[key]} does not fit the tokenizer's {value}; leave it out"
            )
    return {key: config.get(key, value) for key, value in ids.items()}


# ---- convert


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


# ---- sweep and distil


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

    def candidate_run(candidate: Candidate, settings: TrainSettings, place: Path) -> None:
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
    """A run with a fresh student; `teacher` as `fcsd.teachers.load_teacher` gives it."""
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


# ---- evaluate and layers


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
    return study_layers(study, recipe.folder / "layers")


# ---- report and publish


def report(recipe: Recipe, *, as_json: bool = False) -> Path:
    """Write `output_dir/report` from what the stages left; print the table of models, or the whole as JSON."""
    from fcsd.report.report import write_report

    folder = recipe.folder / "report"
    table = write_report(recipe, list(models(recipe)), folder)
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
    else:
        print(f"{table}\n\nreport: {folder / 'report.md'}")
    return folder


def publish(recipe: Recipe, *, as_json: bool = False) -> Path:
    """Leave `output_dir/publish`: checkpoint, remote code, tokenizer, model card with results; then the report."""
    from fcsd.report.card import write_publication

    folder = recipe.folder / "publish"
    report(recipe, as_json=as_json)
    original = find_folder(recipe.model_path, recipe.model.revision)
    write_publication(recipe, original, recipe.folder / "distill" / "model", recipe.folder / "report", folder)
    if not as_json:
        print(f"checkpoint: {folder}")
    return folder


# ---- what the stages share


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


def _connectivity(section: Any) -> Connectivity:
    return Connectivity(section.layers, section.attention, section.mlp)
