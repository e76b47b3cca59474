"""Select the training of a recipe to estimate, and trace its optimiser step."""

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fcsd.base.errors import UserError
from fcsd.base.text import progress_bar
from fcsd.model.autocast import computing_dtype
from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.connectivity.modeling import classes_of
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.dtypes import dtype_of
from fcsd.model.families import EXPERTS, Family, family_of
from fcsd.model.inspect import inspect_model
from fcsd.model.inspect.checkpoint import (
    build_regular,
    checkpoint_dtype,
    config_object,
    find_source,
)
from fcsd.model.load import load_tokenizer
from fcsd.model.quantised.methods import without_quantisation
from fcsd.parallel.engine import checkpoints_activations
from fcsd.planning.cost.memory import Layout
from fcsd.planning.cost.operations import ModelWork
from fcsd.planning.cost.trace import Setting, Trace, trace_step
from fcsd.recipe.recipe import Recipe
from fcsd.training.config import TrainConfig
from fcsd.training.losses.objectives import CrossEntropyObjectiveConfig, ObjectiveConfig
from fcsd.training.teachers.config import AdapterConfig
from fcsd.training.teachers.lora import add_adapters


@dataclass(frozen=True)
class Training:
    """One training of a recipe, and the sources of its models."""

    name: str
    config: Mapping[str, Any]
    where: str
    connectivity: Any
    objective: ObjectiveConfig
    train: TrainConfig
    max_length: int
    teacher_dtype: torch.dtype = torch.bfloat16
    attention: str | None = None
    num_active: int | None = None
    # of the checkpoint that the training writes
    saved_dtype: torch.dtype = torch.bfloat16
    keeps_best: bool = False
    teacher: Literal["sharded", "adapter_off", "cache"] = "sharded"
    lora: AdapterConfig | None = None
    # why `fcsd run` refuses to train these weights
    problem: str | None = None
    # tokenized for this training, and for those that share its data
    data_tokens: int = 0


def distillation(recipe: Recipe, variant: str | None) -> Training:
    recipe = recipe.chosen(variant)
    # Without a path, the model is the one that the recipe pre-trains; it need not exist
    # yet.
    if recipe.model.path:
        source = find_source(recipe.model.path, recipe.model.revision)
        config, where = source.own_config, source.where
        facts = inspect_model(recipe.model.path, recipe.model.revision)
        num_active = (facts["parameters"] or {}).get("active")
        problem = facts["training_problem"]
        stored_dtype = checkpoint_dtype(config)
    else:
        config, where, num_active = _pretrain_config(recipe), "pretrain.config", None
        assert recipe.pretrain is not None
        problem = None
        stored_dtype = recipe.pretrain.train.dtype
    dtype = stored_dtype if recipe.model.dtype == "auto" else recipe.model.dtype
    return Training(
        name=f"distill, variant {variant}" if variant else "distill",
        config=config,
        where=where,
        connectivity=recipe.connectivity,
        objective=recipe.objective,
        train=recipe.train,
        max_length=recipe.data.max_length,
        teacher_dtype=dtype_of(dtype),
        attention=recipe.model.attn_implementation,
        num_active=num_active,
        saved_dtype=dtype_of(dtype),
        keeps_best=recipe.early_stopping is not None,
        teacher=recipe.teacher.backend if recipe.teacher is not None else "sharded",
        lora=recipe.lora,
        problem=problem,
        data_tokens=recipe.training_tokens,
    )


def pretraining(recipe: Recipe) -> Training:
    section = recipe.pretrain
    if section is None:
        raise UserError(
            f"recipe {recipe.name}: has no `pretrain` section; leave --pretrain out"
        )
    return Training(
        name="pretrain",
        config=_pretrain_config(recipe),
        where="pretrain.config",
        connectivity=section.connectivity,
        objective=CrossEntropyObjectiveConfig(name="ce"),
        train=section.train,
        max_length=section.data.max_length,
        saved_dtype=dtype_of(section.train.dtype),
        data_tokens=section.train.max_steps * section.train.batch_size_tokens,
    )


def _pretrain_config(recipe: Recipe) -> dict[str, Any]:
    assert recipe.pretrain is not None
    config = dict(recipe.pretrain.config)
    if "vocab_size" not in config:
        if not Path(recipe.pretrain.tokenizer).is_dir():
            raise UserError(
                f"pretrain.tokenizer: {recipe.pretrain.tokenizer} does not exist yet,"
                " but fcsd needs the size of its vocabulary; make it first, or --set"
                " pretrain.config.vocab_size=N"
            )
        config["vocab_size"] = len(load_tokenizer(recipe.pretrain.tokenizer))
    return config


