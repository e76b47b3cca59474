"""What a run of a recipe needs: memory of a rank, operations, time, and what to change where it does not fit."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from fcsd.config.model import AdapterConfig
from fcsd.config.recipe import Recipe
from fcsd.config.strict import did_you_mean
from fcsd.config.training import CrossEntropyObjectiveConfig, ObjectiveConfig, TrainConfig
from fcsd.connectivity import Connectivity, convert_model
from fcsd.connectivity.aliases import INSTELLA_KEYS
from fcsd.connectivity.modeling import base_model_class
from fcsd.connectivity.rewire import decoder_layers
from fcsd.cost.hardware import GPUS, Gpu
from fcsd.cost.memory import SHARDINGS, Layout, Sharding, memory_parts
from fcsd.cost.time import step_time
from fcsd.cost.trace import Setting, Trace, trace_step
from fcsd.distill.arguments import accumulation_steps
from fcsd.distributed.engine import checkpoints_activations
from fcsd.errors import UserError
from fcsd.families import Family, family_of
from fcsd.inspect import inspect_model
from fcsd.inspect.checkpoint import find_source
from fcsd.models.load import dtype_of

MFU = (0.10, 0.25)


"""Assumption: share of the GPU's peak. Megatron's tuned runs of Qwen3-30B-A3B on H100 reach a little above 200
TFLOP/s a GPU (0.21), of DeepSeek-V3 high tens of percent (Megatron-Bridge, MoE hardware configurations, 2026);
a Trainer without expert parallelism reaches less."""


NETWORK_GB_S = 50.0


ALL_EXPERTS = 1.5


"""Times the active parameters above which a forward pass runs experts that were not chosen."""


MORE_GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Hardware:
    """Where the run is to happen."""

    gpu: str = "h200"
    num_gpus: int = 1
    sharding: Sharding = "none"
    mfu: tuple[float, float] = MFU
    network_gb_s: float = NETWORK_GB_S


@dataclass(frozen=True)
class _Run:
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
    teacher: Literal["sharded", "adapter_off", "cache"] = "sharded"
    lora: AdapterConfig | None = None


def estimate(
    recipe: Recipe, hardware: Hardware | None = None, *, variant: str | None = None, pretrain: bool = False
) -> dict[str, Any]:
    """Memory, operations and time of one training of a recipe; of a Hub model only config.json is fetched.

    Args:
        variant: of the recipe, instead of its main distillation. pretrain: its pre-training instead.

    Returns: JSON data: run, model, parameters, hardware, settings, memory, changes, flops, time, totals,
        assumptions.

    Raises:
        UserError: no such checkpoint, GPU or variant; a family that is refused; a batch that cannot be cut over the
            ranks; a model whose step needs data (`model.experts_implementation` of its own).
    """
    hardware = hardware or Hardware()
    gpu = _gpu(hardware)
    run = _pretraining(recipe) if pretrain else _distillation(recipe, variant)
    micro_batches = accumulation_steps(run.train, run.max_length, hardware.num_gpus)
    layout = Layout(
        hardware.sharding,
        hardware.num_gpus,
        step_tokens=run.train.batch_size_tokens,
        averages=run.train.ema_decay is not None,
    )
    trace_of = _tracer(run)
    setting = _setting(run, layout, micro_batches)
    trace = trace_of(setting)
    parts = memory_parts(trace, setting, layout)
    available = int(gpu.memory_gb * 1e9)
    total = sum(parts.values())
    seconds = step_time(trace, setting, layout, gpu, micro_batches, hardware.mfu, hardware.network_gb_s)
    activations = {
        f"{name}_checkpointing_bytes": _activations(trace_of, replace(setting, checkpointing=on), layout)
        for name, on in (("without", False), ("with", True))
    }
    itemsize = (torch.bfloat16 if setting.autocast else setting.student_dtype).itemsize
    layer_input = setting.num_rows * setting.num_tokens * trace.hidden_size * itemsize
    step_tokens = run.train.batch_size_tokens
    per_token = _flops_per_token(trace, setting)
    return {
        "recipe": recipe.name,
        "run": run.name,
        "model": run.where,
        "model_type": run.config["model_type"],
        "parameters": {
            "total": trace.num_parameters,
            "active": run.num_active,
            "trained": trace.num_trainable,
        },
        "hardware": asdict(gpu)
        | {
            "num_gpus": hardware.num_gpus,
            "sharding": hardware.sharding,
            "supported": _supported(run, layout),
        },
        "settings": {
            "objective": run.objective.name,
            "connectivity": run.connectivity.layers
            if run.connectivity is not None
            else "as in the checkpoint",
            "rows": setting.num_rows,
            "max_length": setting.num_tokens,
            "micro_batches": micro_batches,
            "dtype": run.train.dtype,
            "bf16": run.train.bf16,
            "gradient_checkpointing": setting.checkpointing,
            "teacher": setting.teacher if setting.has_teacher else None,
            "lora": setting.adapters,
            "freeze_embeddings_and_head": setting.freeze_embeddings_and_head,
        },
        "memory": {
            "parts": parts,
            "total_bytes": total,
            "gpu_bytes": available,
            "fits": total <= available,
            "activations": activations
            | {
                "layer_inputs_bytes": trace.num_layers * layer_input,
                "second_inputs_bytes": trace.num_pairs * layer_input,
            },
        },
        "cache": _cache(recipe, run, trace, setting),
        "changes": [] if total <= available else list(_changes(run, setting, layout, available, trace_of)),
        "flops": {
            "per_token": per_token,
            "per_step": sum(per_token.values()) * step_tokens,
            "total": sum(per_token.values()) * step_tokens * run.train.max_steps,
            "float32_share": _float32_share(trace),
        },
        "time": {
            "mfu": list(hardware.mfu),
            "step_s": [seconds.best, seconds.worst],
            "compute_s": seconds.compute,
            "memory_s": seconds.memory,
            "communication_s": seconds.communication,
            "tokens_per_second": [step_tokens / seconds.worst, step_tokens / seconds.best],
        },
        "totals": list(_totals(recipe, run, (seconds.best, seconds.worst), step_tokens, pretrain, variant)),
        "assumptions": list(_assumptions(run, setting, hardware, trace)),
    }


def _gpu(hardware: Hardware) -> Gpu:
    if hardware.gpu not in GPUS:
        raise UserError(
            f"--gpu {hardware.gpu}: unknown GPU; allowed: {', '.join(sorted(GPUS))}"
            f"{did_you_mean(hardware.gpu, list(GPUS))}"
        )
    if hardware.sharding not in SHARDINGS:
        raise UserError(f"--sharding {hardware.sharding}: allowed: {', '.join(SHARDINGS)}")
    if hardware.num_gpus < 1:
        raise UserError(f"--gpus {hardware.num_gpus}: must be 1 or more")
    lowest, highest = hardware.mfu
    if not 0 < lowest <= highest <= 1:
        raise UserError(f"--mfu {lowest:g}-{highest:g}: a range such as 0.1-0.25, within 0 and 1")
    if not hardware.network_gb_s > 0:
        raise UserError(f"--network-gb-s {hardware.network_gb_s:g}: must be above 0")
    return GPUS[hardware.gpu]


def _distillation(recipe: Recipe, variant: str | None) -> _Run:
    if variant is not None:
        if variant not in recipe.variants:
            known = ", ".join(recipe.variants) or "none"
            raise UserError(f"recipe {recipe.name}: has no variant '{variant}'; allowed: {known}")
        recipe = recipe.variant(variant)
    if recipe.model.path:
        source = find_source(recipe.model.path, recipe.model.revision)
        config, where = source.config, source.where
        parameters = inspect_model(recipe.model.path, recipe.model.revision)["parameters"] or {}
        num_active = parameters.get("active")
        dtype = _checkpoint_dtype(config) if recipe.model.dtype == "auto" else recipe.model.dtype
    else:
        config, where, num_active = _pretrain_config(recipe), "pretrain.config", None
        assert recipe.pretrain is not None
        dtype = recipe.pretrain.train.dtype if recipe.model.dtype == "auto" else recipe.model.dtype
    return _Run(
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
        teacher=recipe.teacher.backend if recipe.teacher is not None else "sharded",
        lora=recipe.lora,
    )


def _pretraining(recipe: Recipe) -> _Run:
    plan = recipe.pretrain
    if plan is None:
        raise UserError(f"recipe {recipe.name}: has no `pretrain` section; leave --pretrain out")
    return _Run(
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
        from fcsd.models.load import load_tokenizer

        config["vocab_size"] = len(load_tokenizer(recipe.pretrain.tokenizer))
    return config


def _checkpoint_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a checkpoint's config names; bfloat16 where it names none."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        if (dtype := place.get("dtype") or place.get("torch_dtype")) in ("float32", "bfloat16", "float16"):
            return str(dtype)
    return "bfloat16"


def _built(run: _Run) -> tuple[Family, Callable[[], Any]]:
    """(family, what builds its regular model from the config)."""
    left = {*INSTELLA_KEYS, "farskip", "auto_map", "experts_implementation", "quantization_config"}
    family = family_of(run.config)
    cls = base_model_class(family)
    values = json.loads(
        json.dumps({key: value for key, value in run.config.items() if key not in left}),
        object_hook=_special_float,
    )
    try:
        config = cls.config_class.from_dict(values | {"model_type": family.model_type})
        family_of(config)
    except UserError as error:
        raise UserError(f"{run.where}: {error}") from None
    except Exception as error:  # transformers' strict configs raise many kinds for a wrong field
        raise UserError(f"{run.where}: transformers refuses it: {' '.join(str(error).split())}") from None
    attention = "eager" if run.attention == "eager" else "sdpa"
    if not getattr(cls, "_supports_sdpa", True):
        attention = "eager"
    return family, lambda: cls._from_config(copy.deepcopy(config), attn_implementation=attention)


def _special_float(value: dict[str, Any]) -> Any:
    """transformers writes an infinite number as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _tracer(run: _Run) -> Callable[[Setting], Trace]:
    """`trace_step` for this run; a setting is traced once."""
    family, build = _built(run)
    section = run.connectivity
    known: dict[Setting, Trace] = {}

    def adapt(model: Any) -> None:
        from fcsd.distill.teachers.lora import add_adapters

        assert run.lora is not None
        add_adapters(model, run.lora, seed=0, dtype=dtype_of(run.train.dtype))

    def rewire(model: Any) -> None:
        if section.layers != "none":
            convert_model(model, _chosen(section))

    def trace(setting: Setting) -> Trace:
        if setting not in known:
            try:
                with tqdm(desc="Tracing a step", unit="layer", leave=False, disable=None) as bar:
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
                reason = " ".join(str(error).split())[:200]
                raise UserError(
                    f"{run.where}: the training step of {family.model_type} cannot be followed without data:"
                    f" {type(error).__name__}: {reason}; `fcsd inspect` tells what its weights need"
                ) from error
        return known[setting]

    return trace


