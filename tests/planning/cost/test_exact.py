"""Schedules that change no equation, by hand: one layer with whole seconds, every
timeline written out.
"""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.plan import exact_rows
from benchmarks.plan import planned as published
from fcsd.cli.main import main
from fcsd.model.families import FAMILIES
from fcsd.planning.cost.exact import compared, in_turn, joined, mirrored
from fcsd.planning.cost.operations import ModelWork, part_of
from fcsd.planning.cost.plan import expected_gain, plan
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.rivals import (
    HALVES,
    LADDER,
    MEGA,
    MEGA_FAMILIES,
    PAIRS,
    SHARED,
    SHORTCUT,
    TRACKS,
)
from fcsd.planning.cost.roofline import Roofline
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.table import plan_table
from tests.planning.cost.plans import BARE, lite, with_values
from tests.support import ROOT

WHOLE: Mapping[str, float] = {
    "attention a": 2.0, "attention b": 3.0, "router": 1.0, "experts": 6.0, "shared expert": 2.0, "arrive": 2.0,
}  # fmt: skip
"""Seconds of a layer of the whole batch: 8 before the dispatch, 16 in all."""
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every part of a layer whole seconds. Half a batch takes half of them, but
    its exchanges and its loss take one second more than half.
    """

    def share(model: ModelWork) -> float:
        return model.tokens / whole[0]

    whole: list[int] = []

    def layers(self: Roofline, model: ModelWork, ranks: int) -> list[dict[str, float]]:
        whole.append(model.tokens)  # the whole batch is asked for first
        return [{name: share(model) * value for name, value in WHOLE.items()}]

    def later(seconds: float) -> Any:
        return lambda self, model, *_: (
            share(model) * seconds + (1 if share(model) < 1 else 0)
        )

    def exchange(self: Roofline, model: ModelWork, ranks: int) -> tuple[float, float]:
        return later(10.0)(self, model), later(10.0)(self, model)

    def core(self: Roofline, layer: object) -> float:
        return 1.0  # of the 3 seconds of "attention b" of a whole batch

    monkeypatch.setattr(Roofline, "layers", layers)
    monkeypatch.setattr(Roofline, "core", core)
    monkeypatch.setattr(Roofline, "exchange", exchange)
    monkeypatch.setattr(Roofline, "all_reduce", later(6.0))
    monkeypatch.setattr(Roofline, "loss", later(2.0))
    monkeypatch.setattr(Roofline, "head", later(3.0))
    monkeypatch.setattr(Roofline, "optimizer", lambda *_: 5.0)
    monkeypatch.setattr(Roofline, "sharding", lambda *_: (0.0, 0.0, 0.0))


def rows_of(planned: Planned) -> tuple[dict[str, Any], dict[str, Any]]:
    facts = compared(with_values(planned, slowdown=0.5, **BARE))
    rows = (*facts["exact"], *facts["architectures"])
    return facts, {row["name"]: row for row in rows}


BLOCKS = {
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128] * 2}
}
MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
WIDE = {
    "phase": "decode", "batch": 16, "length": 8, "data_parallel": 8,
    "all2all": "deepep_low_latency",
}  # fmt: skip


def test_two_batches_take_turns_and_share_the_link() -> None:
    """The first computes 0-2, its exchange runs 2-5; the second computes 2-4, and its
    exchange runs after that, 5-8; then first 5-6, second 8-9: 6 of 9 seconds are
    computation.
    """
    chain = [(2.0, 3.0), (1.0, 0.0)]
    assert in_turn(chain, chain) == 3
    # If exchanges are short, only the last one is waited for.
    assert in_turn([(4.0, 1.0)] * 3, [(4.0, 1.0)] * 3) == 1
    # Alone, a batch waits for every exchange.
    assert in_turn([(1.0, 2.0), (1.0, 5.0)], []) == 7


def fewest_idle(first: Any, second: Any) -> float:
    """Return the seconds in which neither batch computes, in the best of all orders."""
    chains = (first, second)

    def from_here(done: tuple[int, int], now: float, link: float, ready: Any) -> float:
        ends = [max(now, *ready)] if done == (len(first), len(second)) else []
        for b in (0, 1):
            if done[b] < len(chains[b]):
                compute, exchange = chains[b][done[b]]
                then = max(now, ready[b]) + compute
                sent = max(then, link) + exchange if exchange else then
                behind = (done[0] + (b == 0), done[1] + (b == 1))
                waits = (sent, ready[1]) if b == 0 else (ready[0], sent)
                busy = sent if exchange else link
                ends.append(from_here(behind, then, busy, waits))
        return min(ends)

    computed = sum(compute for chain in chains for compute, _ in chain)
    return from_here((0, 0), 0.0, 0.0, (0.0, 0.0)) - computed


@pytest.mark.parametrize("seed", range(20))
def test_no_other_order_of_two_layers_computes_sooner(seed: int) -> None:
    """This holds for halves; a backward pass beside a forward pass may lose 4 % to a
    better order. Dispatch and combine take equally long, as in plans without measured
    links.
    """
    draw = random.Random(seed).uniform
    sent = draw(0.5, 12)
    layer = [(draw(1, 10), sent), (draw(1, 10), sent), (draw(0, 2), 0.0)]
    forward, backward = joined([layer] * 2), joined([mirrored(layer, 2)] * 2)
    assert in_turn(forward, forward) == pytest.approx(fewest_idle(forward, forward))
    computed = 3 * 2 * sum(compute for compute, _ in layer)
    assert computed + in_turn(backward, forward) <= 1.04 * (
        computed + fewest_idle(backward, forward)
    )


def test_a_backward_pass_is_the_forward_pass_from_its_end() -> None:
    layer = [(8.0, 10.0), (6.0, 11.0), (2.0, 0.0)]
    assert mirrored(layer, 2) == [(4.0, 11.0), (12.0, 10.0), (16.0, 0.0)]
    assert joined([layer, [(5.0, 0.0)], layer]) == [
        (8.0, 10.0), (6.0, 11.0), (2.0 + 5 + 8, 10.0), (6.0, 11.0), (2.0, 0.0),
    ]  # fmt: skip


def test_a_half_batch_reads_all_weights() -> None:
    work = published("DeepSeek-V2-Lite", {}, {"batch": 2, "length": 64}).work
    half = published("DeepSeek-V2-Lite", {}, {"batch": 1, "length": 64}).work
    part = part_of(work, 64)
    assert (part.tokens, part.num_parameters) == (64, work.num_parameters)
    assert part.layers == half.layers and part.head == half.head


@pytest.mark.usefixtures("by_hand")
def test_the_exact_schedules_of_a_training_by_hand() -> None:
    """Two micro-batches of two rows: forward 8, dispatch 10, experts 6, combine 10, sum
    2; backward twice that, in reverse; loss 2, optimiser 5.
    """
    settings: dict[str, Any] = {
        "batch": 2, "global_batch": 32, "length": 8, "keep_activations": True,
    }  # fmt: skip
    facts, rows = rows_of(published("DeepSeek-V2-Lite", ONE_LAYER, settings))
    compute = 2 * (16 + 32 + 2) + 5
    assert facts["regular_s"] == compute + 2 * 40 and facts["not_exact"] == []
    # 20 beside a shared expert of 2, and of 4 backward; hidden time costs half of
    # itself.
    assert rows[SHARED]["step_s"] == compute + 2 * (18 + 16) + 0.5 * 2 * 6
    # ShortcutMoE: dispatch beside 2 + 1 and combine beside 2 + 2; twice that backward.
    rest = 2 * ((7 + 6) + (4 + 2))
    assert rows[SHORTCUT]["exposed_s"] == rest
    assert rows[SHORTCUT]["step_s"] == compute + rest + 0.5 * (80 - rest)
    assert rows[SHORTCUT] in facts["architectures"]
    # Halves, exchanges of 6. Forward: first 0-4 (exchange 4-10), second 4-8 (10-16),
    # first 10-13 (16-22), second 16-19 (22-28), first 22-23, second 28-29: 16 of 29.
    # Backward: 0-2 (2-8), 2-4 (8-14), 8-14 (14-20), 14-20 (20-26), 20-28, 28-36: 32 of
    # 36. The losses of the halves take 2 each.
    rest = 2 * (29 - 16 + 36 - 32)
    assert rows[HALVES]["communication_s"] == 2 * 2 * 4 * 6
    assert rows[HALVES]["exposed_s"] == rest
    assert rows[HALVES]["step_s"] == compute + 2 * 2 + rest + 0.5 * (96 - rest)
    # The first forward and the last backward pass alone expose 40. Between them the
    # backward pass begins: 0-4 (4-14), forward 4-12 (14-24), backward 14-26 (26-36),
    # forward 26-32 (36-46), backward 36-52, forward 52-54: 48 of 54.
    rest = 40 + 54 - 48
    assert rows[PAIRS]["exposed_s"] == pytest.approx(rest)
    assert rows[PAIRS]["step_s"] == pytest.approx(compute + rest + 0.5 * (80 - rest))
    best = rows[PAIRS]
    assert facts["best_exact"] == PAIRS
    assert facts["over_exact"] == pytest.approx(best["step_s"] / facts["overlapped_s"])
    assert best["speed_up"] == pytest.approx(facts["regular_s"] / best["step_s"])


@pytest.mark.usefixtures("by_hand")
def test_recomputed_layers_are_part_of_the_backward_pass_by_hand() -> None:
    """One micro-batch of two rows; forward as above, and again before its backward
    pass, without its combine: 4 (6), 3, 1 + 2 (6), 6 (6), 8.
    """
    settings: dict[str, Any] = {"batch": 2, "length": 8}
    facts, rows = rows_of(published("DeepSeek-V2-Lite", ONE_LAYER, settings))
    compute = 16 + 16 + 32 + 2 + 5
    assert facts["regular_s"] == compute + 2 * 20 + 10
    # A single rewired layer dispatches beside part a of attention (2), and again when
    # it is recomputed; nothing hides the combine of the last layer.
    assert facts["overlapped_communication_s"] == 2 * 20 + 10
    assert facts["exposed_s"] == (8 + 10) + (6 + 10) + 8
    # The recomputed dispatch alone has the shared expert beside it.
    assert rows[SHARED]["step_s"] == compute + 18 + 8 + 16 + 0.5 * (50 - 42)
    assert rows[SHORTCUT]["exposed_s"] == (7 + 6) + 7 + (4 + 2)
    # 0-4 (4-10), 4-8 (10-16), 10-16 (16-22), 16-22 (22-28), 22-28 (28-34), 28-34
    # (34-40), 34-42, 42-50: 48 of 50, and forward 13.
    rest = 50 - 48 + 13
    assert rows[HALVES]["exposed_s"] == rest
    assert rows[HALVES]["step_s"] == compute + 2 + rest + 0.5 * (60 - rest)
    assert [reason.split(":")[0] for reason in facts["not_exact"]] == [PAIRS]


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_exact_schedules_of_a_wide_server_by_hand(phase: str) -> None:
    """A forward pass as above, and the head, 3."""
    settings: dict[str, Any] = WIDE | {"phase": phase}
    facts, rows = rows_of(published("DeepSeek-V2-Lite", ONE_LAYER, settings))
    assert facts["regular_s"] == 16 + 3 + 20
    assert rows[SHARED]["step_s"] == 16 + 3 + 18 + 0.5 * 2
    assert rows[HALVES]["step_s"] == 16 + 3 + 13 + 0.5 * (24 - 13)
    assert rows[SHORTCUT]["step_s"] == 16 + 3 + 13 + 0.5 * 7
    default = settings | {"all2all": "allgather_reducescatter"}
    facts, rows = rows_of(published("DeepSeek-V2-Lite", ONE_LAYER, default))
    assert [row["name"] for row in facts["exact"]] == [SHARED]
    assert "vLLM's --enable-dbo needs DeepEP" in facts["not_exact"][-1]


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize(
    ("changes", "settings", "runs"),
    [
        (BLOCKS, {"gpu": "h200"}, True),
        ({}, {"gpu": "h200"}, False),
        ({}, {"gpu": "h200", "dtype": "fp8"}, False),
        (BLOCKS, {"gpu": "h200", "nodes": 2, "gpus_per_node": 4}, False),
        (MXFP4, {"gpu": "h200"}, False),
        (MXFP4, {"gpu": "b200"}, True),
        (BLOCKS, {"gpu": "b200"}, False),
        (BLOCKS, {"gpu": "mi300x"}, False),
    ],
)
def test_mega_moe_hides_exchanges_beside_experts_where_its_kernel_runs(
    changes: dict[str, Any], settings: dict[str, Any], runs: bool
) -> None:
    """20 seconds of exchanges beside 6 of experts."""
    facts, rows = rows_of(
        published("DeepSeek-V2-Lite", ONE_LAYER | changes, WIDE | settings)
    )
    if runs:
        assert rows[MEGA]["step_s"] == 16 + 3 + 14 + 0.5 * 6
        assert rows[MEGA]["released"]
    else:
        assert MEGA not in rows
    assert any("MegaMoE: needs" in reason for reason in facts["not_exact"]) != runs


def test_mega_moe_is_compared_only_with_families_that_have_it() -> None:
    """gpt-oss has 4-bit floats, but SGLang's layer of it knows no MegaMoE."""
    settings = WIDE | {"gpu": "b200", "length": 64}
    facts = compared(published("gpt-oss-20b", MXFP4, settings))
    assert MEGA not in [row["name"] for row in facts["exact"]]
    assert any("a family for which SGLang has it" in x for x in facts["not_exact"])


