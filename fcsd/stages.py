"""The stages of a recipe: each reads folders and leaves a folder with a manifest.

    output_dir/pretrain/            model from scratch (only with a `pretrain` section)
    output_dir/convert/             the original, rewired, untrained
    output_dir/sweep/               batch size and learning rate
    output_dir/distill/             the main distillation
    output_dir/variants/NAME/       further distillations
    output_dir/evaluate/NAME/       results of every model, on the same items
    output_dir/layers/              untrained KL against the number of rewired layers
    output_dir/report/              report.md, report.json, figures
    output_dir/publish/             the folder that goes to the Hub

Not covered: uploading it.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from fcsd.artifact import Stage, read_json, weights_fingerprint, write_json
from fcsd.connectivity import Connectivity, convert_checkpoint, convert_model, load_model
from fcsd.connectivity.checkpoint import find_folder
from fcsd.distill.data import build_dataset
from fcsd.distill.early_stopping import EarlyStopper
from fcsd.distill.run import Scorer, TrainingRun, train
from fcsd.distill.sweep import Candidate, run_sweep, with_choice
from fcsd.errors import UserError
from fcsd.evaluate.code import generate_completions, load_problems
from fcsd.evaluate.divergence import mean_kl
from fcsd.evaluate.runner import evaluate, write_result
from fcsd.evaluate.scorer import CodeScorer, pass_at_1
from fcsd.evaluate.suites import SuiteTask, dataset_location, load_suite
from fcsd.families import family_of
from fcsd.loading import data_fingerprint, dtype_of, load_tokenizer
from fcsd.processes import processes
from fcsd.recipe import Data, EarlyStopping, Objective, Recipe, Source
from fcsd.recipe import Train as TrainSettings

MAIN = "fcsd"  # name of the main distillation in results and report


def run(recipe: Recipe) -> None:
    """All stages in a row; what is finished is not run again.

    Raises:
        UserError: in a launch of several processes: evaluation runs in one.
    """
    _alone("run")
    if recipe.pretrain is not None:
        pretrain(recipe)
    convert(recipe)
    if recipe.sweep is not None:
        sweep(recipe)
    distill(recipe)
    for name in recipe.variants:
        distill(recipe, name)
    for name, path in models(recipe).items():
        evaluate_stage(recipe, name, path)
    if recipe.evaluation.layer_study:
        layers(recipe)
    publish(recipe)


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
    stage = Stage(folder, "pretrain", settings, _data_inputs(plan.data))
    if _begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(plan.tokenizer)
    set_seed(recipe.seed)
    model = new_model(plan.config | _token_ids(tokenizer, plan.config), _connectivity(plan.connectivity))
    torch.nn.Module.to(model, dtype_of(plan.train.dtype))
    run_ = TrainingRun(
        folder=folder,
        description="pretrain",
        student=model,
        teacher=None,
        tokenizer=tokenizer,
        rows=_rows(plan.data, tokenizer, recipe.seed),
        max_length=plan.data.max_length,
        objective=Objective(name="ce"),
        train=plan.train,
        seed=recipe.seed,
        save_dtype=dtype_of(plan.train.dtype),
    )
    results = train(run_)
    _finish(stage, results, model=folder / "model")
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
    if _begin(stage) == "finished":
        return stage
    if processes().is_main_process and not (folder / "model").is_dir():
        convert_checkpoint(
            source,
            folder / "model",
            _connectivity(recipe.connectivity),
        )
    processes().wait_for_everyone()
    _finish(stage, {}, model=folder / "model")
    return stage


# ---- sweep and distil


def sweep(recipe: Recipe) -> Stage:
    """Choose batch size, then learning rate."""
    from fcsd.report.plots import plot_sweep

    if recipe.sweep is None:
        raise UserError(f"recipe {recipe.name}: has no `sweep` section; add one (see docs/recipes.md)")
    folder = recipe.folder / "sweep"
    settings = _training_settings(recipe) | {"sweep": recipe.sweep.model_dump(mode="json")}
    stage = Stage(folder, "sweep", settings, _training_inputs(recipe))
    if _begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(recipe.model_path, recipe.model)
    rows = _rows(recipe.data, tokenizer, recipe.seed)
    teacher = _teacher(recipe)

    def candidate_run(candidate: Candidate, settings: TrainSettings, place: Path) -> None:
        student, save_dtype = _student(recipe)
        description = f"sweep {candidate.batch_size_tokens} tok, lr {candidate.learning_rate:g}"
        plan = _training_run(recipe, place, description, student, teacher, tokenizer, rows, save_dtype)
        train(replace(plan, train=settings, save_model=False))

    result = run_sweep(recipe, folder, candidate_run)
    if processes().is_main_process:
        plot_sweep(result, folder)
    _finish(stage, result)
    return stage


def distill(recipe: Recipe, variant: str | None = None) -> Stage:
    """Distil the main model of a recipe, or one of its variants; uses the choice of the sweep when there is one."""
    if variant is not None and variant not in recipe.variants:
        raise UserError(
            f"recipe {recipe.name}: has no variant '{variant}'; allowed: {', '.join(recipe.variants) or 'none'}"
        )
    plan = _with_sweep(recipe)
    if variant is not None:
        plan = plan.variant(variant)
    folder = recipe.folder / "variants" / variant if variant else recipe.folder / "distill"
    stage = Stage(folder, "distill", _training_settings(plan), _training_inputs(plan))
    if _begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(plan.model_path, plan.model)
    rows = _rows(plan.data, tokenizer, plan.seed)
    teacher = _teacher(plan)
    student, save_dtype = _student(plan)
    description = f"distil {variant or MAIN}"
    run_ = _training_run(plan, folder, description, student, teacher, tokenizer, rows, save_dtype)
    with _early_stopping(plan, tokenizer) as (stopper, score):
        results = train(replace(run_, stopper=stopper, score=score))
    _finish(stage, results, model=folder / "model")
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
    student: PreTrainedModel,
    teacher: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    rows: Any,
    save_dtype: torch.dtype,
) -> TrainingRun:
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
    )


def _teacher(recipe: Recipe) -> PreTrainedModel | None:
    return original_model(recipe) if recipe.objective.name in ("kl", "kl+l2") else None


def _student(recipe: Recipe) -> tuple[PreTrainedModel, torch.dtype]:
    """The rewired model in the training dtype, and the dtype of the checkpoint it came from."""
    student = original_model(recipe, _connectivity(recipe.connectivity))
    save_dtype = student.dtype
    torch.nn.Module.to(student, dtype_of(recipe.train.dtype))
    return student, save_dtype


def original_model(recipe: Recipe, connectivity: Connectivity | None = None) -> PreTrainedModel:
    """The recipe's original checkpoint, with regular connectivity or with the one given."""
    model = recipe.model
    return load_model(
        recipe.model_path,
        connectivity=connectivity,
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        experts_implementation=model.experts_implementation,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


@contextlib.contextmanager
def _early_stopping(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[EarlyStopper | None, Scorer | None]]:
    """The stopper, and a function that gives a model's greedy pass@1; the sandbox lives as long as the block.

    The canonical solutions are scored first: a scorer that fails them would stop every run.
    """
    plan = recipe.early_stopping
    if plan is None:
        yield None, None
        return
    stopper = EarlyStopper(every_steps=plan.every_steps, patience=plan.patience, min_delta=plan.min_delta)
    if not processes().is_main_process:
        yield stopper, _never
        return
    task = _stopping_task(plan)
    problems = load_problems(task, _path(recipe.evaluation.data_root))[: plan.max_problems]
    allow_weak = recipe.evaluation.allow_weak_sandbox
    with CodeScorer(timeout_s=plan.timeout_s, allow_weak_sandbox=allow_weak) as scorer:
        scorer.self_check(problems)

        def score(model: PreTrainedModel) -> float:
            # Without a bar of its own, which would cut the training bar to pieces.
            completions = generate_completions(
                model, tokenizer, problems, task=task, batch_size=plan.batch_size, progress=False
            )
            return pass_at_1(scorer.score(problems, completions))

        yield stopper, score


def _stopping_task(plan: EarlyStopping) -> SuiteTask:
    """The code task of early stopping, as a row of a suite."""
    own = {"every_steps", "patience", "min_delta", "max_problems", "batch_size"}
    row = {"task": "early_stopping", "kind": "code", "metric": "pass@1", **plan.model_dump(exclude=own)}
    return SuiteTask.model_validate(row)


def _never(model: PreTrainedModel) -> float:
    raise RuntimeError("only the first rank scores")


# ---- evaluate


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


def evaluate_stage(recipe: Recipe, name: str, path: Path) -> Stage:
    """Judge one model of the run on the recipe's suite, and measure its KL to the original on held-out text."""
    plan = recipe.evaluation
    suite = load_suite(plan.suite)
    settings = {
        "evaluation": plan.model_dump(mode="json", exclude={"layer_study"}),
        "suite": suite.model_dump(mode="json", exclude={"folder"}),
        "data": recipe.data.model_dump(
            mode="json", include={"heldout", "heldout_examples", "max_length", "packing", "loss_on"}
        ),
        "model": {"dtype": recipe.model.dtype},
    }
    original = find_folder(recipe.model_path, recipe.model.revision)
    inputs = {
        "model": weights_fingerprint(path),
        "connectivity": _wiring(path),
        "original": weights_fingerprint(original),
        **_judged_data(suite.tasks, _path(plan.data_root), recipe.data.heldout),
    }
    stage = Stage(recipe.folder / "evaluate" / name, "evaluate", settings, inputs)
    if _begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(path, recipe.model)
    model = load_model(path, dtype=recipe.model.dtype, attn_implementation=recipe.model.attn_implementation,
                       experts_implementation=recipe.model.experts_implementation)  # fmt: skip
    result, samples = evaluate(
        model,
        tokenizer,
        suite,
        data_root=_path(plan.data_root),
        batch_size=plan.batch_size,
        limit=plan.limit,
        allow_weak_sandbox=plan.allow_weak_sandbox,
        name=name,
    )
    if recipe.data.heldout is not None:
        result["kl_to_original"] = mean_kl(
            original_model(recipe), model, _heldout(recipe, tokenizer), progress=True
        )
    write_result(result, samples, stage.folder)
    stage.finish({"mean": result["mean"]})
    return stage


def evaluate_checkpoint(
    path: str,
    *,
    suite: str,
    data_root: Path | None,
    output: Path,
    batch_size: int,
    limit: int | None,
    allow_weak_sandbox: bool,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """`fcsd evaluate`: judge any checkpoint, without a recipe."""
    from fcsd.report.table import result_table

    _alone("evaluate")
    tasks = load_suite(suite)
    folder = find_folder(path, revision)
    settings = {"suite": tasks.model_dump(mode="json", exclude={"folder"}), "limit": limit}
    inputs = {
        "model": weights_fingerprint(folder),
        "connectivity": _wiring(folder),
        **_judged_data(tasks.tasks, data_root),
    }
    stage = Stage(output, "evaluate", settings, inputs)
    if _begin(stage) != "finished":
        model = load_model(str(folder), trust_remote_code=trust_remote_code)
        result, samples = evaluate(
            model,
            load_tokenizer(folder),
            tasks,
            data_root=data_root,
            batch_size=batch_size,
            limit=limit,
            allow_weak_sandbox=allow_weak_sandbox,
            name=path,
        )
        write_result(result, samples, output)
        stage.finish({"mean": result["mean"]})
    print(result_table(output))


def layers(recipe: Recipe) -> Stage:
    """Untrained KL to the original against the number of rewired layers, from both ends (paper Fig. 3)."""
    from fcsd.report.plots import plot_layers

    if recipe.data.heldout is None:
        raise UserError("evaluation.layer_study: needs data.heldout, the text on which KL is measured")
    source = find_folder(recipe.model_path, recipe.model.revision)
    settings = recipe.data.model_dump(mode="json", include={"heldout", "heldout_examples", "max_length"})
    inputs = {"original": weights_fingerprint(source), **_judged_data([], None, recipe.data.heldout)}
    stage = Stage(recipe.folder / "layers", "layers", settings, inputs)
    if _begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(recipe.model_path, recipe.model)
    rows = _heldout(recipe, tokenizer)
    original, model = original_model(recipe), original_model(recipe)
    num_layers = model.config.num_hidden_layers
    points = []
    for side in ("first", "last"):
        for count in range(1, num_layers + 1):
            convert_model(model, Connectivity({side: count}))
            points.append({"side": side, "num_layers": count, **mean_kl(original, model, rows)})
    result = {"num_hidden_layers": num_layers, "points": points}
    write_json(stage.folder / "layers.json", result)
    plot_layers(result, stage.folder / "layers.png")
    stage.finish({})
    return stage


# ---- report and publish


def report(recipe: Recipe) -> Path:
    """Write `output_dir/report` from what the stages left, and print the table of models."""
    from fcsd.report.report import write_report

    folder = recipe.folder / "report"
    print(write_report(recipe, list(models(recipe)), folder))
    print(f"\nreport: {folder / 'report.md'}")
    return folder


def publish(recipe: Recipe) -> Path:
    """Leave `output_dir/publish`: checkpoint, remote code, tokenizer, model card with results; then the report."""
    from fcsd.report.card import write_publication

    folder = recipe.folder / "publish"
    report(recipe)
    write_publication(recipe, recipe.folder / "distill" / "model", recipe.folder / "report", folder)
    print(f"checkpoint: {folder}")
    return folder


# ---- what the stages share


def _alone(command: str) -> None:
    if processes().num_processes > 1:
        raise UserError(
            f"`{command}` evaluates, which runs in one process; launch `pretrain`, `sweep` and `distill` on several,"
            " and then `run` on one: it does what is left"
        )


def _begin(stage: Stage) -> str:
    """Note the start of a stage on the first rank; tells on every rank whether it is finished already."""
    state = stage.state()
    processes().wait_for_everyone()  # nobody may see what the first rank writes below
    if processes().is_main_process:
        if state == "finished":
            print(f"{stage.name}: finished before, in {stage.folder}", file=sys.stderr)
        else:
            stage.start()
    processes().wait_for_everyone()
    return state


def _finish(stage: Stage, results: dict[str, Any], model: Path | None = None) -> None:
    if processes().is_main_process:
        stage.finish(results, {"model": weights_fingerprint(model)} if model is not None else None)
    processes().wait_for_everyone()


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
    names = ("connectivity", "objective", "early_stopping", "seed")
    return {"model": keep["model"], "data": data, "train": train_, **{name: keep[name] for name in names}}


def _training_inputs(recipe: Recipe) -> dict[str, str]:
    source = find_folder(recipe.model_path, recipe.model.revision)
    inputs = {"original": weights_fingerprint(source), **_data_inputs(recipe.data)}
    if recipe.early_stopping is not None:
        inputs |= _judged_data([_stopping_task(recipe.early_stopping)], _path(recipe.evaluation.data_root))
    return inputs


def _data_inputs(data: Data) -> dict[str, str]:
    sources = enumerate(data.train)
    return {
        f"data.train.{index}": data_fingerprint(source.path, source.revision) for index, source in sources
    }


def _judged_data(
    tasks: Sequence[SuiteTask], data_root: Path | None, heldout: Source | None = None
) -> dict[str, str]:
    """What identifies the items that models are judged on: a score is never read for other items."""
    found = {
        f"task {row.task}": data_fingerprint(dataset_location(row, data_root), row.revision) for row in tasks
    }
    return found | (
        {"data.heldout": data_fingerprint(heldout.path, heldout.revision)} if heldout is not None else {}
    )


_held_rows: dict[str, Any] = {}


def _rows(data: Data, tokenizer: PreTrainedTokenizerBase, seed: int) -> Any:
    """Packed training rows; the last ones made stay in memory, for the next stage of a run that reads the same data."""
    plan = data.model_dump(exclude={"heldout", "heldout_examples"})
    # What the rows depend on; two stages of one run may find the same tokenizer in different folders.
    parts = [plan, list(_data_inputs(data).values()), seed, tokenizer.chat_template, tokenizer.get_vocab()]
    key = json.dumps(parts, sort_keys=True)  # a vocabulary comes in another order every time it is loaded
    if key not in _held_rows:
        _held_rows.clear()
        _held_rows[key] = build_dataset(
            data.train,
            tokenizer,
            max_length=data.max_length,
            packing=data.packing,
            loss_on=data.loss_on,
            seed=seed,
        )
    return _held_rows[key]


def _heldout(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    data = recipe.data
    assert data.heldout is not None
    limit = min(data.heldout_examples, data.heldout.max_examples or data.heldout_examples)
    source = Source.model_validate(data.heldout.model_dump() | {"max_examples": limit, "streaming": False})
    return build_dataset(
        [source],
        tokenizer,
        max_length=data.max_length,
        packing=data.packing,
        loss_on=data.loss_on,
        shuffle=False,
    )


def _wiring(path: Path) -> str:
    return str(read_json(path / "config.json").get("farskip", "regular"))


def _connectivity(section: Any) -> Connectivity:
    return Connectivity(section.layers, section.attention, section.mlp)


def _path(text: str | None) -> Path | None:
    return Path(text) if text is not None else None
