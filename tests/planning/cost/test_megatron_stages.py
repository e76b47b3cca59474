"""Training with tensor and pipeline parallelism, by Megatron's formulas (arXiv
2104.04473, 2205.05198) and by hand.
"""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import planned as published
from fcsd.cli.main import main
from fcsd.planning.cost.exact import compared
from fcsd.planning.cost.plan import memory
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.rivals import PAIRS
from fcsd.planning.cost.roofline import total
from fcsd.planning.cost.stages import stage_work, stages_of
from fcsd.planning.cost.times import plan_times
from tests.planning.cost.plans import lite, with_values

LINK, NIC = 450e9 * 0.85, 50e9 * 0.8
"""Bytes a second of a H200's links and of its interface."""


def trained(name: str, changes: dict[str, Any], **settings: Any) -> Planned:
    return published(
        name, changes, {"gpu": "h200", "keep_activations": True} | settings
    )


@pytest.mark.parametrize(
    ("name", "of_a_layer"), [("DeepSeek-V2-Lite", 8), ("Qwen3-30B-A3B", 4)]
)
@pytest.mark.parametrize("keeps", [True, False])
def test_tensor_parallel_ranks_send_what_megatron_says(
    name: str, of_a_layer: int, keeps: bool
) -> None:
    """8 b s h (t - 1) / t elements per layer and micro-batch, forward and backward:
    half for attention, half for the MLP or shared expert, which Qwen3-MoE does not
    have. Recomputation sends half as much again (2104.04473, 3.2).
    """
    one = trained(
        name, {"num_hidden_layers": 3}, tensor_parallel=4, batch=2, length=512,
        global_batch=12, keep_activations=keeps,
    )  # fmt: skip
    times = plan_times(with_values(one, latency_us=0))
    elements = of_a_layer * 2 * 512 * 2048 * 3 / 4 * (1 if keeps else 1.5)
    # two copies of four ranks: three micro-batches each
    assert one.micro_batches == 3
    assert times["megatron"] == pytest.approx(
        {"tensor_parallel_s": 3 * 3 * 2 * elements / LINK, "sends_s": 0, "bubble": 0}
    )
    assert times["exposed_s"] > times["megatron"]["tensor_parallel_s"]


def test_a_rank_of_two_computes_and_exchanges_half_of_the_tokens() -> None:
    """If matmuls compute longer than they read, one rank of two takes as long as a
    single rank with half of the rows; it exchanges them with as many ranks.
    """
    settings: dict[str, Any] = {
        "expert_parallel": 4,
        "length": 2048,
        "rows_once": False,
    }
    alone = trained("DeepSeek-V2-Lite", {}, batch=1, **settings)
    pair = trained("DeepSeek-V2-Lite", {}, batch=2, tensor_parallel=2, **settings)
    for layer in (0, 5):
        assert pair.roofline.layers(pair.work, 4)[layer] == pytest.approx(
            alone.roofline.layers(alone.work, 4)[layer]
        )
    assert pair.roofline.exchange(pair.work, 4) == pytest.approx(
        alone.roofline.exchange(alone.work, 4)
    )
    loss = alone.roofline.loss(alone.work)
    assert pair.roofline.loss(pair.work) == pytest.approx(loss)


def test_a_pipeline_waits_p_minus_1_of_m_plus_p_minus_1_micro_batches() -> None:
    """Two layers on each of two nodes, 8 micro-batches: the stage with the head is
    slower (2104.04473, 2.2: the bubble is (p - 1) / m of the time without it).
    """
    one = trained(
        "Qwen3-30B-A3B", {"num_hidden_layers": 4}, nodes=2, pipeline_parallel=2,
        global_batch=64,
    )  # fmt: skip
    times, roofline = plan_times(one), one.roofline
    assert (one.micro_batches, one.expert_parallel) == (8, 8)
    assert times["megatron"]["bubble"] == pytest.approx(1 / 9)
    layer, exchange = (
        total(roofline.layers(one.work, 8)[0]),
        sum(roofline.exchange(one.work, 8)),
    )
    # b s h to the next stage, and its gradient back, between nodes
    send = 40e-6 + 4096 * 2048 * 2 / NIC
    assert times["megatron"]["sends_s"] == pytest.approx(8 * 2 * send)
    micro_batch = 2 * (3 * layer + 2 * exchange) + roofline.loss(one.work) + 2 * send
    (_, last) = stages_of(4, 2)
    stage = stage_work(one.work, last)
    experts, head = 2 * 128 * 3 * 2048 * 768, 151936 * 2048
    attention = 2 * 2048 * (32 + 4 + 4 + 32) * 128 + 2 * 2048 * 128
    assert stage.num_parameters == experts + attention + head
    # Weights are sent once per step: all except experts over the eight ranks of the
    # stage.
    others = attention + head
    once = roofline.optimizer(stage.num_parameters / 8) + sum(
        2 * 20e-6 + 7 / 8 * width * others / LINK for width in (2, 4)
    )
    assert times["regular_s"] == pytest.approx(9 * micro_batch + once)
    assert times["communication_s"] == pytest.approx(8 * (4 * exchange + 2 * send))
    # Within a node the next stage is four ranks further.
    near = trained(
        "Qwen3-30B-A3B",
        {"num_hidden_layers": 4},
        pipeline_parallel=2,
        tensor_parallel=4,
    )
    part = 4096 * 2048 * 2 / 4
    assert plan_times(near)["megatron"]["sends_s"] == pytest.approx(
        2 * (20e-6 + part / LINK)
    )