def test_the_families_of_mega_moe_are_families_of_fcsd() -> None:
    assert set(FAMILIES) >= MEGA_FAMILIES


def test_mega_moe_saves_about_what_was_published() -> None:
    """DeepGEMM 383, H200, 8 ranks, up to 128 tokens each: dispatch, experts and combine
    took 1.1 to 1.6 times as long apart.
    """
    settings = WIDE | {"gpu": "h200", "length": 2048, "batch": 512}
    one = published("DeepSeek-V3", {}, settings)
    layer_s = one.roofline.layers(one.work, 8)[-1]
    sent_s, experts_s = sum(one.roofline.exchange(one.work, 8)), layer_s["experts"]
    assert 1.05 < (sent_s + experts_s) / max(sent_s, experts_s) < 1.6
    rows = {row["name"]: row for row in compared(one)["exact"]}
    moe = sum(one.work.moe)
    assert rows[MEGA]["exposed_s"] == pytest.approx(
        moe * max(0.0, sent_s - experts_s), abs=1e-9
    )


@pytest.mark.usefixtures("by_hand")
def test_the_exact_schedule_of_tensor_parallel_ranks_by_hand() -> None:
    """Attention 5, all-reduce 6, MLP 9, all-reduce 6. Halves, all-reduces of 4: 0-2.5
    (2.5-6.5), 2.5-5 (6.5-10.5), 6.5-11 (11-15), 11-15.5 (15.5-19.5): 14 of 19.5.
    """
    settings: dict[str, Any] = {"phase": "prefill", "batch": 2, "length": 8}
    facts, rows = rows_of(published("DeepSeek-V2-Lite", ONE_LAYER, settings))
    assert facts["regular_s"] == 14 + 3 + 12
    assert [row["name"] for row in facts["exact"]] == [HALVES]
    assert rows[HALVES]["step_s"] == 14 + 3 + 5.5 + 0.5 * (16 - 5.5)
    # No release has it, so it is not what FarSkip is compared with.
    assert facts["best_exact"] == "regular" and not rows[HALVES]["released"]
    # Ladder Residual: attention's sum beside the MLP, the last one in line.
    assert rows[LADDER]["step_s"] == 14 + 3 + 6 + 0.5 * 6
    # Parallel Track: one sum in eight layers.
    assert rows[TRACKS]["step_s"] == 14 + 3 + 6
    one = settings | {"phase": "decode", "batch": 1}
    facts, rows = rows_of(published("DeepSeek-V2-Lite", ONE_LAYER, one))
    assert facts["exact"] == [] and facts["best_exact"] == "regular"
    assert facts["over_exact"] == facts["speed_up"]


