"""`fcsd plan`: operations by hand, the paper's measured speed-ups, memory, files, and
what is refused.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import ON_300X, ON_VLLM, STEPS, TRAINING, V2, V3, at
from benchmarks.plan import planned as published
from fcsd.base.artifact import Stage
from fcsd.base.errors import UserError
from fcsd.base.files import read_json, write_json
from fcsd.cli.main import main
from fcsd.model.connectivity.spec import ConnectivityConfig
from fcsd.planning.cost.assumptions import ASSUMPTIONS
from fcsd.planning.cost.hardware import find_gpu
from fcsd.planning.cost.measured import ExchangeTime, Times, write_times
from fcsd.planning.cost.operations import WHOLE
from fcsd.planning.cost.plan import OVER_PREDICTION, STEP_RATIO, memory, plan
from fcsd.planning.cost.planned import Planned, prepare
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.table import plan_table
from fcsd.planning.cost.times import plan_times
from fcsd.planning.network.links import write_links
from tests.planning.cost.plans import BARE, EIGHT, even_links, lite
from tests.real_configs import CONFIGS, real_folder
from tests.support import few, skip_unavailable, user_error


@pytest.fixture(scope="module")
def v3() -> Planned:
    return published("DeepSeek-V3", V3, EIGHT | {"global_batch": 64})


# ---- operations


def test_the_operations_of_a_layer_are_those_of_its_published_sizes(
    v3: Planned,
) -> None:
    """arXiv 2412.19437, 4.2: hidden 7168, 128 heads of 128 + 64, latents 1536 and 512,
    8 of 256 experts of 2048.
    """
    tokens, layer = 4096, v3.work.layers[3]
    per_token = {
        "attention a" + WHOLE: 7168 * 1536 + 7168 * (512 + 64),
        "attention a": 1536 * 128 * (128 + 64) + 512 * 128 * (128 + 128), "attention b": 128 * 128 * 7168,
        "router": 7168 * 256, "experts": 8 * 3 * 7168 * 2048, "shared expert": 3 * 7168 * 2048,
    }  # fmt: skip
    assert {name: work.flops for name, work in layer.steps.items()} == {
        name: 2.0 * tokens * weights for name, weights in per_token.items()
    }
    assert layer.core == 2.0 * 128 * tokens**2 * (128 + 64 + 128)
    assert layer.scores == 128 * tokens**2
    assert layer.steps["experts"].weights == 256 * 3 * 7168 * 2048
    assert layer.steps["attention b"].weights == per_token["attention b"]
    # as the paper calls it
    assert v3.work.num_parameters == pytest.approx(71e9, rel=0.005)


def test_every_query_head_has_scores_whoever_shares_its_keys() -> None:
    """Qwen3-30B-A3B: 32 heads of width 128 on 4 heads of keys and values."""
    layer = published(
        "Qwen3-30B-A3B", {"num_hidden_layers": 1}, {"length": 64, "batch": 2}
    ).work.layers[0]
    assert layer.scores == 2 * 32 * 64**2
    assert layer.core == 2.0 * 2 * 32 * 64**2 * (128 + 128)
    assert layer.work("attention a").flops == 2.0 * 2 * 64 * 2048 * (32 + 4 + 4) * 128


def test_experts_that_run_on_all_tokens_count_as_often_as_tokens_choose_them() -> None:
    skip_unavailable("llama4")
    scout = published(
        "Llama-4-Scout-17B-16E", {}, {"batch": 1, "length": 64, "phase": "prefill"}
    )
    assert scout.work.layers[0].work("experts").flops == 2.0 * 64 * 3 * 5120 * 8192
    assert (
        scout.work.layers[0].work("shared expert").flops == 2.0 * 64 * 3 * 5120 * 8192
    )


def test_a_sliding_window_leaves_few_pairs_and_a_short_cache() -> None:
    """gpt-oss-20b: 24 layers, every second of which sees only the last 128 tokens; 64
    heads of width 64 on 8 heads of keys and values.
    """
    length = 512
    served = {"phase": "prefill", "length": length, "batch": 2, "gpu": "h100"}
    windowed, full = published("gpt-oss-20b", {}, served).work.layers[:2]
    pairs = sum(min(k + 1, 128) for k in range(length))
    every = length * (length + 1) / 2
    assert windowed.in_window == pytest.approx(pairs / every) and full.in_window == 1
    assert full.core_left == 2 * 64 * (64 + 64) * 2 * length**2 / 2
    assert windowed.core_left == pytest.approx(full.core_left * pairs / every)
    # A token of an answer reads keys and values of this many tokens before it.
    decoding = served | {"phase": "decode", "data_parallel": 2}
    planned = published("gpt-oss-20b", {}, decoding)
    windowed, full = planned.work.layers[:2]
    token_bytes = 2 * 8 * 64 * 2
    assert windowed.cache_bytes == 128 * token_bytes
    assert full.cache_bytes == length * token_bytes
    assert full.core == 4 * windowed.core == 2 * 64 * (64 + 64) * length
    assert planned.cached == 12 * (128 + length) * token_bytes


def test_a_server_has_an_attention_kernel_where_transformers_has_eager_code() -> None:
    """gpt-oss: its training computes all of attention before the dispatch."""
    settings = {"length": 64, "gpu": "h100"}
    trained = published("gpt-oss-20b", {}, settings).work.layers[1]
    assert trained.core == 0 and "attention b" not in trained.steps
    served = published("gpt-oss-20b", {}, settings | {"phase": "prefill"})
    layer = served.work.layers[1]
    assert layer.work("attention b").flops == 2 * 64 * 64 * 64 * 2880
    assert layer.work("attention a").flops == 2 * 64 * 2880 * (64 + 8 + 8) * 64
    assert served.facts()[1].split == "core"  # type: ignore[union-attr]


def test_only_moe_layers_have_exchanges_and_dense_ones_an_mlp(tmp_path: Path) -> None:
    lite = prepare(
        PlanSettings(
            model=str(real_folder("DeepSeek-V2-Lite", tmp_path / "m")), length=256
        )
    )
    assert lite.work.moe == [False] + [True] * 26
    assert lite.work.layers[0].work("mlp").flops == 2.0 * 256 * 3 * 2048 * 10944
    assert [row["layer"] for row in plan_times(lite)["windows"]] == list(range(1, 27))


# ---- the paper's measurements


@pytest.mark.parametrize("row", TRAINING[:3], ids=[row[0] for row in TRAINING[:3]])
def test_assumptions_that_were_not_fitted_give_the_papers_speed_ups_and_overlap(
    row: Any,
) -> None:
    _, name, changes, settings, speed_up, overlap = row
    times = at(published(name, changes, settings), "assumed")
    assert times["speed_up"] == pytest.approx(speed_up, abs=0.035)
    if overlap is not None:
        shares = [100 * times["overlap"][way] for way in ("forward", "backward")]
        assert shares == pytest.approx(overlap, abs=12)


def test_the_assumed_values_are_those_that_were_chosen_before_the_comparison() -> None:
    chosen = {
        "gemm": 0.5, "grouped": 0.4, "core": 0.3, "hbm": 0.65, "link": 0.85, "nic": 0.8, "slowdown": 0.15,
    }  # fmt: skip
    assert {name: ASSUMPTIONS[name].value for name in chosen} == chosen


def test_a_prefill_plan_expects_the_ends_of_assumptions_and_says_how_far_off_plans_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {  # least and most of three lengths (section 5.2)
        "DeepSeek-V2-Lite": (V2, ON_VLLM, 0.082, 0.168),
        "Llama-4-Scout-17B-16E": ({}, ON_VLLM, 0.122, 0.185),
        "DeepSeek-V3": ({}, ON_300X, 0.34, 0.34),
    }
    over: dict[bool, list[float]] = {True: [], False: []}
    for name, (changes, served, least, most) in measured.items():
        gains = [
            plan_times(published(name, changes, served | {"length": length}))
            for length in (512, 1024, 2048)
        ]
        planned = [times["speed_up"] - 1 for times in gains]
        slow = "without_aiter" in served
        over[not slow] += [min(planned) / most, max(planned) / least]
        if slow:  # the same server with AITER
            with_aiter = [
                plan_times(published(name, changes, ON_300X | {"length": length}))
                for length in (512, 1024, 2048)
            ]
            fast = [times["speed_up"] - 1 for times in with_aiter]
            over[True] += [min(fast) / most, max(fast) / least]
        # Within 0.1 of every speed-up that the paper measured.
        assert max(planned) - most < 0.1 and least - min(planned) < 0.1
    for aiter, ratios in over.items():
        extremes = [min(ratios), max(ratios)]
        assert extremes == pytest.approx(OVER_PREDICTION[aiter], abs=0.06)
    folder = lite(tmp_path)
    assert main(["plan", folder, "--phase", "prefill", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ends = [end - 1 for row in facts["sensitivity"] for end in row["speed_up"]]
    gain = facts["times"]["speed_up"] - 1
    ends.append(gain / 4.9)  # slower kernels than planned
    assert facts["expected_gain"] == pytest.approx([min(ends), max(ends)])
    assert min(ends) < gain < max(ends)
    assert main(["plan", folder, "--phase", "prefill"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if "EXPECTED GAIN" in line
    )
    assert f"EXPECTED GAIN: {100 * min(ends):.1f}% to {100 * max(ends):.1f}%" in line
    assert "were 0.72 to 4.9 times those that the FarSkip paper measured" in line
    assert main(["plan", folder, "--gpu", "mi325x", "--length", "512"]) == 0
    assert "EXPECTED GAIN" not in capsys.readouterr().out


def test_without_aiter_a_prefill_takes_as_many_times_as_long_as_amd_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"num_hidden_layers": 2, "first_k_dense_replace": 0}
    settings = ON_300X | {"length": 4096}
    fast, slow = (
        plan_times(
            published(
                "DeepSeek-V3", few, settings | {"without_aiter": without}
            ).assuming(**BARE)
        )
        for without in (False, True)
    )
    layer, longer = fast["layer_s"], slow["layer_s"]
    # Matmuls alone: projections and the shared expert.
    for name in ("attention a", "shared expert"):
        assert longer[name] == pytest.approx(2 * layer[name]), name
    # Fused attention counts 14 times and the output projection twice; the experts'
    # matmuls count three times, their passes over the rows (two of "arrive") once.
    work = published("DeepSeek-V3", few, settings).work.layers[1]
    core_s = work.core_left / (1307.4e12 * 0.35) / 8
    output_s = work.work("attention b").flops / (2614.9e12 * 0.5) / 8
    assert layer["attention b"] == pytest.approx(core_s + output_s)
    assert longer["attention b"] == pytest.approx(14 * core_s + 2 * output_s)
    rows_s = 2 * layer["arrive"]
    assert longer["experts"] - rows_s == pytest.approx(3 * (layer["experts"] - rows_s))
    assert slow["exchange_s"] == fast["exchange_s"]
    assert slow["communication_share"] < fast["communication_share"] / 2

    folder = lite(tmp_path)
    prefill = ["plan", folder, "--phase", "prefill", "--gpu", "mi300x"]
    assert main([*prefill, "--dtype", "fp8", "--without-aiter"]) == 0
    without = "KERNELS: without AITER, dense matmuls take 2, experts 3 and attention 14"
    assert without in capsys.readouterr().out
    assert main([*prefill, "--dtype", "fp8"]) == 0
    assert "for vLLM's own, add --without-aiter" in capsys.readouterr().out
    assert main(prefill) == 0
    assert "KERNELS" not in capsys.readouterr().out


def test_a_range_contains_its_planned_gain_where_both_ends_lie_on_one_side() -> None:
    few = {"num_hidden_layers": 2, "first_k_dense_replace": 0}
    settings: dict[str, Any] = {
        "phase": "prefill", "gpu": "mi300x", "batch": 16, "length": 2048, "dtype": "fp8",
    }  # fmt: skip
    planned = published("DeepSeek-V3", few, settings)
    # Each all-reduce just fills its window.
    planned = planned.assuming(link=0.8)
    facts = plan(planned)
    one_sided = 0
    for row in facts["sensitivity"]:
        for key in ("speed_up", "over_exact"):
            low, high = row[key]
            assert low <= facts["times"][key] <= high
        ends = [
            plan_times(planned.assuming(**{row["name"]: end}))["speed_up"]
            for end in row["range"]
        ]
        one_sided += max(ends) < facts["times"]["speed_up"] - 1e-3
    assert one_sided


@pytest.mark.breadth
def test_published_times_between_tokens_over_planned_ones_are_the_expected_ratio():
    ratios = [
        ms / 1e3 / plan_times(published(name, changes, settings | served))["regular_s"]
        for _, _, name, changes, settings, steps in STEPS
        for batch, ms in steps.items()
        for served in [{"phase": "decode", "batch": batch}]
    ]
    assert [min(ratios), max(ratios)] == pytest.approx(STEP_RATIO, abs=0.05)


def test_a_decoding_plan_expects_what_published_step_times_leave_of_its_gain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", lite(tmp_path), "--phase", "decode", "--tp", "8"]
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    # Regular steps as planned, and 2.3 times as long, in which the same seconds are
    # hidden, at both ends of every assumption.
    gains = []
    for regular in (1.0, 2.3):
        for row in facts["sensitivity"]:
            for speed_up in row["speed_up"]:
                hidden = 1 - 1 / speed_up
                gains.append(regular / (regular - hidden) - 1)
    assert facts["expected_gain"] == pytest.approx([min(gains), max(gains)])
    assert main(command) == 0
    (line,) = [
        line for line in capsys.readouterr().out.splitlines() if "EXPECTED GAIN" in line
    ]
    assert f"expect {100 * min(gains):.1f}% to {100 * max(gains):.1f}%" in line
    assert f"mostly by {facts['hangs_on']}" in line and "first token" not in line


# ---- memory


def test_memory_is_that_of_the_estimate_and_of_served_weights() -> None:
    served = published(
        "DeepSeek-V2-Lite", {}, {"phase": "prefill", "batch": 2, "length": 100}
    )
    parts = memory(served)["parts"]
    assert memory(served)["gpu_bytes"] == 141_000_000_000
    assert parts["activations"] == 2 * 100 * 2048 * 2 * 4
    short = published(
        "DeepSeek-V2-Lite",
        {},
        {"phase": "prefill", "batch": 2, "length": 100, "dtype": "fp8"},
    )
    assert memory(short)["parts"]["weights"] == 15_706_484_224 // 8
    assert parts["weights"] == 15_706_484_224 * 2 // 8
    assert parts["keys and values"] == 27 * (512 + 64) * 2 * 100 * 2
    wide = published(
        "DeepSeek-V2-Lite",
        {},
        {"phase": "decode", "batch": 16, "length": 100, "data_parallel": 8},
    )
    # a rank has an eighth of these, and all of the rest
    experts = 26 * 64 * 3 * 2048 * 1408
    assert memory(wide)["parts"]["weights"] == 2 * (15_706_484_224 - experts * 7 // 8)
    assert memory(wide)["parts"]["keys and values"] == 27 * (512 + 64) * 2 * 100 * 2
    short = published("DeepSeek-V2-Lite", {"num_hidden_layers": 3}, {"length": 128})
    parts = memory(short)["parts"]
    assert parts["student weights"] == short.work.num_parameters * 4 // 8
    assert parts["optimizer states"] == 2 * parts["gradients"]
    # A rank gathers an eighth of the experts of a layer: two layers in bfloat16, and
    # the gradient of one.
    whole = published(
        "DeepSeek-V2-Lite",
        {"num_hidden_layers": 3},
        {"length": 128, "expert_parallel": 1},
    )
    head, attention = 102400 * 2048, 2048 * (3072 + 576 + 2048) + 512 * 4096
    experts = 64 * 3 * 2048 * 1408
    layer = experts + 3 * 2048 * 2816 + attention + 64 * 2048
    more = memory(whole)["parts"]["gathered weights"] - parts["gathered weights"]
    assert more == pytest.approx(
        2 * 2 * 7 / 8 * experts + (2 + 4) * (layer - head), rel=0.001
    )


def test_ranks_that_share_the_experts_keep_the_activations_of_those_that_a_token_chose():
    """Llama 4's own code runs all 16 experts on every token; ranks that share them run
    only the one that a token chose.
    """
    skip_unavailable("llama4")
    config = read_json(CONFIGS / "Llama-4-Scout-17B-16E.json")
    text = config["text_config"] | {"num_hidden_layers": 2}
    kept = []
    for length in (512, 1024):
        settings = {"length": length, "expert_parallel": 8, "keep_activations": True}
        one = published("Llama-4-Scout-17B-16E", {"text_config": text}, settings)
        kept.append(memory(one)["parts"]["activations"])
    # Per token, layer and expert (routed or shared): gate, up, activation and product,
    # in bfloat16. Attention keeps more beside that; 16 routed experts would be 1.1 MB.
    experts = 2 * 4 * 8192 * 2
    assert experts < (kept[1] - kept[0]) / (512 * 2) < 3 * experts


def test_a_plan_beyond_the_memory_says_what_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lite(tmp_path)
    settings = ["--gpu", "h100", "--batch", "24", "--keep-activations"]
    assert main(["plan", folder, *settings, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    memory = facts["memory"]
    assert not memory["fits"] and memory["total_bytes"] > memory["gpu_bytes"]
    # Activations take most of the memory, so that more GPUs alone do not help, but
    # fewer activations do.
    assert memory["needs_gpus"] is None and facts["times"]["speed_up"] > 1
    first, *others = memory["changes"]
    assert first == "without --keep-activations"
    assert any(change.startswith("--batch ") for change in others)
    assert main(["plan", folder, *settings]) == 0
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if "DOES NOT FIT" in line
    )
    assert (
        "DOES NOT FIT: more GPUs alone do not make it fit (tried: up to 64 times as"
        " many); one of these makes it fit: without" in line
    )
    for change in others:
        assert main(["plan", folder, *settings, *change.split(), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["memory"]["fits"], change
    assert main(["plan", folder, *settings[:-1], "--batch", "1", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)["memory"]
    assert whole["fits"] and whole["needs_gpus"] == 8 and whole["changes"] == []


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("ranks", "needed"),
    few([("--tp", "--nodes 2 --tp 16"), ("--dp", "--nodes 2 --dp 16 --batch 32")], 1),
)
def test_a_server_that_needs_more_ranks_is_told_all_options_of_them(
    ranks: str, needed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek-V3's 671 GB in FP8 do not fit four of a node's eight H100; 16 GPUs of 80
    GB hold them.
    """
    folder = str(real_folder("DeepSeek-V3", tmp_path / "m"))
    server = ["--phase", "decode", "--gpu", "h100", "--length", "1024"]
    words = ["plan", folder, *server, ranks, "4", "--batch", "8", "--json"]
    assert main(words) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert not memory["fits"] and memory["needs_gpus"] == 16
    assert memory["changes"] == [needed]
    assert main(["plan", folder, *server, *needed.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["fits"]


@pytest.mark.parametrize(
    ("name", "changed", "gpu", "expected"),
    [
        ("DeepSeek-V3", {}, "h100", ("FP8", 1.0, 1.0, "fp8")),
        ("DeepSeek-V3", {}, "a100", ("FP8, computed in bfloat16", 1.0, 1.0, "bfloat16")),
        ("gpt-oss-20b", {}, "h100", ("MXFP4 experts", 0.53125, 2.0, "bfloat16")),
        ("Qwen3-30B-A3B", {}, "h100", ("bfloat16", 2.0, 2.0, "bfloat16")),
        ("Qwen3-30B-A3B", {"quant_method": "gptq", "bits": 4, "group_size": 128}, "h100",
         ("INT4", 0.515625, 0.515625, "bfloat16")),
        ("Qwen3-30B-A3B", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "b200",
         ("NVFP4", 0.5625, 0.5625, "bfloat16")),
        (
            "Qwen3-30B-A3B",
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "group_0": {"weights": {"num_bits": 8, "type": "float"}}
                },
            },
            "h200",
            ("FP8", 1.0, 1.0, "fp8"),
        ),
        ("Kimi-K2-Thinking", {}, "h200", ("INT4 experts", 0.5625, 2.0, "bfloat16")),
        *few([
            ("Qwen3-30B-A3B", {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "lm_head"]}, "h200",
             ("FP8 experts", 1.0, 2.0, "fp8")),
            ("Qwen3-30B-A3B",
             {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.2.self_attn*"]},
             "b200", ("NVFP4 experts", 0.5625, 2.0, "bfloat16")),
            ("Qwen3-30B-A3B",
             {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "config_groups": {
                 "group_0": {"targets": ["model.language_model.layers.2.self_attn.o_proj"],
                             "weights": {"num_bits": 8, "type": "float"}},
                 "group_1": {"targets": ["model.language_model.layers.2.mlp.experts"],
                             "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}},
             "b200", ("NVFP4 experts, FP8", 0.5625, 1.0, "bfloat16")),
            ("Qwen3-30B-A3B",
             {"quant_method": "compressed-tensors", "config_groups": {
                 "group_0": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 8, "type": "float"}}}},
             "h100", ("FP8 experts", 1.0, 2.0, "fp8")),
            ("Qwen3-30B-A3B", {"quant_method": "fp8", "ignored_layers": ["model.layers.2.self_attn.o_proj"]}, "h200",
             ("FP8 experts", 1.0, 2.0, "fp8")),
            ("Qwen3-30B-A3B", {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*self_attn.*": {}}}, "h100",
             ("INT4 experts", 0.515625, 2.0, "bfloat16")),
            ("Qwen3-30B-A3B",
             {"quant_method": "quark", "exclude": ["lm_head", "re:model.layers.*self_attn.*"],
              "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}, "layer_quant_config": {}},
             "mi355x", ("MXFP4 experts", 0.53125, 2.0, "bfloat16")),
            ("Qwen3-30B-A3B",
             {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}},
              "layer_quant_config": {"*.mlp.experts*": {"weight": [{"dtype": "fp8_e4m3"}, {"dtype": "int4"}]}}},
             "mi355x", ("INT4 experts, FP8", 0.5, 1.0, "bfloat16")),
            ("Qwen3-30B-A3B", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "h100",
             ("INT4", 0.515625, 0.515625, "bfloat16")),
            ("Qwen3-30B-A3B",
             {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {
                 "group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}}},
             "b200", ("MXFP4", 0.53125, 0.53125, "bfloat16")),
            ("Qwen3-30B-A3B", {"quant_method": "mxfp8"}, "b200", ("FP8", 1.0, 1.0, "fp8")),
            ("Qwen3-30B-A3B", {"quant_method": "nvfp4"}, "b200", ("NVFP4", 0.5625, 0.5625, "bfloat16")),
        ], 2),
        ("Qwen3-30B-A3B", {"quant_method": "aqlm", "modules_to_not_convert": ["self_attn"]}, "h200",
         ("bfloat16 (the method aqlm is not planned)", 2.0, 2.0, "bfloat16")),
        pytest.param("DeepSeek-V4-Flash", {}, "h100", ("MXFP4 experts, FP8", 0.53125, 1.0, "fp8"),
                     marks=pytest.mark.breadth),
    ],
)  # fmt: skip
def test_a_server_holds_weights_as_the_checkpoint_says(
    name: str, changed: dict[str, Any], gpu: str, expected: tuple[Any, ...]
) -> None:
    changes = {"quantization_config": changed} if changed else {}
    served = {"phase": "decode", "gpu": gpu, "length": 64, "batch": 8}
    # Some name the kind of each of their layers.
    named = name in ("gpt-oss-20b", "DeepSeek-V4-Flash")
    few = {} if named else {"num_hidden_layers": 4}
    planned = published(name, changes | few, served)
    stored = planned.stored
    assert (stored.name, stored.experts, stored.others, stored.precision) == expected
    # One decoding step reads the weights of its experts once, at the rate of memory.
    work, roofline = planned.work, planned.assuming(**BARE).roofline
    layer = next(layer for layer in reversed(work.layers) if layer.moe)
    tp, active = (
        planned.tensor_parallel,
        1 - (1 - work.experts_per_token / work.num_experts) ** 8,
    )
    bandwidth = planned.machine.gpu.memory_gb_s * 1e9 * 0.65
    read = layer.work("experts").weights * active * expected[1] / bandwidth / tp
    rows = 2 * roofline.passes(
        roofline.values["row_passes"] / 4,
        work.tokens * work.experts_per_token / tp * work.row_width,
    )
    assert roofline.steps(work, layer, 1)["experts"] == pytest.approx(read + rows)
    # What is left out of a quantisation to FP8 is multiplied in bfloat16.
    if stored.name == "FP8 experts":
        whole = replace(roofline, stored=replace(stored, others=1.0))
        left_out = roofline.steps(work, layer, 1)["attention b"]
        assert left_out > whole.steps(work, layer, 1)["attention b"]
    # A training holds them in bfloat16, whatever the checkpoint says.
    trained = published(name, changes | few, {"length": 64})
    assert trained.stored.name == "bfloat16"


def test_a_sweep_has_a_row_for_each_value_that_is_that_values_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lite(tmp_path)
    machine = ["--gpu", "h100", "--batch", "2", "--length", "512"]
    assert main(["plan", folder, *machine, "--sweep", "ep=2,3,8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["swept"] == "ep" and facts["phase"] == "train"
    two, three, eight = facts["rows"]
    assert three["refused"] == "--ep 3: does not divide the 8 GPUs (1 x 8)"
    for row, ep in ((two, "2"), (eight, "8")):
        assert main(["plan", folder, *machine, "--ep", ep, "--json"]) == 0
        single = json.loads(capsys.readouterr().out)
        assert row["times"] == single["times"]
        # The tokens of a rank in a step, by hand.
        rate = 2 * 512 / single["times"]["regular_s"]
        assert row["tokens_per_second_per_gpu"]["regular"] == pytest.approx(rate)
        hours = row["gpu_hours_per_billion_tokens"]["regular"]
        assert 3600 * hours * rate == pytest.approx(1e9)
    served = ["--phase", "decode", "--tp", "8", "--length", "512"]
    assert main(["plan", folder, *served, "--sweep", "batch=8,16", "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)["rows"]
    rate = 8 / 8 / first["times"]["overlapped_s"]
    assert first["tokens_per_second_per_gpu"]["overlapped"] == pytest.approx(rate)
    assert main(["plan", folder, *served, "--sweep", "batch=8,16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "time between tokens, ms" in lines[0] and len(lines) == 4
    cluster = tmp_path / "c.yaml"
    cluster.write_text("{gpu: h200, assumptions: {all_reduce_us: 12}}")
    own = ["--sweep", "batch=8,16", "--cluster", str(cluster)]
    assert main(["plan", folder, *served, *own]) == 0
    same = "every row has the same all_reduce_us, as given"
    assert capsys.readouterr().out.splitlines()[-1] == same
    figure = tmp_path / "sweep.png"
    assert (
        main(["plan", folder, *served, "--sweep", "batch=8,16", f"--figure={figure}"])
        == 0
    )
    assert figure.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main(["plan", folder, *served[:2], "--sweep", "tp=2,8"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    # The GPUs of the server, not those of the machine.
    assert [row.split()[1:4:2] for row in rows] == [["2", "2"], ["8", "8"]]
    assert main(["plan", folder, *served, "--sweep", "nodes=1,2"]) == 2
    assert "a server of 8 ranks is the same on any" in capsys.readouterr().err
    for wrong, reason in {
        "gpu=h100": "one of nodes, gpus-per-node",
        "batch": "must look like nodes=1,2,4",
        "batch=1,x": "'x' is not a number",
        "ep=3,5": "no value can be planned: --ep 3: does not divide",
    }.items():
        assert main(["plan", folder, "--sweep", wrong]) == 2
        assert reason in capsys.readouterr().err


# ---- files


def test_the_windows_are_written_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "windows.json"
    assert (
        main(["plan", lite(tmp_path), "--length", "512", "--windows", str(path)]) == 0
    )
    windows = json.loads(path.read_text())
    rows = plan_times(prepare(PlanSettings(model=str(tmp_path / "lite"), length=512)))[
        "windows"
    ]
    for name in ("dispatch_s", "combine_s"):
        assert windows[name] == [row[name] for row in rows]
    assert windows["layers"] == [1, 2, 3] and windows["expert_parallel"] == 8
    assert len(windows["dispatch_s"]) == len(windows["combine_s"]) == 3
    assert min(windows["dispatch_s"]) > 0
    assert windows["combine_s"][-1] < windows["combine_s"][0]


@pytest.mark.parametrize("option", ["--windows", "--figure"])
def test_a_file_that_plan_did_not_write_stays_and_its_own_is_replaced(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lite(tmp_path)
    words = ["plan", folder, "--length", "64"]
    words += ["--study", str(study(tmp_path / "s", 4))] if option == "--figure" else []
    foreign = [Path(folder) / "config.json", tmp_path / "picture.png"]
    foreign[1].write_bytes(b"\x89PNG\r\n\x1a\n" + b"tEXtSoftware\0somebody else's")
    before = [path.read_bytes() for path in foreign]
    for path in foreign:
        assert main([*words, option, str(path)]) == 2
        assert (
            f"{path}: exists and is another kind of file; name another file"
            in capsys.readouterr().err
        )
    assert [path.read_bytes() for path in foreign] == before
    own = tmp_path / "own"
    for length in ("64", "128"):
        assert main([*words, "--length", length, option, str(own)]) == 0
        before.append(own.read_bytes())
    assert option == "--figure" or before[-1] != before[-2]


def test_a_cluster_file_says_what_the_options_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, cluster = lite(tmp_path), tmp_path / "cluster.yaml"
    cluster.write_text(
        "gpu: mi300x\nnodes: 2\nnetwork_gb_s: 25\nassumptions: {gemm: 0.6}\n"
    )

    def planned(*words: str) -> Any:
        assert main(["plan", folder, "--length", "512", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    by_file = planned("--cluster", str(cluster))
    by_options = planned("--gpu", "mi300x", "--nodes", "2", "--network-gb-s", "25")
    assert by_file["machine"] == by_options["machine"]
    assert by_file["memory"] == by_options["memory"]
    assert by_file["times"]["compute_s"] < by_options["times"]["compute_s"]  # gemm


SIDES = {"attention": "partial", "mlp": "outdated"}


def study(folder: Path, num_layers: int) -> Path:
    points = [
        {
            "side": side,
            "num_layers": n,
            "layers": (
                list(range(n))
                if side == "first"
                else list(range(num_layers - n, num_layers))
            ),
            "values": {"kl": {"value": 0.1 * n, "stderr": 0.01, "num_tokens": 9}},
        }
        for side in ("first", "last")
        for n in (2, num_layers)
    ]
    folder.mkdir()
    content = {
        "schema_version": 1, "study": SIDES, "num_hidden_layers": num_layers, "moe_layers": list(range(1, num_layers)),
        "metrics": [{"name": "kl", "unit": "nats per token", "better": "lower"}], "points": points,
    }  # fmt: skip
    (folder / "layers.json").write_text(json.dumps(content))
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_study_stands_beside_what_each_selection_brings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "worth.png"
    words = [
        "plan", lite(tmp_path), "--length", "512", "--study", str(study(tmp_path / "s", 4)), "--json",
    ]  # fmt: skip
    assert main([*words, "--figure", str(figure)]) == 0
    facts = json.loads(capsys.readouterr().out)
    rows = {(row["side"], row["num_layers"]): row for row in facts["study"]}
    assert rows["last", 4]["speed_up"] == pytest.approx(facts["times"]["speed_up"])
    # One of the first two layers is dense.
    assert (
        1
        < rows["first", 2]["speed_up"]
        < rows["last", 2]["speed_up"]
        < rows["last", 4]["speed_up"]
    )
    assert rows["last", 2]["loss"] == 0.2 and rows["last", 2]["selection"] == "2-3"
    assert figure.stat().st_size > 5000


def routed(folder: Path, **changes: Any) -> Path:
    """Return a routing study of the model of `lite`: in each of three layers the first
    eighth of 64 experts has the most rows.
    """
    loads = [[[hot] * 8 + [10] * 56 for _ in range(2)] for hot in (10, 30, 50)]
    facts = {
        "layers": [1, 2, 3], "num_experts": 64, "top_k": 6, "counts": loads,
    } | changes  # fmt: skip
    folder.mkdir()
    (folder / "routing.json").write_text(
        json.dumps({"schema_version": 1, "models": [facts]})
    )
    return folder


def test_a_routing_study_is_read_as_its_stage_left_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", lite(tmp_path), "--routing", str(routed(tmp_path / "r"))]
    stage = Stage(tmp_path / "r", "routing", {}, {})
    stage.finish({})
    assert main(words) == 0
    file = tmp_path / "r" / "routing.json"
    file.write_text(file.read_text().replace("[50,", "[60,", 1))
    assert main(words) == 2
    assert (
        "r: differs from what the stage wrote (routing.json: "
        in capsys.readouterr().err
    )


def test_the_imbalance_of_a_routing_study_is_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", lite(tmp_path), "--length", "512"]
    assert main(words) == 0
    assert "EVEN ROUTING is assumed (imbalance 1)" in capsys.readouterr().out
    assert main([*words, "--routing", str(routed(tmp_path / "r"))]) == 0
    assert "EVEN ROUTING" not in capsys.readouterr().out
    assert main([*words, "--routing", str(tmp_path / "r"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    # 1; 30 over (30 + 7 x 10) / 8; 50 over 120 / 8
    expected = (1 + 30 / 12.5 + 50 / 15) / 3
    (row,) = [row for row in facts["sensitivity"] if row["name"] == "imbalance"]
    assert facts["imbalance"] == row["value"] == pytest.approx(expected)
    assert row["range"] == [1.0, 5.1] and "DeepSpeed issue 8213" in row["source"]
    assert row["speed_up"][0] != row["speed_up"][1]
    even = plan_times(prepare(PlanSettings(model=str(tmp_path / "lite"), length=512)))[
        "exchange_s"
    ]["combine"]
    uneven = facts["times"]["exchange_s"]["combine"]
    # 6 of 64 experts; the busiest of 8 ranks has 8 of them, or acts as if it had more.
    hit = [
        1 - math.prod(1 - own / (64 - i) for i in range(6)) for own in (8, 8 * expected)
    ]
    assert uneven - 20e-6 == pytest.approx(hit[1] / hit[0] * (even - 20e-6))


def test_the_table_names_the_back_end_of_a_wide_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", lite(tmp_path), "--phase", "decode", "--dp", "8", "--batch", "8"]
    for chosen, named in (
        ([], "allgather_reducescatter"),
        (["--all2all", "deepep_low_latency"], "deepep_low_latency"),
    ):
        assert main([*words, *chosen]) == 0
        (line,) = (x for x in capsys.readouterr().out.splitlines() if x[:5] == "phase")
        assert f"data parallel 8, expert parallel 8 over {named}, 8 x" in line


def test_layers_with_equal_windows_are_one_row() -> None:
    """gpt-oss: every second layer reads only a window; the last layer hides no
    combine.
    """
    served = {"phase": "decode", "batch": 64, "length": 4096, "gpu": "h100"}
    facts = plan(published("gpt-oss-20b", {}, served), advise=False)
    text = plan_table(facts)
    first = [line.split("|")[1].strip() for line in text.splitlines() if "|" in line]
    assert {"0,2,…,22", "1,3,…,21", "23"} <= set(first)


def test_people_read_milliseconds_shares_of_their_own_row_and_whether_equation_9_holds(
    v3: Planned,
) -> None:
    facts = plan(v3)
    times, text = facts["times"], plan_table(facts)
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    }
    share = f"{times['communication_s'] / times['regular_s']:.1%}"
    assert rows["regular"] == [
        f"{1e3 * times['regular_s']:,.0f}", share, share, "1.000", f"{times['over_exact'] / times['speed_up']:.3f}",
    ]  # fmt: skip
    overlapped = times["overlapped_s"]
    shares = [
        f"{times[name] / overlapped:.1%}" for name in ("communication_s", "exposed_s")
    ]
    assert rows["overlapped"] == [
        f"{1e3 * overlapped:,.0f}", *shares, f"{times['speed_up']:.3f}", f"{times['over_exact']:.3f}",
    ]  # fmt: skip
    first = times["windows"][0]
    assert rows["0"][:2] == [
        f"{1e3 * times['exchange_s']['dispatch']:.3g}",
        f"{1e3 * first['dispatch_s']:.3g}",
    ]
    for ratio, words in (
        (0.99, "holds: necessary, not sufficient"),
        (1.01, "does not hold"),
    ):
        assert f"= {ratio}, {words}" in plan_table(
            facts | {"times": times | {"equation_9": ratio}}
        )


# ---- what is refused


def refusals(tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    write_links(tmp_path / "links.json", even_links(4, 1e-9))
    others = even_links(8, 1e-9).model_copy(update={"collective": "p2p"})
    write_links(tmp_path / "p2p.json", others)
    times = Times(
        model_type="deepseek_v2", num_layers=4, ranks=8, batch=1, length=64, step_s=1.0,
        connectivity=ConnectivityConfig(),
        exchanges=[ExchangeTime(layer=1, kind="dispatch", backward=False, seconds=0.1, window_s=0.2)],
    )  # fmt: skip
    write_times(tmp_path / "times.json", times)
    of_a_server = {"phase": "decode", "exchanges": [], "communication_s": 0.1}
    write_times(tmp_path / "served.json", times.model_copy(update=of_a_server))
    (tmp_path / "cluster.yaml").write_text("gpu: h100\nassumptions: {gem: 1}\n")
    (tmp_path / "gpu.yaml").write_text("gpu: h1000\n")
    (tmp_path / "less.yaml").write_text("gpu: h100\nassumptions: {imbalance: 0.5}\n")
    (tmp_path / "more.yaml").write_text("gpu: h100\nassumptions: {slowdown: 5}\n")
    (tmp_path / "zero.yaml").write_text("gpu: h100\nassumptions: {gemm: 0}\n")
    (tmp_path / "true.yaml").write_text("gpu: h100\nassumptions: {gemm: true}\n")
    (tmp_path / "late.yaml").write_text("gpu: h100\nassumptions: {latency_us: 1e300}\n")
    (tmp_path / "ranks.yaml").write_text("gpu: h100\nassumptions: {imbalance: 9}\n")
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text('{"model_type": "llama"}')
    model = lite(tmp_path)
    return {
        "gpu": ([model, "--gpu", "h1000"], "--gpu h1000: unknown GPU; allowed: a100"),
        "experts": ([model, "--nodes", "3", "--ep", "24"], "--ep 24: does not divide the 64 experts"),
        "experts of all ranks": ([model, "--nodes", "3"], "--ep (by default all 24 GPUs): does not divide the 64"),
        "experts of a stage's ranks": (
            [model, "--nodes", "3", "--pp", "2"], "--ep (by default all 12 GPUs of a stage): does not divide",
        ),
        "experts of a server": ([model, "--phase", "prefill", "--tp", "3"], "--tp 3: does not divide the 64 experts"),
        "experts of a whole server": (
            [model, "--phase", "decode", "--nodes", "3"], "--tp (by default all 24 GPUs): does not divide the 64",
        ),
        "experts of a wide server": (
            [model, "--phase", "decode", "--nodes", "3", "--dp", "3", "--batch", "3"],
            "--dp 3: does not divide the 64 experts",
        ),
        "tensor-parallel ranks": ([model, "--tp", "3"], "error: --tp 3: 3 ranks do not divide the 8 GPUs"),
        "stages": ([model, "--pp", "3"], "error: --pp 3: 3 ranks do not divide the 8 GPUs"),
        "ranks": ([model, "--ep", "3"], "--ep 3: does not divide the 8 GPUs (1 x 8)"),
        "far beyond memory": (
            [model, "--batch", str(10**20)],
            f"--batch {10**20} --length 4096: the residual stream of these tokens alone takes",
        ),
        "rows far beyond memory": ([model, "--length", str(10**13)], f"--batch 1 --length {10**13}: the residual"),
        "links": ([model, "--links", str(tmp_path / "links.json")], "; give --ep 4, or"),
        "another collective": (
            [model, "--links", str(tmp_path / "p2p.json")],
            "the links were measured with p2p, the exchanges are all_to_all_single; measure them with",
        ),
        "links in serving": (
            [model, "--phase", "decode", "--tp", "4", "--links", str(tmp_path / "links.json")],
            "measured for all-to-all, but without --dp decode uses all-reduces",
        ),
        "dense": ([str(tmp_path / "dense")], "'llama' is a dense model"),
        "top-k": (
            [damaged(tmp_path / "top", num_experts_per_tok=500)],
            "top/config.json: num_experts_per_tok must be from 1 to 64, the number of experts in a layer, got 500",
        ),
        "no heads": (
            [damaged(tmp_path / "heads", num_attention_heads=0)],
            "heads/config.json: num_attention_heads must be at least 1, got 0; correct it, or fetch the config again",
        ),
        "text as a number": (
            [damaged(tmp_path / "base", rope_theta="abc")],
            "base/config.json: rope_theta must be a number above 0, got 'abc'",
        ),
        "no base": (
            [damaged(tmp_path / "empty", rope_theta=None)],
            "empty/config.json: transformers cannot build it (without a value: rope_theta): unsupported operand",
        ),
        "no section": (
            [damaged(tmp_path / "text", text_config=[1])], "text/config.json: text_config must be an object, got [1]",
        ),
        "ranks of stages": ([model, "--tp", "2", "--pp", "3"], "--tp 2 --pp 3: 6 ranks do not divide the 8 GPUs"),
        "tokens of ranks": ([model, "--tp", "8", "--length", "12"], "--tp 8: does not divide the 12 tokens of a"),
        "more stages than layers": ([model, "--pp", "8"], f"--pp 8: {model}/config.json has 4 layers"),
        "stages of a server": ([model, "--phase", "decode", "--pp", "2"], "--pp 2: --phase decode has no"),
        "experts of a stage": ([model, "--pp", "2", "--ep", "8"], "does not divide the 8 GPUs (1 x 8) / 2 stages"),
        "rows of copies": (
            [model, "--tp", "2", "--pp", "2", "--global-batch", "3"],
            "--global-batch 3: not a multiple of 2 rows, 1 on each of 2 copies (GPUs / --tp / --pp)",
        ),
        "measured by another": (
            [model, "--tp", "2", "--length", "64", "--measured", str(tmp_path / "times.json")],
            "--measured: the times are of fcsd's training, which has neither tensor nor pipeline parallelism",
        ),
        "server's experts": (
            [model, "--phase", "prefill", "--ep", "4"],
            "--ep 4: a server's experts are distributed over all its 8 tensor-parallel ranks",
        ),
        "data-parallel training": ([model, "--dp", "8"], "--dp 8: only for a server; in training every rank"),
        "both ways": ([model, "--phase", "prefill", "--dp", "8", "--tp", "8"], "--dp 8: implies --tp 1 --ep 8"),
        "ranks of no server": ([model, "--phase", "prefill", "--dp", "3"], "--dp 3: does not divide the 8 GPUs"),
        "requests": ([model, "--phase", "decode", "--dp", "8", "--batch", "12"], "--batch 12: the server's requests"),
        "backend of no ranks": (
            [model, "--phase", "decode", "--all2all", "deepep_low_latency"],
            "--all2all deepep_low_latency: works only with --dp",
        ),
        "links of a gather": (
            [model, "--phase", "decode", "--dp", "4", "--batch", "4", "--links", str(tmp_path / "links.json")],
            "--all2all allgather_reducescatter gathers; choose another",
        ),
        "measured wide": (
            [model, "--phase", "decode", "--dp", "8", "--batch", "8", "--measured", str(tmp_path / "served.json")],
            "--measured: data_parallel is False in the file, but True in the plan",
        ),
        "global batch": ([model, "--global-batch", "12"], "--global-batch 12: not a multiple of 8 rows"),
        "batch": ([model, "--batch", "0"], "--batch: Input should be greater than or equal to 1, got 0"),
        "network": ([model, "--network-gb-s", "0"], "--network-gb-s: Input should be greater than 0, got 0"),
        "no network": ([model, "--network-gb-s", "inf"], "--network-gb-s: Input should be a finite number"),
        "no ranks": ([model, "--ep", "0"], "--ep 0: does not divide the 8 GPUs"),
        "no servers": ([model, "--phase", "prefill", "--tp", "0"], "--tp 0: there are 8 GPUs"),
        "no rows": ([model, "--global-batch", "0"], "--global-batch 0: not a multiple of 8 rows"),
        "gpu of a file": ([model, "--cluster", str(tmp_path / "gpu.yaml")], f"{tmp_path}/gpu.yaml: gpu h1000: unknown"),
        "two machines": (
            [model, "--gpu", "h100", "--cluster", str(tmp_path / "cluster.yaml")],
            "--cluster and --gpu are both given",
        ),
        "assumption": (
            [model, "--cluster", str(tmp_path / "cluster.yaml")],
            "assumptions.gem: unknown; did you mean 'gemm'?",
        ),
        "measured elsewhere": (
            [model, "--length", "128", "--measured", str(tmp_path / "times.json")],
            "--measured: length is 64 in the file, but 128 in the plan",
        ),
        "another model's routing": (
            [model, "--routing", str(routed(tmp_path / "r", top_k=8))],
            "a routing study of 3 MoE layers, top 8 of 64 experts, but the model has 3, top 6 of 64",
        ),
        "no routing": ([model, "--routing", str(tmp_path)], "routing.json: no such file; `fcsd-steer routing` writes"),
        "routing twice": (
            [model, "--routing", str(tmp_path / "r"), "--measured", str(tmp_path / "times.json")],
            "--routing and --measured are both given",
        ),
        "less than even": (
            [model, "--cluster", str(tmp_path / "less.yaml")],
            "assumptions.imbalance: 0.5: must be 1 or more: rows of the busiest rank",
        ),
        "more than all": (
            [model, "--cluster", str(tmp_path / "more.yaml")],
            "assumptions.slowdown: 5: must be 0 or more, at most 1: seconds that computation loses",
        ),
        "kernels in training": (
            [model, "--gpu", "mi300x", "--without-aiter"],
            "--without-aiter: --phase train: AMD published its kernels' times for a prefill in FP8",
        ),
        "kernels of another vendor": (
            [model, "--phase", "prefill", "--dtype", "fp8", "--without-aiter"],
            "--without-aiter: --gpu h200: AMD published",
        ),
        "kernels in bfloat16": (
            [model, "--phase", "prefill", "--gpu", "mi300x", "--without-aiter"],
            "--without-aiter: --dtype auto: AMD published",
        ),
        "fp8": ([model, "--dtype", "fp8", "--gpu", "a100"], "--dtype fp8: the NVIDIA A100 80GB SXM has no FP8 matmuls"),
        "steps of a server": (
            [model, "--phase", "decode", "--global-batch", "8"],
            "--global-batch: --phase decode has no optimiser step",
        ),
        "value": ([model, "--cluster", str(tmp_path / "zero.yaml")], "assumptions.gemm: 0: must be above 0"),
        "no number": (
            [model, "--cluster", str(tmp_path / "true.yaml")],
            "true.yaml: assumptions.gemm: a number is needed, got True",
        ),
        "no time": (
            [model, "--cluster", str(tmp_path / "late.yaml")],
            "assumptions.latency_us: 1e+300: must be above 0, at most 100000: fixed microseconds of a training's",
        ),
        "more than all ranks": (
            [model, "--cluster", str(tmp_path / "ranks.yaml")],
            "assumptions.imbalance: 9: must be at most 8, the number of ranks that share the experts",
        ),
        "figure": ([model, "--figure", "x.png"], "--figure: plots speed-up against quality, so it needs --study"),
        "windows": ([model, "--phase", "decode", "--windows", "x.json"], "has no dispatch and combine"),
        "windows nowhere": ([model, "--windows", "none/w.json"], "none/w.json: is in a folder that does not exist"),
        "figure of a folder": ([model, "--study", "x", "--figure", str(tmp_path)], "is a folder; name the file"),
        "study": ([model, "--study", str(study(tmp_path / "s", 5))], "a study of 5 layers, but the model has 4"),
    }  # fmt: skip


def damaged(folder: Path, **changes: Any) -> str:
    """Return a folder with the config of DeepSeek-V2-Lite and these values."""
    folder.mkdir()
    config = read_json(CONFIGS / "DeepSeek-V2-Lite.json") | changes
    write_json(folder / "config.json", config)
    return str(folder)


def test_what_cannot_be_planned_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = refusals(tmp_path)
    for words, expected in cases.values():
        assert main(["plan", *words]) == 2, words
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err.count("\n") == 1
        assert expected in printed.err, (words, printed.err)


def test_amds_keys_are_read_with_its_gate_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = real_folder("Instella-MoE-16B-A3B-Think", tmp_path / "amd")
    assert main(["plan", str(folder), "--length", "64", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["layers"] == list(range(27))
    own = {
        "gated_attention": False, "mlp_only_farskip": True, "num_hidden_layers": 5, "farskip_end_idx": 3,
    }  # fmt: skip
    (folder / "config.json").write_text(
        json.dumps(read_json(folder / "config.json") | own)
    )
    assert main(["plan", str(folder), "--length", "64", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["layers"], settings["attention"], settings["mlp"]) == (
        [0, 1, 2, 3],
        "full",
        "outdated",
    )


def test_the_gpus_that_are_known_are_listed_once() -> None:
    with pytest.raises(UserError) as refusal:
        find_gpu("none of them")
    assert str(refusal.value).count("allowed:") == 1
    with user_error(r"allowed: a100, .*; did you mean 'h200'\?$"):
        find_gpu("h20")


def test_mfu_is_that_of_the_parameters_a_token_meets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-30B-A3B, whose layers are all alike: projections, 8 of 128 experts, router,
    half of attention's pairs, and the head.
    """
    folder = str(real_folder("Qwen3-30B-A3B", tmp_path))
    words = ["plan", folder, "--gpu", "h200", "--nodes", "2", "--length", "4096"]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    width, heads, head = 2048, 32, 128
    attention = width * head * (2 * heads + 2 * 4)
    experts = 8 * 3 * 768 * width + 128 * width
    pairs = 2 * 2 * heads * head * 4096 / 2
    token_flops = 48 * (2 * (attention + experts) + pairs) + 2 * 151_936 * width
    for name, rate in facts["tokens_per_second_per_gpu"].items():
        by_hand = 3 * token_flops * rate / 989e12
        assert facts["mfu"][name] == pytest.approx(by_hand, rel=1e-3)
    assert main(words) == 0
    share = f"{facts['mfu']['regular']:.1%}"
    assert f"of the GPU's peak): regular {share}" in capsys.readouterr().out
    assert main([*words[:2], "--phase", "prefill", "--tp", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mfu"] is None