def _chosen(section: Any) -> Connectivity:
    from fcsd.connectivity.spec import parse_selection

    return Connectivity(parse_selection(section.layers), section.attention, section.mlp)


def _setting(run: _Run, layout: Layout, micro_batches: int) -> Setting:
    """A sharded run computes in bfloat16 from gathered weights; one with whole copies casts under autocast."""
    return Setting(
        objective=run.objective.name,
        num_rows=run.train.per_device_train_batch_size,
        num_tokens=run.max_length,
        student_dtype=dtype_of(run.train.dtype),
        teacher_dtype=run.teacher_dtype,
        autocast=run.train.bf16,
        sharded=layout.sharding != "none",
        checkpointing=_checkpointing(run),
        freeze_embeddings_and_head=run.objective.freeze_embeddings_and_head,
        accumulates=micro_batches > 1,
        on_gpu=True,
        divergence=tuple(
            (name, value)
            for name in ("temperature", "jsd_beta", "clip")
            if (value := getattr(run.objective, name)) is not None
        ),
        vocab_size=run.objective.vocab_size,
        teacher=run.teacher,
        adapters=run.lora is not None,
    )


def _checkpointing(run: _Run) -> bool:
    if run.train.gradient_checkpointing is not None:
        return run.train.gradient_checkpointing
    with torch.device("meta"):
        return checkpoints_activations(run.train, _built(run)[1]())