def test_the_table_leads_with_the_gain_over_the_best_exact_schedule(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", lite(tmp_path), "--batch", "2", "--global-batch", "32"]
    assert main([*words, "--length", "512"]) == 0
    text = capsys.readouterr().out
    facts = plan(
        published("DeepSeek-V2-Lite", {"num_hidden_layers": 4}, {
            "batch": 2, "global_batch": 32, "length": 512,
        })
    )  # fmt: skip
    times = facts["times"]
    ends = [end for row in facts["sensitivity"] for end in row["over_exact"]]
    assert min(ends) < times["over_exact"] < max(ends)
    assert text.split("GAIN: ")[1].split("\n")[0] == (
        f"{min(ends):.3f} to {max(ends):.3f} times as fast as the best exact schedule,"
        f" {times['best_exact']} (planned {times['over_exact']:.3f}); planned"
        f" {times['speed_up']:.3f} times as fast as regular blocks"
    )
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    }
    assert rows["overlapped"][-1] == f"{times['over_exact']:.3f}"
    assert rows[times["best_exact"]][-1] == "1.000"
    for kind, mark in (
        ("exact", " (in no release)"),
        ("architectures", " (another architecture)"),
    ):
        for row in times[kind]:
            marked = row["name"] + ("" if row["released"] else mark)
            assert rows[marked][3] == f"{row['speed_up']:.3f}"
    assert "1F1B with recomputation (in no release)" in rows
    assert "ShortcutMoE (another architecture)" in rows
    for row in (*times["exact"], *times["architectures"]):
        assert f"\n{row['name']}: {row['hides']}. " in text
    alone = facts | {"times": times | {"best_exact": "regular"}}
    assert "no exact schedule below is faster than those" in plan_table(alone)


