"""Estimate the needs of a recipe's run: memory per rank, FLOPs, time, and the changes
that make it fit.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

from fcsd.base.errors import UserError
from fcsd.data.write_rows import MOST_WORKERS
from fcsd.evaluation.config import KINDS
from fcsd.model.families import expert_counts
from fcsd.parallel.engine import Engine
from fcsd.parallel.launch import fits_whole
from fcsd.planning.cost.assumptions import ASSUMPTIONS
from fcsd.planning.cost.changes import activation_bytes, changes, is_supported
from fcsd.planning.cost.job import (
    SHARES,
    Job,
    assumed_values,
    gather_s,
    job_of,
    step_times,
)
from fcsd.planning.cost.memory import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    GPUS_PER_NODE,
    compute_dtype,
    memory_parts,
    room,
)
from fcsd.planning.cost.own_text import (
    HOST_US,
    TextOfOriginal,
    text_of_student,
    texts_of_original,
)
from fcsd.planning.cost.settings import Hardware
from fcsd.planning.cost.training import (
    Training,
    distillation,
    pretraining,
)
from fcsd.recipe.recipe import Recipe, TaskStoppingConfig
from fcsd.training.arguments import refuse_what_cannot_be_sharded
from fcsd.training.checkpoint_writer import BACKGROUND_FROM, disk_need
from fcsd.training.config import micro_batches

# benchmarks/tokens.py, docs/decisions.md of 2026-11-22: 13,031 rows of 4096 tokens,
# read, tokenized and packed in one process, took 70.0 s of processor time.
WORKER_TOKENS_S = 13_031 * 4096 / 70.0
TOKEN_BYTES = 5  # its id, and whether it is predicted


def estimate(
    recipe: Recipe,
    hardware: Hardware | None = None,
    *,
    variant: str | None = None,
    pretrain: bool = False,
) -> dict[str, Any]:
    """Estimate memory, FLOPs and time of one training of a recipe; of a Hub model only
    config.json is fetched.

    variant: a variant of the recipe, instead of its main training. pretrain:
    estimate the pre-training instead; always the case for a recipe without a `train`
    section, which only pre-trains.

    Raises:
        UserError: no such checkpoint, GPU or variant; a family that is refused; a batch
            that cannot be divided among the ranks; a model whose step needs data
            (`model.experts_implementation` of its own).
    """
    hardware = hardware or Hardware()
    if recipe.only_pretrains:
        recipe, variant, pretrain = recipe.chosen(variant), None, True
    training = pretraining(recipe) if pretrain else distillation(recipe, variant)
    job = job_of(training, hardware)
    # Three cases: all assumptions at their fast ends, as expected, and at their slow
    # ends.
    seconds, memory = step_times(job), _memory(job)
    own_text = text_of_student(job, _free_bytes(job, memory))
    own_s = [0.0, 0.0, 0.0] if own_text is None else own_text.seconds
    step_s = [case["regular_s"] + own for case, own in zip(seconds, own_s, strict=True)]
    # A pre-training has no original.
    sources = [] if pretrain else recipe.chosen(variant).data.train
    of_original = list(texts_of_original(job, sources))
    return {
        "recipe": recipe.name,
        "run": training.name,
        "model": training.where,
        "model_type": training.config["model_type"],
        "parameters": {
            "total": job.trace.num_parameters,
            "active": training.num_active,
            "trained": job.trace.num_trainable,
        },
        "hardware": (
            asdict(job.machine.gpu)
            | {
                name: getattr(hardware, name)
                for name in ("num_gpus", "sharding", "expert_parallel")
            }
            | {"supported": is_supported(training, job.layout)}
        ),
        "settings": _settings(job),
        "memory": memory,
        "cache": _cache(recipe, job),
        "changes": [] if memory["fits"] else list(changes(job, memory["gpu_bytes"])),
        "disk": _disk(job),
        "scoring": None if pretrain else _scoring(recipe, job, memory),
        "own_text": None if own_text is None else asdict(own_text),
        "written": list(map(asdict, of_original)),
        "flops": _flops(job),
        "time": _time(job, seconds[1], step_s),
        "tokens": _tokenizing(training.data_tokens),
        "totals": [
            *_pretraining_rows(recipe, hardware, pretrain, variant),
            *_written(of_original),
            *([] if pretrain else _calibration(recipe, variant, job)),
            *_totals(
                recipe, training, step_s, with_sweep=not pretrain and variant is None
            ),
        ],
        "refused": (
            []
            if pretrain
            else list(_reasons_against(recipe, variant, hardware, training))
        ),
        "assumptions": list(_assumptions(job, of_original)),
    }


def _tokenizing(num_tokens: int) -> dict[str, Any]:
    """Return tokens, bytes on disk, and seconds with the largest number of processes
    and with one.
    """
    # The time is assumed to fall with the number of processes.
    seconds = num_tokens / WORKER_TOKENS_S
    return {
        "num_tokens": num_tokens,
        "bytes": num_tokens * TOKEN_BYTES,
        "processes": MOST_WORKERS,
        "seconds": [seconds / MOST_WORKERS, seconds],
    }


def _reasons_against(
    recipe: Recipe, variant: str | None, hardware: Hardware, training: Training
) -> Iterator[str]:
    """Yield the reasons why `fcsd run` refuses: quantised weights, and other trainings
    whose batch cannot be divided among the ranks.
    """
    if recipe.pretrain is None and training.problem is not None:
        yield f"{training.where}: {training.problem}"
    shared = hardware.expert_parallel
    if shared > 1 or hardware.sharding == "zero3":
        engine = Engine("ep" if shared > 1 else "zero3", expert_parallel=shared)
        try:
            refuse_what_cannot_be_sharded(training.objective, engine)
        except UserError as error:
            yield str(error)
    if variant is not None:
        return
    # `fcsd run` checks the batch of every training, so all of them are tried here.
    sizes = recipe.sweep.batch_size_tokens if recipe.sweep is not None else []
    other_trainings = [
        ("sweep", recipe, recipe.train.model_copy(update={"batch_size_tokens": size}))
        for size in sizes
    ]
    variants = {name: recipe.variant(name) for name in recipe.variants}
    other_trainings += [
        (f"variants.{name}: train", trained_recipe, trained_recipe.train)
        for name, trained_recipe in variants.items()
    ]
    for where, trained_recipe, train in other_trainings:
        key, length = f"{where}.batch_size_tokens", trained_recipe.data.max_length
        try:
            micro_batches(train, length, hardware.num_gpus, key)
        except UserError as error:
            yield str(error)


def _settings(job: Job) -> dict[str, Any]:
    training, setting = job.training, job.setting
    return {
        "objective": training.objective.name,
        "connectivity": training.connectivity.layers,
        "rows": setting.num_rows,
        "max_length": setting.num_tokens,
        "micro_batches": job.micro_batches,
        "dtype": training.train.dtype,
        "bf16": training.train.bf16,
        "gradient_checkpointing": setting.checkpointing,
        "teacher": setting.teacher if setting.has_teacher else None,
        "lora": setting.adapters,
        "freeze_embeddings_and_head": setting.freeze_embeddings_and_head,
    }


def _memory(job: Job) -> dict[str, Any]:
    trace, setting = job.trace, job.setting
    parts = memory_parts(trace, setting, job.layout)
    # Both are always reported, so that the reader sees what checkpointing saves.
    without, checkpointed = (
        activation_bytes(job.trace_of, replace(setting, checkpointing=on), job.layout)
        for on in (False, True)
    )
    layer_input = job.tokens * trace.hidden_size * compute_dtype(setting).itemsize
    return room(parts, job.machine.gpu) | {
        "activations": {
            "without_checkpointing_bytes": without,
            "with_checkpointing_bytes": checkpointed,
            "layer_inputs_bytes": trace.num_layers * layer_input,
            "second_inputs_bytes": trace.num_pairs * layer_input,
        },
    }


def _disk(job: Job) -> dict[str, int]:
    # The same function checks the disk before a training, so both agree.
    need = disk_need(
        job.training.train,
        num_trained=job.trace.num_trainable,
        num_parameters=job.trace.num_parameters,
        model_itemsize=job.training.saved_dtype.itemsize,
        keeps_best=job.training.keeps_best,
    )
    # While a checkpoint is written, a machine's memory holds the parts of its ranks; of
    # several replicas only one writes.
    ranks = job.layout.num_shards
    host_copy = 0
    if job.trace.num_trainable >= BACKGROUND_FROM:
        host_copy = need.checkpoint * min(ranks, GPUS_PER_NODE) // ranks
    return {
        "checkpoint_bytes": need.checkpoint,
        "host_copy_bytes": host_copy,
        "num_checkpoints": need.num_checkpoints,
        "best_bytes": need.best,
        "model_bytes": need.model,
        "total_bytes": need.total,
    }


_HELD = {
    "student weights",
    "master weights",
    "optimizer states",
    "averaged weights",
    "GPU context",
    "teacher weights",
    "teacher head",
}
"""Parts of the memory that stay allocated between steps; gradients only with ZeRO-3."""


def _scoring(recipe: Recipe, job: Job, memory: dict[str, Any]) -> dict[str, Any] | None:
    """Return the weights that are gathered when early stopping scores by generation;
    None where it does not generate, or the weights are not sharded that way.

    seconds: the time of one gather, without the computation. once: the weights are
    gathered once for the whole score, else for every token.
    """
    rule, layout = recipe.early_stopping, job.layout
    generates = isinstance(rule, TaskStoppingConfig) and KINDS[rule.row.kind].writes
    if not generates or layout.num_shards == 1 or layout.expert_parallel > 1:
        return None
    num_bytes = job.trace.num_parameters * compute_dtype(job.setting).itemsize
    free = _free_bytes(job, memory)
    once = layout.sharding != "zero3" and fits_whole(num_bytes, free)
    return {
        "gathered_bytes": num_bytes,
        "free_bytes": free,
        "once": once,
        "seconds": gather_s(job),
    }


def _free_bytes(job: Job, memory: dict[str, Any]) -> int:
    """Return the bytes of a GPU that are free between steps, when gathered weights,
    activations and, except with ZeRO-3, gradients are freed.
    """
    zero3 = job.layout.sharding == "zero3"
    held = _HELD | {"gradients"} if zero3 else _HELD
    stays = sum(memory["parts"].get(name, 0) for name in held)
    return max(0, int(memory["gpu_bytes"]) - stays)


def _flops(job: Job) -> dict[str, Any]:
    """Return the operations that run, including those of the teacher and of recomputed
    layers.
    """
    by_phase = {phase: sum(by.values()) for phase, by in job.trace.flops.items()}
    # The tracker counts the student's forward pass under the kind of its allocations.
    per_token = {
        "student forward" if phase == "activations" else phase: (
            by_phase[phase] / job.tokens
        )
        for phase in ("teacher forward", "activations", "loss", "backward")
        if phase in by_phase
    }
    per_step = sum(per_token.values()) * job.training.train.batch_size_tokens
    in_float32 = sum(by.get("float32", 0) for by in job.trace.flops.values())
    return {
        "per_token": per_token,
        "per_step": per_step,
        "total": per_step * job.training.train.max_steps,
        "float32_share": in_float32 / sum(by_phase.values()),
    }


def _time(job: Job, seconds: dict[str, Any], step_s: list[float]) -> dict[str, Any]:
    step_tokens, mfu = job.training.train.batch_size_tokens, job.hardware.mfu
    return {
        "mfu": None if mfu is None else list(mfu),
        "step_s": [step_s[0], step_s[2]],
        "expected_s": step_s[1],
        "compute_s": seconds["compute_s"],
        "exchanges_s": seconds["communication_s"],
        "sharding_s": seconds["sharding_s"][0],
        "tokens_per_second": [step_tokens / step_s[2], step_tokens / step_s[0]],
        "expected_tokens_per_second": step_tokens / step_s[1],
    }


def _cache(recipe: Recipe, job: Job) -> dict[str, int] | None:
    """Compute the bytes on disk of a teacher cache, per token with loss and for all
    tokens of the longest training.
    """
    training, setting = job.training, job.setting
    if not setting.has_teacher or setting.teacher != "cache":
        return None
    tokens = training.train.max_steps * training.train.batch_size_tokens
    if recipe.sweep is not None:
        sweep, sizes = recipe.sweep, recipe.sweep.batch_size_tokens
        # Trainings of a sweep read the same rows, so the longest one fills the cache.
        tokens = max(
            tokens, *(size * sweep.steps_of(size, training.train) for size in sizes)
        )
    bytes_per_token = job.trace.hidden_size * setting.teacher_dtype.itemsize
    return {
        "bytes_per_token": bytes_per_token,
        "at_most_tokens": tokens,
        "at_most_bytes": bytes_per_token * tokens,
    }


def _pretraining_rows(
    recipe: Recipe, hardware: Hardware, pretrain: bool, variant: str | None
) -> list[dict[str, Any]]:
    """Return the row of the pre-training, with which a full run of the recipe starts."""
    if recipe.pretrain is None or pretrain or variant is not None:
        return []
    rows: list[dict[str, Any]] = estimate(recipe, hardware, pretrain=True)["totals"]
    return rows


def _written(of_original: list[TextOfOriginal]) -> Iterator[dict[str, Any]]:
    """Yield the row of the text that the original writes in memory."""
    in_memory = [text for text in of_original if text.seconds is not None]
    if not in_memory:
        return
    hours = [
        sum(text.seconds[case] for text in in_memory if text.seconds) / 3600
        for case in range(3)
    ]
    tokens = sum(text.texts * text.tokens for text in in_memory)
    yield _row("text of the original", len(in_memory), 1, tokens, hours)


def _calibration(
    recipe: Recipe, variant: str | None, job: Job
) -> Iterator[dict[str, Any]]:
    """Yield the row of the calibration that precedes the training, as if all layers
    were rewired.
    """
    calibrated_recipe = recipe.variant(variant) if variant is not None else recipe
    if calibrated_recipe.calibration is None:
        return
    trace, config = job.trace, job.training.config
    counts = expert_counts(SimpleNamespace(**(config.get("text_config") or config)))
    flops = calibration_flops(
        forward=sum(trace.flops["activations"].values()) / job.tokens,
        tokens=calibrated_recipe.calibration.tokens,
        num_layers=trace.num_layers,
        hidden_size=trace.hidden_size,
        num_parameters=trace.num_parameters - trace.embeddings_and_head,
        num_experts=counts[0] or 0,
        experts_per_token=counts[1] or 0,
    )
    # Most operations are plain matmuls in float32, so the dense share of that peak
    # counts.
    shares = [values["gemm"] for values in assumed_values(job.hardware.mfu)]
    peak = job.machine.gpu.float32_tflops * 1e12 * job.machine.num_gpus
    hours = [flops / (peak * share) / 3600 for share in shares]
    yield _row("calibration", 1, 1, calibrated_recipe.calibration.tokens, hours)


def calibration_flops(
    *,
    forward: float,
    tokens: int,
    num_layers: int,
    hidden_size: int,
    num_parameters: int,
    num_experts: int,
    experts_per_token: int,
) -> float:
    """Count the operations of a calibration, most of them forward passes in float32.

    Args:
        forward: operations of one token's forward pass.
        num_layers: number of rewired layers. num_parameters: parameters of these
            layers; a map is multiplied into each.
    """
    # One pass of the original. Of the student: one up to its routed experts, one for
    # the branches' additions, one for the remaining residual, one for the experts one
    # by one, and one with the calibrated weights.
    passes = 6 * forward
    # XᵀX and XᵀY for two problems with D inputs and one with 2 D, and for two with D
    # inputs for every expert that a token uses.
    sums = (20 + 8 * experts_per_token) * hidden_size**2
    # A problem with n inputs takes n³/3 for Cholesky and 6 n² D for the map and the
    # residuals before and after it. Each problem is solved with and without its test
    # rows, on which two more residuals are computed.
    solutions = (
        (2 * (2 * 19 + 12) + 2 * (8 + 72) + 48 + num_experts * 2 * (2 * 19 + 12))
        / 3
        * hidden_size**3
    )
    products = 2 * hidden_size * num_parameters
    return tokens * (passes + num_layers * sums) + num_layers * solutions + products


def _row(
    stage: str, num_runs: int, steps: int, tokens: int, hours: list[float]
) -> dict[str, Any]:
    """Return a row of the totals. hours: the fewest, the expected and the most."""
    return {
        "stage": stage,
        "runs": num_runs,
        "steps": steps,
        "tokens": tokens,
        "hours": [hours[0], hours[2]],
        "expected_hours": hours[1],
    }


def _totals(
    recipe: Recipe, training: Training, step_s: list[float], with_sweep: bool
) -> Iterator[dict[str, Any]]:
    step_tokens = training.train.batch_size_tokens

    def hours(tokens: int) -> list[float]:
        return [tokens / step_tokens * seconds / 3600 for seconds in step_s]

    tokens = training.train.max_steps * step_tokens
    yield _row(training.name, 1, training.train.max_steps, tokens, hours(tokens))
    if recipe.sweep is None or not with_sweep:
        return
    sizes, rates = recipe.sweep.batch_size_tokens, recipe.sweep.learning_rate
    # The sweep first varies the batch size at the recipe's learning rate, then the rate
    # at the best batch size; the worst case is that the largest training is the best
    # one.
    extra_rates = len(set(rates) - {training.train.learning_rate})
    runs = [size * recipe.sweep.steps_of(size, training.train) for size in sizes]
    tokens = sum(runs) + extra_rates * max(runs)
    yield _row(
        "sweep, at most",
        len(sizes) + extra_rates,
        recipe.sweep.steps,
        tokens,
        hours(tokens),
    )


def _assumptions(job: Job, of_original: list[TextOfOriginal]) -> Iterator[str]:
    training, setting, hardware = job.training, job.setting, job.hardware
    # Only the notes that apply to this estimate are listed: each condition below is a
    # property of the run.
    if hardware.mfu is None:
        shares = ", ".join(
            f"{assumption.what.removeprefix('share of the peak, ')}"
            f" {assumption.value:.0%} ({assumption.low:.0%} to {assumption.high:.0%})"
            for assumption in map(ASSUMPTIONS.__getitem__, SHARES)
        )
        yield (
            f"of the published peak: {shares}; all else in"
            " fcsd/planning/cost/assumptions.py"
        )
    else:
        yield (
            f"{hardware.mfu[0]:.0%} to {hardware.mfu[1]:.0%} of the published peak:"
            " assumed for every matmul"
        )
    if hardware.num_gpus > 1:
        yield (
            "half of the computation (none to all) hides weights that are gathered and"
            " gradients that are reduced; exchanges between ranks that share the"
            " experts are not hidden: run `fcsd plan` for the gain from overlap"
        )
    yield (
        "every token carries loss, attention covers all pairs in a row, tokens are"
        " spread evenly over experts"
    )
    yield (
        f"{FRAGMENTATION:.0%} of the changing memory is lost to fragmentation, the"
        f" GPU's context takes {CONTEXT_BYTES / 2**30:.0f} GiB; memory of the GPU is"
        " taken in decimal GB"
    )
    yield (
        "not included: scoring for early stopping, evaluation, loading, writing"
        " checkpoints"
    )
    if job.machine.num_nodes > 1:
        yield f"between nodes {job.machine.nic_gb_s:g} GB/s per GPU"
    if training.attention not in (None, "eager", "sdpa"):
        yield f"attention as with sdpa; {training.attention} keeps less"
    if job.work.runs_all and hardware.expert_parallel == 1:
        yield (
            f"transformers' code of this family runs all {job.work.num_experts} experts"
            f" on every token, although a token chooses only"
            f" {job.work.experts_per_token}"
        )
    if training.objective.own_text is not None:
        yield (
            "own text: one text for each row that is written, of half a row unless"
            " own_text_tokens is less; a row of several examples has more and shorter"
            f" ones; {HOST_US[1]} microseconds ({HOST_US[0]} to {HOST_US[2]}) of the"
            " host for a layer and token"
        )
    if of_original:
        yield (
            "text of the original: all texts have max_new_tokens, behind prompts of"
            f" prompt_tokens; {HOST_US[1]} microseconds ({HOST_US[0]} to {HOST_US[2]})"
            " of the host for a layer and token; written once for all trainings with"
            " the same source"
        )
    if training.lora is not None and hardware.sharding != "none":
        yield (
            "`fcsd distill` does not shard a LoRA student; launch data parallel copies,"
            " --sharding none"
        )
    yield (
        "tokenizing has the speed of benchmarks/tokens.py: chats read from a local"
        " disk, by the small tokenizer of the tests; scale this to your tokenizer and"
        " processor. Local files up to 4 GiB are tokenized whole, even if a training"
        " reads less"
    )
    if setting.has_teacher and setting.teacher == "cache":
        yield (
            "filling the cache, one forward pass of the teacher over every row, is not"
            " included"
        )
