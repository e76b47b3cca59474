"""The evaluation stage: one model judged on a suite, in a folder with a manifest.

Not covered: which models a recipe has; that is `fcsd.stages`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.artifact import Stage, read_json, weights_fingerprint
from fcsd.connectivity import load_model
from fcsd.connectivity.checkpoint import find_folder
from fcsd.distill.data import build_dataset
from fcsd.evaluate.divergence import mean_kl
from fcsd.evaluate.runner import evaluate, write_result
from fcsd.evaluate.suites import SuiteTask, dataset_location, load_suite
from fcsd.loading import data_fingerprint, load_tokenizer, original_model
from fcsd.processes import alone, begin
from fcsd.recipe import Recipe, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def evaluate_stage(recipe: Recipe, name: str, path: Path) -> Stage:
    """Judge one model of the run on the recipe's suite, and measure its KL to the original on held-out text."""
    plan = recipe.evaluation
    data_root = Path(plan.data_root) if plan.data_root is not None else None
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
        **judged_data(suite.tasks, data_root, recipe.data.heldout),
    }
    stage = Stage(recipe.folder / "evaluate" / name, "evaluate", settings, inputs)
    if begin(stage) == "finished":
        return stage
    tokenizer = load_tokenizer(path, recipe.model)
    model = load_model(path, dtype=recipe.model.dtype, attn_implementation=recipe.model.attn_implementation,
                       experts_implementation=recipe.model.experts_implementation)  # fmt: skip
    result, samples = evaluate(
        model,
        tokenizer,
        suite,
        data_root=data_root,
        batch_size=plan.batch_size,
        limit=plan.limit,
        allow_weak_sandbox=plan.allow_weak_sandbox,
        name=name,
    )
    if recipe.data.heldout is not None:
        rows = heldout_rows(
            recipe.data.heldout,
            tokenizer,
            num_examples=recipe.data.heldout_examples,
            max_length=recipe.data.max_length,
            packing=recipe.data.packing,
            loss_on=recipe.data.loss_on,
        )
        teacher = original_model(recipe.model, recipe.model_path)
        result["kl_to_original"] = mean_kl(teacher, model, rows, progress=True)
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
    """`fcsd evaluate`: judge any checkpoint, without a recipe; the results are in `output`."""
    alone("evaluate")
    tasks = load_suite(suite)
    folder = find_folder(path, revision)
    settings = {"suite": tasks.model_dump(mode="json", exclude={"folder"}), "limit": limit}
    inputs = {
        "model": weights_fingerprint(folder),
        "connectivity": _wiring(folder),
        **judged_data(tasks.tasks, data_root),
    }
    stage = Stage(output, "evaluate", settings, inputs)
    if begin(stage) != "finished":
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


def judged_data(
    tasks: Sequence[SuiteTask], data_root: Path | None, heldout: Source | None = None
) -> dict[str, str]:
    """What identifies the items that models are judged on: a score is never read for other items."""
    found = {
        f"task {row.task}": data_fingerprint(dataset_location(row, data_root), row.revision) for row in tasks
    }
    return found | (
        {"data.heldout": data_fingerprint(heldout.path, heldout.revision)} if heldout is not None else {}
    )


def heldout_rows(
    source: Source,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    num_examples: int,
    max_length: int,
    packing: bool,
    loss_on: str,
) -> Any:
    """Rows of the first `num_examples` of held-out text, in order."""
    limit = min(num_examples, source.max_examples or num_examples)
    plain = Source.model_validate(source.model_dump() | {"max_examples": limit, "streaming": False})
    return build_dataset(
        [plain], tokenizer, max_length=max_length, packing=packing, loss_on=loss_on, shuffle=False
    )


def _wiring(path: Path) -> str:
    return str(read_json(path / "config.json").get("farskip", "regular"))
