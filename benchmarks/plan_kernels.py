"""Compare the kernels that `fcsd plan` expects with published traces of whole steps, class by class
(docs/plan.md).

    python benchmarks/plan_kernels.py

A sum can be right where two errors cancel, so each class stands by itself: exchanges, dense matmuls, experts,
attention, norms and routing, gaps. No assumption was chosen by these traces, except that `gap_us` quotes the first.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fcsd.base.files import read_json, write_json
from fcsd.base.text import markdown
from fcsd.planning.cost.planned import Planned, PlanSettings, prepare

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "files" / "configs"
CLASSES = (
    "exchanges",
    "dense matmuls",
    "experts",
    "attention",
    "norms, routing",
    "gap",
)


@dataclass(frozen=True)
class Trace:
    """A published trace of a step. milliseconds: of its classes, those that were published. forward: passes of the
    forward kind in it (a training's backward pass counts twice).
    """

    title: str
    source: str
    config: str
    changes: Mapping[str, Any]
    settings: Mapping[str, Any]
    milliseconds: Mapping[str, float]
    forward: int = 1
    notes: str = ""
    drop: tuple[str, ...] = field(default=("quantization_config",))


GLM_5 = {
    "num_hidden_layers": 78, "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "vocab_size": 154880, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3,
}  # fmt: skip
"""Where GLM-5 differs from DeepSeek-V3 (transformers' GlmMoeDsaConfig); without its indexer, which runs beside."""
WIDE = {
    "phase": "decode", "gpu": "h200", "data_parallel": 8, "all2all": "deepep_low_latency", "dtype": "fp8",
    "length": 128,
}  # fmt: skip
R1 = {"phase": "decode", "length": 1536}

TRACES = (
    Trace(
        "GLM-5.2, 8 H200, EP 8, 1 request per rank", "pegainfer, whole-step-decode-graph.md (2026-07-04)",
        "DeepSeek-V3", GLM_5, WIDE | {"batch": 8},
        {"exchanges": 5.6, "dense matmuls": 5.3, "experts": 4.9, "attention": 1.7, "norms, routing": 2.2, "gap": 0.7},
    ),
    Trace(
        "the same, 8 requests per rank", "pegainfer 568", "DeepSeek-V3", GLM_5, WIDE | {"batch": 64},
        {"exchanges": 10.0, "dense matmuls": 21.6, "experts": 9.0, "attention": 2.6, "norms, routing": 6.9},
    ),
    Trace(
        "DeepSeek-R1 NVFP4, 4 B200, TP 4, 64 requests", "InferenceX 863", "DeepSeek-V3",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        R1 | {"gpu": "b200", "gpus_per_node": 4, "batch": 64},
        {"dense matmuls": 3.0, "experts": 8.0, "attention": 1.2}, drop=(),
    ),
    Trace(
        "DeepSeek-R1 FP8, 8 MI325X, TP 8, 64 requests", "InferenceX 863", "DeepSeek-V3", {},
        R1 | {"gpu": "mi325x", "batch": 64, "dtype": "fp8"},
        {"dense matmuls": 12.1, "experts": 9.3, "attention": 4.1},
    ),
    Trace(
        "DeepSeek-R1 MXFP4, 4 MI355X, TP 4, 992 tokens", "InferenceX 1005, a pass of 8", "DeepSeek-V3",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {"phase": "prefill", "gpu": "mi355x", "gpus_per_node": 4, "batch": 1, "length": 992},
        {"exchanges": 9.7, "dense matmuls": 7.0, "experts": 14.7, "norms, routing": 7.4}, drop=(),
    ),
    Trace(
        "DeepSeek-V3, training, 64 H800, EP 64, 4 layers", "deepseek-ai/profile-data, train.json", "DeepSeek-V3",
        {"num_hidden_layers": 4, "first_k_dense_replace": 0},
        {"gpu": "h100", "nodes": 8, "length": 4096, "dtype": "fp8", "keep_activations": True},
        {"exchanges": 80.4, "experts": 43.1, "dense matmuls": 31.4, "attention": 22.0}, forward=3,
    ),
)  # fmt: skip
"""Matmuls of weight gradients (32.8 ms) are divided as the others of the training are."""


def planned(trace: Trace) -> Planned:
    """Prepare the plan of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_json(CONFIGS / f"{trace.config}.json")
        for key in trace.drop:
            config.pop(key, None)
        path = Path(folder) / "config.json"
        write_json(path, config | dict(trace.changes))
        return prepare(PlanSettings(model=folder, **trace.settings))


def classes(plan: Planned) -> dict[str, float]:
    """Return the milliseconds of each class in one forward pass."""
    roofline, work = plan.roofline, plan.work
    shared_ranks = plan.expert_parallel if plan.wide or not roofline.served else 1
    layers = roofline.layers(work, shared_ranks)
    seconds = dict.fromkeys(CLASSES, 0.0)
    for layer, steps in zip(work.layers, layers, strict=True):
        core = roofline.core(layer)
        attention_s = steps["attention a"] + steps["attention b"]
        seconds["attention"] += core
        seconds["dense matmuls"] += attention_s - core
        seconds["dense matmuls"] += steps.get("shared expert", 0.0) + steps.get(
            "mlp", 0.0
        )
        seconds["experts"] += steps.get("experts", 0.0)
        seconds["norms, routing"] += steps.get("router", 0.0) + steps.get("arrive", 0.0)
    if roofline.served:
        seconds["dense matmuls"] += roofline.head(work)
        seconds["gap"] = roofline.gap
    if roofline.served and not plan.wide:
        seconds["exchanges"] = 2 * len(layers) * roofline.all_reduce(work)
    else:
        seconds["exchanges"] = sum(work.moe) * sum(
            roofline.exchange(work, shared_ranks)
        )
    return {name: 1e3 * value for name, value in seconds.items()}


def compared_classes(trace: Trace) -> dict[str, tuple[float, float]]:
    """Return published and planned milliseconds of the classes that were published."""
    one = classes(planned(trace))
    # A backward pass repeats the exchanges once and the computation twice.
    passes = dict.fromkeys(CLASSES, trace.forward) | {
        "exchanges": min(trace.forward, 2)
    }
    return {
        name: (published, passes[name] * one[name])
        for name, published in trace.milliseconds.items()
    }


def within(factor: float) -> tuple[int, int]:
    """Return how many published classes a plan meets within a factor, and how many there are."""
    ratios = [
        published / ours
        for trace in TRACES
        for published, ours in compared_classes(trace).values()
    ]
    return sum(1 / factor <= ratio <= factor for ratio in ratios), len(ratios)


def rows() -> Iterator[list[str]]:
    """Yield the published and planned milliseconds of each class."""
    for trace in TRACES:
        cells = compared_classes(trace)
        yield [
            trace.title,
            *(
                "-" if name not in cells else "{:.1f} / {:.1f}".format(*cells[name])
                for name in CLASSES
            ),
            trace.source,
        ]


def main() -> None:
    header = ["published / planned, ms", *CLASSES, "source"]
    print(markdown(header, list(rows())))
    for factor in (1.5, 2.0, 3.0):
        met, number = within(factor)
        print(f"within a factor of {factor:g}: {met} of {number}")


if __name__ == "__main__":
    main()
