"""What `fcsd plan` says of the runs that the FarSkip paper measured, beside what it
measured (docs/plan.md).

    python benchmarks/plan.py

Three columns: published peaks (every efficiency 1, links at their nominal rate, no
slow-down), the assumptions of `fcsd.planning.cost.assumptions`, which are not fitted,
and one of many settings that fit. A second table has plans beside exact schedules. One
network interface for each GPU is assumed; the paper says "400 Gbps between nodes"
without saying of what. DeepSeek-V3 with 6 layers, all of them MoE: the paper's 71B
parameters are those (three dense layers first, as published, would make 38B).
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fcsd.base.files import read_json
from fcsd.base.text import markdown
from fcsd.planning.cost.exact import compared
from fcsd.planning.cost.planned import Planned, PlanSettings, prepare
from fcsd.planning.cost.times import plan_times

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "files" / "configs"
_SHARES = ("gemm", "grouped", "fp8_grouped", "core", "fused_core", "hbm", "link", "nic")
PEAKS = dict.fromkeys(_SHARES, 1.0) | {"slowdown": 0.0}
FITTED = {
    "gemm": 0.3,
    "grouped": 0.3,
    "core": 0.25,
    "score_passes": 8.0,
    "slowdown": 0.0,
}
V3 = {"num_hidden_layers": 6, "first_k_dense_replace": 0}
MEGATRON = {"sharding": "optimizer", "rows_once": False, "keep_activations": True}
ON_8: dict[str, Any] = {"gpu": "mi325x", "unfused_attention": True} | MEGATRON
ON_32: dict[str, Any] = ON_8 | {"nodes": 4, "global_batch": 64}

TRAINING: tuple[tuple[str, str, dict[str, Any], dict[str, Any], float, tuple[float, float] | None], ...] = (
    ("V2-Lite, EP 8", "DeepSeek-V2-Lite", {}, ON_8 | {"batch": 8, "global_batch": 128}, 1.11, (87.6, 89.0)),
    ("V3 (6 layers), EP 8", "DeepSeek-V3", V3, ON_8 | {"global_batch": 64}, 1.04, (92.9, 84.1)),
    ("V3 (6 layers), EP 32", "DeepSeek-V3", V3, ON_32, 1.22, None),
    ("V3, EP 32, one interface a node", "DeepSeek-V3", V3, ON_32 | {"network_gb_s": 6.25}, 1.22, None),
)  # fmt: skip
"""Name, config, changes to it, settings, the paper's speed-up, its overlap forward and
backward (Table 3, Figure 5).
"""

ON_300X: dict[str, Any] = {
    "gpu": "mi300x",
    "phase": "prefill",
    "batch": 16,
    "dtype": "fp8",
}
V2 = {
    "num_hidden_layers": 60, "hidden_size": 5120, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "n_routed_experts": 160, "moe_intermediate_size": 1536, "intermediate_size": 12288,
    "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
}  # fmt: skip
"""What DeepSeek-V2 has that DeepSeek-V2-Lite has not: arXiv 2405.04434, section 3.1.2."""
FIGURE_7 = ON_300X | {"phase": "decode", "batch": 1024, "nodes": 2}
"""16 ranks, 1,024 requests, eight interfaces of 400 Gbit/s a node. The paper names no
GPUs for Figures 6 and 7.
"""
SERVING: tuple[tuple[str, str, dict[str, Any], dict[str, Any], str, str], ...] = (
    (
        "DeepSeek-V2, time to first token",
        "DeepSeek-V2-Lite",
        V2,
        ON_300X,
        "8.2-16.8 %",
        "8-15 % / 97.6 %",
    ),
    (
        "Llama-4-Scout, time to first token",
        "Llama-4-Scout-17B-16E",
        {},
        ON_300X,
        "12.2-18.5 %",
        "11-16 % / 95.3 %",
    ),
    (
        "DeepSeek-V3, time to first token (Fig. 6)",
        "DeepSeek-V3",
        {},
        ON_300X,
        "at most 34 %",
        "unknown",
    ),
    (
        "DeepSeek-V3, between tokens (Fig. 7)",
        "DeepSeek-V3",
        {},
        FIGURE_7,
        "a figure, no number",
        "unknown",
    ),
    (
        "the same, --dp 16, deepep_low_latency",
        "DeepSeek-V3",
        {},
        FIGURE_7 | {"data_parallel": 16, "all2all": "deepep_low_latency"},
        "not measured",
        "not measured",
    ),
)
"""Name, config, changes, settings, the paper's gain at 512 to 2048 tokens (5.2), and
the communication that this gain and its hidden share imply, 1 - 1 / (1 + gain) over the share.
"""


ON_H200: dict[str, Any] = {"phase": "decode", "batch": 64, "length": 2048}
EXACT: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    *(row[:4] for row in TRAINING[:3]),
    (
        "Qwen3-30B-A3B, 16 H200, 2 rows a rank",
        "Qwen3-30B-A3B",
        {},
        {"nodes": 2, "batch": 2},
    ),
    (
        "the same, --keep-activations",
        "Qwen3-30B-A3B",
        {},
        {"nodes": 2, "batch": 2, "keep_activations": True},
    ),
    (
        "DeepSeek-V3, prefill, 16 x 1,024 tokens, --tp 8",
        "DeepSeek-V3",
        {},
        {"phase": "prefill", "batch": 16, "length": 1024},
    ),
    ("DeepSeek-V3, decoding, 64 x 2,048, --tp 8", "DeepSeek-V3", {}, ON_H200),
    (
        "the same, --dp 16, deepep_low_latency",
        "DeepSeek-V3",
        {},
        ON_H200 | {"nodes": 2, "data_parallel": 16, "all2all": "deepep_low_latency"},
    ),
)
"""Name, config, changes, settings of plans beside exact schedules; H200 where no other
is named.
"""


def planned(name: str, changes: dict[str, Any], settings: dict[str, Any]) -> Planned:
    """Prepare a published configuration with changes."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_json(CONFIGS / f"{name}.json") | changes
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return prepare(PlanSettings(model=folder, **settings))


