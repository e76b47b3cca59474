"""Plan the gain of FarSkip connectivity on a cluster before anything runs: `fcsd plan`.

    planned = prepare(PlanSettings(model="owner/name", nodes=4))   operations of its layers, from one traced pass
    times = plan_times(planned)                              seconds: arithmetic on the operations
    times = compared(planned)                                beside exact schedules (fcsd.planning.cost.exact)
    facts = plan(planned)                                    with memory, and how each assumption matters

Not covered: everything that only a profiler shows (launches, the host's work,
contention). Measured times replace the
roofline (`fcsd.planning.cost.measured`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any, Literal

from fcsd.base.errors import UserError
from fcsd.base.strict import flag_of
from fcsd.model.connectivity.selection import resolve_layers
from fcsd.model.families import FAMILIES, served_by
from fcsd.model.families.overlap import refusal
from fcsd.planning.cost.assumptions import ASSUMPTIONS
from fcsd.planning.cost.exact import compared
from fcsd.planning.cost.memory import (
    CONTEXT_BYTES,
    FRAGMENTATION,
    memory_parts,
    room,
)
from fcsd.planning.cost.operations import ModelWork
from fcsd.planning.cost.planned import Planned, prepare
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.stages import stage_work, stages_of
from fcsd.planning.cost.trace import Setting, Trace
from fcsd.planning.cost.training import micro_batch_setting, spread, tracer

OVER_PREDICTION = {True: (0.72, 4.9), False: (0.71, 2.1)}
"""Smallest and largest ratio of planned gains in the time to the first token to the
paper's measured ones, by whether kernels as fast as AITER's are planned
(`benchmarks/plan.py`). The paper does not name its kernels.

With them: DeepSeek-V2 2.1 to 4.9, Llama-4-Scout 1.4 to 2.3, DeepSeek-V3 0.72 to 0.80.
Without: DeepSeek-V2 0.71 to 2.1, Llama-4-Scout 0.92 to 1.7.
"""

STEP_RATIO = (0.97, 2.3)
"""Ratio of published times between tokens, none of them the paper's, to planned ones,
as `benchmarks/plan.py` lists them: DeepSeek-V3 0.97 to 1.1 on 8 H200, 1.5 to 2.1 on 8
MI300X, 1.8 on 16 H100 with one request; gpt-oss-120b 1.1 to 1.2 on 8 H100, 1.1 to 1.2
on 8 MI300X, 1.6 to 2.3 on one.
"""

PRINTED = 5e-4
"""The least change of a gain that its printed digits show."""

_OF_TOKENS = {
    "activations",
    "loss",
    "teacher hidden states",
    "keys and values",
    "fragmentation",
}
"""Parts of a rank's memory that shrink with batch or length."""

MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""How many times as many GPUs are tried for a plan that does not fit."""


def plan(planned: Planned, *, advise: bool = True) -> dict[str, Any]:
    """Plan a step of training, the time to the first token, or the time between tokens,
    as JSON data. A plan that needs too much memory is returned, too; its `memory` says
    so.

    advise: if the plan does not fit, search for settings that do; this traces the model
    several times.
    """
    kept_bytes = kept_memory(planned)
    times = compared(planned, kept_bytes)
    machine, rows = planned.machine, []
    # One assumption at a time, at both ends of its range.
    for name, assumption in ASSUMPTIONS.items():
        if name in planned.ranges:
            low, value, high = planned.ranges[name]
        elif name in machine.values:
            low, value, high = assumption.low, machine.values[name], assumption.high
        else:
            continue
        # A given value may lie outside the table's range, which then extends to it.
        ends = [min(low, value), max(high, value)]
        at = [compared(planned.assuming(**{name: end}), kept_bytes) for end in ends]
        gains = {
            key: reach(times[key], (case[key] for case in at))
            for key in ("speed_up", "over_exact")
        }
        facts = {"what": assumption.what, "source": assumption.source}
        rows.append({"name": name, "value": value, "range": ends, **gains, **facts})
    names = ("num_nodes", "gpus_per_node", "nic_gb_s", "num_gpus")
    values = {name: getattr(machine, name) for name in names}
    settings = planned.settings
    serves = settings.phase != "train"
    # Megatron's sharding without its layout serves only to compare times.
    has_layout = planned.megatron or settings.sharding == "fsdp2"
    # Measured gains exist only for the time to the first token; between tokens, only
    # durations of steps are published.
    over_prediction = step_ratio = None
    if settings.phase == "prefill":
        over_prediction = list(OVER_PREDICTION[planned.aiter is not False])
    if settings.phase == "decode":
        step_ratio = list(STEP_RATIO)
    over_exact = expected_gain(times, settings, rows, "over_exact")
    refused = None
    if not serves and not planned.megatron:
        refused = refusal(FAMILIES[planned.model_type])
    return {
        "model": planned.training.where,
        "model_type": planned.model_type,
        "machine": {"gpu": asdict(machine.gpu), **values},
        "settings": _settings(planned),
        "times": times,
        "memory": _memory(planned, advise) if has_layout else None,
        "sensitivity": rows,
        "upper_bound": serves,
        "over_prediction": over_prediction,
        "step_ratio": step_ratio,
        "expected_gain": expected_gain(times, settings, rows) if serves else None,
        "expected_over_exact": over_exact,
        "hangs_on": hangs_on(rows),
        "imbalance": machine.values["imbalance"],
        "links": machine.links is not None,
        "overlap_refused": refused,
        "served_by": served_by(planned.model_type) if serves else None,
    }


def expected_gain(
    times: Mapping[str, Any],
    settings: PlanSettings,
    sensitivity: Sequence[Mapping[str, Any]],
    over: Literal["speed_up", "over_exact"] = "speed_up",
) -> list[float]:
    """Return the smallest and the largest gain to expect from planned times, as shares
    of the step. over: regular blocks, or the best exact schedule.

    They cover the gains at both ends of every assumption. In the time to the first
    token, unless slow kernels are planned, the smallest is at most the planned gain by
    the largest ratio of `OVER_PREDICTION`: the server's kernels may be slower. Between
    tokens, a step may take up to the largest of `STEP_RATIO` times as long as planned,
    and hides as many seconds as planned.
    """
    # Each gain with the one over regular blocks of the same plan.
    planned = [(times[over], times["speed_up"])]
    for row in sensitivity:
        planned += zip(row[over], row["speed_up"], strict=True)
    ends = [gain - 1 for gain, _ in planned]
    if settings.phase == "prefill" and not settings.without_aiter:
        _, most = OVER_PREDICTION[True]
        ends.append((times[over] - 1) / most)
    if settings.phase == "decode":
        # As shares of the planned regular step: the overlapped one, and what it gains.
        ends = [
            (gain - 1) / speed_up / (ratio - 1 + 1 / speed_up)
            for gain, speed_up in planned
            for ratio in (1, STEP_RATIO[1])
        ]
    return [min(ends), max(ends)]


def hangs_on(sensitivity: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the assumption that moves the gain over regular blocks most;
    None if none moves it by as much as is printed.
    """

    def moved(row: Mapping[str, Any]) -> float:
        low, high = row["speed_up"]
        return float(high - low)

    most = max(sensitivity, key=moved, default=None)
    return most["name"] if most is not None and moved(most) >= PRINTED else None


def reach(planned: float, ends: Iterable[float]) -> list[float]:
    """Return the smallest and the largest among a planned gain and the gains at both
    ends of an assumption's range.

    A gain is largest where an exchange just fills its window, so the gains at both ends
    may be below it.
    """
    gains = [planned, *ends]
    return [min(gains), max(gains)]


