"""Compute the seconds of an optimiser step or of a server's step, regular and
overlapped, by arithmetic on the operations; nothing is run.

`step_time` is the only model of a training step: `fcsd plan` takes the gain of overlap
from it, `fcsd estimate` the duration of a recipe.

An MoE layer k has two separate windows. The window of its dispatch is the computation
between the exchange's start and its wait (the core of attention and the output
projection); the window of its combine is the shared expert and the next layer's
queries, keys and values (`fcsd.parallel.overlap.schedule.beside`). The part of an
exchange beyond its own window is exposed, however much room the other window has. In
the backward pass every window is twice as long as in the forward pass, because its
computation is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fcsd.parallel.overlap.schedule import (
    Computed,
    LayerFacts,
    is_with_mixer,
    layer_facts,
    served_beside,
    served_branches,
)
from fcsd.parallel.overlap.schedule import beside as computed_beside
from fcsd.planning.cost.collectives import Way
from fcsd.planning.cost.memory import GPUS_PER_NODE, Layout
from fcsd.planning.cost.operations import ModelWork
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.roofline import Roofline, fused_norm, total
from fcsd.planning.cost.stages import (
    Stage,
    sends_s,
    stage_facts,
    stage_work,
    stages_of,
    tensor_parallel_s,
)

Seconds = Mapping[str, float]
"""Seconds of a layer's steps by the names of `fcsd.parallel.overlap.schedule`; an
absent step takes 0.
"""

BACKWARD = 2.0
"""Backward computation over forward computation: gradients of inputs and of weights."""


def window(computed: Computed, seconds: Sequence[Seconds]) -> float:
    """Return the seconds of the computation beside an exchange. seconds: seconds of
    each layer's steps.
    """
    return sum((seconds[k].get(step, 0.0) for k, step in computed), 0.0)


def exposed(seconds: float, window: float) -> float:
    """Return the seconds of an exchange beyond its window."""
    return max(0.0, seconds - window)


def equation_9(exchanges: float, seconds: Seconds) -> float:
    """Return (T_d + T_c) / (T_layer - T_experts - T_gate) of one layer (FarSkip paper):
    at most 1 where all exchanges could be hidden.

    exchanges: T_d + T_c. A value of at most 1 is necessary for no exposed time, not
    sufficient.
    """
    overlappable = sum(
        value
        for name, value in seconds.items()
        if name not in ("router", "experts", "arrive")
    )
    return exchanges / overlappable if overlappable else float("inf")


def gain(exposed_share: float, overlap: float) -> float:
    """Return regular / overlapped time - 1, f v / (1 - f v): a share f of the time is
    exposed, and a share v of that is hidden.
    """
    hidden = exposed_share * overlap
    return hidden / (1 - hidden)


@dataclass(frozen=True)
class Step:
    """An optimiser step: the work of a rank in each micro-batch, and the ranks with
    which it shares the weights.

    num_trained: parameters that are updated. trained_bytes: bytes of one of them, and
    of its gradient. adapters: only adapters are trained; the model's own weights get no
    gradients. recomputes: layers run again for the backward pass. teacher: roofline of
    its forward pass; None: no teacher runs. loss_matmuls: matmuls of head and loss:
    logits, and the gradients of their two factors; a teacher's logits are one more.
    blocking_s: seconds of a micro-batch's other communication, which nothing hides.
    """

    work: ModelWork
    roofline: Roofline
    layout: Layout
    micro_batches: int
    num_trained: int
    trained_bytes: int = 4
    adapters: bool = False
    recomputes: bool = False
    teacher: Roofline | None = None
    loss_matmuls: int = 3
    blocking_s: float = 0.0

    def assuming(self, values: Mapping[str, float]) -> Step:
        """Return this step with other values of some assumptions."""
        teacher = None if self.teacher is None else self.teacher.assuming(values)
        return replace(self, roofline=self.roofline.assuming(values), teacher=teacher)

    @property
    def backward(self) -> float:
        """Backward computation over forward computation: without adapters, gradients of
        inputs and of weights.
        """
        return BACKWARD / 2 if self.adapters else BACKWARD

    @property
    def loss_s(self) -> float:
        """Seconds of head and loss of a micro-batch."""
        return self.roofline.loss(self.work, self.loss_matmuls)


def step_time(
    step: Step,
    facts: Sequence[LayerFacts | None] | None = None,
    last_combine: float = 1.0,
) -> dict[str, Any]:
    """Return the seconds of a step whose exchanges block, and of a step whose layers
    follow the schedule.

    Everything runs in sequence except exchanges, and weights and gradients that are
    sent beside computation. Nothing hides the exchanges of a teacher. A recomputed
    layer of either step sends its dispatch again, a rewired one beside the same steps.
    Neither sends its combine again, since weights are applied before it and no
    gradient needs its rows (`recomputed`).

    facts: the facts of each layer for the schedule; None: no layer is rewired.
    last_combine: share of the computation beside the last layer's combine that hides
    it.
    """
    work, roofline, ranks = step.work, step.roofline, step.layout.expert_parallel
    facts = [None] * len(work.layers) if facts is None else facts
    seconds = roofline.layers(work, ranks)
    windows = [
        (window(computed["dispatch"], seconds), window(computed["combine"], seconds))
        for computed in computed_beside(facts)
    ]
    # The reported windows are those of the schedule; only the last combine is hidden by
    # less than its window.
    hiding_s = [*windows[:-1], (windows[-1][0], windows[-1][1] * last_combine)]
    dispatch, combine = roofline.exchange(work, ranks)
    moe = [k for k, is_moe in enumerate(work.moe) if is_moe]
    pass_exchange_s = len(moe) * (dispatch + combine)
    exposed_s = {
        name: sum(
            exposed(dispatch, factor * hiding_s[k][0])
            + exposed(combine, factor * hiding_s[k][1])
            for k in moe
        )
        for name, factor in (("forward", 1.0), ("backward", step.backward))
    }
    forward = sum(map(total, seconds))
    # Neither a teacher's forward pass nor communication other than exchanges follows
    # the schedule.
    teacher, other_s = 0.0, step.blocking_s
    if step.teacher is not None:
        teacher = sum(map(total, step.teacher.layers(work, ranks)))
        other_s += pass_exchange_s
    again = recomputed(step, dispatch, [w[0] for w in windows])
    # Once per step, on the rank's own shard; everything else below counts in every
    # micro-batch.
    optimizer_s = roofline.optimizer(
        step.num_trained / step.layout.num_shards, step.trained_bytes
    )
    layers = (1 + step.backward + step.recomputes) * forward + teacher
    compute = step.micro_batches * (layers + step.loss_s) + optimizer_s
    passes = 2 * pass_exchange_s + other_s
    communication = step.micro_batches * (passes + again[0])
    remaining = step.micro_batches * (sum(exposed_s.values()) + other_s + again[1])
    # Computation that hides an exchange cannot hide gathered weights as well.
    hidden = [pass_exchange_s - remaining_s for remaining_s in exposed_s.values()]
    hidden[1] += again[0] - again[1]
    sharding = [
        sharding_s(step, forward, teacher, hidden_s)
        for hidden_s in ([0.0, 0.0], hidden)
    ]
    # The middle MoE layer represents all; a stage may have none.
    typical_layer = moe[len(moe) // 2] if moe else 0
    return summary(
        compute,
        communication,
        remaining,
        roofline.values["slowdown"],
        sharding=sharding,
    ) | {
        "overlap": {
            name: 1 - remaining_s / pass_exchange_s if pass_exchange_s else 0.0
            for name, remaining_s in exposed_s.items()
        },
        "exchange_s": {"dispatch": dispatch, "combine": combine},
        "outside_layers_s": optimizer_s + step.micro_batches * step.loss_s,
        "windows": [
            {"layer": k, "dispatch_s": windows[k][0], "combine_s": windows[k][1]}
            for k in moe
        ],
        "equation_9": equation_9(dispatch + combine, seconds[typical_layer]),
        "layer_s": seconds[typical_layer],
    }


def recomputed(
    step: Step, dispatch: float, windows: Sequence[float]
) -> tuple[float, float]:
    """Return the seconds of the exchanges of a micro-batch's recomputed layers, and how
    many of these are exposed. windows: the window of each layer's dispatch.

    Only dispatches are sent again, whatever the schedule: non-reentrant checkpointing
    ends a recomputation behind the last tensor that the backward pass needs, and with
    weights applied before the combine, that is the experts' output.
    """
    if not step.recomputes:
        return 0.0, 0.0
    moe = [w for is_moe, w in zip(step.work.moe, windows, strict=True) if is_moe]
    return len(moe) * dispatch, sum(exposed(dispatch, window_s) for window_s in moe)


def sharding_s(
    step: Step, forward: float, teacher: float, hidden: Sequence[float]
) -> float:
    """Return the exposed seconds of a step in which weights are gathered and gradients
    reduced.

    With shards, every micro-batch does both, a layer ahead of the computation that
    hides them; a second of computation hides one second of communication. Whole copies
    reduce their gradients once, beside the last backward pass. forward, teacher:
    seconds of their layers. hidden: seconds of exchanges beside the forward and the
    backward pass.
    """
    roofline, layout = step.roofline, step.layout
    share = roofline.values["prefetch"]
    backward = (step.backward + step.recomputes) * forward
    if layout.sharding == "none":
        sent = 2 * roofline.ring(step.num_trained * step.trained_bytes, layout.num_gpus)
        return exposed(sent, share * (backward - hidden[1]))
    ranks, expert_parallel = layout.num_shards, layout.expert_parallel
    reduced = step.trained_bytes * step.num_trained / step.work.num_parameters
    gather_s, regather_s, reduce_s = roofline.sharding(
        step.work, ranks, expert_parallel, reduced
    )
    if layout.sharding == "optimizer":
        # Megatron's distributed optimiser: sent once per step, not hidden.
        return gather_s + reduce_s
    if (copies := layout.num_gpus // ranks) > 1:
        # Each rank reduces its shard with its peers on other nodes.
        sent = step.num_trained * step.trained_bytes / ranks
        reduce_s += 2 * roofline.ring(sent, copies, apart=GPUS_PER_NODE)
    passes = [
        (gather_s, forward, hidden[0]),
        (regather_s + reduce_s, backward, hidden[1]),
    ]
    if step.teacher is not None:
        passes.append(
            (step.teacher.sharding(step.work, ranks, expert_parallel)[0], teacher, 0.0)
        )
    return step.micro_batches * sum(
        exposed(sent, share * (time - hidden_s)) for sent, time, hidden_s in passes
    )


def plan_times(planned: Planned) -> dict[str, Any]:
    """Return the times of a step, regular and overlapped."""
    if planned.settings.phase != "train":
        times = _serving_times(planned)
        if planned.tensor_parallel > 1:
            # What FarSkip would gain if the engine's own kernels ran beside
            # computation, as in AMD's fork.
            ideal = _serving_times(planned, "engine")
            times["engine_beside_s"] = ideal["overlapped_s"]
        return times
    steps = planned_steps(planned)
    stages = [_stage_times(planned, *step) for step in steps]
    times = stages[0] if len(steps) == 1 else _pipeline(planned, steps, stages)
    return times | ({"megatron": _beside(planned, steps)} if planned.megatron else {})


def planned_steps(planned: Planned) -> list[tuple[Step, Stage]]:
    """Return the optimiser step of each stage of a planned training; a single stage has
    all layers.

    A step of m micro-batches in p stages counts m + p - 1 of them here: while a stage
    waits for others, a micro-batch takes as long as while it works.
    """
    work, roofline = planned.work, planned.roofline
    recomputes = bool(planned.training.train.gradient_checkpointing)
    number = planned.settings.pipeline_parallel
    steps = []
    for stage in stages_of(len(work.layers), number):
        part = work if number == 1 else stage_work(work, stage)
        sent_s = (2 + recomputes) * tensor_parallel_s(roofline, part)
        step = Step(
            part,
            roofline,
            planned.layout,
            planned.micro_batches + number - 1,
            part.num_parameters,
            recomputes=recomputes,
            blocking_s=sent_s + sends_s(roofline, part, number),
        )
        steps.append((step, stage))
    return steps


def slowest_step(planned: Planned) -> Step:
    """Return the step of the stage that takes longest where all exchanges block."""
    steps = (step for step, _ in planned_steps(planned))
    return max(steps, key=lambda step: float(step_time(step)["regular_s"]))


def keeping_activations(step: Step) -> Step:
    """Return the step of a training that recomputes no layer."""
    if not step.recomputes:
        return step
    # Tensor-parallel ranks sum in the forward, the backward and the recomputed pass.
    saved_s = tensor_parallel_s(step.roofline, step.work)
    return replace(step, recomputes=False, blocking_s=step.blocking_s - saved_s)


def _stage_times(planned: Planned, step: Step, stage: Stage) -> dict[str, Any]:
    facts, values = stage_facts(planned.facts(), stage), planned.machine.values
    in_flight = (
        facts[-1] is not None
        and planned.connectivity.attention == "partial"
        and not planned.inside
    )
    return step_time(step, facts, values["last_combine"] if in_flight else 1.0)


def _pipeline(
    planned: Planned,
    steps: Sequence[tuple[Step, Stage]],
    stages: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the times of a pipeline from those of its stages. The slowest stage sets
    the pace for either connectivity; the seconds of its parts are those in which it
    works.
    """
    slowest = max(range(len(steps)), key=lambda k: float(stages[k]["regular_s"]))
    step, index = steps[slowest]
    working = replace(step, micro_batches=planned.micro_batches)
    busy = _stage_times(planned, working, index)
    regular_s, overlapped_s = (
        max(stage[name] for stage in stages) for name in ("regular_s", "overlapped_s")
    )
    return busy | {
        "regular_s": regular_s,
        "overlapped_s": overlapped_s,
        "speed_up": regular_s / overlapped_s,
        "communication_share": busy["communication_s"] / regular_s,
        "windows": [
            row | {"layer": first + row["layer"]}
            for (_, (first, _)), stage in zip(steps, stages, strict=True)
            for row in stage["windows"]
        ],
    }