def at(one: Planned, column: str) -> dict[str, Any]:
    """Return the times under one of the three columns."""
    if column == "assumed":
        return plan_times(one)
    machine = one.machine.assuming(PEAKS if column == "peaks" else FITTED)
    if column == "peaks":
        machine = replace(machine, gpu=replace(machine.gpu, payload=1.0))
    return plan_times(replace(one, machine=machine))


def training_rows() -> Iterator[list[str]]:
    """Yield speed-ups, and hidden communication forward and backward."""
    for title, name, changes, settings, speed_up, overlap in TRAINING:
        one = planned(name, changes, settings)
        times = {column: at(one, column) for column in ("peaks", "assumed", "fitted")}
        yield [
            title,
            f"{speed_up:.2f}",
            *(f"{each['speed_up']:.3f}" for each in times.values()),
        ]
        if overlap is not None:
            shares = [
                " / ".join(
                    f"{100 * each['overlap'][name]:.1f}"
                    for name in ("forward", "backward")
                )
                for each in times.values()
            ]
            yield [
                "hidden, % forward / backward",
                " / ".join(map(str, overlap)),
                *shares,
            ]
        once = replace(
            one, settings=one.settings.model_copy(update={"rows_once": True})
        )
        ratios = (at(once, column)["speed_up"] for column in times)
        yield [
            "the same, one row a rank",
            "not measured",
            *(f"{each:.3f}" for each in ratios),
        ]


def serving_rows() -> Iterator[list[str]]:
    """Yield the gain in the time to the first token, or between tokens: the least and
    the most of three lengths.
    """
    for title, name, changes, settings, gain, implied in SERVING:
        cells = []
        each = [
            planned(name, changes, settings | {"length": length})
            for length in (512, 1024, 2048)
        ]
        shares = []
        for column in ("peaks", "assumed", "fitted"):
            times = [at(one, column) for one in each]
            cells.append(_span(100 * (one["speed_up"] - 1) for one in times))
            sent = _span(100 * one["communication_share"] for one in times)
            hidden = _span(100 * one["overlap"]["forward"] for one in times)
            shares.append(f"{sent} / {hidden}")
        yield [title, gain, *cells]
        yield ["communication / hidden of it", implied, *shares]


def _span(values: Iterable[float]) -> str:
    every = list(values)
    return f"{min(every):.0f}-{max(every):.0f} %"


def exact_rows() -> Iterator[list[str]]:
    """Yield the gain over the best exact schedule, its name, and the gain over regular
    blocks.
    """
    for title, name, changes, settings in EXACT:
        times = compared(planned(name, changes, settings))
        gains = [f"{times[key]:.3f}" for key in ("over_exact", "speed_up")]
        yield [title, times["best_exact"], *gains]


def main() -> None:
    header = ["", "paper", "published peaks", "assumed (not fitted)", "fitted"]
    print(markdown(header, [*training_rows(), *serving_rows()]))
    header = ["", "best exact schedule", "over it", "over regular blocks"]
    print(markdown(header, list(exact_rows()), left=2))


if __name__ == "__main__":
    main()
