"""Compare the kernels that `fcsd plan` expects with published traces of whole steps, class by class
(docs/plan.md).

    python benchmarks/plan_kernels.py

A sum can be right where two errors cancel, so each class stands by itself: exchanges, dense matmuls, experts,
attention, norms and routing, gaps. No assumption was chosen by these traces: their kernels are in no source of
`fcsd/planning/cost/assumptions.py` or `collectives.py`.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    forward kind in it (a training's backward pass counts twice). different: tokens that are no copies of another, where
    a batch is padded; None: all of them. roofline: what an engine sends or stores otherwise than a plan does.
    """

    title: str
    source: str
    config: str
    changes: Mapping[str, Any]
    settings: Mapping[str, Any]
    milliseconds: Mapping[str, float]
    forward: int = 1
    different: int | None = None
    roofline: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = field(default=("quantization_config",))


GLM_5 = {
    "num_hidden_layers": 78, "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
    "v_head_dim": 256, "vocab_size": 154880, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3,
}  # fmt: skip
"""Where GLM-5 differs from DeepSeek-V3 (transformers' GlmMoeDsaConfig); without its indexer, which runs beside."""
KIMI_K2 = {
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "first_k_dense_replace": 1,
    "vocab_size": 163840, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MISTRAL_SMALL_4 = {
    "num_hidden_layers": 36, "hidden_size": 4096,
    "intermediate_size": 12288, "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_experts_per_tok": 4,
    "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 256, "q_lora_rank": 1024,
    "qk_nope_head_dim": 64, "vocab_size": 131072, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0,
}  # fmt: skip
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
WIDE = {
    "phase": "decode",
    "gpu": "h200",
    "data_parallel": 8,
    "all2all": "deepep_low_latency",
    "length": 128,
}
GB300 = {
    "phase": "decode", "gpu": "b200", "gpus_per_node": 4, "data_parallel": 4, "all2all": "deepep_low_latency",
    "dtype": "fp8", "length": 1152,
}  # fmt: skip
"""With the figures of a B200, whose memory is 4 % slower."""
R1 = {"phase": "decode", "length": 1536}
GRAPH = "pegainfer, whole-step-decode-graph.md (2026-07-04)"
MEGATRON = "NVIDIA/Megatron-LM 6454 (experts), 6462 (attention), 6064"


def gb300(per_rank: int, *milliseconds: float) -> Trace:
    """Return a step of GLM-5.2 on four GB300, of which pegainfer 668 has three; its glue and quantisation count as
    norms and routing, whose kernels a plan counts them with.
    """
    return Trace(
        f"GLM-5.2 FP8, 4 GB300, EP 4, {per_rank} per rank", "pegainfer 668", "DeepSeek-V3", GLM_5,
        GB300 | {"batch": 4 * per_rank}, dict(zip(CLASSES, milliseconds, strict=False)),
    )  # fmt: skip


TRACES = (
    Trace(
        "GLM-5.2 FP8, 8 H200, EP 8, 1 request, 7 ranks padded", GRAPH, "DeepSeek-V3", GLM_5,
        WIDE | {"dtype": "fp8", "batch": 8},
        {"exchanges": 5.6, "dense matmuls": 5.3, "experts": 4.9, "attention": 1.7, "norms, routing": 2.2, "gap": 0.7},
        different=2,
    ),
    Trace(
        "the same, 8 rows of it on one rank", GRAPH, "DeepSeek-V3", GLM_5, WIDE | {"dtype": "fp8", "batch": 64},
        {"exchanges": 10.0, "dense matmuls": 21.6, "experts": 9.0, "attention": 2.6}, different=9,
    ),
    gb300(1, 4.38, 5.59, 8.88, 2.20, 2.81),
    gb300(4, 6.27, 8.12, 13.17, 2.35, 2.79),
    gb300(8, 6.48, 7.57, 17.27, 2.18, 2.89),
    Trace(
        "Kimi-K2 INT4, 8 H200, EP 8, 64 requests", "pegainfer, moe-bench-prompt-diversity.md", "DeepSeek-V3", KIMI_K2,
        WIDE | {"batch": 64}, {"exchanges": 7.8, "dense matmuls": 11.6, "experts": 10.7, "attention": 0.8},
        roofline={"expert_bytes": 4.5 / 8},
    ),
    Trace(
        "DeepSeek-R1 NVFP4, 4 B200, TP 4, 64 requests", "InferenceX 863", "DeepSeek-V3", NVFP4,
        R1 | {"gpu": "b200", "gpus_per_node": 4, "batch": 64},
        {"dense matmuls": 3.0, "experts": 8.0, "attention": 1.2}, drop=(),
    ),
    Trace(
        "DeepSeek-R1 FP8, 8 MI325X, TP 8, 64 requests", "InferenceX 863", "DeepSeek-V3", {},
        R1 | {"gpu": "mi325x", "batch": 64, "dtype": "fp8"},
        {"dense matmuls": 12.1, "experts": 9.3, "attention": 4.1},
    ),
    Trace(
        "DeepSeek-R1 MXFP4, 4 MI355X, TP 4, 992 tokens", "InferenceX 1005, a pass of 8", "DeepSeek-V3", NVFP4,
        {"phase": "prefill", "gpu": "mi355x", "gpus_per_node": 4, "batch": 1, "length": 992},
        {"exchanges": 9.7, "dense matmuls": 7.0, "experts": 14.7, "norms, routing": 7.4}, drop=(),
    ),
    Trace(
        "Qwen3-30B-A3B, 4 GB200, EP 4, 1,024 requests", MEGATRON, "Qwen3-30B-A3B", {},
        {"phase": "decode", "gpu": "b200", "gpus_per_node": 4, "data_parallel": 4, "batch": 1024, "length": 1024},
        {"exchanges": 1.0, "experts": 4.05, "attention": 3.87},
    ),
    Trace(
        "Mistral-Small-4 FP8, 2 H200, TP 2, 1 request", "BBuf/AI-Infra-Auto-Driven-SKILLS 1, a step of 6",
        "DeepSeek-V3", MISTRAL_SMALL_4,
        {"phase": "decode", "gpu": "h200", "gpus_per_node": 2, "batch": 1, "length": 512, "dtype": "fp8"},
        {"exchanges": 0.57, "experts": 0.95, "attention": 0.40},
    ),
    Trace(
        "DeepSeek-V3 FP8, training, 64 H800, EP 64, 4 layers", "deepseek-ai/profile-data, train.json", "DeepSeek-V3",
        {"num_hidden_layers": 4, "first_k_dense_replace": 0},
        {"gpu": "h100", "nodes": 8, "length": 4096, "dtype": "fp8", "keep_activations": True},
        {"exchanges": 80.4, "experts": 43.1, "dense matmuls": 31.4, "attention": 22.0}, forward=3,
        roofline={"rows": "node", "sent_bytes": 1 + 4 / 128},
    ),
)  # fmt: skip
"""Matmuls of weight gradients (32.8 ms) are divided as the others of the training are, whose rows DeepEP forwards in
each node. Mistral's batch is one by its kernels' names (top k of one dimension); its matmuls and routing were cut off.
The passes of InferenceX 1005 may have fewer tokens: 14 MB would exceed its links.
"""


def planned(trace: Trace) -> Planned:
    """Prepare the plan of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_json(CONFIGS / f"{trace.config}.json")
        for key in trace.drop:
            config.pop(key, None)
        path = Path(folder) / "config.json"
        write_json(path, config | dict(trace.changes))
        return prepare(PlanSettings(model=folder, **trace.settings))


def classes(trace: Trace, plan: Planned) -> dict[str, float]:
    """Return the milliseconds of each class in one forward pass."""
    work = plan.work
    if trace.different is not None:
        chosen = 1 - work.experts_per_token / work.num_experts
        tokens = work.tokens * plan.expert_parallel
        read = (1 - chosen**trace.different) / (1 - chosen**tokens)
        plan = plan.assuming(distinct=read)
    roofline = replace(plan.roofline, **trace.roofline)
    shared_ranks = plan.expert_parallel if plan.wide or not roofline.served else 1
    seconds = dict.fromkeys(CLASSES, 0.0)
    for layer in work.layers:
        seconds["attention"] += roofline.served_core(layer)
        for name, (matmul_s, other_s) in roofline.parts(
            work, layer, shared_ranks
        ).items():
            if name in ("attention a", "attention b", "shared expert", "mlp"):
                seconds["dense matmuls"] += matmul_s
                seconds["norms, routing"] += other_s
            elif name == "experts":
                seconds["experts"] += matmul_s + other_s
            elif name == "router":
                seconds["norms, routing"] += matmul_s + other_s
            elif plan.wide or not roofline.served:
                # Combines sum the returned rows; tensor-parallel ranks have none.
                seconds["exchanges"] += other_s
    if roofline.served:
        seconds["dense matmuls"] += roofline.head(work)
        seconds["gap"] = roofline.gap
    if roofline.served and not plan.wide:
        seconds["exchanges"] = 2 * len(work.layers) * roofline.all_reduce(work)
    else:
        seconds["exchanges"] += sum(work.moe) * sum(
            roofline.exchange(work, shared_ranks)
        )
    return {name: 1e3 * value for name, value in seconds.items()}


def compared_classes(trace: Trace) -> dict[str, tuple[float, float]]:
    """Return published and planned milliseconds of the classes that were published."""
    one = classes(trace, planned(trace))
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