def _activations(trace_of: Callable[[Setting], Trace], setting: Setting, layout: Layout) -> int | None:
    """Bytes, or None for a family that cannot recompute its layers."""
    try:
        return memory_parts(trace_of(setting), setting, layout).get("activations", 0)
    except UserError:
        return None


def _flops_per_token(trace: Trace, setting: Setting) -> dict[str, float]:
    tokens = setting.num_rows * setting.num_tokens
    names = {"teacher forward": "teacher forward", "activations": "student forward", "loss": "loss"}
    counts = {names.get(kind, kind): sum(by.values()) / tokens for kind, by in trace.flops.items()}
    order = ("teacher forward", "student forward", "loss", "backward")
    return {name: counts[name] for name in order if name in counts}


def _supported(run: _Run, layout: Layout) -> bool:
    """Whether `fcsd distill` runs it: adapters need whole weights."""
    return run.lora is None or layout.sharding == "none"


def _cache(recipe: Recipe, run: _Run, trace: Trace, setting: Setting) -> dict[str, int] | None:
    """Bytes on disk of a teacher cache: a token with loss, and all tokens that the longest training reads."""
    if not setting.has_teacher or setting.teacher != "cache":
        return None
    tokens = run.train.max_steps * run.train.batch_size_tokens
    if recipe.sweep is not None:
        tokens = max(tokens, recipe.sweep.steps * max(recipe.sweep.batch_size_tokens))
    each = trace.hidden_size * setting.teacher_dtype.itemsize
    return {"bytes_per_token": each, "at_most_tokens": tokens, "at_most_bytes": each * tokens}


