"""Recipes in Python: load one by its path or name, and run a stage of it.

Not covered: the launch; start a script that calls these with `accelerate launch`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError, kind_of
from fcsd.base.strict import check_kind, did_you_mean, refuse
from fcsd.base.writing import release_folders
from fcsd.parallel.engine import Overlap
from fcsd.parallel.failure import stop_watching
from fcsd.parallel.launch import join_launch
from fcsd.recipe import layout
from fcsd.recipe.load_recipe import check_recipe
from fcsd.recipe.load_recipe import load_recipe as load_file
from fcsd.recipe.recipe import Recipe

STAGES = (*layout.STAGES, "run")


def load_recipe(
    path: str | Path, overrides: Mapping[str, Any] | list[str] | None = None
) -> Recipe:
    """Load and check a recipe.

    Args:
        path: the path of the file, or the name of a recipe that ships with fcsd
            ("tiny/demo").
        overrides: {"train.learning_rate": 4e-5}, or texts as `--set` takes them.

    Raises:
        UserError: there is no such recipe, a key is unknown, or a value out of range.
    """
    check_kind(
        "path",
        path,
        str | Path,
        "the path of a recipe, or the name of one that ships with fcsd,",
    )
    check_kind(
        "overrides",
        overrides,
        Mapping | list | None,
        "a dict of keys to values, or a list of KEY=VALUE,",
    )
    if isinstance(overrides, Mapping):
        # JSON is YAML, in which the values of `--set` are read.
        overrides = [f"{key}={_json(key, value)}" for key, value in overrides.items()]
    for override in overrides or []:
        check_kind("overrides", override, str, "KEY=VALUE in a list")
    return load_file(path, overrides)


def _json(key: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        raise UserError(
            f"overrides: {key}: {kind_of(value)}; a recipe cannot hold such a value"
        ) from None


def run_stage(
    stage: str,
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    variant: str | None = None,
    expert_parallel: int = 1,
    overlap: Overlap | None = None,
) -> Path:
    """Run one stage of a recipe, or all of them ("run"), as `fcsd run RECIPE
    --only STAGE` and `fcsd run RECIPE` do; finished stages are not rerun.

    Args:
        stage: tokenize, pretrain, convert, calibrate, cache-teacher, sweep, distill,
            evaluate (every model that exists), layers, report, publish or run.
        recipe: a recipe, its path or shipped name, or the content of its file.
        variant: one of the recipe's variants, for pretrain, cache-teacher and distill.
        expert_parallel: number of ranks that share the experts of an MoE layer.
        overlap: how much of their communication overlaps computation: full, forward or
            off; None: full where the model supports it.

    Returns:
        The output folder of the stage; for "evaluate" the folder of all evaluations,
        for "run" that of the run.

    Raises:
        UserError: there is no such stage, or the command would refuse to run it.
            Interrupted: a signal arrived, and fcsd has written a checkpoint.
    """
    refuse(
        (
            stage not in STAGES,
            lambda: (
                f"run_stage: no stage {stage!r}{did_you_mean(str(stage), [*STAGES])}"
            ),
        ),
        (
            variant is not None and stage not in layout.VARIANT_STAGES,
            f"run_stage: stage {stage!r} has no variants; leave variant out",
        ),
    )
    check_kind("expert_parallel", expert_parallel, int, "a number of ranks")
    if isinstance(recipe, Mapping):
        recipe = check_recipe(dict(recipe), "recipe")
    elif not isinstance(recipe, Recipe):
        check_kind(
            "recipe",
            recipe,
            str | Path,
            "a recipe, its path or name, or a dict of its keys",
        )
        recipe = load_recipe(recipe)
    from fcsd.pipeline.context import Run
    from fcsd.pipeline.run import run_all, run_only

    launch = join_launch(expert_parallel=expert_parallel, overlap=overlap)
    try:
        run = Run(recipe, launch)
        if stage != "run":
            return run_only(run, stage, variant)
        run_all(run)
        return Path(recipe.output_dir)
    finally:
        # Unlike a command, whose process ends, a script may continue after the stage.
        stop_watching()
        release_folders()