def _beside(planned: Planned, steps: Sequence[tuple[Step, Stage]]) -> dict[str, float]:
    """Return what Megatron's layout adds to a step: seconds of communication between
    tensor-parallel ranks and between stages, for the stage with the most, and the share
    of the bubble.
    """
    number, slots = planned.micro_batches, steps[0][0].micro_batches
    sent_s = [sends_s(step.roofline, step.work, len(steps)) for step, _ in steps]
    most = max(
        step.blocking_s - sends for (step, _), sends in zip(steps, sent_s, strict=True)
    )
    return {
        "tensor_parallel_s": number * most,
        "sends_s": number * sent_s[0],
        "bubble": 1 - number / slots,
    }


def _wide_times(planned: Planned) -> dict[str, Any]:
    """Return the times of a server whose ranks exchange tokens: a rank's layers run as
    those of a training step do.
    """
    # A forward pass and the head: no loss, backward pass or optimiser.
    work, roofline, ranks = planned.work, planned.roofline, planned.expert_parallel
    seconds = roofline.layers(work, ranks)
    together, facts = _together(planned)
    of_groups = [_added(seconds[first : last + 1]) for first, last in together]
    windows = {
        last: {
            kind: window(computed[kind], of_groups) for kind in ("dispatch", "combine")
        }
        for (_, last), computed in zip(together, computed_beside(facts), strict=True)
    }
    exchange = dict(
        zip(("dispatch", "combine"), roofline.exchange(work, ranks), strict=True)
    )
    moe = [k for k, is_moe in enumerate(work.moe) if is_moe]
    sent = len(moe) * sum(exchange.values())
    remaining = sum(
        exposed(exchange[kind], windows[k][kind]) for k in moe for kind in exchange
    )
    compute = sum(map(total, seconds)) + roofline.head(work) + roofline.gap
    return summary(compute, sent, remaining, roofline.values["slowdown"]) | {
        "overlap": {"forward": 1 - remaining / sent if sent else 0.0},
        "exchange_s": exchange,
        "windows": [
            {"layer": k, **{f"{kind}_s": windows[k][kind] for kind in exchange}}
            for k in moe
        ],
        "layer_s": seconds[moe[len(moe) // 2]],
    }


def _together(
    planned: Planned,
) -> tuple[list[tuple[int, int]], list[LayerFacts | None]]:
    """Return the first and the last of the layers that a server computes as one, and the
    facts of these: a rewired mixer and the rewired experts behind it, where each layer
    is one branch.
    """
    work, rewired, mlp = planned.work, planned.rewired(), planned.mlp
    layers = work.layers
    if not layers[0].one_branch:
        return [(k, k) for k in range(len(layers))], planned.facts()
    together = [
        (k - is_with_mixer(k, rewired, work.moe), k)
        for k in range(len(layers))
        if not is_with_mixer(k + 1, rewired, work.moe)
    ]
    facts = layer_facts(
        [rewired[last] for _, last in together],
        [work.moe[last] for _, last in together],
        planned.connectivity.attention,
        mlp
        if isinstance(mlp, str)
        else [j for j, (_, last) in enumerate(together) if last in mlp],
        ["core" if layers[first].core else "end" for first, _ in together],
    )
    return together, facts


def _added(layers: Sequence[Seconds]) -> dict[str, float]:
    """Return the seconds of the steps of layers that are computed as one."""
    return {
        name: sum(layer.get(name, 0.0) for layer in layers)
        for name in dict.fromkeys(name for layer in layers for name in layer)
    }


def _serving_times(planned: Planned, side: Way = "side") -> dict[str, Any]:
    """Return the times of a server. side: the all-reduces that a converted model sends
    on a side stream.
    """
    if planned.wide:
        return _wide_times(planned)
    work, roofline = planned.work, planned.roofline
    seconds = roofline.layers(work, 1)
    shared = [layer_s.get("shared expert", 0.0) > 0 for layer_s in seconds]
    # Tensor-parallel ranks sum after attention and after the MLP instead of exchanging
    # tokens.
    beside = served_branches if work.layers[0].one_branch else served_beside
    computed = beside(
        planned.rewired(),
        work.moe,
        planned.connectivity.attention,
        planned.mlp,
        shared,
    )
    windows = [[window(steps, seconds) for steps in layer] for layer in computed]
    all_reduce_s, side_s = roofline.all_reduce(work), roofline.all_reduce(work, side)
    branches = sum(layer.branches for layer in work.layers)
    communication = branches * all_reduce_s
    # What nothing hides, the engine sends itself, in line. One all-reduce less in a
    # dense layer, one more where shared experts have their own.
    windows_s = [window_s for layer in windows for window_s in layer]
    sent = sum(side_s if window_s else all_reduce_s for window_s in windows_s)
    remaining = sum(
        exposed(side_s, window_s) if window_s else all_reduce_s
        for window_s in windows_s
    )
    # A regular layer has two norms, each behind an all-reduce; one behind an all-reduce
    # on the side cannot be fused with it.
    norms, in_line = branches, sum(not window_s for window_s in windows_s)
    saved_s = fused_norm(roofline, work)
    lost_s = saved_s * max(0, norms - in_line)
    # Without a combine there are no returned rows to sum.
    compute = (
        sum(total(layer_s) - layer_s.get("arrive", 0.0) for layer_s in seconds)
        + roofline.head(work)
        + roofline.gap
        - norms * saved_s
    )
    moe = [k for k, is_moe in enumerate(work.moe) if is_moe]
    return summary(
        compute,
        communication,
        remaining,
        roofline.values["slowdown"],
        sent=sent,
        added=lost_s,
    ) | {
        "fused_norms_s": {"regular": norms * saved_s, "lost": lost_s},
        "overlap": {"forward": 1 - remaining / sent if sent else 0.0},
        "exchange_s": {"all_reduce": all_reduce_s, "side": side_s},
        "windows": [
            {"layer": k, "attention_s": windows[k][0], "routed_s": windows[k][-1]}
            for k in moe
        ],
        "layer_s": seconds[moe[len(moe) // 2]],
    }


def summary(
    compute: float,
    communication: float,
    remaining: float,
    slowdown: float,
    *,
    sent: float | None = None,
    added: float = 0.0,
    sharding: Sequence[float] = (0.0, 0.0),
) -> dict[str, Any]:
    """Sum up the regular and the overlapped step.

    sent: seconds of the rewired model's communication; None: as long as in the regular
    one. added: seconds of computation that only the rewired model has. sharding: exposed
    seconds of gathers and reductions in both.
    """
    sent = communication if sent is None else sent
    regular = compute + communication + sharding[0]
    # Hidden communication is not free: it slows down the computation that hides it.
    hiding = slowdown * (sent - remaining)
    overlapped = compute + added + remaining + hiding + sharding[1]
    return {
        "regular_s": regular,
        "overlapped_s": overlapped,
        "speed_up": regular / overlapped,
        "compute_s": compute,
        "communication_s": communication,
        "overlapped_communication_s": sent,
        "exposed_s": remaining,
        "sharding_s": list(sharding),
        "communication_share": communication / regular,
    }
