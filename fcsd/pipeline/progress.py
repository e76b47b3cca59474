"""Estimate the remaining work of `fcsd run`, stage by stage, to predict its remaining
time.
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from fcsd.base.text import Progress, Work
from fcsd.pipeline.context import Run
from fcsd.recipe.layout import MAIN
from fcsd.training.checkpoints import checkpoints, step_of

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
    for name in (None, *recipe.variants) if recipe.only_pretrains else (None,):
        if (config := run.variant(name).recipe.pretrain) is not None:
            folder, train = layout.stage(name or "original"), config.train
            cost = _training(folder, train.max_steps, train.batch_size_tokens, False)
            add(pretraining(name), folder, "tokens", cost)
    if not recipe.only_pretrains:
        _add_distillations(run, add)
    for name in recipe.model_names:
        add(evaluation(name), layout.evaluation(name), "evaluations", 1)
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
