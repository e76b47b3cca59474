"""The times of a plan by hand: matmuls, rows, exchanges, rings, servers, the step as a whole."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import V3
from benchmarks.plan import planned as published
from fcsd.model.connectivity import Connectivity
from fcsd.planning.cost.assumptions import ASSUMPTIONS
from fcsd.planning.cost.plan import plan
from fcsd.planning.cost.planned import ALL2ALL, Planned, prepare
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.stored import stored_weights
from fcsd.planning.cost.times import plan_times
from tests.planning.cost.plans import (
    BARE,
    EIGHT,
    even_links,
    lite,
    lite_with,
    with_links,
    with_values,
)
from tests.support import user_error


@pytest.fixture(scope="module")
def v3() -> Planned:
    return published("DeepSeek-V3", V3, EIGHT | {"global_batch": 64})


def rows_of_v3(ranks: int) -> float:
    """Return the rows that a token sends: it chooses 8 of the 128 experts in 4 of 8
    groups of 32.
    """
    # with 8 ranks or more, a group has 1, 2, ... ranks, and 4 of 8 groups are half of
    # them
    here = 256 // ranks
    return ranks / 2 * (1 - math.comb(128 - here, 8) / math.comb(128, 8))


def test_an_exchange_takes_the_slowest_of_peer_links_and_interface(v3: Planned) -> None:
    sent = 4096 * 7168 * 2  # bytes of a row for each token
    one = plan_times(v3)["exchange_s"]["dispatch"]
    near = sent * rows_of_v3(8)
    assert one == pytest.approx(20e-6 + near / 8 / (64e9 * 0.75 * 0.85))
    far = published("DeepSeek-V3", V3, EIGHT | {"nodes": 4})
    apart = sent * rows_of_v3(32) * 24 / 32
    assert plan_times(far)["exchange_s"]["combine"] == pytest.approx(
        40e-6 + apart / (50e9 * 0.8)
    )
    switch = published(
        "DeepSeek-V3", V3, {"gpu": "h200", "nodes": 2, "expert_parallel": 8}
    )
    assert plan_times(switch)["exchange_s"]["combine"] == pytest.approx(
        20e-6 + near * 7 / 8 / (450e9 * 0.85)
    )
    # Megatron's all-to-all gives each expert a row of its own.
    megatron = published("DeepSeek-V3", V3, EIGHT | {"rows_once": False})
    assert plan_times(megatron)["exchange_s"]["combine"] == pytest.approx(
        20e-6 + sent * 8 / 8 / (64e9 * 0.75 * 0.85)
    )


def test_the_step_is_what_it_computes_and_what_stays_exposed(v3: Planned) -> None:
    times = plan_times(with_values(v3, slowdown=0.25))
    # micro-batches, layers, both passes
    sent = 8 * 6 * 2 * sum(times["exchange_s"].values())
    assert times["communication_s"] == pytest.approx(sent)
    gathers = times["sharding_s"]
    assert times["regular_s"] == pytest.approx(times["compute_s"] + sent + gathers[0])
    hidden = sent - times["exposed_s"]
    assert times["overlapped_s"] == pytest.approx(
        times["regular_s"] - 0.75 * hidden + gathers[1] - gathers[0]
    )
    exchange = times["exchange_s"]["combine"]
    exposed_s = {"forward": 0.0, "backward": 0.0}
    for row in times["windows"]:
        for name, factor in (("forward", 1), ("backward", 2)):
            # in the paper, the last one is not hidden
            combine = 0.0 if row["layer"] == 5 else row["combine_s"]
            exposed_s[name] += max(0, exchange - factor * row["dispatch_s"]) + max(
                0, exchange - factor * combine
            )
    for name, seconds in exposed_s.items():
        assert times["overlap"][name] == pytest.approx(1 - seconds / (6 * 2 * exchange))
    steps = times["layer_s"]
    assert times["windows"][3]["dispatch_s"] == pytest.approx(steps["attention b"])
    assert times["windows"][3]["combine_s"] == pytest.approx(
        steps["shared expert"] + steps["attention a"]
    )


def test_fewer_rewired_layers_hide_less(v3: Planned) -> None:
    some = replace(v3, connectivity=Connectivity("last:50%"))
    speed_ups = [plan_times(one)["speed_up"] for one in (v3, some)]
    assert speed_ups[0] > speed_ups[1] > 1
    none = plan_times(replace(v3, connectivity=Connectivity("none")))
    assert none["speed_up"] == pytest.approx(1)
    assert none["exposed_s"] == pytest.approx(none["communication_s"])
    assert plan_times(replace(v3, connectivity=Connectivity([3, 4, 5]))) == plan_times(
        some
    )


def test_a_converted_checkpoint_is_planned_as_it_is() -> None:
    field = {"version": 1, "layers": [4, 5], "attention": "partial", "mlp": "outdated"}
    own = published(
        "DeepSeek-V3",
        V3 | {"farskip": field, "model_type": "farskip_deepseek_v3"},
        {"length": 64},
    )
    regular = published(
        "DeepSeek-V3", V3, {"length": 64, "connectivity": Connectivity([4, 5])}
    )
    assert plan_times(own) == plan_times(regular)
    assert sum(row["dispatch_s"] > 0 for row in plan_times(own)["windows"]) == 2


def test_a_token_reads_the_cache_and_the_weights_of_the_experts_that_are_used() -> None:
    lite = lite_with(gpu="h200", phase="decode", batch=4, length=1000)
    latent = 27 * (512 + 64) * 2 * 1000 * 4  # bytes, whole on every rank
    assert lite.cached == latent
    steps = plan_times(with_values(lite, row_passes=0, **BARE))["layer_s"]
    bandwidth = 4800e9 * 0.65
    output = 2048 * 2048 * 2 / 8  # bytes of the output projection on one of 8 ranks
    assert steps["attention b"] == pytest.approx(
        latent / 27 / bandwidth + output / bandwidth
    )
    used = 64 * (1 - (1 - 6 / 64) ** 4)
    assert steps["experts"] == pytest.approx(used * 3 * 2048 * 1408 * 2 / 8 / bandwidth)
    # 16 KiB, published for 8 and for 64 KiB: 11 and 11.6 us; by NCCL 22.
    exchange = plan_times(lite)["exchange_s"]
    assert exchange["all_reduce"] == pytest.approx(11.2e-6)
    assert exchange["side"] == pytest.approx(22e-6)


@pytest.mark.parametrize("fp8", [False, True])
def test_matmuls_are_spread_over_the_ranks_but_those_to_latents_and_of_the_router(
    fp8: bool,
) -> None:
    """DeepSeek-V2-Lite on a machine where memory takes no time: hidden 2048, 16 heads
    of 128 + 64, latent 512, 6 of 64 experts.
    """
    dtype = "fp8" if fp8 else "auto"
    lite = lite_with(gpu="h200", phase="prefill", batch=2, length=512, dtype=dtype)
    lite = with_values(lite, hbm=1e9, **BARE)
    peak, bf16, tokens = (1978.9e12 if fp8 else 989.4e12) * 0.5, 989.4e12, 1024
    # a mask leaves out half of the pairs
    core = 2.0 * 2 * 16 * 512**2 * (128 + 64 + 128) / 2
    seconds = plan_times(lite)["layer_s"]
    per_token = {
        "attention a": 2048 * (512 + 64) + (2048 * 16 * 192 + 512 * 16 * 256) / 8,
        "attention b": 16 * 128 * 2048 / 8,
        "router": 2048 * 64,
        "shared expert": 3 * 2048 * 2816 / 8,
        "experts": 6 * 3 * 2048 * 1408 / 8 / ((0.1 if fp8 else 0.4) / 0.5),
    }
    for name, weights in per_token.items():
        more = core / (bf16 * 0.35) / 8 if name == "attention b" else 0.0
        assert seconds[name] == pytest.approx(
            2 * tokens * weights / peak + more, rel=1e-6
        ), name
    assert lite.roofline.head(lite.work) == pytest.approx(
        2 * tokens * 102400 * 2048 / peak / 8
    )


@pytest.mark.parametrize("fp8", [False, True])
def test_a_rank_reads_those_of_its_experts_that_any_ranks_tokens_choose(
    fp8: bool,
) -> None:
    lite = with_values(
        lite_with(gpu="h200", length=8, dtype="fp8" if fp8 else "auto"),
        row_passes=0,
        grouped=1e9,
        fp8_grouped=1e9,
    )
    used = 64 / 8 * (1 - (1 - 6 / 64) ** (8 * 8))
    bandwidth, width = 4800e9 * 0.65, 1 if fp8 else 2
    assert plan_times(lite)["layer_s"]["experts"] == pytest.approx(
        used * 3 * 2048 * 1408 * width / bandwidth
    )


@pytest.mark.parametrize("tp", [1, 4])
def test_dispatched_rows_are_passed_over_around_both_exchanges(tp: int) -> None:
    """Eight passes in four equal parts: before the dispatch, before and after the
    experts, after the combine.
    """
    lite = lite_with(gpu="h200", phase="prefill", length=64, tensor_parallel=tp)
    some, none = (
        with_values(lite, row_passes=passes, imbalance=1.5, **BARE) for passes in (8, 0)
    )
    part = 2 * 64 * 6 * 2048 * 2 / (4800e9 * 0.65) * 1.5 / tp
    layer = lite.work.layers[5]
    steps, without = (one.roofline.steps(one.work, layer, 1) for one in (some, none))
    more = {name: steps[name] - without[name] for name in steps}
    assert {name: value / part for name, value in more.items()} == pytest.approx(
        {
            "attention a": 0, "attention b": 0, "router": 1, "experts": 2, "shared expert": 0, "arrive": 1,
        },
        abs=1e-6,
    )  # fmt: skip
    # A server has no returned rows to sum.
    compute = [plan_times(one)["compute_s"] for one in (some, none)]
    assert compute[0] - compute[1] == pytest.approx(26 * 3 * part)


def test_loss_and_optimizer_are_those_of_the_whole_step_by_hand() -> None:
    lite = lite_with(
        gpu="h200", length=64, batch=2, global_batch=48, keep_activations=True
    )
    roofline, bandwidth, parameters = lite.roofline, 4800e9 * 0.65, 15_706_484_224
    head = max(
        2 * 128 * 102400 * 2048 / (989.4e12 * 0.5), 102400 * 2048 * 2 / bandwidth
    )
    loss = 3 * head + 8 * 128 * 102400 * 4 / bandwidth
    assert roofline.loss(lite.work) == pytest.approx(loss)
    experts = 26 * 64 * 3 * 2048 * 1408
    once = parameters / 8 * 32 / bandwidth
    assert roofline.optimizer(parameters / 8) == pytest.approx(once)
    others, head_only = parameters - experts, 102400 * 2048
    sent = [
        27 * 20e-6 + 7 / 8 * each / (450e9 * 0.85)
        for each in (2 * others, 2 * (others - head_only), 4 * others)
    ]
    assert roofline.sharding(lite.work, 8, 8) == pytest.approx(sent)
    times = plan_times(lite)
    layers = sum(
        sum(roofline.steps(lite.work, layer, 8).values()) for layer in lite.work.layers
    )
    # three micro-batches
    assert times["compute_s"] == pytest.approx(3 * (3 * layers + loss) + once)
    assert times["outside_layers_s"] == pytest.approx(3 * loss + once)


def test_the_rank_with_most_rows_holds_up_an_exchange(v3: Planned) -> None:
    """It gets as many rows as if it had half as many experts again, and at most one row
    per token. In Megatron it gets half as many rows again, because each expert gets its
    own row.
    """
    even, uneven, all_of_them = (
        plan_times(with_values(v3, imbalance=share, latency_us=0))["exchange_s"][
            "combine"
        ]
        for share in (1.0, 1.5, 5.0)
    )
    busy = 4 * (1 - math.comb(128 - 48, 8) / math.comb(128, 8))
    assert uneven / even == pytest.approx(busy / rows_of_v3(8))
    # half of the tokens choose none of its experts
    assert all_of_them / even == pytest.approx(4 / rows_of_v3(8))
    megatron = replace(v3, settings=v3.settings.model_copy(update={"rows_once": False}))
    even, uneven = (
        plan_times(with_values(megatron, imbalance=share, latency_us=0))["exchange_s"][
            "combine"
        ]
        for share in (1.0, 1.5)
    )
    assert uneven == pytest.approx(1.5 * even)


def test_a_server_takes_two_all_reduces_a_layer_and_its_head() -> None:
    lite = lite_with(gpu="h200", phase="prefill", batch=2, length=512)
    times, each = plan_times(lite), lite.roofline.all_reduce(lite.work)
    side = lite.roofline.all_reduce(lite.work, "side")
    steps = [lite.roofline.steps(lite.work, layer, 1) for layer in lite.work.layers]
    head = lite.roofline.head(lite.work) + 400e-6
    assert times["communication_s"] == pytest.approx(2 * 27 * each)
    assert times["compute_s"] == pytest.approx(
        sum(sum(one.values()) - one.get("arrive", 0) for one in steps) + head
    )
    beside = [one["attention a"] + one["attention b"] for one in steps]
    assert times["windows"][0] == pytest.approx(
        {"layer": 1, "attention_s": steps[1]["experts"], "routed_s": beside[2]}
    )
    # The dense first layer has one, with nothing beside it; the last routed layer has
    # nothing beside it either. What nothing hides, the engine sends in line.
    exposed_s = 2 * each + sum(
        max(0, side - one["experts"]) + (max(0, side - beside[k]) if k < 27 else 0)
        for k, one in enumerate(steps[1:], 2)
    )
    assert times["exposed_s"] == pytest.approx(exposed_s)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_wide_server_exchanges_what_tokens_chose_and_hides_it_as_docs_overlap_says(
    phase: str,
) -> None:
    """Eight ranks with two requests each; DeepSeek-V2-Lite: 27 layers, the first dense,
    6 of 64 experts.
    """
    lite = lite_with(
        gpu="h200", phase=phase, batch=16, length=512, data_parallel=8,
        all2all="deepep_low_latency",
    )  # fmt: skip
    lite = with_values(lite, slowdown=0.25, **BARE)
    times = plan_times(lite)
    tokens = 2 * (512 if phase == "prefill" else 1)
    assert (lite.work.tokens, lite.expert_parallel, lite.tensor_parallel) == (
        tokens,
        8,
        1,
    )
    each = tokens * 6 * 2048 * 2 / 8 * 7 / (450e9 * 0.85)
    sent = {"dispatch": 27e-6 + each, "combine": 36e-6 + each}
    assert times["exchange_s"] == pytest.approx(sent)
    steps = [lite.roofline.steps(lite.work, layer, 8) for layer in lite.work.layers]
    bandwidth = 4800e9 * 0.65
    # a rank reads the weights of those of its experts that any of the 16 tokens chose
    if phase == "decode":
        used = 64 / 8 * (1 - (1 - 6 / 64) ** 16)
        rows = 2 * lite.roofline.passes(2, tokens * 6 * 2048)
        assert steps[5]["experts"] == pytest.approx(
            used * 3 * 2048 * 1408 * 2 / bandwidth + rows
        )
    # Nothing is in flight when layer 1 begins: its dispatch runs beside all of
    # attention. A combine runs beside the shared expert and the next layer's queries,
    # keys and values, except the last one.
    dispatch = {
        k: steps[k]["attention b"] + (steps[k]["attention a"] if k == 1 else 0)
        for k in range(1, 27)
    }
    combine = {
        k: steps[k]["shared expert"] + (steps[k + 1]["attention a"] if k < 26 else 0)
        for k in range(1, 27)
    }
    for row in times["windows"]:
        k = row["layer"]
        assert row == pytest.approx(
            {"layer": k, "dispatch_s": dispatch[k], "combine_s": combine[k]}
        )
    rest = sum(
        max(0, sent[name] - window[k])
        for name, window in (("dispatch", dispatch), ("combine", combine))
        for k in range(1, 27)
    )
    all_sent = 26 * sum(sent.values())
    compute = sum(sum(one.values()) for one in steps) + lite.roofline.head(lite.work)
    assert times["regular_s"] == pytest.approx(compute + all_sent)
    assert times["overlapped_s"] == pytest.approx(
        compute + rest + 0.25 * (all_sent - rest)
    )
    assert 0 < times["overlap"]["forward"] <= 1


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_back_end_says_what_a_wide_servers_tokens_are_sent_to(nodes: int) -> None:
    """DeepSeek-V2-Lite, 128 tokens per rank in rows of 4,096 bytes, 6 of 64 experts."""
    ranks, row = 8 * nodes, 128 * 2048 * 2
    settings: dict[str, Any] = {
        "gpu": "h200", "phase": "prefill", "length": 128, "batch": ranks, "nodes": nodes,
        "data_parallel": ranks, "network_gb_s": 10.0,
    }  # fmt: skip
    link, nic = 450e9 * 0.85, 10e9 * 0.8
    hit = {
        n: n * (1 - math.comb(64 - 64 // n, 6) / math.comb(64, 6)) for n in (2, 8, 16)
    }
    if nodes == 1:
        expected = {
            # seven others' tokens arrive
            "allgather_reducescatter": 20e-6 + 7 * row / link,
            "deepep_high_throughput": hit[8] * row / 8 * 7 / link,
            "deepep_low_latency": 6 * row / 8 * 7 / link,
        }
    else:
        expected = {
            # a ring over both nodes, with eight interfaces in each
            "allgather_reducescatter": 40e-6 + 15 * row / (8 * nic),
            # half of the nodes to which a token is sent are the other node
            "deepep_high_throughput": hit[2] * row / 2 / nic,
            "deepep_low_latency": 6 * row / 16 * 8 / nic,
        }
    assert list(expected) == list(ALL2ALL)
    for name, seconds in expected.items():
        one = published("DeepSeek-V2-Lite", {}, settings | {"all2all": name})
        times = plan_times(one)["exchange_s"]
        fixed = (0.0, 0.0) if name.startswith("allgather") else (27e-6, 36e-6)
        assert times == pytest.approx(
            {"dispatch": fixed[0] + seconds, "combine": fixed[1] + seconds}
        ), name
    by_default = published("DeepSeek-V2-Lite", {}, settings)
    assert by_default.roofline.rows == "all"  # as in vLLM
    # Forwarded rows cross the links of a node, too, so that these carry the rows to all
    # ranks.
    if nodes == 2:
        fast = settings | {"network_gb_s": 1e6, "all2all": "deepep_high_throughput"}
        times = plan_times(published("DeepSeek-V2-Lite", {}, fast))["exchange_s"]
        within = 36e-6 + hit[16] * row / 8 * 7 / link
        assert times["combine"] == pytest.approx(within, rel=1e-3)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("all2all", list(ALL2ALL))
def test_rows_of_an_fp8_server_are_dispatched_in_fp8_and_come_back_in_bfloat16(
    all2all: str, nodes: int
) -> None:
    """DeepSeek-V3: rows of 7,168 values, with a 32-bit scale for each 128 of them, to 8
    of 256 experts in 4 of 8 groups.
    """
    ranks = 8 * nodes
    settings: dict[str, Any] = {
        "gpu": "h200", "phase": "decode", "length": 64, "batch": 16 * ranks,
        "nodes": nodes, "data_parallel": ranks, "all2all": all2all,
    }  # fmt: skip

    def exchange(**changes: Any) -> dict[str, float]:
        few: dict[str, Any] = V3 | {"num_hidden_layers": 2}
        one = published("DeepSeek-V3", few, settings | changes)
        bytes_alone = dict.fromkeys(("latency_us", "dispatch_us", "combine_us"), 0.0)
        return plan_times(with_values(one, **bytes_alone))["exchange_s"]

    sent = exchange()
    assert sent["dispatch"] == pytest.approx(sent["combine"] * (7168 + 4 * 56) / 14336)
    in_bfloat16 = exchange(dtype="bfloat16")
    assert in_bfloat16["dispatch"] == in_bfloat16["combine"] == sent["combine"]
    # On measured links the dispatch takes proportionally less time, and the combine
    # takes as long as before.
    few: dict[str, Any] = V3 | {"num_hidden_layers": 2}
    linked = published("DeepSeek-V3", few, settings)
    linked = with_links(linked, even_links(ranks, 1e-9))
    if all2all != "allgather_reducescatter":
        one, fp8, two = (
            replace(
                linked.roofline, stored=replace(linked.stored, sent=width)
            ).exchange(linked.work, ranks)
            for width in (1.0, linked.stored.sent, 2.0)
        )
        assert two[0] - fp8[0] == pytest.approx((1 - 4 / 128) * (two[0] - one[0]))
        assert one[1] == fp8[1] == two[1]
    # Without FP8 matmuls the activations are not quantised.
    on_a100 = exchange(gpu="a100")
    assert on_a100["dispatch"] == on_a100["combine"]


def test_kernels_of_fp8_experts_are_those_of_fp8_matmuls_alone() -> None:
    """Training a checkpoint in FP8 runs in bfloat16, with neither FP8 kernels nor FP8
    rows.
    """
    few: dict[str, Any] = V3 | {"num_hidden_layers": 2}
    for settings, has_effect in (
        ({}, False),
        ({"dtype": "fp8"}, False),  # DeepGEMM's are as near to their peak as others
        ({"phase": "prefill"}, True),
        ({"phase": "prefill", "gpu": "a100"}, False),
        ({"phase": "prefill", "dtype": "bfloat16"}, False),
    ):
        one = published("DeepSeek-V3", few, {"length": 512, "batch": 8} | settings)
        slow = with_values(one, fp8_grouped=0.01)
        changed = plan_times(slow)["regular_s"] != plan_times(one)["regular_s"]
        assert changed == has_effect, settings
    trained = published("DeepSeek-V3", few, {"length": 512, "dtype": "fp8"})
    times = plan_times(trained)["exchange_s"]
    assert times["dispatch"] == times["combine"]  # fcsd sends rows in bfloat16


def test_a_servers_third_all_reduce_is_sent_by_the_rewired_model_alone() -> None:
    """With `mlp: full` shared experts have their own all-reduce, except in the last
    layer and in the dense one.
    """
    lite = with_values(
        lite_with(
            gpu="mi300x",
            phase="prefill",
            batch=16,
            length=512,
            connectivity=Connectivity("all", mlp="full"),
        ),
        slowdown=0.25,
        all_reduce_us=20_000,
        side_us=20_000,
    )
    times, each = plan_times(lite), lite.roofline.all_reduce(lite.work)
    side = lite.roofline.all_reduce(lite.work, "side")
    # Nothing is beside attention's sums, those of the dense layer, and the last one;
    # the engine sends these 29 in line.
    sent = (27 * 2 + 25 - 29) * side + 29 * each
    assert times["communication_s"] == pytest.approx(27 * 2 * each)
    assert times["overlapped_communication_s"] == pytest.approx(sent)
    # which used to be reported as a negative share of hidden time
    assert times["exposed_s"] > times["communication_s"]
    assert times["overlap"]["forward"] == pytest.approx(1 - times["exposed_s"] / sent)
    assert times["overlap"]["forward"] > 0
    hidden = sent - times["exposed_s"]
    assert times["overlapped_s"] == pytest.approx(
        times["compute_s"] + times["exposed_s"] + 0.25 * hidden
    )


def test_a_token_attends_to_all_before_it_whatever_computes_its_attention() -> None:
    lite = lite_with(
        gpu="h200", phase="decode", batch=4, length=1000, tensor_parallel=1
    )
    core = 4 * 16 * 2 * 1000 * (128 + 64 + 128)  # FLOPs of 4 tokens, 16 heads
    peak, bandwidth, layer = 989.4e12, 4800e9 * 0.65, lite.work.layers[5]
    slow = with_values(lite, fused_core=1e-6, core=1e-6).roofline
    assert slow.core(layer) == pytest.approx(core / (peak * 1e-6))
    scores = 4 * 16 * 1000 * 2 * 4 / bandwidth  # bytes, passes
    assert replace(slow, fused=False).core(layer) == pytest.approx(
        core / (peak * 1e-6) + scores
    )
    cached = (512 + 64) * 2 * 1000 * 4 / bandwidth
    written_out = replace(lite.roofline, fused=False)
    assert written_out.core(layer) == pytest.approx(cached + scores)


def test_sparse_attention_reads_what_its_indexer_selects_and_scores_every_token() -> (
    None
):
    """DeepSeek-V3.2 beside DeepSeek-V3: 61 layers, 128 heads of 192 and 128, latents of
    576 numbers; an indexer of 64 heads of 128 selects 2,048 tokens.
    """
    length, batch, bandwidth = 65536, 8, 4800e9 * 0.65
    decoding = {"gpu": "h200", "phase": "decode", "batch": batch, "length": length}
    dense, sparse = (
        with_values(published(name, {}, decoding), **BARE)
        for name in ("DeepSeek-V3", "DeepSeek-V3.2")
    )
    # The memory keeps all latents; a token reads those of 2,048 tokens.
    assert dense.cached == sparse.cached == 61 * batch * length * 576 * 2
    full, selected = (one.work.layers[30] for one in (dense, sparse))
    assert selected.cache_bytes == batch * 2048 * 576 * 2 == full.cache_bytes / 32
    assert selected.core == batch * 2048 * 2 * 128 * (192 + 128) == full.core / 32
    # q k for each head, and the sum over the heads; keys in FP8 with a scale.
    scores = batch * length * 2 * 64 * (128 + 1)
    assert selected.index == scores and full.index == 0
    assert selected.index_bytes == batch * length * (128 + 4)
    assert sparse.work.flops - dense.work.flops == pytest.approx(
        # of these, projections: queries from 1,536, keys and weights from 7,168
        61 * (scores + 2 * batch * (1536 * 64 * 128 + 7168 * (128 + 64)))
        - 61 * (full.core - selected.core)
    )
    # Every rank scores for all heads, and computes an eighth of everything else.
    dense_s, sparse_s = (plan_times(one)["layer_s"] for one in (dense, sparse))
    projections = (1536 * 64 * 128 + 7168 * (128 + 64)) / bandwidth
    assert sparse_s["attention a"] - dense_s["attention a"] == pytest.approx(
        batch * length * 132 / bandwidth + projections
    )
    # A prefill: token k sees min(k, 2,048) others, but its indexer scores all k.
    prefill = {"gpu": "h200", "phase": "prefill", "batch": 1, "length": length}
    dense_s, sparse_s = (
        plan_times(with_values(published(name, {}, prefill), hbm=1e9, **BARE))[
            "layer_s"
        ]
        for name in ("DeepSeek-V3", "DeepSeek-V3.2")
    )
    peak, pairs = 989.4e12 * 0.35, sum(min(k + 1, 2048) for k in range(length))
    core_s = 2 * 128 * (192 + 128) / peak / 8
    assert dense_s["attention b"] - sparse_s["attention b"] == pytest.approx(
        (length * (length + 1) / 2 - pairs) * core_s, rel=1e-4
    )
    scoring = length**2 / 2 * 2 * 64 * 129 / (1978.9e12 * 0.35)
    tokens = 2 * length * (1536 * 64 * 128 + 7168 * (128 + 64)) / (1978.9e12 * 0.5)
    assert sparse_s["attention a"] - dense_s["attention a"] == pytest.approx(
        scoring + tokens
    )
    assert sum(sparse_s.values()) < sum(dense_s.values())
    # A training runs transformers' code, which computes all pairs; layers of GLM-5.2
    # that share the tokens of another have no indexer.
    trained = published("DeepSeek-V3.2", {"num_hidden_layers": 4}, {"length": 8192})
    assert {layer.in_window for layer in trained.work.layers} == {1.0}
    glm = published("GLM-5.2", {}, decoding).work.layers
    assert [k for k, layer in enumerate(glm) if layer.index][:5] == [0, 1, 2, 6, 10]
    assert len({layer.core for layer in glm}) == 1


def test_keys_and_values_are_on_as_many_ranks_as_there_are_heads() -> None:
    settings: dict[str, Any] = {"phase": "prefill", "length": 100}
    one, two, sixteen = (
        published(
            "Qwen3-30B-A3B", {}, settings | {"tensor_parallel": tp, "nodes": 2}
        ).cached
        for tp in (1, 2, 16)
    )
    assert one == 48 * 2 * 4 * 128 * 2 * 100 and (one / two, one / sixteen) == (2, 4)


def test_a_group_that_lies_across_nodes_sends_over_the_network() -> None:
    """Two nodes of 6: of groups of 4 consecutive ranks, the second is split two and
    two; no group of 3 is split.
    """
    settings: dict[str, Any] = {
        "gpu": "h200", "nodes": 2, "gpus_per_node": 6, "length": 64, "network_gb_s": 10.0,
    }  # fmt: skip
    sent, out, far = 64 * 2048 * 2, 450e9 * 0.85, 10e9 * 0.8  # a row for each token
    apart, near = (
        plan_times(
            published(
                "DeepSeek-V2-Lite",
                {"n_routed_experts": 60},
                settings | {"expert_parallel": ep},
            )
        )
        for ep in (4, 3)
    )
    # of a token, each rank
    hit = {ep: 1 - math.comb(60 - 60 // ep, 6) / math.comb(60, 6) for ep in (4, 3)}
    assert apart["exchange_s"]["combine"] == pytest.approx(
        40e-6 + sent * hit[4] * 2 / far
    )
    assert near["exchange_s"]["combine"] == pytest.approx(
        20e-6 + sent * hit[3] * 2 / out
    )


def test_a_ring_is_as_fast_as_the_links_that_its_ranks_have_to_each_other() -> None:
    def ring(ranks: int, apart: int = 1, **settings: Any) -> float:
        one = published(
            "DeepSeek-V3", V3, {"length": 64, "network_gb_s": 10.0} | settings
        )
        across = apart * ranks > 8
        return one.roofline.ring(1e9, ranks, apart) - (40e-6 if across else 20e-6)

    two: dict[str, Any] = {"gpu": "mi325x", "nodes": 2}
    peer, nic = 64e9 * 0.75 * 0.85, 10e9 * 0.8
    assert ring(8, **two) == pytest.approx(7 / 8 * 1e9 / (7 * peer))
    # a mesh: three links of seven
    assert ring(4, **two) == pytest.approx(3 / 4 * 1e9 / (3 * peer))
    assert ring(4, gpu="h200") == pytest.approx(3 / 4 * 1e9 / (450e9 * 0.85))
    assert ring(16, **two) == pytest.approx(15 / 16 * 1e9 / (8 * nic))
    # one rank on each node has one interface there
    assert ring(2, 8, **two) == pytest.approx(1 / 2 * 1e9 / nic)
    assert ring(4, 4, **two) == pytest.approx(3 / 4 * 1e9 / min(2 * nic, peer))


def test_experts_on_every_node_are_made_equal_over_the_network() -> None:
    """One group of 8 on each of two nodes: the rank with the same experts is on the
    other node.
    """
    settings: dict[str, Any] = {
        "gpu": "mi325x", "nodes": 2, "expert_parallel": 8, "length": 64, "network_gb_s": 10.0,
    }  # fmt: skip
    one = with_values(published("DeepSeek-V3", V3, settings), latency_us=0)
    experts = 6 * 256 * 3 * 7168 * 2048
    others = one.work.num_parameters - experts
    gather, again, reduce = one.roofline.sharding(one.work, 16, 8)
    for seconds, width, kept in (
        (gather, 2, 0),
        (again, 2, 129280 * 7168),
        (reduce, 4, 0),
    ):
        sent = width * experts / 8 / 2 + 15 / 16 * width * (others - kept) / 8
        assert seconds == pytest.approx(sent / (10e9 * 0.8))


def test_weights_are_gathered_and_gradients_reduced_in_every_micro_batch() -> None:
    """Qwen3-30B-A3B, 4 nodes of 8, groups of 8: its 32 micro-batches send for 18.9 s,
    of which only 0.44 s used to be counted.
    """
    settings: dict[str, Any] = {
        "nodes": 4, "expert_parallel": 8, "global_batch": 1024, "length": 4096, "keep_activations": True,
    }  # fmt: skip
    one = published("Qwen3-30B-A3B", {}, settings)
    experts, head = 48 * 128 * 3 * 2048 * 768, 151936 * 2048
    others = one.work.num_parameters - experts
    # a ring over all ranks has eight interfaces per node, that of the experts has one
    near, far = 8 * 50e9 * 0.8, 50e9 * 0.8
    links = min(450e9 * 0.85, near)

    def sent(width: int, kept: int = 0) -> float:
        latency = 2 * 48 * 40e-6  # between nodes
        return (
            latency
            + 31 / 32 * width * (others - kept) / links
            + 3 / 4 * width * experts / 8 / far
        )

    whole = 32 * (sent(2) + sent(2, head) + sent(4))
    assert whole == pytest.approx(18.9, abs=0.05)
    times = plan_times(with_values(one, prefetch=0.0))
    assert times["sharding_s"] == pytest.approx([whole, whole])
    assert times["regular_s"] == pytest.approx(
        times["compute_s"] + times["communication_s"] + whole
    )
    # Half of the computation hides them; in the overlapped step, half of what hides no
    # exchange.
    assumed = plan_times(one)
    layers = sum(
        sum(one.roofline.steps(one.work, layer, 8).values())
        for layer in one.work.layers
    )
    each = assumed["communication_s"] / 2
    for k, share in enumerate(({"forward": 0.0, "backward": 0.0}, assumed["overlap"])):
        beside = [
            32 * layers - share["forward"] * each,
            2 * 32 * layers - share["backward"] * each,
        ]
        ways = (32 * sent(2), 32 * (sent(2, head) + sent(4)))
        rest = sum(
            max(0.0, way - 0.5 * time) for way, time in zip(ways, beside, strict=True)
        )
        assert assumed["sharding_s"][k] == pytest.approx(rest)
    # Megatron's ranks hold whole weights, and send once per step.
    once = plan_times(
        published("Qwen3-30B-A3B", {}, settings | {"sharding": "optimizer"})
    )
    assert once["sharding_s"] == pytest.approx([sent(2) + sent(4)] * 2)


def test_measured_links_replace_the_published_rates(v3: Planned) -> None:
    seconds = plan_times(with_links(v3, even_links(8, 1e-9)))["exchange_s"]
    rows, pairs = 4096 * rows_of_v3(8) / 8, 4096 * 8 / 8
    assert seconds["combine"] == pytest.approx(1e-5 + rows * 7168 * 2 * 1e-9)
    assert seconds["dispatch"] == pytest.approx(
        2e-5 + (rows * 7168 * 2 + pairs * 8 + 256 * 8) * 1e-9
    )


def test_each_exchange_is_exposed_beyond_its_own_window(v3: Planned) -> None:
    """Uses links on which no dispatch is hidden, and every combine except the last
    is.
    """
    links = even_links(8, 1e-11)
    slow = links.dispatch.model_copy(update={"beta_s_per_byte": [[1e-9] * 8] * 8})
    times = plan_times(with_links(v3, links.model_copy(update={"dispatch": slow})))
    dispatch, combine = (times["exchange_s"][name] for name in ("dispatch", "combine"))
    own = [row["dispatch_s"] for row in times["windows"]]
    assert max(own) < dispatch
    assert combine < min(row["combine_s"] for row in times["windows"][:-1])
    rest = 6 * dispatch - sum(own) + combine
    assert times["overlap"]["forward"] == pytest.approx(
        1 - rest / (6 * (dispatch + combine))
    )


def test_links_are_between_the_ranks_that_share_the_experts(tmp_path: Path) -> None:
    settings = PlanSettings(model=lite(tmp_path), nodes=2, expert_parallel=8, length=64)
    assert prepare(settings, even_links(8, 1e-9)).machine.num_gpus == 16


def test_no_assumption_is_without_effect(v3: Planned) -> None:
    by_phase = [
        plan(v3),
        plan(published("DeepSeek-V3", V3, {"gpu": "mi325x", "nodes": 2, "global_batch": 16})),
        plan(published("DeepSeek-V3", V3, {"phase": "prefill", "gpu": "mi325x"})),
        plan(published("DeepSeek-V3", V3, {"phase": "decode", "nodes": 2, "batch": 8})),
        plan(published("DeepSeek-V3", V3, {"phase": "decode", "batch": 8})),
        plan(
            published(
                "DeepSeek-V3",
                V3,
                {
                    "phase": "decode",
                    "batch": 16,
                    "data_parallel": 8,
                    "all2all": "deepep_low_latency",
                },
            )
        ),
    ]  # fmt: skip
    moved = {
        row["name"]
        for facts in by_phase
        for row in facts["sensitivity"]
        if abs(row["speed_up"][0] - row["speed_up"][1]) > 1e-6
    }
    assert moved == set(ASSUMPTIONS)
    assert all(row["source"] and row["what"] for row in by_phase[0]["sensitivity"])


@pytest.mark.parametrize(
    "damaged",
    [
        ["gptq"],
        {"quant_method": "gptq", "bits": "four"},
        {"quant_method": "gptq", "bits": 4, "group_size": None},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}},
        {"quant_method": "fp8", "modules_to_not_convert": 3},
        {"quant_method": "fp8", "modules_to_not_convert": [{}]},
        {"quant_method": "compressed-tensors", "ignore": ["re:("]},
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"group_size": 32}},
        },
    ],
)
def test_a_damaged_quantisation_is_one_line_that_says_how_to_plan_without_it(
    damaged: Any,
) -> None:
    with user_error(r"quantization_config: .*--dtype bfloat16"):
        stored_weights({"quantization_config": damaged}, has_fp8=True)
