"""Compute the steps of schedules that hide communication and change no equation, as
today's engines have them: the baselines for FarSkip.

Either the shared expert of a layer hides its exchanges, or two batches take turns: one
computes while an exchange of the other runs. The two are the halves of a batch, or, in
training, a micro-batch in its backward pass and the next one in its forward pass.

Not covered: kernels that fuse a collective with computation (an all-reduce with the
norm after it, a matmul in chunks); measured times have none of these schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fcsd.base.text import size
from fcsd.planning.cost.operations import ModelWork, part_of
from fcsd.planning.cost.planned import ALL2ALL, Planned
from fcsd.planning.cost.roofline import total
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

SHARED, HALVES, PAIRS, RECOMPUTED_PAIRS = (
    "shared expert beside exchanges",
    "two half batches in turn",
    "two micro-batches in turn (1F1B)",
    "1F1B with recomputation",
)


@dataclass(frozen=True)
class Exact:
    """A schedule of a step. compute_s, sent_s: seconds of computation and of exchanges.
    exposed_s: seconds of exchanges that stay exposed. sharding_s: exposed seconds of
    gathered weights and gradients. busy: share of a pipeline's time in which a stage
    works. released: a release of an engine has it.
    """

    name: str
    assumes: str
    compute_s: float
    sent_s: float
    exposed_s: float
    sharding_s: float = 0.0
    busy: float = 1.0
    released: bool = True

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
        return {
            "name": self.name,
            "assumes": self.assumes,
            "released": self.released,
            "step_s": step_s,
            "compute_s": self.compute_s,
            "communication_s": self.busy * self.sent_s,
            "exposed_s": self.busy * self.exposed_s,
            "speed_up": regular_s / step_s,
        }


def compared(planned: Planned, kept: Memory | None = None) -> dict[str, Any]:
    """Return `plan_times` together with the exact schedules.

    kept: the memory of a rank of a training that keeps all activations of a micro-batch
    (`fcsd.planning.cost.plan.memory`); None: it is taken to fit.

    exact: their rows. not_exact: the schedules that cannot run here, each with the
    reason. best_exact: name of the fastest that a release has, "regular" where none is
    faster. over_exact: seconds of the fastest over those of the overlapped step.
    """
    times = plan_times(planned)
    if planned.settings.phase == "train":
        schedules, missing = _training(planned, kept)
    elif planned.wide:
        schedules, missing = _wide(planned)
    else:
        schedules, missing = _tensor_parallel(planned)
    slowdown = planned.machine.values["slowdown"]
    rows = [one.facts(times["regular_s"], slowdown) for one in schedules]
    seconds = {"regular": times["regular_s"]}
    seconds |= {row["name"]: row["step_s"] for row in rows if row["released"]}
    best = min(seconds, key=lambda name: seconds[name])
    return times | {
        "exact": rows,
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


def _beside_shared(
    seconds: Sequence[Seconds], sent_s: float, factor: float = 1.0
) -> float:
    """Return the part of the layers' exchanges that exceeds their shared experts.
    sent_s: seconds of a layer's exchanges. factor: computation relative to a forward
    pass.
    """
    return sum(
        exposed(sent_s, factor * layer_s["shared expert"])
        for layer_s in seconds
        if "experts" in layer_s
    )


@dataclass(frozen=True)
class _Training:
    """The passes of a planned training's micro-batches, of which schedules are made.
    step: of the stage that takes longest.
    """

    planned: Planned
    step: Step

    def passes(self, work: ModelWork, recomputes: bool) -> tuple[Chain, Chain]:
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
            for chain in (*[repeated] * recomputes, mirrored(layer, self.step.backward))
        ]
        return joined(forward), joined(behind)

    def exact(
        self,
        name: str,
        assumes: str,
        parts: Sequence[ModelWork],
        rest: Sequence[float],
        step: Step | None = None,
        released: bool = True,
    ) -> Exact:
        """Make a schedule. parts: the work of a micro-batch, in parts. rest: the
        exposed seconds of its forward and of its backward pass. step: another than its
        own.
        """
        step = step or self.step
        number, roofline = step.micro_batches, step.roofline
        once = roofline.optimizer(
            step.num_trained / step.layout.num_shards, step.trained_bytes
        )
        forward, backward = zip(
            *(self.passes(part, step.recomputes) for part in parts), strict=True
        )
        computed = _computed(*forward), _computed(*backward)
        sent = _sent(*forward), _sent(*backward)
        loss_s = sum(roofline.loss(part, step.loss_matmuls) for part in parts)
        hidden = [all_s - rest_s for all_s, rest_s in zip(sent, rest, strict=True)]
        return Exact(
            name,
            assumes,
            number * (sum(computed) + loss_s) + once,
            number * (sum(sent) + step.blocking_s),
            number * (sum(rest) + step.blocking_s),
            sharding_s(step, computed[0], 0.0, hidden),
            self.planned.micro_batches / number,
            released,
        )

    def pairs(self, step: Step) -> list[float]:
        """Return the exposed seconds of a forward and of a backward pass of two
        micro-batches in turn.
        """
        forward, backward = self.passes(step.work, step.recomputes)
        in_turns = self.planned.micro_batches - 1
        # The first forward and the last backward pass run alone, as do those for which
        # a stage waits. In all others, the forward pass hides the exchanges of the
        # backward pass, and vice versa.
        sent, both_s = _sent(forward, backward), _computed(forward, backward)
        beside = in_turn(backward, forward)
        hidden = (sent - beside) * in_turns / step.micro_batches
        return [
            _sent(chain) - hidden * _computed(chain) / both_s
            for chain in (forward, backward)
        ]


def _training(planned: Planned, kept: Memory | None) -> tuple[list[Exact], list[str]]:
    step, ranks = slowest_step(planned), planned.expert_parallel
    training, work, roofline = _Training(planned, step), step.work, step.roofline
    seconds, exchange = roofline.layers(work, ranks), roofline.exchange(work, ranks)
    schedules, missing = [], []
    if any(layer_s.get("shared expert") for layer_s in seconds):
        ahead = _beside_shared(seconds, sum(exchange))
        behind = _beside_shared(seconds, sum(exchange), step.backward)
        behind += step.recomputes * _beside_shared(seconds, exchange[0])
        assumes = "Megatron's --moe-shared-expert-overlap"
        schedules.append(training.exact(SHARED, assumes, [work], [ahead, behind]))
    else:
        missing.append(f"{SHARED}: the model has no shared expert")
    if work.num_rows > 1:
        halves = _halves(work, work.num_tokens)
        chains = [training.passes(half, step.recomputes) for half in halves]
        rest = [in_turn(*both) for both in zip(*chains, strict=True)]
        assumes = (
            "the rows of a micro-batch in two halves (torchtitan), which read the"
            " weights twice and start twice as many exchanges"
        )
        schedules.append(training.exact(HALVES, assumes, halves, rest))
    else:
        missing.append(f"{HALVES}: needs --batch 2 or more")
    if planned.micro_batches == 1:
        missing.append(f"{PAIRS}: needs a --global-batch of two micro-batches or more")
        return schedules, missing
    if step.recomputes:
        assumes = (
            f"{PAIRS}, with every layer recomputed; no release has it (Megatron refuses"
            " full recomputation with it)"
        )
        schedules.append(
            training.exact(
                RECOMPUTED_PAIRS, assumes, [work], training.pairs(step), released=False
            )
        )
    if kept is not None and not kept["fits"]:
        missing.append(
            f"{PAIRS}: keeps the activations of a micro-batch, in all"
            f" {size(kept['total_bytes'])} on a GPU of {size(kept['gpu_bytes'])}"
        )
    else:
        keeps = keeping_activations(step)
        assumes = (
            "the backward pass of one beside the forward pass of the next (Megatron's"
            " --overlap-moe-expert-parallel-comm; DualPipe), without recomputation"
        )
        schedules.append(
            training.exact(PAIRS, assumes, [work], training.pairs(keeps), keeps)
        )
    return schedules, missing


def _wide(planned: Planned) -> tuple[list[Exact], list[str]]:
    work, roofline, ranks = planned.work, planned.roofline, planned.expert_parallel
    head_s, back_end = roofline.head(work) + roofline.gap, planned.settings.all2all
    seconds, exchange = roofline.layers(work, ranks), roofline.exchange(work, ranks)

    def passed(work: ModelWork) -> Chain:
        exchange = roofline.exchange(work, ranks)
        layers = zip(roofline.layers(work, ranks), work.moe, strict=True)
        return joined(layer_chain(*layer, *exchange) for layer in layers)

    schedules, missing = [], []
    if any(layer_s.get("shared expert") for layer_s in seconds):
        chain = passed(work)
        rest = _beside_shared(seconds, sum(exchange))
        assumes = "as vLLM does with DeepEP, and otherwise for up to 256 tokens"
        compute = _computed(chain) + head_s
        schedules.append(Exact(SHARED, assumes, compute, _sent(chain), rest))
    else:
        missing.append(f"{SHARED}: the model has no shared expert")
    if ALL2ALL[back_end] == "all":
        missing.append(
            f"{HALVES}: vLLM's --enable-dbo needs DeepEP; --all2all deepep_low_latency"
        )
    elif work.tokens < 2:
        missing.append(f"{HALVES}: needs two requests of each rank (--batch)")
    else:
        chains = [passed(half) for half in _halves(work)]
        assumes = "vLLM's --enable-dbo: weights are read twice, exchanges start twice"
        compute = _computed(*chains) + head_s
        schedules.append(
            Exact(HALVES, assumes, compute, _sent(*chains), in_turn(*chains))
        )
    return schedules, missing


def _tensor_parallel(planned: Planned) -> tuple[list[Exact], list[str]]:
    work, roofline = planned.work, planned.roofline
    missing = [f"{SHARED}: tensor-parallel ranks sum it with the routed experts"]
    if work.tokens < 2 or planned.tensor_parallel == 1:
        return [], [*missing, f"{HALVES}: needs two tokens, and --tp 2 or more"]

    def passed(work: ModelWork) -> Chain:
        all_reduce_s, chain = roofline.all_reduce(work), []
        for layer_s in roofline.layers(work, 1):
            attention_s = layer_s["attention a"] + layer_s["attention b"]
            mlp_s = total(layer_s) - attention_s - layer_s.get("arrive", 0.0)
            chain += [(attention_s, all_reduce_s), (mlp_s, all_reduce_s)]
        return chain

    chains = [passed(half) for half in _halves(work)]
    assumes = (
        "no release of vLLM or SGLang has it for all-reduces (vLLM pull request 44677):"
        " weights are read twice, twice as many all-reduces start"
    )
    compute = _computed(*chains) + roofline.head(work) + roofline.gap
    halves = Exact(
        HALVES, assumes, compute, _sent(*chains), in_turn(*chains), released=False
    )
    return [halves], missing
