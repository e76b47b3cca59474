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
from unittest.mock import patch

from fcsd.base.files import read_json
from fcsd.base.text import markdown
from fcsd.base.writing import write_json
from fcsd.model.inspect.shipped import CONFIGS
from fcsd.planning.cost.collectives import Way
from fcsd.planning.cost.operations import LayerWork, ModelWork
from fcsd.planning.cost.plan import plan as plan_facts
from fcsd.planning.cost.planned import Planned, prepare
from fcsd.planning.cost.roofline import Roofline
from fcsd.planning.cost.settings import PlanSettings
from fcsd.planning.cost.stored import FP8
from fcsd.planning.cost.times import plan_times

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
        "Kimi-K2 INT4, 8 H200, EP 8, 64 requests", "pegainfer, moe-bench-prompt-diversity.md", "Kimi-K2-Thinking", {},
        WIDE | {"batch": 64}, {"exchanges": 7.8, "dense matmuls": 11.6, "experts": 10.7, "attention": 0.8}, drop=(),
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
        roofline={"rows": "node", "stored": replace(FP8, sent=1 + 4 / 128)},
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


def priced(trace: Trace) -> Planned:
    """Return the plan of a trace, which reads the experts of the tokens that differ."""
    plan = planned(trace)
    if trace.different is None:
        return plan
    chosen = 1 - plan.work.experts_per_token / plan.work.num_experts
    tokens = plan.work.tokens * plan.expert_parallel
    read = (1 - chosen**trace.different) / (1 - chosen**tokens)
    return plan.assuming(distinct=read)


def shared_by(plan: Planned) -> int:
    """Return the number of ranks that share the experts, as the roofline counts them."""
    return plan.expert_parallel if plan.wide or not plan.roofline.served else 1


def parts_by_class(
    plan: Planned, roofline: Roofline, layer: LayerWork
) -> Iterator[tuple[str, str, float]]:
    """Yield step, class and seconds of each part of a layer; "arrive" is of the combine."""
    yield "attention b", "attention", roofline.served_core(layer)
    parts = roofline.parts(plan.work, layer, shared_by(plan))
    for name, (matmul_s, other_s) in parts.items():
        kind = {"experts": "experts", "arrive": "exchanges", "router": "norms, routing"}
        yield name, kind.get(name, "dense matmuls"), matmul_s
        yield name, kind.get(name, "norms, routing"), other_s


def classes(trace: Trace, plan: Planned) -> dict[str, float]:
    """Return the milliseconds of each class in one forward pass."""
    roofline, work = replace(plan.roofline, **trace.roofline), plan.work
    seconds = dict.fromkeys(CLASSES, 0.0)
    for layer in work.layers:
        for _, kind, part_s in parts_by_class(plan, roofline, layer):
            seconds[kind] += part_s
    if roofline.served:
        seconds["dense matmuls"] += roofline.head(work)
        seconds["gap"] = roofline.gap
    if roofline.served and not plan.wide:
        # No rows are returned.
        seconds["exchanges"] = 2 * len(work.layers) * roofline.all_reduce(work)
    else:
        seconds["exchanges"] += sum(work.moe) * sum(
            roofline.exchange(work, shared_by(plan))
        )
    return {name: 1e3 * value for name, value in seconds.items()}


def compared_classes(trace: Trace) -> dict[str, tuple[float, float]]:
    """Return published and planned milliseconds of the classes that were published."""
    one = classes(trace, priced(trace))
    # A backward pass repeats the exchanges once and the computation twice.
    passes = dict.fromkeys(CLASSES, trace.forward) | {
        "exchanges": min(trace.forward, 2)
    }
    return {
        name: (published, passes[name] * one[name])
        for name, published in trace.milliseconds.items()
    }


@dataclass(frozen=True)
class Traced:
    """A roofline with the kernels of a trace: each class takes as many times as long as
    it was published. Classes that were not keep their planned times.
    """

    roofline: Roofline
    plan: Planned
    times: Mapping[str, float]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.roofline, name)

    def layers(self, work: ModelWork, ranks: int) -> list[dict[str, float]]:
        """Return the seconds of the steps of every layer."""
        layers = []
        for layer in work.layers:
            seconds: dict[str, float] = {}
            for step, kind, part_s in parts_by_class(self.plan, self.roofline, layer):
                seconds[step] = seconds.get(step, 0.0) + part_s * self.times[kind]
            layers.append(seconds)
        return layers

    def exchange(self, work: ModelWork, ranks: int) -> tuple[float, float]:
        """Return the seconds of a dispatch and of a combine."""
        ahead, back = self.roofline.exchange(work, ranks)
        return self.times["exchanges"] * ahead, self.times["exchanges"] * back

    def all_reduce(self, work: ModelWork, way: Way = "engine") -> float:
        """Return the seconds of an all-reduce; the plugins' are planned."""
        factor = self.times["exchanges"] if way == "engine" else 1.0
        return factor * self.roofline.all_reduce(work, way)

    def head(self, work: ModelWork) -> float:
        """Return the seconds of the output head."""
        return self.times["dense matmuls"] * self.roofline.head(work)

    @property
    def gap(self) -> float:
        """Seconds of a step outside of its kernels."""
        return self.times["gap"] * self.roofline.gap


def implied(trace: Trace) -> tuple[float, list[float]]:
    """Return the gain over regular blocks that a trace implies, which is what FarSkip
    hides of its exchanges behind its own kernels, and the range that a plan prints.
    """
    plan = priced(trace)
    times = dict.fromkeys(CLASSES, 1.0)
    for name, (published, ours) in compared_classes(
        replace(trace, roofline={})
    ).items():
        times[name] = published / ours
    traced = Traced(plan.roofline, plan, times)
    with patch.object(Planned, "roofline", property(lambda _: traced)):
        gain = plan_times(plan)["speed_up"] - 1
    facts = plan_facts(plan, advise=False)
    ends = facts["expected_gain"] or [
        end - 1 for row in facts["sensitivity"] for end in row["speed_up"]
    ]
    return gain, [min(ends), max(ends)]


IMPLIED = tuple(trace for trace in TRACES if "exchanges" in trace.milliseconds)
"""Traces from which a gain follows."""


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
    for trace in IMPLIED:
        gain, (least, most) = implied(trace)
        print(f"{trace.title}: {gain:.1%} implied, {least:.1%} to {most:.1%} planned")
    for factor in (1.5, 2.0, 3.0):
        met, number = within(factor)
        print(f"within a factor of {factor:g}: {met} of {number}")


if __name__ == "__main__":
    main()
