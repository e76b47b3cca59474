"""Choose batch size and learning rate: the `sweep` stage of a recipe."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fcsd.base.artifact import Stage, read_manifest
from fcsd.base.errors import UserError
from fcsd.base.writing import write_text
from fcsd.parallel.launch import Launch, begin_stage, finish_stage
from fcsd.pipeline.checks import check_training, settle_overlap
from fcsd.pipeline.context import Run
from fcsd.pipeline.distill import (
    calibrated_folder,
    input_fingerprints,
    load_run_teacher,
    training_inputs,
    training_settings,
    with_choice,
)
from fcsd.pipeline.rows import exclusions, training_rows
from fcsd.recipe.recipe import EarlyStoppingConfig, Recipe, to_yaml
from fcsd.report.plots import plot_sweep
from fcsd.training.arguments import Job, Scorer
from fcsd.training.config import TrainConfig, may_change
from fcsd.training.early_stopping import EarlyStopper
from fcsd.training.run import remove_checkpoints, train
from fcsd.training.sweep import Candidate, choice_text, edges, last_score, run_sweep


def sweep(run: Run, *, fill_cache: bool = False) -> Stage:
    """Choose batch size, then learning rate; fill_cache as in `distill`."""
    recipe, launch, folder = run.recipe, run.launch, run.layout.sweep
    if recipe.sweep is None:
        raise UserError(
            f"recipe {recipe.name}: has no `sweep` section; add one (see"
            " docs/recipes.md)"
        )
    settings = training_settings(recipe) | {
        "sweep": recipe.sweep.model_dump(mode="json")
    }
    inputs = launch.ranks.from_first(lambda: input_fingerprints(run))
    stage = Stage(folder, "sweep", settings, inputs, may_change(recipe.train))
    if begin_stage(stage, launch) == "finished":
        _tell_choice(read_manifest(folder)["results"], launch)
        return stage
    check_training(run, recipe.sweep.batch_size_tokens)
    settle_overlap(run)
    start = calibrated_folder(run, None)
    rows = training_rows(recipe.data, run.tokenizer, run)
    teacher = load_run_teacher(run, rows, fill=fill_cache)

    # Rows, teacher and start are shared by all candidates; the student is new for each.
    def candidate_run(
        candidate: Candidate, settings: TrainConfig, candidate_folder: Path
    ) -> dict[str, Any] | None:
        # Candidates are only compared: their models are not kept.
        job = Job(
            candidate_folder,
            f"sweep {candidate.batch_size_tokens} tok, lr {candidate.learning_rate:g}",
            recipe.seed,
            owner=[stage.identity, candidate.folder],
            save_model=False,
        )
        models = training_inputs(run, teacher, rows, start)
        sections = recipe.sections.model_copy(update={"train": settings})
        if rule is None or score is None:
            train(models, sections, job, launch)
            return None
        # Before the first step, where a score that fails is found early, and after the
        # last one.
        stopper = EarlyStopper(
            every_steps=settings.max_steps,
            patience=2,
            min_delta=rule.min_delta,
            metric=rule.metric,
        )
        job = replace(job, stopper=stopper, score=score)
        train(models, sections, job, launch)
        return last_score(stopper)

    rule = recipe.early_stopping if recipe.sweep.choose_by is not None else None
    with _scoring(run, rule) as score:
        result = run_sweep(
            recipe.sweep,
            recipe.train,
            folder,
            candidate_run,
            remove_checkpoints=lambda candidate_folder: remove_checkpoints(
                candidate_folder, launch
            ),
            metric=rule.metric if rule is not None else "loss",
            identity=stage.identity,
            ranks=launch.ranks,
        )
    if launch.first:
        write_ready_recipe(recipe, result, folder)
        plot_sweep(result, folder)
    finish_stage(stage, launch, result | exclusions(rows, folder, launch))
    _tell_choice(result, launch)
    return stage


@contextmanager
def _scoring(run: Run, rule: EarlyStoppingConfig | None) -> Iterator[Scorer | None]:
    """Yield the function that scores the candidates; None: their loss decides."""
    if rule is None:
        yield None
        return
    from fcsd.pipeline.scoring import early_stopping

    with early_stopping(run) as (_, score):
        yield score


def _tell_choice(result: dict[str, Any], launch: Launch) -> None:
    if launch.first:
        for line in (choice_text(result), *edges(result)):
            print(f"sweep: {line}", file=sys.stderr)


def write_ready_recipe(recipe: Recipe, result: dict[str, Any], folder: Path) -> None:
    """Write the recipe with the choice of its sweep to `folder/recipe.yaml`."""
    ready = with_choice(recipe, result).dump() | {"sweep": None}
    head = f"# {recipe.name}, with the values that its sweep chose; see sweep.md.\n"
    write_text(folder / "recipe.yaml", head + to_yaml(ready))
