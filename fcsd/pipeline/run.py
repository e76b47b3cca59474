"""Run all stages of a recipe in order (`fcsd.recipe.layout`); the short ones are here:
conversion, report, publication; estimate the time that the run still takes.

What a stage alone needs is imported when it begins.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.text import Progress, Work, show, terminal_columns
from fcsd.base.writing import discard_folder
from fcsd.data.counts import tell_examples
from fcsd.evaluation.suites import load_suite
from fcsd.model.connectivity.export import convert_checkpoint
from fcsd.parallel.launch import begin_stage, finish_stage
from fcsd.pipeline.checks import check_run
from fcsd.pipeline.context import Run
from fcsd.pipeline.distill import cache_teacher, distill
from fcsd.pipeline.rows import tokenize
from fcsd.recipe.layout import MAIN
from fcsd.training.checkpoints import checkpoints, step_of


def convert(run: Run) -> Stage:
    """Write the original with FarSkip connectivity, untrained."""
    recipe, launch, original = run.recipe, run.launch, run.original
    settings = {"connectivity": recipe.connectivity.model_dump(mode="json")}
    inputs = launch.ranks.from_first(lambda: original.fingerprints("original"))
    stage = Stage(run.layout.convert, "convert", settings, inputs)
    if begin_stage(stage, launch) == "finished":
        return stage
    model = run.layout.model("converted")
    if launch.first:
        # Of a run that was killed before the manifest: nothing tells whether it is whole.
        discard_folder(model)
        convert_checkpoint(original.folder, model, recipe.connectivity.spec)
    launch.wait()
    finish_stage(
        stage,
        launch,
        {"model": {"path": recipe.model_path, "revision": recipe.model.revision}},
        model,
    )
    return stage


def report(run: Run, *, as_json: bool = False) -> Path:
    """Write `output_dir/report` from the results of the stages; print the table of
    models, or the whole report as JSON.
    """
    from fcsd.report.report import write_report

    folder = run.layout.report
    columns = terminal_columns()
    table = write_report(run.recipe, list(run.models()), folder, columns)
    if as_json:
        print((folder / "report.json").read_text(encoding="utf-8"))
    else:
        print(f"{table}\n")
        show(f"report: {folder / 'report.html'}, or report.md beside it")
    return folder


def publish(run: Run, *, as_json: bool = False) -> Path:
    """Write the report, and then `output_dir/publish`: checkpoint, remote code,
    tokenizer, and a model card with results.
    """
    from fcsd.report.publish.card import write_publication

    layout = run.layout
    report(run, as_json=as_json)
    write_publication(
        run.recipe,
        run.original.folder,
        layout.model(MAIN),
        layout.report,
        layout.publish,
    )
    if not as_json:
        print(f"checkpoint: {layout.publish}")
    return layout.publish


def run_all(run: Run, *, as_json: bool = False) -> None:
    """Run all stages in order, except those that are finished; print as `report` does.
    All ranks call this.

    Raises:
        UserError: as `fcsd.pipeline.checks.check_run`.
    """
    recipe, launch = run.recipe, run.launch
    # Everything is checked before the first stage, which may take hours.
    check_run(run)
    if launch.first:
        run = replace(run, progress=run_progress(run))
    # Expert parallelism loads its model from a checkpoint, which does not exist yet.
    copies = replace(run, launch=launch.with_copies())
    if recipe.pretrain is not None:
        from fcsd.pipeline.pretrain import pretrain

        run.begin(pretraining(None))
        pretrain(copies)
    if recipe.only_pretrains:
        finish = report
        for name in recipe.variants:
            run.begin(pretraining(name))
            pretrain(copies, name)
    else:
        finish = publish
        _distill_all(run)
    evaluate_models(run)
    if run.studies_layers:
        run.begin(LAYERS)
        layers(run)
    run.begin(PUBLICATION)
    launch.ranks.from_first(lambda: finish(run, as_json=as_json))
    if run.progress is not None:
        run.progress.end()
    # Printed last, so that the hint is not lost above the output of the stages.
    is_due = (
        recipe.evaluation.layer_study
        and not (run.layout.layers / "manifest.json").is_file()
    )
    if is_due and launch.first:
        print(
            "evaluation.layer_study: postponed, because the study rewires whole copies"
            " of the model and this launch shards the weights; `fcsd run` of the same"
            " recipe in one process, or on copies, adds it to the report",
            file=sys.stderr,
        )


def run_only(
    run: Run,
    stage: str,
    variant: str | None = None,
    *,
    as_json: bool = False,
    num_rows_shown: int = 0,
    verify: bool = False,
) -> Path:
    """Run one stage of a recipe and return its output folder. All ranks call this.

    stage: of `fcsd.recipe.layout.STAGES`. variant: for `VARIANT_STAGES`. as_json: print
    the whole report, for report and publish. num_rows_shown: print this many rows of
    the tokens, for tokenize. verify: read the finished cache again, for cache-teacher.

    Raises:
        UserError: the recipe does not have this stage; as the stage.
    """
    ranks, layout = run.launch.ranks, run.layout
    # Only the first rank writes the report and the publication.
    written: dict[str, Callable[..., Path]] = {"report": report, "publish": publish}
    if stage in written:
        return Path(ranks.from_first(lambda: str(written[stage](run, as_json=as_json))))
    if stage == "write":
        from fcsd.pipeline.written import write_all

        return write_all(run)
    if stage == "tokenize":
        _tokenize(run, num_rows_shown)
        return layout.tokens
    if stage == "cache-teacher":
        return cache_teacher(run, variant, verify=verify)
    if stage == "evaluate":
        evaluate_models(run)
        return layout.root / "evaluate"
    if stage == "pretrain":
        from fcsd.pipeline.pretrain import pretrain

        # Expert parallelism loads its model from a checkpoint, which does not exist yet.
        copies = replace(run, launch=run.launch.with_copies())
        return Path(pretrain(copies, variant).folder)
    if stage == "distill":
        return Path(distill(run, variant).folder)
    if stage == "layers":
        _check_layer_study(run)
    others = {
        "convert": convert,
        "calibrate": _calibrate,
        "sweep": _sweep,
        "layers": layers,
    }
    return Path(others[stage](run).folder)


def _calibrate(run: Run) -> Stage:
    from fcsd.pipeline.calibrate import calibrate

    return calibrate(run)


def _sweep(run: Run, *, fill_cache: bool = False) -> Stage:
    from fcsd.pipeline.sweep import sweep

    return sweep(run, fill_cache=fill_cache)


def _tokenize(run: Run, num_rows_shown: int) -> None:
    """Write the tokens of all trainings of a recipe, and print what they are."""
    from fcsd.data.show import print_rows

    for key, (rows, tokenizer) in tokenize(run).items():
        if not run.launch.first:
            continue
        print(
            f"{key}: {len(rows):,} rows of {rows.layout.max_length} tokens, in"
            f" {rows.path.parent}"
        )
        tell_examples(rows, key)
        if num_rows_shown:
            print_rows(rows, tokenizer, num_rows_shown)


def _check_layer_study(run: Run) -> None:
    """Raise UserError where the layer study cannot run, alone, in this launch."""
    if run.recipe.evaluation.layer_study is None:
        raise UserError(
            f"recipe {run.recipe.name}: has no `evaluation.layer_study`; add one, or"
            " use `fcsd layers MODEL`"
        )
    if not run.studies_layers:
        raise UserError(
            "layers: the study rewires whole copies of the model, but this launch"
            " shards the weights; run it in one process, or on copies"
        )


def _distill_all(run: Run) -> None:
    """Run the stages that lead to the distilled models."""
    recipe = run.recipe
    run.begin(CONVERSION)
    convert(run)
    if recipe.calibration is not None:
        run.begin(CALIBRATION)
        _calibrate(run)
    if recipe.sweep is not None:
        run.begin(SWEEP)
        _sweep(run, fill_cache=True)
    for name in (None, *recipe.variants):
        run.begin(distillation(name))
        distill(run, name, fill_cache=True)


def evaluate_models(run: Run) -> None:
    """Evaluate every model of the run that exists, on the same items."""
    from fcsd.evaluation.stage import PlannedEvaluation, run_evaluation
    from fcsd.pipeline.reference import Reference

    config = run.recipe.evaluation
    # One suite and one reference, so that all models answer the same items.
    suite = load_suite(config.suite)
    reference = Reference(run.original, run.recipe.data)
    texts: dict[str, Any] = {}
    for name in run.models():
        run.begin(evaluation(name))
        model_evaluation = PlannedEvaluation(
            name,
            run.model(name),
            suite,
            config,
            reference,
            original=run.original,
            texts_of_original=texts,
        )
        folder = run.layout.evaluate / name
        run_evaluation(model_evaluation, folder, run.launch)


def layers(run: Run) -> Stage:
    """Run the layer study: KL on the recipe's held-out text, and scores, as functions
    of the rewired layers (paper Fig. 3).
    """
    from fcsd.planning.layers.settings import study_from_recipe
    from fcsd.planning.layers.study import study_layers
    from fcsd.report.study_plots import plot_layers

    study = study_from_recipe(run.recipe)
    return study_layers(study, run.original, run.layout.layers, run.launch, plot_layers)


PRETRAINING = "pre-training"
CONVERSION = "conversion"
CALIBRATION = "calibration"
SWEEP = "sweep"
LAYERS = "layer study"
PUBLICATION = "report and folder for the Hub"


def pretraining(name: str | None) -> str:
    return PRETRAINING if name is None else f"{PRETRAINING} {name}"


def distillation(name: str | None) -> str:
    return f"distillation {name or MAIN}"


def evaluation(name: str) -> str:
    return f"evaluation of {name}"


def run_progress(run: Run, **where: Any) -> Progress:
    """List the unfinished stages of a run, with the work of each. where: stream and
    clock of `Progress`.
    """
    recipe, layout = run.recipe, run.layout
    stages: list[tuple[str, Path, Work]] = []

    def add(name: str, folder: Path, unit: str, cost: float) -> None:
        stages.append((name, folder, Work(1, unit, cost)))

    # Tokens are weighted by the passes of a step, since a teacher adds one.
    only_pretrains = recipe.only_pretrains
    for name in (None, *recipe.variants) if only_pretrains else (None,):
        if (config := run.variant(name).recipe.pretrain) is not None:
            folder, train = layout.stage(name or "original"), config.train
            cost = _training(folder, train.max_steps, train.batch_size_tokens, False)
            add(pretraining(name), folder, "tokens", cost)
    if not only_pretrains:
        _add_distillations(run, add)
    for name in recipe.model_names:
        add(evaluation(name), layout.evaluate / name, "evaluations", 1)
    if run.studies_layers:
        add(LAYERS, layout.layers, "studies", 1)
    add(PUBLICATION, layout.publish, "files", 0)
    # A manifest marks a finished stage.
    unfinished = {
        name: work
        for name, folder, work in stages
        if not (folder / "manifest.json").is_file()
    }
    heading, ended = "\n== {1}: {0}".format, "   {0} took {1}".format
    return Progress(
        unfinished,
        len(stages) - len(unfinished),
        label=heading,
        ended=ended,
        noun="stage",
        **where,
    )


def _add_distillations(run: Run, add: Callable[[str, Path, str, float], None]) -> None:
    """Add the stages that lead to the distilled models."""
    recipe, layout = run.recipe, run.layout
    add(CONVERSION, layout.convert, "files", 0)
    if recipe.calibration is not None:
        add(CALIBRATION, layout.stage("calibrated"), "files", 0)
    batch = float(recipe.train.batch_size_tokens)
    if recipe.sweep is not None:
        sweep = recipe.sweep
        # Until the sweep has chosen a size, each learning rate counts with the mean
        # size.
        sizes = [
            *sweep.batch_size_tokens,
            *[fmean(sweep.batch_size_tokens)] * len(sweep.learning_rate),
        ]
        done = len(list(layout.sweep.glob("*/result.json"))) / len(sizes)
        tokens = sum(size * sweep.steps_of(round(size), recipe.train) for size in sizes)
        add(
            SWEEP,
            layout.sweep,
            "tokens",
            tokens * (1 - done) * _passes(recipe.objective.has_teacher),
        )
        batch = fmean(sweep.batch_size_tokens)
    for name in (None, *recipe.variants):
        variant_recipe, folder = run.variant(name).recipe, layout.stage(name or MAIN)
        changes = recipe.variants.get(name or "", {})
        tokens = batch
        if "train.batch_size_tokens" in changes:
            tokens = variant_recipe.train.batch_size_tokens
        if "train.max_steps" in changes:
            steps = variant_recipe.train.max_steps
        else:
            steps = recipe.steps_with(round(tokens))
        add(
            distillation(name),
            folder,
            "tokens",
            _training(folder, steps, tokens, variant_recipe.objective.has_teacher),
        )


def _training(
    folder: Path, max_steps: int, batch_size_tokens: float, teacher: bool
) -> float:
    """Return the tokens of the steps after the newest checkpoint, times the passes per
    step.
    """
    saved = checkpoints(folder / "checkpoints")
    steps = max(0, max_steps - (step_of(saved[-1]) if saved else 0))
    return steps * batch_size_tokens * _passes(teacher)


def _passes(teacher: bool) -> int:
    """Return the cost in forward passes: a backward pass counts as two, a teacher as
    one.
    """
    return 4 if teacher else 3
