"""Train a model from scratch with cross-entropy: the `pretrain` section of a recipe."""

import contextlib
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.files import tokenizer_files
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.connectivity.checkpoint import find_folder
from fcsd.model.dtypes import dtype_of, to_dtype
from fcsd.model.load import load_tokenizer
from fcsd.parallel.launch import begin_stage, finish_stage
from fcsd.pipeline.checks import check_rows_fit, check_settings, model_config
from fcsd.pipeline.context import Run
from fcsd.pipeline.rows import data_inputs, exclusions, pretraining_rows
from fcsd.training.arguments import Job
from fcsd.training.config import Sections, may_change
from fcsd.training.losses.objectives import CrossEntropyObjectiveConfig
from fcsd.training.prepare import TrainingInputs
from fcsd.training.run import remove_checkpoints, train


def pretrain(run: Run, variant: str | None = None) -> Stage:
    """Train `recipe.pretrain.config` from scratch with cross-entropy, as the recipe or
    one of its variants has it.
    """
    if variant is not None and not run.recipe.only_pretrains:
        raise UserError(
            f"recipe {run.recipe.name}: its variants are distillations; use `fcsd"
            f" distill --variant {variant}`"
        )
    run = run.variant(variant)
    recipe, launch, section = run.recipe, run.launch, run.recipe.pretrain
    if section is None:
        raise UserError(
            f"recipe {recipe.name}: has no `pretrain` section; add one, or give"
            " model.path"
        )
    folder = run.layout.stage(variant or "original")
    settings = section.model_dump(mode="json")
    settings["seed"] = recipe.seed

    def read() -> dict[str, Any]:
        files = tokenizer_files(find_folder(section.tokenizer))
        return {
            f"tokenizer/{name}": fingerprint for name, fingerprint in files.items()
        } | data_inputs(section.data, run)

    inputs = launch.ranks.from_first(read)
    stage = Stage(folder, "pretrain", settings, inputs, may_change(section.train))
    if begin_stage(stage, launch) == "finished":
        remove_checkpoints(folder, launch)
        return stage
    check_settings(section.train, section.data, launch, "pretrain.")
    # Refuse a configuration that does not fit before tokens are written.
    check_rows_fit(
        run, model_config(section.config), section.data.max_length, "pretrain."
    )
    tokenizer = load_tokenizer(section.tokenizer)
    rows = pretraining_rows(run)
    set_seed(recipe.seed)
    # In a sharded run only the first rank makes the weights; it sends the others their
    # shards.
    with contextlib.nullcontext() if launch.loads_weights else torch.device("meta"):
        model = new_model(
            section.config | _token_ids(tokenizer, section.config),
            section.connectivity.spec,
        )
    to_dtype(model, dtype_of(section.train.dtype))
    sections = Sections(
        objective=CrossEntropyObjectiveConfig(name="ce"),
        train=section.train,
        data=section.data,
        safety=recipe.safety,
    )
    job = Job(
        folder,
        " ".join(["pretrain", *([variant] if variant else [])]),
        recipe.seed,
        stage.identity,
        remaining=run.remaining,
    )
    models = TrainingInputs(model, None, tokenizer, rows)
    results = train(models, sections, job, launch) | exclusions(rows, folder, launch)
    finish_stage(stage, launch, results, folder / "model")
    remove_checkpoints(folder, launch)
    return stage


def new_model(config: dict[str, Any], connectivity: Connectivity) -> PreTrainedModel:
    """Return a model with fresh random weights; the caller sets the seed. Raises the
    errors of `model_config`.
    """
    built, experts = model_config(config), config.get("experts_implementation")
    try:
        model = AutoModelForCausalLM.from_config(
            built, **({"experts_implementation": experts} if experts else {})
        )
    except Exception as error:
        raise UserError(
            f"pretrain.config: {built.model_type}: {' '.join(str(error).split())}"
        ) from error
    if connectivity.layers != "none":
        convert_model(model, connectivity)
    return model


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the fields of a new model that its tokenizer determines; a recipe may set
    them, too, but only to the same values.
    """
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    # A vocabulary may be larger than the tokenizer's, for example padded to a multiple.
    for key, value in ids.items():
        if config.get(key, value) != value and not (
            key == "vocab_size" and config[key] > value
        ):
            raise UserError(
                f"pretrain.config.{key}: {config[key]} does not fit the tokenizer's"
                f" {value}; leave it out"
            )
    return {key: config.get(key, value) for key, value in ids.items()}
