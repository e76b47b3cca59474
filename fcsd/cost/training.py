"""Say which training of a recipe is estimated, and trace its optimiser step."""

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fcsd.config.model import AdapterConfig
from fcsd.config.recipe import Recipe
from fcsd.config.training import CrossEntropyObjectiveConfig, ObjectiveConfig, TrainConfig
from fcsd.connectivity import Connectivity, convert_model
from fcsd.connectivity.aliases import has_instella_keys, translate_instella
from fcsd.connectivity.modeling import base_model_class
from fcsd.connectivity.rewire import decoder_layers
from fcsd.cost.memory import Layout
from fcsd.cost.trace import Setting, Trace, trace_step
from fcsd.distill.teachers.lora import add_adapters
from fcsd.distributed.engine import checkpoints_activations
from fcsd.errors import UserError, one_line
from fcsd.families import Family, family_of
from fcsd.inspect import inspect_model
from fcsd.inspect.checkpoint import Source, checkpoint_dtype, config_object, find_source
from fcsd.models.load import dtype_of, load_tokenizer
from fcsd.text import progress_bar


@dataclass(frozen=True)
class Training:
    """One training of a recipe, with what its models are built from."""

    name: str
    config: Mapping[str, Any]
    where: str
    connectivity: Any
    objective: ObjectiveConfig
    train: TrainConfig
    max_length: int
    teacher_dtype: torch.dtype
    attention: str | None
    num_active: int | None
    left_dtype: torch.dtype  # of the checkpoint that the training leaves
    keeps_best: bool = False
    teacher: Literal["sharded", "adapter_off", "cache"] = "sharded"
    lora: AdapterConfig | None = None
    data_tokens: int = 0  # tokenized for it, and for the trainings that share its data


def config_of(source: Source) -> Mapping[str, Any]:
    """Return a checkpoint's config, a connectivity in another project's keys in ours; raises UserError as that does."""
    keys = has_instella_keys(source.config)
    return translate_instella(source.config, source.where) if keys else source.config


def distillation(recipe: Recipe, variant: str | None) -> Training:
    if variant is not None:
        if variant not in recipe.variants:
            known = ", ".join(recipe.variants) or "none"
            raise UserError(f"recipe {recipe.name}: has no variant '{variant}'; allowed: {known}")
        recipe = recipe.variant(variant)
    if recipe.model.path:
        source = find_source(recipe.model.path, recipe.model.revision)
        config, where = config_of(source), source.where
        parameters = inspect_model(recipe.model.path, recipe.model.revision)["parameters"] or {}
        num_active = parameters.get("active")
        dtype = checkpoint_dtype(config) if recipe.model.dtype == "auto" else recipe.model.dtype
    else:
        config, where, num_active = _pretrain_config(recipe), "pretrain.config", None
        assert recipe.pretrain is not None
        dtype = recipe.pretrain.train.dtype if recipe.model.dtype == "auto" else recipe.model.dtype
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
        left_dtype=dtype_of(dtype),
        keeps_best=recipe.early_stopping is not None,
        teacher=recipe.teacher.backend if recipe.teacher is not None else "sharded",
        lora=recipe.lora,
        data_tokens=recipe.training_tokens,
    )


def only_pretrains(recipe: Recipe) -> bool:
    """Tell whether a recipe is about its pre-training alone: it says nothing of a training that would follow."""
    return recipe.pretrain is not None and "train" not in recipe.model_fields_set


def pretraining(recipe: Recipe) -> Training:
    plan = recipe.pretrain
    if plan is None:
        raise UserError(f"recipe {recipe.name}: has no `pretrain` section; leave --pretrain out")
    return Training(
        name="pretrain",
        config=_pretrain_config(recipe),
        where="pretrain.config",
        connectivity=plan.connectivity,
        objective=CrossEntropyObjectiveConfig(name="ce"),
        train=plan.train,
        max_length=plan.data.max_length,
        teacher_dtype=torch.float32,
        attention=None,
        num_active=None,
        left_dtype=dtype_of(plan.train.dtype),
        data_tokens=plan.train.max_steps * plan.train.batch_size_tokens,
    )


