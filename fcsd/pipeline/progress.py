"""What `fcsd run` has still to do, stage by stage, so that it can say how long all of it takes.

Not covered: the time of conversion, report and publication, which is short beside the others'.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

from fcsd.evaluation.progress import Progress, Work
from fcsd.pipeline.context import Run
from fcsd.recipe.layout import MAIN
from fcsd.training.checkpoints import checkpoints, step_of

PRETRAINING, CONVERSION, CALIBRATION, SWEEP = "pre-training", "conversion", "calibration", "sweep"
STEERING = "tables that steer the routers"
LAYERS, PUBLICATION = "layer study", "report and folder for the Hub"


def distillation(name: str | None) -> str:
    """Name the distillation of a variant, or the main one."""
    return f"distillation {name or MAIN}"


def evaluation(name: str) -> str:
    """Name the evaluation of one of the run's models."""
    return f"evaluation of {name}"


def run_progress(run: Run, **where: Any) -> Progress:
    """List the stages of a run that are not finished, in their order, with the work that each asks.

    where: stream and clock of `Progress`.
    """
    recipe, layout, plan = run.recipe, run.layout, run.recipe.pretrain
    stages: list[tuple[str, Path, Work]] = []
    if plan is not None:
        folder = layout.pretrain
        stages.append(
            (
                PRETRAINING,
                folder,
                _training(folder, plan.train.max_steps, plan.train.batch_size_tokens, teacher=False),
            )
        )
    stages.append((CONVERSION, layout.convert, Work(1, "files", 0)))
    if recipe.calibration is not None:
        stages.append((CALIBRATION, layout.stage("calibrated"), Work(1, "files", 0)))
    batch = float(recipe.train.batch_size_tokens)
    if recipe.sweep is not None:
        sweep = recipe.sweep
        sizes = [*sweep.batch_size_tokens, *[fmean(sweep.batch_size_tokens)] * len(sweep.learning_rate)]
        done = len(list(layout.sweep.glob("*/result.json"))) / len(sizes)
        tokens = sum(size * sweep.steps_of(round(size), recipe.train) for size in sizes)
        cost = tokens * (1 - done) * _passes(recipe.objective.has_teacher)
        stages.append((SWEEP, layout.sweep, Work(1, "tokens", cost)))
        batch = fmean(sweep.batch_size_tokens)
    for name in (None, *recipe.variants):
        one, folder = run.variant(name).recipe, layout.stage(name or MAIN)
        changes = recipe.variants.get(name or "", {})
        tokens = one.train.batch_size_tokens if "train.batch_size_tokens" in changes else batch
        steps = one.train.max_steps if "train.max_steps" in changes else recipe.steps_with(round(tokens))
        work = _training(folder, steps, tokens, teacher=one.objective.has_teacher)
        stages.append((distillation(name), folder, work))
    for name in run.model_names:
        stages.append((evaluation(name), layout.evaluation(name), Work(1, "evaluations", 1)))
    if (bias := recipe.evaluation.router_bias) is not None:
        stages.append((STEERING, layout.router_bias, Work(1, "evaluations", 1)))
        for name in bias.names:
            stages.append((evaluation(name), layout.evaluation(name), Work(1, "evaluations", 1)))
    if run.studies_layers:
        stages.append((LAYERS, layout.layers, Work(1, "studies", 1)))
    stages.append((PUBLICATION, layout.publish, Work(1, "files", 0)))
    left = {name: work for name, folder, work in stages if not (folder / "manifest.json").is_file()}
    heading, ended = "\n== {1}: {0}".format, "   {0} took {1}".format
    return Progress(left, len(stages) - len(left), label=heading, ended=ended, **where)


def _training(folder: Path, max_steps: int, batch_size_tokens: float, *, teacher: bool) -> Work:
    """Return the tokens of the steps after the newest checkpoint, times the passes that each takes."""
    kept = checkpoints(folder / "checkpoints")
    steps = max(0, max_steps - (step_of(kept[-1]) if kept else 0))
    return Work(1, "tokens", steps * batch_size_tokens * _passes(teacher))


def _passes(teacher: bool) -> int:
    """Count forward passes: the backward pass costs as much as two, a teacher's is one more."""
    return 4 if teacher else 3