def built(training: Training) -> tuple[Family, Any, Callable[[], Any]]:
    """Return the family, the config object, and a function that builds the regular
    model from it.
    """
    family = family_of(training.config)
    classes = classes_of(family)
    # A training needs plain weights, and transformers' default implementation of the
    # experts.
    plain = without_quantisation(training.config)
    raw = {
        key: value for key, value in plain.items() if key != "experts_implementation"
    }
    config = config_object(classes.config, raw, family.model_type, training.where)
    # Checked again with the class's defaults for keys that the file lacks.
    try:
        family_of(config)
    except UserError as error:
        raise UserError(f"{training.where}: {error}") from None
    attention = "eager" if training.attention == "eager" else "sdpa"
    if not getattr(classes.model, "_supports_sdpa", True):
        attention = "eager"
    build = functools.partial(classes.model._from_config, attn_implementation=attention)
    return (
        family,
        config,
        lambda: build_regular(build, copy.deepcopy(config), training.where),
    )


def tracer(training: Training) -> Callable[[Setting], Trace]:
    """Return `trace_step` for this training; each setting is traced once."""
    family, _, build = built(training)
    section = training.connectivity

    def adapt(model: Any) -> None:
        assert training.lora is not None
        add_adapters(model, training.lora, seed=0, dtype=dtype_of(training.train.dtype))

    def rewire(model: Any) -> None:
        if section.layers != "none":
            convert_model(
                model, Connectivity(section.layers, section.attention, section.mlp)
            )

    # `changes` and the report ask for the same settings again.
    @functools.cache
    def trace(setting: Setting) -> Trace:
        is_terminal = sys.stderr.isatty()
        with progress_bar(
            desc="Tracing a step", unit="layer", leave=False, shown=is_terminal
        ) as bar:
            return trace_step(
                build,
                rewire,
                lambda model: decoder_layers(model, family),
                setting,
                adapt=adapt,
                progress=bar.update,
                subject=f"{training.where}: the training step of {family.model_type}",
            )

    return trace


def spread(
    trace_of: Callable[[Setting], Trace],
    training: Training,
    work: ModelWork,
    ranks: int,
) -> Callable[[Setting], Trace]:
    """Return `trace_of` for ranks that share the experts: each rank gathers its own
    experts, and keeps the activations of the experts that its tokens choose.

    work: of the regular model.
    """
    if ranks == 1:
        return trace_of

    def fewer(config: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {
            key: fewer(value) if isinstance(value, Mapping) else value
            for key, value in config.items()
        }
        return sizes | {
            name: work.experts_per_token for name in EXPERTS if name in config
        }

    # With as many experts as a token uses, their activations equal those of the
    # dispatched rows.
    chosen_of = trace_of
    if work.runs_all:
        chosen_of = tracer(replace(training, config=fewer(training.config)))
    experts = max(layer.work("experts").weights for layer in work.layers)

    def trace(setting: Setting) -> Trace:
        # The full trace has all experts of a layer; a rank gathers only some.
        full_trace = trace_of(setting)
        gathered = full_trace.largest_layer - experts + experts // ranks
        return replace(
            full_trace, largest_layer=gathered, transient=chosen_of(setting).transient
        )

    return trace


def micro_batch_setting(
    training: Training, layout: Layout, micro_batches: int
) -> Setting:
    """Describe a micro-batch: sharded runs compute in bfloat16 from gathered weights,
    whole copies cast by autocast.
    """
    # If left open, the engine decides by the size of the model.
    checkpointing = training.train.gradient_checkpointing
    if checkpointing is None:
        with torch.device("meta"):
            checkpointing = checkpoints_activations(None, built(training)[2]())
    sharded, train = layout.sharding != "none", training.train
    # The teacher computes like its student; a cache is filled as without shards.
    teacher_dtype = training.teacher_dtype
    if training.lora is None:
        teacher_dtype = computing_dtype(
            teacher_dtype,
            dtype_of(train.dtype),
            bf16=train.bf16,
            shards=sharded and training.teacher != "cache",
        )
    return Setting(
        objective=training.objective,
        num_rows=training.train.per_device_train_batch_size,
        num_tokens=training.max_length,
        student_dtype=dtype_of(training.train.dtype),
        teacher_dtype=teacher_dtype,
        autocast=training.train.bf16,
        sharded=sharded,
        checkpointing=checkpointing,
        freeze_embeddings_and_head=training.objective.freeze_embeddings_and_head,
        accumulates=micro_batches > 1,
        on_gpu=True,
        teacher=training.teacher,
        adapters=training.lora is not None,
    )
