"""Seconds of a planned step, regular and overlapped: arithmetic on the operations, nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fcsd.cost.planned import Planned
from fcsd.cost.roofline import total
from fcsd.cost.windows import BACKWARD, equation_9, exposed, window
from fcsd.network.links import LinkModel
from fcsd.overlap.schedule import LayerFacts, served_beside
from fcsd.overlap.schedule import beside as computed_beside


def plan_times(
    planned: Planned, links: LinkModel | None = None, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the times of a step, regular and overlapped; layers: rewired ones instead of the planned ones."""
    work = planned.work
    facts = planned.facts(layers)
    tokens_apart = planned.expert_parallel if planned.settings.phase == "train" else 1
    by_layer = {id(layer): planned.roofline.steps(work, layer, tokens_apart) for layer in work.layers}
    seconds = [by_layer[id(layer)] for layer in work.layers]
    if planned.settings.phase == "train":
        return _train_times(planned, facts, seconds, links)
    return _serving_times(planned, [layer is not None for layer in facts], seconds)


def _train_times(
    planned: Planned,
    facts: Sequence[LayerFacts | None],
    seconds: list[dict[str, float]],
    links: LinkModel | None,
) -> dict[str, Any]:
    work, roofline = planned.work, planned.roofline
    found = [
        (window(each["dispatch"], seconds), window(each["combine"], seconds))
        for each in computed_beside(facts)
    ]
    beside = list(found)
    if facts[-1] is not None and planned.connectivity.attention == "partial" and not planned.inside:
        beside[-1] = (found[-1][0], found[-1][1] * planned.values["last_combine"])
    dispatch, combine = roofline.exchange(work, planned.expert_parallel, links)
    moe = [k for k, is_moe in enumerate(work.moe) if is_moe]
    total_each = len(moe) * (dispatch + combine)
    left = {
        name: sum(
            exposed(dispatch, times * beside[k][0]) + exposed(combine, times * beside[k][1]) for k in moe
        )
        for name, times in (("forward", 1.0), ("backward", BACKWARD))
    }
    forward = sum(map(total, seconds))
    once = roofline.optimizer(work)
    compute = planned.micro_batches * ((1 + BACKWARD) * forward + roofline.loss(work)) + once
    communication = planned.micro_batches * 2 * total_each
    remaining = planned.micro_batches * sum(left.values())
    hidden = [total_each - each for each in left.values()]
    sharding = [_sharding(planned, forward, beside) for beside in ([0.0, 0.0], hidden)]
    first = moe[len(moe) // 2]  # one in the middle stands for all
    return _summary(compute, communication, remaining, planned.values["slowdown"], sharding=sharding) | {
        "overlap": {name: 1 - each / total_each if total_each else 0.0 for name, each in left.items()},
        "exchange_s": {"dispatch": dispatch, "combine": combine},
        "outside_layers_s": once + planned.micro_batches * roofline.loss(work),
        "windows": [{"layer": k, "dispatch_s": found[k][0], "combine_s": found[k][1]} for k in moe],
        "equation_9": equation_9(dispatch + combine, seconds[first]),
        "layer_s": seconds[first],
    }


def _sharding(planned: Planned, forward: float, hidden: Sequence[float]) -> float:
    """Return the exposed seconds of a step in which weights are gathered and gradients reduced.

    FSDP2 does both in every micro-batch, a layer ahead of the computation that hides them; a second of computation
    hides one second of communication. hidden: seconds of exchanges beside the forward and the backward pass.
    """
    gather, again, reduce = planned.roofline.sharding(planned.work, planned.expert_parallel)
    if planned.settings.sharding == "optimizer":
        return gather + reduce
    share = planned.values["prefetch"]
    ways = zip((gather, again + reduce), (forward, BACKWARD * forward), hidden, strict=True)
    return planned.micro_batches * sum(exposed(sent, share * (time - beside)) for sent, time, beside in ways)


def _serving_times(planned: Planned, rewired: list[bool], seconds: list[dict[str, float]]) -> dict[str, Any]:
    spec, work, roofline = planned.connectivity, planned.work, planned.roofline
    shared = [each.get("shared expert", 0.0) > 0 for each in seconds]
    computed = served_beside(rewired, work.moe, spec.attention, spec.mlp, shared)
    found = [[window(each, seconds) for each in layer] for layer in computed]
    each = roofline.all_reduce(work)
    communication = 2 * len(work.layers) * each
    remaining = sum(exposed(each, window) for beside in found for window in beside)
    sent = each * sum(
        map(len, found)
    )  # one less of a dense layer, one more where shared experts have their own
    # What only an exchange brings there is nothing to sum up of.
    compute = sum(total(one) - one.get("arrive", 0.0) for one in seconds) + roofline.head(work)
    moe = [k for k, is_moe in enumerate(work.moe) if is_moe]
    return _summary(compute, communication, remaining, planned.values["slowdown"], sent=sent) | {
        "overlap": {"forward": 1 - remaining / sent if sent else 0.0},
        "exchange_s": {"all_reduce": each},
        "windows": [{"layer": k, "attention_s": found[k][0], "routed_s": found[k][1]} for k in moe],
        "layer_s": seconds[moe[len(moe) // 2]],
    }


def _summary(
    compute: float,
    communication: float,
    remaining: float,
    slowdown: float,
    *,
    sent: float | None = None,
    sharding: Sequence[float] = (0.0, 0.0),
) -> dict[str, Any]:
    """Sum up both steps.

    sent: what the rewired model communicates; None: as much as the regular one. sharding: what is exposed of gathers
    and reductions in both.
    """
    sent = communication if sent is None else sent
    regular = compute + communication + sharding[0]
    overlapped = compute + remaining + slowdown * (sent - remaining) + sharding[1]
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
