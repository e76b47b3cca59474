"""Compute the steps of FarSkip's rivals (`fcsd.planning.cost.rivals`): schedules that
change no equation, as today's engines have them, and other architectures.

Either other steps of a layer hide its exchanges, or two batches take turns: one
computes while an exchange of the other runs. The two are the halves of a batch, or, in
training, a micro-batch in its backward pass and the next one in its forward pass.

Not covered: measured times have none of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from fcsd.base.text import size
from fcsd.planning.cost.operations import ModelWork, part_of
from fcsd.planning.cost.planned import ALL2ALL, Planned
from fcsd.planning.cost.rivals import (
    HALVES,
    LADDER,
    MEGA,
    MEGA_FAMILIES,
    PAIRS,
    RECOMPUTED_PAIRS,
    SHARED,
    SHORTCUT,
    TRACK_LAYERS,
    TRACKS,
    Rival,
    rival,
)
from fcsd.planning.cost.roofline import Roofline, fused_norm, total
from fcsd.planning.cost.stored import BFLOAT16
from fcsd.planning.cost.times import (
    Seconds,
    Step,
    exposed,
    keeping_activations,
    plan_times,
    sharding_s,
    slowest_step,
    summary,
)

Memory = Mapping[str, Any]

Chain = Sequence[tuple[float, float]]
"""The work of one batch: seconds of computation, and seconds of the exchange that it
then starts and waits for (0: none).
"""


@dataclass(frozen=True)
class Priced:
    """A rival's step. compute_s, sent_s: seconds of computation and of exchanges.
    exposed_s: seconds of exchanges that stay exposed. sharding_s: exposed seconds of
    gathered weights and gradients. busy: share of a pipeline's time in which a stage
    works.
    """

    rival: Rival
    compute_s: float
    sent_s: float
    exposed_s: float
    sharding_s: float = 0.0
    busy: float = 1.0

    def facts(self, regular_s: float, slowdown: float) -> dict[str, Any]:
        """Return the row of a plan. regular_s: seconds of the step whose exchanges
        block.
        """
        step_s = summary(
            self.compute_s,
            self.sent_s,
            self.exposed_s,
            slowdown,
            sharding=(0.0, self.sharding_s),
        )["overlapped_s"]
        facts = ("name", "hides", "released", "source")
        return {name: getattr(self.rival, name) for name in facts} | {
            "step_s": step_s,
            "compute_s": self.compute_s,
            "communication_s": self.busy * self.sent_s,
            "exposed_s": self.busy * self.exposed_s,
            "speed_up": regular_s / step_s,
        }


def compared(planned: Planned, kept: Memory | None = None) -> dict[str, Any]:
    """Return `plan_times` together with the rivals.

    kept: the memory of a rank of a training that keeps all activations of a micro-batch
    (`fcsd.planning.cost.plan.memory`); None: it is taken to fit.

    exact: the rows of schedules. architectures: those of other architectures. not_exact:
    the schedules that cannot run here, each with the reason. best_exact: name of the
    fastest that a release has, "regular" where none is faster. over_exact: seconds of
    the fastest over those of the overlapped step.
    """
    times = plan_times(planned)
    if planned.settings.phase == "train":
        priced, missing = _training(planned, kept)
    elif planned.wide:
        priced, missing = _wide(planned)
    else:
        priced, missing = _tensor_parallel(planned)
    slowdown = planned.machine.values["slowdown"]
    rows, others = (
        [
            p.facts(times["regular_s"], slowdown)
            for p in priced
            if p.rival.exact == exact
        ]
        for exact in (True, False)
    )
    seconds = {"regular": times["regular_s"]}
    seconds |= {row["name"]: row["step_s"] for row in rows if row["released"]}
    best = min(seconds, key=lambda name: seconds[name])
    return times | {
        "exact": rows,
        "architectures": others,
        "not_exact": missing,
        "best_exact": best,
        "over_exact": seconds[best] / times["overlapped_s"],
    }


def in_turn(first: Chain, second: Chain) -> float:
    """Return the seconds in which neither of two batches computes, until both are done.

    A batch computes until it must wait. Then the batch that can continue sooner runs;
    if both can continue, the one with more work left. Exchanges run one after the
    other.
    """
    chains, ready, done = (first, second), [0.0, 0.0], [0, 0]
    left = [sum(map(sum, chain)) for chain in chains]
    now = link = 0.0
    while undone := [b for b in (0, 1) if done[b] < len(chains[b])]:
        b = min(undone, key=lambda b: (max(now, ready[b]), -left[b]))
        compute, exchange = chains[b][done[b]]
        now = ready[b] = max(now, ready[b]) + compute
        if exchange:
            link = ready[b] = max(now, link) + exchange
        left[b] -= compute + exchange
        done[b] += 1
    computed = sum(compute for chain in chains for compute, _ in chain)
    return max(0.0, now - computed, *(end - computed for end in ready))


def joined(chains: Iterable[Chain]) -> list[tuple[float, float]]:
    """Return the chains one after another; the last part of each waits for nothing."""
    parts, before = [], 0.0
    for chain in chains:
        (first, exchange), *others = chain
        parts += [(before + first, exchange), *others]
        before, _ = parts.pop()
    return [*parts, (before, 0.0)]


def mirrored(chain: Chain, factor: float) -> Chain:
    """Return the backward pass of a chain: the chain in reverse, with `factor` times
    the computation and the same exchanges.
    """
    exchanges = [exchange for _, exchange in chain[:-1]]
    computes = [factor * compute for compute, _ in chain]
    return list(zip(computes[::-1], [*exchanges[::-1], 0.0], strict=True))


def layer_chain(seconds: Seconds, moe: bool, dispatch: float, combine: float) -> Chain:
    """Return the forward pass of a regular layer: attention, router and shared expert,
    dispatch, experts, combine.
    """
    if not moe:
        return [(total(seconds), 0.0)]
    experts, arrive = seconds["experts"], seconds["arrive"]
    return [
        (total(seconds) - experts - arrive, dispatch),
        (experts, combine),
        (arrive, 0.0),
    ]


def _halves(work: ModelWork, unit: int = 1) -> list[ModelWork]:
    """Return the work of the two halves of a batch, which is cut at a multiple of
    `unit` tokens.
    """
    second = work.tokens // unit // 2 * unit
    return [part_of(work, work.tokens - second), part_of(work, second)]


def _computed(*chains: Chain) -> float:
    return sum(compute for chain in chains for compute, _ in chain)


def _sent(*chains: Chain) -> float:
    return sum(exchange for chain in chains for _, exchange in chain)


def _beside(
    one: Rival,
    layers: Sequence[Seconds],
    dispatch: float,
    combine: float,
    factor: float = 1.0,
) -> float:
    """Return the seconds of the layers' exchanges beyond the steps that run beside them
    (`Rival.beside`). factor: computation relative to a forward pass.
    """
    sent = {"dispatch": dispatch, "combine": combine}
    return sum(
        exposed(
            sum(sent[kind] for kind in kinds),
            factor * sum(layer_s.get(step, 0.0) for step in steps),
        )
        for layer_s in layers
        if "experts" in layer_s
        for kinds, steps in one.beside
    )


def _steps(roofline: Roofline, work: ModelWork, ranks: int) -> list[Seconds]:
    """Return the seconds of each layer's steps, with attention's core apart from its
    output projection.
    """
    steps: list[Seconds] = []
    for layer, layer_s in zip(work.layers, roofline.layers(work, ranks), strict=True):
        core_s = min(roofline.core(layer), layer_s["attention b"])
        apart = {"core": core_s, "output": layer_s["attention b"] - core_s}
        steps.append(layer_s | apart)
    return steps


@dataclass(frozen=True)
class _Training:
    """The passes of a planned training's micro-batches, from which schedules are made.
    step: of the stage that takes longest.
    """

    planned: Planned
    step: Step

    def passes(self, work: ModelWork) -> tuple[Chain, Chain]:
        """Return the forward pass of a micro-batch, and its backward pass."""
        roofline, ranks = self.step.roofline, self.planned.expert_parallel
        dispatch, combine = roofline.exchange(work, ranks)
        layers = list(zip(roofline.layers(work, ranks), work.moe, strict=True))
        forward = [layer_chain(*layer, dispatch, combine) for layer in layers]
        # A recomputed layer does not send its combine again (`times.recomputed`).
        again = [layer_chain(*layer, dispatch, 0.0) for layer in layers]
        behind = [
            chain
            for layer, repeated in zip(reversed(forward), reversed(again), strict=True)
            for chain in (
                *[repeated] * self.step.recomputes,
                mirrored(layer, self.step.backward),
            )
        ]
        return joined(forward), joined(behind)

    def priced(
        self, name: str, parts: Sequence[ModelWork], rest: Sequence[float]
    ) -> Priced:
        """Price a rival. parts: the work of a micro-batch, in parts. rest: the exposed
        seconds of its forward and of its backward pass.
        """
        step = self.step
        number, roofline = step.micro_batches, step.roofline
        once = roofline.optimizer(
            step.num_trained / step.layout.num_shards, step.trained_bytes
        )
        forward, backward = zip(*map(self.passes, parts), strict=True)
        computed = _computed(*forward), _computed(*backward)
        sent = _sent(*forward), _sent(*backward)
        loss_s = sum(roofline.loss(part, step.loss_matmuls) for part in parts)
        hidden = [all_s - rest_s for all_s, rest_s in zip(sent, rest, strict=True)]
        return Priced(
            rival(name, "train"),
            number * (sum(computed) + loss_s) + once,
            number * (sum(sent) + step.blocking_s),
            number * (sum(rest) + step.blocking_s),
            sharding_s(step, computed[0], 0.0, hidden),
            self.planned.micro_batches / number,
        )

    def beside(self, name: str) -> Priced:
        """Price a rival whose exchanges run beside other steps of their layer."""
        step, ranks = self.step, self.planned.expert_parallel
        one, layers = rival(name, "train"), _steps(step.roofline, step.work, ranks)
        dispatch, combine = step.roofline.exchange(step.work, ranks)
        ahead = _beside(one, layers, dispatch, combine)
        behind = _beside(one, layers, dispatch, combine, step.backward)
        # A recomputed layer sends its dispatch again.
        behind += step.recomputes * _beside(one, layers, dispatch, 0.0)
        return self.priced(name, [step.work], [ahead, behind])

    def pairs(self, name: str) -> Priced:
        """Price two micro-batches in turn."""
        step = self.step
        forward, backward = self.passes(step.work)
        in_turns = self.planned.micro_batches - 1
        # The first forward and the last backward pass run alone, as do those for which
        # a stage waits. In all others, the forward pass hides the exchanges of the
        # backward pass, and vice versa.
        sent, both_s = _sent(forward, backward), _computed(forward, backward)
        beside = in_turn(backward, forward)
        hidden = (sent - beside) * in_turns / step.micro_batches
        rest = [
            _sent(chain) - hidden * _computed(chain) / both_s
            for chain in (forward, backward)
        ]
        return self.priced(name, [step.work], rest)


def _training(planned: Planned, kept: Memory | None) -> tuple[list[Priced], list[str]]:
    step = slowest_step(planned)
    training, work = _Training(planned, step), step.work
    priced, missing = [training.beside(SHORTCUT)], []
    if _has_shared(step.roofline.layers(work, planned.expert_parallel)):
        priced.append(training.beside(SHARED))
    else:
        missing.append(f"{SHARED}: the model has no shared expert")
    if work.num_rows > 1:
        halves = _halves(work, work.num_tokens)
        chains = zip(*map(training.passes, halves), strict=True)
        rest = [in_turn(*both) for both in chains]
        priced.append(training.priced(HALVES, halves, rest))
    else:
        missing.append(f"{HALVES}: needs --batch 2 or more")
    if planned.micro_batches == 1:
        missing.append(f"{PAIRS}: needs a --global-batch of two micro-batches or more")
        return priced, missing
    if step.recomputes:
        priced.append(training.pairs(RECOMPUTED_PAIRS))
    if kept is not None and not kept["fits"]:
        missing.append(
            f"{PAIRS}: keeps the activations of a micro-batch, in all"
            f" {size(kept['total_bytes'])} on a GPU of {size(kept['gpu_bytes'])}"
        )
    else:
        keeps = replace(training, step=keeping_activations(step))
        priced.append(keeps.pairs(PAIRS))
    return priced, missing


def _has_shared(layers: Iterable[Seconds]) -> bool:
    return any(layer_s.get("shared expert") for layer_s in layers)


def _wide(planned: Planned) -> tuple[list[Priced], list[str]]:
    work, roofline, ranks = planned.work, planned.roofline, planned.expert_parallel
    layers, exchange = _steps(roofline, work, ranks), roofline.exchange(work, ranks)

    def passed(work: ModelWork) -> Chain:
        exchange = roofline.exchange(work, ranks)
        layers = zip(roofline.layers(work, ranks), work.moe, strict=True)
        return joined(layer_chain(*layer, *exchange) for layer in layers)

    def beside(name: str) -> Priced:
        one, chain = rival(name, "dp"), passed(work)
        rest = _beside(one, layers, *exchange)
        return Priced(one, _computed(chain) + outside_s, _sent(chain), rest)

    outside_s = roofline.head(work) + roofline.gap
    priced, missing = [beside(SHORTCUT)], []
    if _has_shared(layers):
        priced.append(beside(SHARED))
    else:
        missing.append(f"{SHARED}: the model has no shared expert")
    if _has_mega_moe(planned):
        priced.append(beside(MEGA))
    else:
        missing.append(
            f"{MEGA}: needs ranks of one node with experts in FP8 blocks of 128 (Hopper)"
            " or 4-bit floats (Blackwell), and a family for which SGLang has it"
        )
    if ALL2ALL[planned.settings.all2all] == "all":
        missing.append(
            f"{HALVES}: vLLM's --enable-dbo needs DeepEP; --all2all deepep_low_latency"
        )
    elif work.tokens < 2:
        missing.append(f"{HALVES}: needs two requests of each rank (--batch)")
    else:
        chains = [passed(half) for half in _halves(work)]
        compute = _computed(*chains) + outside_s
        priced.append(
            Priced(rival(HALVES, "dp"), compute, _sent(*chains), in_turn(*chains))
        )
    return priced, missing


def _has_mega_moe(planned: Planned) -> bool:
    """Whether SGLang's MegaMoE runs with the planned ranks, GPU and weights. The kernel
    writes into other ranks' memory, by the links of a node.
    """
    machine, stored, ranks = planned.machine, planned.stored, planned.expert_parallel
    is_near = machine.near(ranks, 1) == [ranks]
    if not is_near or planned.model_type not in MEGA_FAMILIES:
        return False
    name = machine.gpu.name
    if name.startswith("NVIDIA H"):
        return stored.precision == "fp8" and stored.sent < BFLOAT16.sent
    return name.startswith("NVIDIA B") and stored.name.startswith(("MXFP4", "NVFP4"))


def _tensor_parallel(planned: Planned) -> tuple[list[Priced], list[str]]:
    work, roofline = planned.work, planned.roofline
    missing = [
        f"{SHARED}: tensor-parallel ranks sum it with the routed experts (vLLM 0.32: but"
        " for Kimi-K3)"
    ]
    if planned.tensor_parallel == 1:
        return [], [*missing, f"{HALVES}: needs --tp 2 or more"]

    def passed(work: ModelWork, all_reduce_s: float) -> list[tuple[float, float]]:
        chain = []
        for layer, layer_s in zip(work.layers, roofline.layers(work, 1), strict=True):
            attention_s = layer_s["attention a"] + layer_s["attention b"]
            mlp_s = total(layer_s) - attention_s - layer_s.get("arrive", 0.0)
            if layer.one_branch:
                chain.append((attention_s + mlp_s, all_reduce_s))
            else:
                chain += [(attention_s, all_reduce_s), (mlp_s, all_reduce_s)]
        return chain

    outside_s, saved_s = roofline.head(work) + roofline.gap, fused_norm(roofline, work)
    line_s, side_s = roofline.all_reduce(work), roofline.all_reduce(work, "side")
    chain = passed(work, side_s)
    compute = _computed(chain) + outside_s
    # Each sum runs beside the half of a layer behind it; the engine sends the last.
    hidden = sum(min(sent, following) for (_, sent), (following, _) in pairwise(chain))
    sums = -(-len(work.layers) // TRACK_LAYERS)
    sent_s = _sent(chain) - side_s + line_s
    ladder, tracks = rival(LADDER, "tp"), rival(TRACKS, "tp")
    priced = [
        Priced(ladder, compute - saved_s, sent_s, sent_s - hidden),
        Priced(tracks, compute - sums * saved_s, sums * line_s, sums * line_s),
    ]
    if work.tokens < 2:
        return priced, [*missing, f"{HALVES}: needs two tokens"]
    chains = [passed(half, roofline.all_reduce(half)) for half in _halves(work)]
    compute = _computed(*chains) + outside_s
    halves = Priced(rival(HALVES, "tp"), compute, _sent(*chains), in_turn(*chains))
    return [halves, *priced], missing
