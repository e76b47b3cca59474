"""The evaluation stage: one model judged on a suite, in a folder with a manifest.

Not covered: which models a recipe has; that is `fcsd.stages.run`.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.artifact import Stage, versions
from fcsd.config.data import SourceConfig
from fcsd.config.model import ModelConfig
from fcsd.config.recipe import Recipe
from fcsd.config.suite import SuiteConfig, TaskConfig, load_suite
from fcsd.connectivity.checkpoint import find_folder
from fcsd.data.local import data_fingerprint
from fcsd.distributed.launch import begin, finish, processes
from fcsd.distributed.ranks import launched_ranks
from fcsd.evaluate.batch import BatchSize, check_batch_size
from fcsd.evaluate.lm_eval.write import write_lm_eval
from fcsd.evaluate.results import Samples, write_result
from fcsd.evaluate.runner import judging
from fcsd.evaluate.store import TaskStore, configuration_fingerprint
from fcsd.evaluate.suites import dataset_location
from fcsd.files import new_folder, read_json, weights_fingerprint
from fcsd.losses.kl import mean_kl, read_original
from fcsd.models.load import free_memory, load_tokenizer
from fcsd.models.place import check_device_map, judging_engine, load_judged

if TYPE_CHECKING:
    pass
from fcsd.data.dataset import heldout_rows

FINISHED_TASKS = "finished-tasks"


def evaluate_stage(recipe: Recipe, name: str, path: Path) -> Stage:
    """Judge one model of the run on the recipe's suite, and measure its KL to the original on held-out text.

    All ranks call this.
    """
    ranks = launched_ranks(in_step=judging_engine().shards)
    plan = recipe.evaluation
    data_root = Path(plan.data_root) if plan.data_root is not None else None
    suite = load_suite(plan.suite)
    settings = {
        # No score depends on the batch size beyond float noise, so an evaluation may go on with another.
        "evaluation": plan.model_dump(mode="json", exclude={"layer_study", "cache", "batch_size"}),
        "suite": suite.model_dump(mode="json", exclude={"folder"}),
        "data": recipe.data.model_dump(
            mode="json", include={"heldout", "heldout_examples", "max_length", "packing", "loss_on"}
        ),
        "model": {"dtype": recipe.model.dtype},
    }
    original = find_folder(recipe.model_path, recipe.model.revision)
    inputs = ranks.from_first(
        lambda: {
            **_judged_model(path),
            "original": weights_fingerprint(original),
            **judged_data(suite.tasks, data_root, recipe.data.heldout),
        }
    )
    stage = Stage(recipe.folder / "evaluate" / name, "evaluate", settings, inputs)
    if begin(stage) == "finished":
        return stage
    free_memory()  # of the trainings before
    tokenizer = load_tokenizer(path, trust_remote_code=recipe.model.trust_remote_code)
    loading = recipe.model.model_dump(include={"dtype", "attn_implementation", "experts_implementation"})
    cache = Path(plan.cache) if plan.cache is not None else None
    with judging(
        tokenizer,
        suite,
        data_root=data_root,
        batch_size=plan.batch_size,
        limit=plan.limit,
        allow_weak_sandbox=plan.allow_weak_sandbox,
        store=_store(stage, suite, cache, plan.limit, loading),
        ranks=ranks,
    ) as judge:
        rows, known = None, None
        if recipe.data.heldout is not None:
            rows = heldout_rows(
                recipe.data.heldout,
                tokenizer,
                num_examples=recipe.data.heldout_examples,
                max_length=recipe.data.max_length,
                packing=recipe.data.packing,
                loss_on=recipe.data.loss_on,
            )
            # First, and then it goes: a device may not hold two models.
            known = read_original(load_judged(recipe.model, original), rows, progress=True, ranks=ranks)
            free_memory()
        model = load_judged(recipe.model, path)
        result, samples = judge(model, name)
    if rows is not None and known is not None:
        result["kl_to_original"] = mean_kl(known, model, rows, progress=True, ranks=ranks)
    _leave(stage, result, samples)
    return stage


def evaluate_checkpoint(
    path: str,
    *,
    suite: str,
    data_root: Path | None,
    output: Path,
    batch_size: BatchSize,
    limit: int | None,
    allow_weak_sandbox: bool,
    cache: Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> None:
    """`fcsd evaluate`: judge any checkpoint, without a recipe; the results are in `output`. All ranks call this.

    cache: a folder of finished tasks that several evaluations share; None: one in `output`, until all are finished.
    device_map: see `fcsd.models.place.load_judged`.
    """
    ranks = launched_ranks(in_step=judging_engine().shards)
    check_device_map(device_map)
    check_batch_size(batch_size, ranks)
    tasks = load_suite(suite)
    folder = find_folder(path, revision)
    settings = {"suite": tasks.model_dump(mode="json", exclude={"folder"}), "limit": limit}
    inputs = ranks.from_first(lambda: {**_judged_model(folder), **judged_data(tasks.tasks, data_root)})
    stage = Stage(output, "evaluate", settings, inputs)
    if begin(stage) != "finished":
        with judging(
            load_tokenizer(folder, trust_remote_code=trust_remote_code),
            tasks,
            data_root=data_root,
            batch_size=batch_size,
            limit=limit,
            allow_weak_sandbox=allow_weak_sandbox,
            store=_store(stage, tasks, cache, limit, {}),
            ranks=ranks,
        ) as judge:  # a mistake in tasks or data shows before the weights are read
            named = ModelConfig(path=path, trust_remote_code=trust_remote_code)
            result, samples = judge(load_judged(named, folder, device_map=device_map), path)
        _leave(stage, result, samples)


def _judged_model(folder: Path) -> dict[str, str]:
    """What identifies the model that answers: never its path."""
    return {
        "model": weights_fingerprint(folder),
        "connectivity": _wiring(folder),
        "configuration": configuration_fingerprint(folder),
    }


def _store(
    stage: Stage, suite: SuiteConfig, cache: Path | None, limit: int | None, loading: dict[str, Any]
) -> TaskStore:
    """Where finished tasks are kept: under the fingerprints of what was judged, never under its path."""
    identity = {
        **{name: stage.inputs[name] for name in ("model", "connectivity", "configuration")},
        "loading": loading,
        "limit": limit,
        "versions": {name: text for name, text in versions().items() if name not in ("python", "accelerate")},
    }
    data = {row.task: stage.inputs[f"task {row.task}"] for row in suite.tasks}
    return TaskStore(cache or stage.folder / FINISHED_TASKS, identity, data)


def _leave(stage: Stage, result: dict[str, Any], samples: Samples) -> None:
    """On the first rank; the others wait."""
    first = processes().is_main_process
    if first:
        write_result(result, samples, stage.folder)
        with new_folder(stage.folder / "lm_eval") as new:
            write_lm_eval(result, samples, new)
    finish(stage, {"mean": result["mean"]})
    if first:
        # The samples are in their own files now.
        shutil.rmtree(stage.folder / FINISHED_TASKS, ignore_errors=True)


def judged_data(
    tasks: Sequence[TaskConfig], data_root: Path | None, heldout: SourceConfig | None = None
) -> dict[str, str]:
    """What identifies the items that models are judged on: a score is never read for other items."""
    found = {
        f"task {row.task}": data_fingerprint(dataset_location(row, data_root), row.revision) for row in tasks
    }
    return found | (
        {"data.heldout": data_fingerprint(heldout.path, heldout.revision)} if heldout is not None else {}
    )


def _wiring(path: Path) -> str:
    return str(read_json(path / "config.json").get("farskip", "regular"))