@pytest.mark.parametrize(
    ("over_exact", "expected"),
    # A regular step of 1 s, overlapped 0.8 s. Steps that take 2.3 times as long hide
    # the same 0.2 s; the best exact schedule hides 0.12 s of them, or 0.28 s.
    [(1.1, [2.18 / 2.1 - 1, 0.1]), (0.9, [-0.1, 2.02 / 2.1 - 1])],
)
def test_longer_steps_leave_less_of_a_decoding_gain_over_exact_schedules_too(
    over_exact: float, expected: list[float]
) -> None:
    times = {"regular_s": 1.0, "overlapped_s": 0.8, "speed_up": 1.25}
    settings = PlanSettings(model="x", phase="decode")
    gains = expected_gain(
        times | {"over_exact": over_exact}, settings, [], "over_exact"
    )
    assert gains == pytest.approx(expected)


def test_the_first_line_of_a_servers_plan_has_no_planned_gain_without_its_range():
    facts = plan(
        published(
            "DeepSeek-V2-Lite",
            {"num_hidden_layers": 4},
            {"phase": "prefill", "batch": 16, "length": 2048},
        ),
        advise=False,
    )
    times = facts["times"] | {"best_exact": "two halves", "over_exact": 1.01}
    facts |= {"times": times, "expected_over_exact": [0.002, 0.05]}
    facts["expected_gain"] = [0.09, 0.59]
    (line,) = (x for x in plan_table(facts).splitlines() if x[:5] == "GAIN:")
    assert line == (
        "GAIN: 1.002 to 1.050 times as fast as the best exact schedule, two halves"
        " (planned 1.010); 1.090 to 1.590 times as fast as regular blocks (planned"
        f" {times['speed_up']:.3f})"
    )


def test_a_prefill_may_gain_as_much_less_over_exact_schedules_as_past_plans_were_off():
    times = {"speed_up": 1.3, "over_exact": 1.049}
    rows = [{"speed_up": [1.2, 1.4], "over_exact": [1.03, 1.07]}]
    settings = PlanSettings(model="x", phase="prefill")
    gains = expected_gain(times, settings, rows, "over_exact")
    assert gains == pytest.approx([0.049 / 4.9, 0.07])


@pytest.mark.breadth
def test_the_page_has_the_gains_over_the_best_exact_schedule() -> None:
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    table = "\n".join(f"| {' | '.join(row)} |" for row in exact_rows())
    assert table in page
