"""The times of `fcsd plan` against an event simulation that knows dependencies only
(`tests/reference/events.py`): regular blocks, FarSkip and the exact schedules.

Both get the seconds of each part of a layer. Most tests leave out the slowdown of
computation beside an exchange: a plan charges it for all hidden seconds, also where
computation waits for the link anyway, so that it is up to 6 % slower than the
simulation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.plan import planned
from fcsd.planning.cost.exact import compared
from fcsd.planning.cost.operations import part_of
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.rivals import (
    HALVES,
    LADDER,
    MEGA,
    PAIRS,
    RECOMPUTED_PAIRS,
    SHARED,
    SHORTCUT,
    TRACKS,
)
from fcsd.planning.cost.times import plan_times, slowest_step
from tests.reference.events import (
    Pass,
    farskip_backward,
    farskip_forward,
    fused_layer,
    ladder_forward,
    regular_backward,
    regular_layer,
    shared_layer,
    shortcut_layer,
    simulate,
    summed_forward,
    tracks_forward,
)

H100 = {"gpu": "h100", "nodes": 4, "global_batch": 512}
H200 = {"gpu": "h200", "global_batch": 64, "batch": 2}
TRAININGS = {
    "Qwen3-30B-A3B, 32 H100": ("Qwen3-30B-A3B", H100),
    "Qwen3-30B-A3B, 32 H100, all kept": ("Qwen3-30B-A3B", {**H100, "keep_activations": True}),
    "Qwen3-30B-A3B, 8 H200": ("Qwen3-30B-A3B", H200),
    "DeepSeek-V2-Lite, 32 H100": ("DeepSeek-V2-Lite", H100),
    "DeepSeek-V2-Lite, 8 H200, all kept": ("DeepSeek-V2-Lite", {**H200, "keep_activations": True}),
}  # fmt: skip
SERVERS = {
    "Qwen3-30B-A3B, decoding": {"phase": "decode", "batch": 64},
    "Qwen3-30B-A3B, norms fused": {"phase": "decode", "batch": 16},
    "Qwen3-30B-A3B, first token": {"phase": "prefill", "batch": 16, "length": 2048},
}
WIDE = {
    "phase": "prefill", "gpu": "h200", "nodes": 2, "batch": 32, "length": 2048,
    "data_parallel": 16, "all2all": "deepep_low_latency",
}  # fmt: skip


def training(plan: Planned, *, recomputes: bool) -> dict[str, Any]:
    """Return the parts of a micro-batch: seconds of layers and exchanges, the factor of
    the backward pass, and the chains of a regular one.
    """
    step = slowest_step(plan)
    layers = step.roofline.layers(step.work, plan.expert_parallel)
    dispatch, combine = step.roofline.exchange(step.work, plan.expert_parallel)
    forward, backward = Pass("forward"), Pass("backward")
    for seconds in layers:
        regular_layer(forward, seconds, dispatch, combine)
    for seconds in reversed(layers):
        if recomputes:
            regular_layer(backward, seconds, dispatch, 0.0)
        regular_backward(backward, seconds, dispatch, combine, step.backward)
    return {
        "layers": layers, "exchange": (dispatch, combine), "factor": step.backward, "forward": forward,
        "backward": backward,
    }  # fmt: skip


def farskip(parts: Mapping[str, Any], *, recomputes: bool) -> Pass:
    batch, factor = Pass("rewired"), parts["factor"]
    moe = [seconds for seconds in parts["layers"] if "experts" in seconds]
    dense_s = sum(
        sum(seconds.values()) for seconds in parts["layers"] if "experts" not in seconds
    )
    batch.compute(dense_s)
    farskip_forward(batch, moe, *parts["exchange"])
    farskip_backward(batch, moe, *parts["exchange"], factor, recomputes=recomputes)
    batch.compute((factor + recomputes) * dense_s)
    return batch


def best(*orders: Sequence[Pass]) -> float:
    return min(simulate([batch.work for batch in order]) for order in orders)


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_takes_as_long_as_its_events(name: str) -> None:
    model, settings = TRAININGS[name]
    plan = planned(model, {}, settings).assuming(slowdown=0.0, last_combine=1.0)
    times, number = compared(plan), plan.micro_batches
    recomputes = not settings.get("keep_activations", False)
    parts = training(plan, recomputes=recomputes)
    outside_s, (sharding_s, shard_beside_s) = (
        times["outside_layers_s"],
        times["sharding_s"],
    )
    regular_s = simulate([parts["forward"].work]) + simulate([parts["backward"].work])
    assert times["regular_s"] - sharding_s == pytest.approx(
        number * regular_s + outside_s, rel=1e-6
    )
    rewired_s = simulate([farskip(parts, recomputes=recomputes).work])
    planned_s = times["overlapped_s"] - shard_beside_s
    # The simulation recomputes a layer while a combine is in flight, and lets exchanges
    # wait for each other; a plan does neither.
    bound = 0.03 if recomputes else 0.003
    assert planned_s == pytest.approx(number * rewired_s + outside_s, rel=bound)
    slowed = plan_times(plan.assuming(slowdown=0.15))
    slowed_s = slowed["overlapped_s"] - slowed["sharding_s"][1]
    events_s = simulate([farskip(parts, recomputes=recomputes).work], slowdown=0.15)
    assert -0.001 < slowed_s / (number * events_s + outside_s) - 1 < 0.06
    # Two micro-batches in turn: alone at both ends, beside each other in between.
    rows = {row["name"]: row for row in times["exact"]}
    for row, again in ((RECOMPUTED_PAIRS, True), (PAIRS, False)):
        if again and not recomputes:
            assert row not in rows
            continue
        both = training(plan, recomputes=again)
        forward, backward = both["forward"], both["backward"]
        beside_s = best((backward, forward), (forward, backward))
        alone_s = simulate([forward.work]) + simulate([backward.work])
        events_s = alone_s + (number - 1) * beside_s + outside_s
        exact_s = rows[row]["compute_s"] + rows[row]["exposed_s"]
        assert exact_s == pytest.approx(events_s, rel=0.02)


@pytest.mark.parametrize("name", SERVERS)
def test_tensor_parallel_ranks_take_as_long_as_their_events(name: str) -> None:
    plan = planned("Qwen3-30B-A3B", {}, {"gpu": "h200"} | SERVERS[name])
    plan = plan.assuming(slowdown=0.0)
    times, roofline = compared(plan), plan.roofline
    layers, all_reduce_s = roofline.layers(plan.work, 1), times["exchange_s"]
    head_s = roofline.head(plan.work) + roofline.gap
    # 64 KiB: the engine's own kernel computes the norm, too.
    fused = 3.2e-6 if "fused" in name else 0.0
    for rewired, name in ((False, "regular_s"), (True, "overlapped_s")):
        batch = Pass(name)
        way = "side" if rewired else "all_reduce"
        summed_forward(
            batch,
            layers,
            all_reduce_s[way],
            rewired=rewired,
            fused=0.0 if rewired else fused,
        )
        assert times[name] == pytest.approx(
            simulate([batch.work]) + head_s, rel=1e-6 if not rewired else 0.01
        )
    ladder, tracks = Pass("ladder"), Pass("tracks")
    line_s = all_reduce_s["all_reduce"]
    ladder_forward(ladder, layers, all_reduce_s["side"], line_s)
    tracks_forward(tracks, layers, line_s, 8)
    rows = {row["name"]: row for row in times["architectures"]}
    for batch, planned_s, fused_norms in (
        (ladder, rows[LADDER]["step_s"], 1),
        (tracks, rows[TRACKS]["step_s"], 6),
    ):
        events_s = simulate([batch.work]) + head_s - fused_norms * fused
        assert planned_s == pytest.approx(events_s, rel=0.003)


@pytest.mark.parametrize("name", SERVERS)
def test_two_halves_that_sum_take_as_long_as_their_events(name: str) -> None:
    plan = planned("Qwen3-30B-A3B", {}, {"gpu": "h200"} | SERVERS[name])
    plan = plan.assuming(slowdown=0.0)
    roofline = plan.roofline
    half = part_of(plan.work, plan.work.tokens // 2)
    layers, all_reduce_s = roofline.layers(half, 1), roofline.all_reduce(half)
    halves = Pass("first"), Pass("second")
    for batch in halves:
        summed_forward(batch, layers, all_reduce_s, rewired=False)
    events_s = best(halves) + roofline.head(plan.work) + roofline.gap
    (row,) = (row for row in compared(plan)["exact"] if row["name"] == HALVES)
    assert row["step_s"] == pytest.approx(events_s, rel=0.01)


def test_ranks_that_exchange_tokens_take_as_long_as_their_events() -> None:
    plan = planned("DeepSeek-V2-Lite", {}, WIDE).assuming(slowdown=0.0)
    times, roofline = compared(plan), plan.roofline
    layers = roofline.layers(plan.work, plan.expert_parallel)
    exchange = roofline.exchange(plan.work, plan.expert_parallel)
    head_s = roofline.head(plan.work) + roofline.gap
    moe = [seconds for seconds in layers if "experts" in seconds]
    dense_s = sum(sum(seconds.values()) for seconds in layers) - sum(
        sum(seconds.values()) for seconds in moe
    )
    regular, shared, rewired = Pass("regular"), Pass("shared"), Pass("rewired")
    shortcut, core_s = Pass("shortcut"), roofline.core(plan.work.layers[-1])
    for seconds in moe:
        regular_layer(regular, seconds, *exchange)
        shared_layer(shared, seconds, *exchange)
        shortcut_layer(shortcut, seconds, core_s, *exchange)
    farskip_forward(rewired, moe, *exchange)
    rows = {row["name"]: row for row in (*times["exact"], *times["architectures"])}
    for batch, planned_s, bound in (
        (regular, times["regular_s"], 1e-6),
        (shared, rows[SHARED]["step_s"], 0.01),
        (shortcut, rows[SHORTCUT]["step_s"], 0.01),
        (rewired, times["overlapped_s"], 0.01),
    ):
        events_s = simulate([batch.work]) + dense_s + head_s
        assert planned_s == pytest.approx(events_s, rel=bound)
    half = part_of(plan.work, plan.work.tokens // 2)
    layers = roofline.layers(half, plan.expert_parallel)
    halves = Pass("first"), Pass("second")
    for batch in halves:
        for seconds in layers:
            regular_layer(
                batch, seconds, *roofline.exchange(half, plan.expert_parallel)
            )
    assert rows[HALVES]["step_s"] == pytest.approx(best(halves) + head_s, rel=0.02)


@pytest.mark.parametrize("batch", [64, 65536])
def test_one_kernel_for_exchanges_and_experts_takes_as_long_as_its_events(
    batch: int,
) -> None:
    """With few tokens the experts are longer than their exchanges, with many shorter."""
    settings = {"phase": "decode", "gpu": "h200", "batch": batch, "data_parallel": 8}
    plan = planned("DeepSeek-V3", {}, settings | {"all2all": "deepep_low_latency"})
    plan = plan.assuming(slowdown=0.0)
    roofline = plan.roofline
    layers, exchange = roofline.layers(plan.work, 8), roofline.exchange(plan.work, 8)
    kernel = Pass("kernel")
    for seconds in layers:
        if "experts" in seconds:
            fused_layer(kernel, seconds, *exchange)
        else:
            kernel.compute(sum(seconds.values()))
    events_s = simulate([kernel.work]) + roofline.head(plan.work) + roofline.gap
    (row,) = (row for row in compared(plan)["exact"] if row["name"] == MEGA)
    assert row["step_s"] == pytest.approx(events_s, rel=1e-6)


def test_a_reversed_order_is_seen() -> None:
    """The simulation tells a schedule whose attention waits for the routed sum."""
    plan = planned(
        "Qwen3-30B-A3B", {}, {"gpu": "h200"} | SERVERS["Qwen3-30B-A3B, decoding"]
    )
    roofline = plan.roofline
    layers, all_reduce_s = roofline.layers(plan.work, 1), roofline.all_reduce(plan.work)
    rewired, waiting = Pass("rewired"), Pass("waiting")
    summed_forward(rewired, layers, all_reduce_s, rewired=True)
    summed_forward(waiting, layers, all_reduce_s, rewired=False)
    assert simulate([waiting.work]) > 1.05 * simulate([rewired.work])