def _float32_share(trace: Trace) -> float:
    total = sum(sum(by.values()) for by in trace.flops.values())
    return sum(by.get("float32", 0) for by in trace.flops.values()) / total


def _changes(
    run: _Run, setting: Setting, layout: Layout, available: int, trace_of: Callable[[Setting], Trace]
) -> Iterator[dict[str, Any]]:
    """Changes one after another, each on top of those before, until the run fits."""
    freeze = False

    def row(change: str) -> dict[str, Any]:
        total = sum(memory_parts(trace_of(setting), setting, layout, freeze=freeze).values())
        fits = total <= available
        return {"change": change, "total_bytes": total, "fits": fits, "supported": _supported(run, layout)}

    def steps() -> Iterator[dict[str, Any]]:
        nonlocal setting, layout, freeze
        if not setting.checkpointing and _activations(trace_of, replace(setting, checkpointing=True), layout):
            setting = replace(setting, checkpointing=True)
            yield row("train.gradient_checkpointing: true")
        if setting.num_rows > 1:
            setting = replace(setting, num_rows=1, accumulates=True)
            yield row("train.per_device_train_batch_size: 1")
        if setting.runs_teacher_model and setting.objective != "kl+l2":
            setting = replace(setting, teacher="cache")
            yield row("teacher.backend: cache, filled before")
        if setting.adapters:
            return  # neither shards nor anything below for a LoRA student
        if layout.sharding == "none":
            first = max(layout.num_gpus, MORE_GPUS[0])
            setting, layout = (
                replace(setting, sharded=True),
                replace(layout, sharding="fsdp2", num_gpus=first),
            )
            yield row(f"--sharding fsdp2 --gpus {first}: student and teacher in shards")
        if not setting.freeze_embeddings_and_head:
            freeze = True
            yield row("objective.freeze_embeddings_and_head: true")
        base = layout
        layout = replace(layout, offload=True)
        yield row("optimiser states offloaded to the host's memory")
        layout = base
        for count in MORE_GPUS:
            if count > layout.num_gpus:
                layout = replace(layout, num_gpus=count)
                yield row(f"--gpus {count} instead of offloading")

    for change in steps():
        yield change
        if change["fits"]:
            return


def _totals(
    recipe: Recipe,
    run: _Run,
    step_s: tuple[float, float],
    step_tokens: int,
    pretrain: bool,
    variant: str | None,
) -> Iterator[dict[str, Any]]:
    def row(name: str, num_runs: int, steps: int, tokens: int) -> dict[str, Any]:
        hours = [tokens / step_tokens * seconds / 3600 for seconds in step_s]
        return {"stage": name, "runs": num_runs, "steps": steps, "tokens": tokens, "hours": hours}

    yield row(run.name, 1, run.train.max_steps, run.train.max_steps * step_tokens)
    if recipe.sweep is None or pretrain or variant is not None:
        return
    sizes, rates = recipe.sweep.batch_size_tokens, recipe.sweep.learning_rate
    more = len(set(rates) - {run.train.learning_rate})
    tokens = recipe.sweep.steps * (sum(sizes) + more * max(sizes))
    yield row("sweep, at most", len(sizes) + more, recipe.sweep.steps, tokens)


def _assumptions(run: _Run, setting: Setting, hardware: Hardware, trace: Trace) -> Iterator[str]:
    from fcsd.cost.memory import CONTEXT_BYTES, FRAGMENTATION

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
    if run.attention not in (None, "eager", "sdpa"):
        yield f"attention as with sdpa; {run.attention} keeps less"
    if setting.autocast and not setting.sharded and setting.student_dtype == torch.float32:
        yield (
            "bf16 is autocast, which leaves transformers' grouped products of the experts in the dtype of their"
            " weights, float32: slow on every GPU"
        )
    products = sum(trace.flops["activations"].values()) - trace.attention_flops
    each = products / (setting.num_rows * setting.num_tokens)
    if run.num_active is not None and each > 2 * ALL_EXPERTS * run.num_active:
        yield (
            f"transformers' code of this family runs far more than the {run.num_active:,} parameters that a token"
            f" uses, {each / 2 / run.num_active:.1f} times as many: it runs experts on tokens that did not choose them"
        )
    if run.lora is not None and hardware.sharding != "none":
        yield "`fcsd distill` does not shard a LoRA student; launch data parallel copies, --sharding none"
    if setting.has_teacher and setting.teacher == "cache":
        yield "the cache is filled before: one forward pass of the teacher over every row, which is not in it"


def parse_mfu(text: str) -> tuple[float, float]:
    """`0.1-0.25` or `0.2` as a range.

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