def _settings(planned: Planned) -> dict[str, Any]:
    settings = planned.settings
    names = ("phase", "batch", "global_batch", "length")
    spec = planned.connectivity
    return {name: getattr(settings, name) for name in names} | {
        "num_gpus": planned.num_gpus,
        "weights": asdict(planned.stored),
        "fused_attention": not settings.unfused_attention,
        "aiter": planned.aiter,
        "expert_parallel": planned.expert_parallel,
        "tensor_parallel": planned.tensor_parallel,
        "pipeline_parallel": settings.pipeline_parallel,
        "data_parallel": settings.data_parallel,
        "all2all": settings.all2all if planned.wide else None,
        "micro_batches": planned.micro_batches,
        "layers": resolve_layers(spec.layers, planned.work.moe),
        "num_layers": len(planned.work.layers),
        "attention": spec.attention,
        "mlp": planned.mlp,
    }


Tracers = Callable[[int], Callable[[Setting], Trace]]
"""Gives the traces of a training's steps for a number of ranks that share the experts."""


def _tracers(planned: Planned) -> Tracers:
    """Return the tracers of a training, which traces each setting once: a trace of all
    layers takes seconds.
    """
    whole = tracer(planned.training)

    @cache
    def of_ranks(ranks: int) -> Callable[[Setting], Trace]:
        return spread(whole, planned.training, planned.work, ranks)

    return of_ranks


def memory(planned: Planned, tracers: Tracers | None = None) -> dict[str, Any]:
    """Return the bytes of a rank (in serving: weights, keys and values), and whether
    the GPU has that much memory.

    tracers: of the same training, with any rows, length and cluster; None: new ones.
    """
    settings = planned.settings
    # Training is traced, as in `fcsd estimate`; a server holds weights, cache and the
    # activations of one pass.
    if settings.phase == "train":
        setting = micro_batch_setting(
            planned.training, planned.layout, planned.micro_batches
        )
        trace = (tracers or _tracers(planned))(planned.expert_parallel)(setting)
        if planned.megatron:
            parts = _megatron_memory(planned, trace)
        else:
            parts = memory_parts(trace, setting, planned.layout)
    else:
        parts = _serving_memory(planned)
    return room(parts, planned.machine.gpu)


def kept_memory(planned: Planned) -> dict[str, Any] | None:
    """Return the memory of a training that recomputes no layer, as two micro-batches in
    turn need it; None where no two take turns.

    As the forward pass of one keeps the activations of a layer, the backward pass of
    the other frees those of another: together they keep those of one micro-batch.
    """
    if planned.settings.phase != "train" or planned.micro_batches == 1:
        return None
    train = planned.training.train.model_copy(update={"gradient_checkpointing": False})
    return memory(replace(planned, training=replace(planned.training, train=train)))


def _memory(planned: Planned, advise: bool) -> dict[str, Any]:
    """Return `memory`, and with `advise` also settings that would fit."""
    tracers = _tracers(planned)
    facts = memory(planned, tracers)
    if not advise:
        return facts
    if facts["fits"]:
        return facts | {"changes": [], "needs_gpus": planned.num_gpus}
    return facts | _what_fits(planned, facts, tracers)