def test_stages_share_layers_and_weights_and_no_combine_is_in_flight_between_them():
    assert [end - first for first, end in stages_of(61, 8)] == [8] * 5 + [7] * 3
    one = trained("DeepSeek-V2-Lite", {}, nodes=2, pipeline_parallel=2, length=512)
    parts = [stage_work(one.work, stage) for stage in stages_of(27, 2)]
    for name in ("num_parameters", "num_expert_parameters"):
        assert sum(getattr(part, name) for part in parts) == getattr(one.work, name)
    assert parts[0].head.weights == 0 and parts[1].head == one.work.head
    steps = one.roofline.layers(one.work, 8)[5]
    windows = {row["layer"]: row for row in plan_times(one)["windows"]}
    assert list(windows) == list(range(1, 27))
    a, b, shared = (
        steps[name] for name in ("attention a", "attention b", "shared expert")
    )
    for layer, dispatch, combine in (
        (12, b, shared + a), (13, b, shared), (14, a + b, shared + a), (26, b, shared),
    ):  # fmt: skip
        assert windows[layer]["dispatch_s"] == pytest.approx(dispatch)
        assert windows[layer]["combine_s"] == pytest.approx(combine)


def test_a_rank_holds_its_part_of_its_stage_and_what_a_full_pipeline_keeps() -> None:
    """Qwen3-30B-A3B, 4 layers on 16 ranks: two stages of two copies by four ranks."""
    sizes, few = {"num_hidden_layers": 4}, {"length": 512, "keep_activations": False}
    one, alone = (
        trained("Qwen3-30B-A3B", sizes, **few, **settings)
        for settings in (
            {"nodes": 2, "pipeline_parallel": 2, "tensor_parallel": 4, "global_batch": 8},
            {"expert_parallel": 8},
        )
    )  # fmt: skip
    assert (one.expert_parallel, one.micro_batches) == (8, 4)
    parts = memory(one)["parts"]
    # Each stage has two layers; the last has the head, the first has embeddings of the
    # same size, and all have norms.
    experts, norms = 2 * 128 * 3 * 2048 * 768, 4 * (2 * 2048 + 2 * 128) + 2048
    attention = 2 * 2048 * (32 + 4 + 4 + 32) * 128
    others = attention + 2 * 2048 * 128 + 151936 * 2048 + norms
    rank = experts / 8 + others / 4
    assert parts["weights"] == 2 * rank and parts["gradients"] == 4 * rank
    # Experts are whole in eight ranks, the rest twice.
    assert parts["optimizer states"] == 12 * (experts / 8 + others / 8)
    # Of two stages the first keeps two micro-batches of its half of the layers.
    whole = memory(alone)["parts"]
    assert parts["activations"] == pytest.approx(whole["activations"] / 4, abs=1)
    few_batches = trained(
        "Qwen3-30B-A3B", sizes, nodes=2, pipeline_parallel=2, tensor_parallel=4, **few
    )
    assert memory(few_batches)["parts"]["activations"] == pytest.approx(
        whole["activations"] / 8, abs=1
    )


def test_two_micro_batches_in_turn_fill_no_bubble() -> None:
    """Of the p - 1 + m passes in each direction, all but m - 1 pairs run alone."""
    settings: dict[str, Any] = {"nodes": 2, "length": 1024, "pipeline_parallel": 2}
    rows = [
        {row["name"]: row for row in compared(one)["exact"]}[PAIRS]["exposed_s"]
        * (one.micro_batches + 1)
        / one.micro_batches
        for one in (
            trained(
                "Qwen3-30B-A3B",
                {"num_hidden_layers": 4},
                global_batch=8 * m,
                **settings,
            )
            for m in (2, 3, 4)
        )
    ]
    # Each further micro-batch adds one pair.
    assert rows[2] - rows[1] == pytest.approx(rows[1] - rows[0])


def test_the_plan_says_that_fcsd_does_not_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", lite(tmp_path), "--length", "512", "--tp", "2"]
    words += ["--global-batch", "6"]
    assert main([*words, "--sweep", "pp=1,2,3"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 5 and "--tp 2 --pp 3: 6 ranks do not" in rows[-1]
    assert main([*words, "--pp", "2", "--sweep", "pp=1,2,3"]) == 2
    assert "--sweep pp and --pp are both given" in capsys.readouterr().err
    assert main([*words, "--pp", "2"]) == 0
    text = capsys.readouterr().out
    assert "phase      train, Megatron, tensor parallel 2, pipeline parallel 2," in text
    (line,) = (line for line in text.splitlines() if line.startswith("MEGATRON"))
    assert line.startswith("MEGATRON: fcsd does not train with tensor or pipeline")
    assert line.endswith("the bubble is 25.0% of the step")
    assert "| memory per rank  |" in text