def _pretrain_config(recipe: Recipe) -> dict[str, Any]:
    assert recipe.pretrain is not None
    config = dict(recipe.pretrain.config)
    if "vocab_size" not in config:
        if not Path(recipe.pretrain.tokenizer).is_dir():
            raise UserError(
                f"pretrain.tokenizer: {recipe.pretrain.tokenizer} is not there yet, and the vocabulary's size comes"
                " from it; make it first, or --set pretrain.config.vocab_size=N"
            )
        config["vocab_size"] = len(load_tokenizer(recipe.pretrain.tokenizer))
    return config


def built(training: Training) -> tuple[Family, Callable[[], Any]]:
    """Return the family, and what builds its regular model from the config."""
    left = ("experts_implementation", "quantization_config")
    family = family_of(training.config)
    cls = base_model_class(family)
    raw = {key: value for key, value in training.config.items() if key not in left}
    config = config_object(cls.config_class, raw, family.model_type, training.where)
    try:
        family_of(config)
    except UserError as error:
        raise UserError(f"{training.where}: {error}") from None
    attention = "eager" if training.attention == "eager" else "sdpa"
    if not getattr(cls, "_supports_sdpa", True):
        attention = "eager"
    return family, lambda: cls._from_config(copy.deepcopy(config), attn_implementation=attention)


def tracer(training: Training) -> Callable[[Setting], Trace]:
    """Return `trace_step` for this run; a setting is traced once."""
    family, build = built(training)
    section = training.connectivity
    known: dict[Setting, Trace] = {}

    def adapt(model: Any) -> None:
        assert training.lora is not None
        add_adapters(model, training.lora, seed=0, dtype=dtype_of(training.train.dtype))

    def rewire(model: Any) -> None:
        if section.layers != "none":
            convert_model(model, Connectivity(section.layers, section.attention, section.mlp))

    def trace(setting: Setting) -> Trace:
        if setting not in known:
            try:
                with progress_bar(
                    desc="Tracing a step", unit="layer", leave=False, shown=sys.stderr.isatty()
                ) as bar:
                    known[setting] = trace_step(
                        build,
                        rewire,
                        lambda model: decoder_layers(model, family),
                        setting,
                        adapt=adapt,
                        progress=bar.update,
                    )
            except UserError:
                raise
            except Exception as error:  # any part of a family's code may need data
                reason = one_line(error)[:200]
                raise UserError(
                    f"{training.where}: the training step of {family.model_type} cannot be followed without data:"
                    f" {type(error).__name__}: {reason}; `fcsd inspect` tells what its weights need"
                ) from error
        return known[setting]

    return trace


def micro_batch_setting(training: Training, layout: Layout, micro_batches: int) -> Setting:
    """Describe a micro-batch: sharded runs compute in bfloat16 from gathered weights, whole copies cast by autocast."""
    return Setting(
        objective=training.objective.name,
        num_rows=training.train.per_device_train_batch_size,
        num_tokens=training.max_length,
        student_dtype=dtype_of(training.train.dtype),
        teacher_dtype=training.teacher_dtype,
        autocast=training.train.bf16,
        sharded=layout.sharding != "none",
        checkpointing=_checkpointing(training),
        freeze_embeddings_and_head=training.objective.freeze_embeddings_and_head,
        accumulates=micro_batches > 1,
        on_gpu=True,
        divergence=tuple(
            (name, value)
            for name in ("temperature", "jsd_beta", "clip")
            if (value := getattr(training.objective, name)) is not None
        ),
        vocab_size=training.objective.vocab_size,
        teacher=training.teacher,
        adapters=training.lora is not None,
    )


def _checkpointing(training: Training) -> bool:
    if training.train.gradient_checkpointing is not None:
        return training.train.gradient_checkpointing
    with torch.device("meta"):
        return checkpoints_activations(training.train, built(training)[1]())