def _what_fits(
    planned: Planned, facts: Mapping[str, Any], tracers: Tracers
) -> dict[str, Any]:
    """Return the changes that make a plan fit its GPUs (`changes`, as text), and the
    number of GPUs that it needs without them (`needs_gpus`; None where none of
    `MORE_GPUS` suffices).

    facts: the memory of the plan. tracers: those that found it.
    """
    settings = planned.settings

    def fits(**changed: Any) -> bool:
        try:
            changed_plan = prepare(settings.model_copy(update=changed))
            return bool(memory(changed_plan, tracers)["fits"])
        except UserError:  # ranks that do not divide batch or experts
            return False

    changes = []
    keeps = settings.keep_activations and settings.phase == "train"
    if keeps and fits(keep_activations=False):
        changes.append("without --keep-activations")
    if settings.phase != "train" and settings.dtype != "fp8" and fits(dtype="fp8"):
        changes.append("--dtype fp8")
    # Where the weights alone are too large, no batch or length is small enough.
    least = sum(n for name, n in facts["parts"].items() if name not in _OF_TOKENS)
    has_room = least <= facts["gpu_bytes"]
    for batch in _halves(settings.batch) if has_room else ():
        if fits(batch=batch):
            changes.append(f"--batch {batch}")
            break
    for length in _halves(settings.length) if has_room else ():
        if length >= 256 and fits(length=length):
            changes.append(f"--length {length}")
            break
    needs_gpus = None
    for factor in MORE_GPUS:
        num_gpus = factor * planned.num_gpus
        more: dict[str, Any] = {
            "nodes": max(settings.nodes, -(-num_gpus // settings.gpus_per_node))
        }
        # The ranks that share a server's weights grow with the machine; in training,
        # the ranks that share the experts grow only as far as they divide the experts.
        if settings.phase == "train":
            more["expert_parallel"] = planned.expert_parallel
            if settings.global_batch is not None:
                more["global_batch"] = factor * settings.global_batch
        elif settings.data_parallel is not None:
            more["data_parallel"] = num_gpus
            more["batch"] = factor * settings.batch
        elif settings.tensor_parallel is not None:
            more["tensor_parallel"] = num_gpus
            if settings.expert_parallel not in (None, 1):
                more["expert_parallel"] = num_gpus
        if fits(**more):
            needs_gpus = num_gpus
            words = (
                f"{flag_of(PlanSettings, name)} {value}" for name, value in more.items()
            )
            changes.append(" ".join(words))
            break
    return {"changes": changes, "needs_gpus": needs_gpus}


def _halves(value: int) -> Iterator[int]:
    while value > 1:
        value //= 2
        yield value


def _megatron_memory(planned: Planned, trace: Trace) -> dict[str, int]:
    """Return the bytes of a rank of the stage with the most weights.

    Weights are in bfloat16 and gradients in float32; master weights and both moments
    are sharded over the ranks that have the same weights. While a pipeline is full, its
    first stage keeps as many micro-batches as there are stages, which equals the
    activations of all layers for one micro-batch; each tensor-parallel rank keeps its
    part (arXiv 2205.05198, 4.2.3).
    """
    number, tp = planned.settings.pipeline_parallel, planned.tensor_parallel
    ep, ranks = planned.expert_parallel, planned.layout.num_gpus
    stages = stages_of(len(planned.work.layers), number)
    works = [stage_work(planned.work, stage) for stage in stages]

    def of_a_rank(work: ModelWork) -> tuple[float, float]:
        experts = work.num_expert_parameters
        return experts / ep, (work.num_parameters - experts) / tp

    experts, other_parameters = max(map(of_a_rank, works), key=sum)
    share_kept = min(number, planned.micro_batches) / number / tp
    moving = trace.transient
    parts = {
        "weights": int(2 * (experts + other_parameters)),
        "gradients": int(4 * (experts + other_parameters)),
        "optimizer states": int(12 * (experts * ep + other_parameters * tp) / ranks),
        "activations": int(
            share_kept * sum(size for kind, size in moving.items() if kind != "loss")
        ),
        "loss": moving.get("loss", 0) // tp,
    }
    temporary = parts["activations"] + parts["loss"]
    return parts | {
        "fragmentation": int(FRAGMENTATION * temporary),
        "GPU context": CONTEXT_BYTES,
    }


def _serving_memory(planned: Planned) -> dict[str, int]:
    work, tp = planned.work, planned.tensor_parallel
    # A rank of a wide server has all but the other ranks' experts.
    experts: float = work.num_expert_parameters
    other_parameters = work.num_parameters - experts
    if planned.wide:
        experts /= planned.expert_parallel
    stored = planned.stored
    return {
        "weights": int(experts * stored.experts + other_parameters * stored.others)
        // tp,
        "keys and values": int(planned.cached),
        # Serving keeps no activations for a backward pass.
        "activations": work.tokens * work.hidden_size * 2 * 4,
        "GPU context": CONTEXT_BYTES,
    }
