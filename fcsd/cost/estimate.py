"""Estimate what a run of a recipe needs: memory of a rank, FLOPs, time, and what to change where it does not fit."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from fcsd.config.recipe import Recipe
from fcsd.config.training import ObjectiveConfig
from fcsd.cost.calibration import calibration_flops, calibration_row
from fcsd.cost.changes import activation_bytes, changes, is_supported
from fcsd.cost.hardware import Gpu, find_gpu
from fcsd.cost.memory import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    GPUS_PER_NODE,
    SHARDINGS,
    Layout,
    Sharding,
    memory_parts,
)
from fcsd.cost.time import StepTime, step_time
from fcsd.cost.tokens import tokenizing
from fcsd.cost.trace import Setting, Trace
from fcsd.cost.training import (
    Training,
    distillation,
    micro_batch_setting,
    only_pretrains,
    pretraining,
    tracer,
)
from fcsd.distill.arguments import accumulation_steps
from fcsd.distill.disk import disk_need
from fcsd.errors import UserError
from fcsd.families import expert_counts

MFU = (0.10, 0.25)
"""Assumption: share of the GPU's peak. Megatron's tuned runs of Qwen3-30B-A3B on H100 reach a little above 200
TFLOP/s a GPU (0.21), of DeepSeek-V3 high tens of percent (Megatron-Bridge, MoE hardware configurations, 2026);
a Trainer without expert parallelism reaches less."""

NETWORK_GB_S = 50.0
"""Assumption: GB/s between one GPU and other nodes, each GPU with an interface of its own (400 Gbit/s)."""

ALL_EXPERTS = 1.5
"""Times the active parameters above which a forward pass runs experts that were not chosen."""


@dataclass(frozen=True)
class Hardware:
    """The machine that the run is estimated for."""

    gpu: str = "h200"
    num_gpus: int = 1
    sharding: Sharding = "none"
    mfu: tuple[float, float] = MFU
    network_gb_s: float = NETWORK_GB_S


def estimate(
    recipe: Recipe, hardware: Hardware | None = None, *, variant: str | None = None, pretrain: bool = False
) -> dict[str, Any]:
    """Estimate memory, FLOPs and time of one training of a recipe; of a Hub model only config.json is fetched.

    Args:
        variant: of the recipe, instead of its main distillation. pretrain: its pre-training instead; of a recipe that
            has no `train` section, whose pre-training is all that it is about, that is what is estimated anyway.

    Returns: JSON data: run, model, parameters, hardware, settings, memory, changes, disk, flops, time, tokens,
        totals, assumptions.

    Raises:
        UserError: no such checkpoint, GPU or variant; a family that is refused; a batch that cannot be cut over the
            ranks; a model whose step needs data (`model.experts_implementation` of its own).
    """
    hardware = hardware or Hardware()
    gpu = _gpu(hardware)
    pretrain = pretrain or (variant is None and only_pretrains(recipe))
    training = pretraining(recipe) if pretrain else distillation(recipe, variant)
    micro_batches = accumulation_steps(training.train, training.max_length, hardware.num_gpus)
    layout = Layout(
        hardware.sharding,
        hardware.num_gpus,
        step_tokens=training.train.batch_size_tokens if _prepares_whole_steps(training.objective) else 0,
        averages=training.train.ema_decay is not None,
    )
    trace_of = tracer(training)
    setting = micro_batch_setting(training, layout, micro_batches)
    trace = trace_of(setting)
    seconds = step_time(trace, setting, layout, gpu, micro_batches, hardware.mfu, hardware.network_gb_s)
    memory = _memory(trace_of, setting, layout, int(gpu.memory_gb * 1e9))
    return {
        "recipe": recipe.name,
        "run": training.name,
        "model": training.where,
        "model_type": training.config["model_type"],
        "parameters": {
            "total": trace.num_parameters,
            "active": training.num_active,
            "trained": trace.num_trainable,
        },
        "hardware": asdict(gpu)
        | {
            "num_gpus": hardware.num_gpus,
            "sharding": hardware.sharding,
            "supported": is_supported(training, layout),
        },
        "settings": _settings(training, setting, micro_batches),
        "memory": memory,
        "cache": _cache(recipe, training, trace, setting),
        "changes": []
        if memory["fits"]
        else list(changes(training, setting, layout, memory["gpu_bytes"], trace_of)),
        "disk": _disk(training, trace),
        "flops": _flops(training, trace, setting),
        "time": _time(training, seconds, hardware),
        "tokens": tokenizing(training.data_tokens),
        "totals": [
            *_before(recipe, hardware, pretrain, variant),
            *([] if pretrain else _calibration(recipe, training, variant, trace, setting, hardware)),
            *_totals(recipe, training, (seconds.best, seconds.worst), pretrain, variant),
        ],
        "assumptions": list(_assumptions(training, setting, hardware, trace)),
    }


def _prepares_whole_steps(objective: ObjectiveConfig) -> bool:
    """Tell whether a teacher gives the hidden states of all micro-batches of a step at once, if only in the end."""
    ends = objective.router_kl_coefficient is None and objective.l2_until is not None
    return not objective.has_hidden_terms or ends


def _settings(training: Training, setting: Setting, micro_batches: int) -> dict[str, Any]:
    section = training.connectivity
    return {
        "objective": training.objective.name,
        "connectivity": section.layers if section is not None else "as in the checkpoint",
        "rows": setting.num_rows,
        "max_length": setting.num_tokens,
        "micro_batches": micro_batches,
        "dtype": training.train.dtype,
        "bf16": training.train.bf16,
        "gradient_checkpointing": setting.checkpointing,
        "teacher": setting.teacher if setting.has_teacher else None,
        "lora": setting.adapters,
        "freeze_embeddings_and_head": setting.freeze_embeddings_and_head,
    }


def _memory(
    trace_of: Callable[[Setting], Trace], setting: Setting, layout: Layout, available: int
) -> dict[str, Any]:
    trace = trace_of(setting)
    parts = memory_parts(trace, setting, layout)
    activations = {
        f"{name}_checkpointing_bytes": activation_bytes(trace_of, replace(setting, checkpointing=on), layout)
        for name, on in (("without", False), ("with", True))
    }
    itemsize = (torch.bfloat16 if setting.autocast else setting.student_dtype).itemsize
    layer_input = setting.num_rows * setting.num_tokens * trace.hidden_size * itemsize
    layer_inputs = {
        "layer_inputs_bytes": trace.num_layers * layer_input,
        "second_inputs_bytes": trace.num_pairs * layer_input,
    }
    total = sum(parts.values())
    return {
        "parts": parts,
        "total_bytes": total,
        "gpu_bytes": available,
        "fits": total <= available,
        "activations": activations | layer_inputs,
    }


def _disk(training: Training, trace: Trace) -> dict[str, int]:
    need = disk_need(
        training.train,
        num_trained=trace.num_trainable,
        num_parameters=trace.num_parameters,
        model_itemsize=training.left_dtype.itemsize,
        keeps_best=training.keeps_best,
    )
    return {
        "checkpoint_bytes": need.checkpoint,
        "num_checkpoints": need.num_checkpoints,
        "best_bytes": need.best,
        "model_bytes": need.model,
        "total_bytes": need.total,
    }


def _flops(training: Training, trace: Trace, setting: Setting) -> dict[str, Any]:
    per_token = _flops_per_token(trace, setting)
    per_step = sum(per_token.values()) * training.train.batch_size_tokens
    return {
        "per_token": per_token,
        "per_step": per_step,
        "total": per_step * training.train.max_steps,
        "float32_share": _float32_share(trace),
    }


def _time(training: Training, seconds: StepTime, hardware: Hardware) -> dict[str, Any]:
    step_tokens = training.train.batch_size_tokens
    return {
        "mfu": list(hardware.mfu),
        "step_s": [seconds.best, seconds.worst],
        "compute_s": seconds.compute,
        "memory_s": seconds.memory,
        "communication_s": seconds.communication,
        "tokens_per_second": [step_tokens / seconds.worst, step_tokens / seconds.best],
    }


def _gpu(hardware: Hardware) -> Gpu:
    gpu = find_gpu(hardware.gpu)
    if hardware.sharding not in SHARDINGS:
        raise UserError(f"--sharding {hardware.sharding}: allowed: {', '.join(SHARDINGS)}")
    if hardware.num_gpus < 1:
        raise UserError(f"--gpus {hardware.num_gpus}: must be 1 or more")
    if hardware.sharding == "hsdp" and hardware.num_gpus % GPUS_PER_NODE:
        raise UserError(
            f"--sharding hsdp: a copy is shared by the {GPUS_PER_NODE} GPUs of a node, so that --gpus is a multiple of"
            f" {GPUS_PER_NODE}, not {hardware.num_gpus}"
        )
    lowest, highest = hardware.mfu
    if not 0 < lowest <= highest <= 1:
        raise UserError(f"--mfu {lowest:g}-{highest:g}: a range such as 0.1-0.25, within 0 and 1")
    if not hardware.network_gb_s > 0:
        raise UserError(f"--network-gb-s {hardware.network_gb_s:g}: must be above 0")
    return gpu


def _flops_per_token(trace: Trace, setting: Setting) -> dict[str, float]:
    tokens = setting.num_rows * setting.num_tokens
    names = {"teacher forward": "teacher forward", "activations": "student forward", "loss": "loss"}
    counts = {names.get(kind, kind): sum(by.values()) / tokens for kind, by in trace.flops.items()}
    order = ("teacher forward", "student forward", "loss", "backward")
    return {name: counts[name] for name in order if name in counts}


def _cache(recipe: Recipe, training: Training, trace: Trace, setting: Setting) -> dict[str, int] | None:
    """Compute the bytes on disk of a teacher cache: a token with loss, and all that the longest training reads."""
    if not setting.has_teacher or setting.teacher != "cache":
        return None
    tokens = training.train.max_steps * training.train.batch_size_tokens
    if recipe.sweep is not None:
        sweep, sizes = recipe.sweep, recipe.sweep.batch_size_tokens
        tokens = max(tokens, *(size * sweep.steps_of(size, training.train) for size in sizes))
    each = trace.hidden_size * setting.teacher_dtype.itemsize
    return {"bytes_per_token": each, "at_most_tokens": tokens, "at_most_bytes": each * tokens}


def _float32_share(trace: Trace) -> float:
    total = sum(sum(by.values()) for by in trace.flops.values())
    return sum(by.get("float32", 0) for by in trace.flops.values()) / total


def _before(recipe: Recipe, hardware: Hardware, pretrain: bool, variant: str | None) -> list[dict[str, Any]]:
    """Return the row of the pre-training that a whole run of the recipe begins with."""
    if recipe.pretrain is None or pretrain or variant is not None:
        return []
    rows: list[dict[str, Any]] = estimate(recipe, hardware, pretrain=True)["totals"]
    return rows


def _calibration(
    recipe: Recipe,
    training: Training,
    variant: str | None,
    trace: Trace,
    setting: Setting,
    hardware: Hardware,
) -> Iterator[dict[str, Any]]:
    """Return the row of the calibration that precedes the training, with all layers as if they were rewired."""
    one = recipe.variant(variant) if variant is not None else recipe
    if one.calibration is None:
        return
    forward = sum(trace.flops["activations"].values()) / (setting.num_rows * setting.num_tokens)
    text = SimpleNamespace(**training.config.get("text_config", training.config))
    counts = expert_counts(text, None)
    flops = calibration_flops(
        forward=forward,
        tokens=one.calibration.tokens,
        num_layers=trace.num_layers,
        hidden_size=trace.hidden_size,
        num_parameters=trace.num_parameters - trace.embeddings_and_head,
        num_experts=counts[0] or 0,
        experts_per_token=counts[1] or 0,
    )
    yield calibration_row(flops, one.calibration.tokens, _gpu(hardware), hardware.num_gpus, hardware.mfu)


def _totals(
    recipe: Recipe,
    training: Training,
    step_s: tuple[float, float],
    pretrain: bool,
    variant: str | None,
) -> Iterator[dict[str, Any]]:
    step_tokens = training.train.batch_size_tokens

    def row(name: str, num_runs: int, steps: int, tokens: int) -> dict[str, Any]:
        hours = [tokens / step_tokens * seconds / 3600 for seconds in step_s]
        return {"stage": name, "runs": num_runs, "steps": steps, "tokens": tokens, "hours": hours}

    yield row(training.name, 1, training.train.max_steps, training.train.max_steps * step_tokens)
    if recipe.sweep is None or pretrain or variant is not None:
        return
    sizes, rates = recipe.sweep.batch_size_tokens, recipe.sweep.learning_rate
    more = len(set(rates) - {training.train.learning_rate})
    runs = [size * recipe.sweep.steps_of(size, training.train) for size in sizes]
    yield row("sweep, at most", len(sizes) + more, recipe.sweep.steps, sum(runs) + more * max(runs))


def _assumptions(training: Training, setting: Setting, hardware: Hardware, trace: Trace) -> Iterator[str]:
    lowest, highest = hardware.mfu
    yield (
        f"{lowest:.0%} to {highest:.0%} of the published peak is reached; teacher and recomputation count as work,"
        " so this is not the usual MFU, which leaves them out"
    )
    yield "every token carries loss, attention is computed for all pairs of a row, tokens spread evenly over experts"
    yield (
        f"{FRAGMENTATION:.0%} of what comes and goes is lost to fragmentation, the context of the GPU takes"
        f" {CONTEXT_BYTES / 2**30:.0f} GiB; memory of the GPU is taken in decimal GB"
    )
    yield "scoring for early stopping, evaluation, loading, and writing checkpoints are not in it"
    if hardware.num_gpus > 8:
        yield f"between nodes {hardware.network_gb_s:g} GB/s a GPU"
    if training.attention not in (None, "eager", "sdpa"):
        yield f"attention as with sdpa; {training.attention} keeps less"
    matmuls = sum(trace.flops["activations"].values()) - trace.attention_flops
    each = matmuls / (setting.num_rows * setting.num_tokens)
    if training.num_active is not None and each > 2 * ALL_EXPERTS * training.num_active:
        yield (
            f"transformers' code of this family runs far more than the {training.num_active:,} parameters that a"
            f" token uses, {each / 2 / training.num_active:.1f} times as many: it runs experts on tokens that did not"
            " choose them"
        )
    if training.lora is not None and hardware.sharding != "none":
        yield "`fcsd distill` does not shard a LoRA student; launch data parallel copies, --sharding none"
    yield (
        "data are tokenized as fast as in benchmarks/tokens.py: chats read from a local disk, by the small tokenizer of"
        " the tests; scale by what your tokenizer and your processor do. Of files that are here all up to 4 GiB are"
        " tokenized, even if a training reads less"
    )
    if setting.has_teacher and setting.teacher == "cache":
        yield "the cache is filled before: one forward pass of the teacher over every row, which is not in it"


def parse_mfu(text: str) -> tuple[float, float]:
    """Parse `0.1-0.25` or `0.2` as a range.

    Raises:
        UserError: anything else.
    """
    try:
        values = [float(part) for part in text.split("-")]
    except ValueError:
        values = []
    if len(values) not in (1, 2) or not all(math.isfinite(value) for value in values):
        raise UserError(f"--mfu {text}: a range such as 0.1-0.25, or one number")
    return values[0], values[-1]
