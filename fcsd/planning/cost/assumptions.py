"""The planner's assumptions about a machine beyond its published figures: one table,
each value with its range and its source.

The values were chosen before any of them was compared with a measured speed-up, except
`fp8_grouped` and `WITHOUT_AITER`: they come from published kernels, and were added when
the planned serving was too fast. None is fitted to a speed-up or to a whole step. A
cluster file replaces them (`assumptions: {gemm: 0.6}`); a plan from measured times
needs few (`fcsd.planning.cost.measured`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fcsd.planning.cost.collectives import Way


@dataclass(frozen=True)
class Assumption:
    """A value with its plausible range, its description and its source.

    least, most: bounds outside of which a value makes no sense.
    """

    value: float
    low: float
    high: float
    what: str
    source: str
    least: float = 0.0
    most: float = math.inf


_MI300X = "AMD MI300X GPU Performance Analysis (arXiv, Oct 2025)"
_CHOSEN = "assumed"

ASSUMPTIONS = {
    "gemm": Assumption(0.50, 0.30, 0.70, "share of the peak, dense matmuls",
                       f"{_MI300X}: about 45 % in BF16 and FP8; rocm.blogs.amd.com, measuring-max-achievable-flops:"
                       " more at the best shapes", most=1.0),
    "grouped": Assumption(0.40, 0.20, 0.60, "share of the peak, the experts' grouped matmuls", _CHOSEN, most=1.0),
    "fp8_grouped": Assumption(0.10, 0.08, 0.25, "share of the FP8 peak, the experts' grouped matmuls in FP8",
                              "vllm-project/vllm pull 24700: 4,096 tokens through the experts of one layer of"
                              " Qwen3-30B-A3B in 1.65 ms on an H100, 0.095 of its peak", most=1.0),
    "core": Assumption(0.30, 0.15, 0.45, "share of the peak, batched matmuls of attention written out", _CHOSEN,
                       most=1.0),
    "fused_core": Assumption(0.25, 0.12, 0.60, "share of the peak, fused attention, of the pairs that a causal mask"
                             " leaves", _CHOSEN, most=1.0),
    "hbm": Assumption(0.65, 0.40, 0.80, "share of the memory's bandwidth",
                      f"{_MI300X}: 81 % at large arrays; scalarlm.com, memcpy on MI300X: 40 to 60 %", most=1.0),
    "link": Assumption(0.85, 0.60, 1.00, "share of what a link within a node can carry", _CHOSEN, most=1.0),
    "nic": Assumption(0.80, 0.50, 0.95, "share of a network interface", _CHOSEN, most=1.0),
    "all_reduce_us": Assumption(11, 8.3, 18.7, "microseconds of an engine's own all-reduce of the plan's tokens, in"
                                " line", "by size, GPU and ranks: fcsd/planning/cost/collectives.py",
                                most=100_000),
    "side_us": Assumption(24, 20.7, 34, "microseconds of the same by NCCL or RCCL on a side stream, which FarSkip's"
                          " plugins overlap", "by size, GPU and ranks: fcsd/planning/cost/collectives.py",
                          most=100_000),
    "fused_norm_us": Assumption(3.2, 0, 4.8, "microseconds that an engine saves where it fuses a norm with the"
                                " all-reduce before it, in line; FarSkip's plugins cannot",
                                "TensorRT-LLM tech blog 1 (8 B200, DeepSeek-R1: 164 to 168 tokens/s, 2.82 of them a"
                                " step); least: vllm-project/vllm 22086 (2 H100); most: sgl-project/sglang 7621 (8"
                                " B200)", most=1000),
    "latency_us": Assumption(20, 12, 47, "fixed microseconds of another exchange, or of an all-reduce without published"
                             " times, in addition to its bytes; twice that between nodes",
                             "within a node: pegainfer 568 (8 H200, DeepEP V2, one token: 12 and 30 to 47),"
                             " TensorRT-LLM tech blog 18 (GB200, 18 and 31), ROCm/mori (8 MI300X, 128 tokens: 35 and"
                             " 47); between nodes: DeepEP's legacy page (16 ranks: 118 for 73 of bytes)",
                             most=100_000),
    "node_us": Assumption(50, 25, 75, "fixed microseconds of an all-reduce between nodes, in addition to its bytes",
                          "NVIDIA/nccl 1244 (46 to 48, 16 H20), 1453 (62 to 75, 16 H100; NCCL's model: 25)",
                          most=100_000),
    "kernel_us": Assumption(2, 1, 4, "least microseconds of a kernel of a server, captured in a graph",
                            "neuralmagic/nm-vllm 332 (norm, quantisation 2, rotary 3), lightseekorg/tokenspeed 1154"
                            " (norm 1.9); number of kernels: sglang-omni 760 (1,065 in 48 layers)", most=1000),
    "gap_us": Assumption(600, 400, 800, "microseconds of a server's step outside of its kernels: launch, sampling,"
                         " scheduling", "pegainfer 568 (640 to 810 of 19.6 ms), sglang-omni 760 (400 of 18.6 ms)",
                         most=1_000_000),
    "slowdown": Assumption(0.15, 0.0, 0.58, "seconds that computation loses per second of hidden communication",
                           f"{_CHOSEN}; arXiv 2412.14335 (MI300X): matmuls beside collectives gave 42 % of the ideal"
                           " gain where the collective starts first, as here (21 % where it does not)", most=1.0),
    "score_passes": Assumption(4, 2, 8, "passes over the scores in memory, attention written out", _CHOSEN, most=1000),
    "norm_passes": Assumption(6, 3, 12, "passes over the residual stream: norms, sums", _CHOSEN, most=1000),
    "row_passes": Assumption(8, 4, 12, "passes over the dispatched rows: sorting before and after, twice", _CHOSEN,
                              most=1000),
    "logit_passes": Assumption(8, 2, 12, "passes over float32 logits for head and loss, both directions", _CHOSEN,
                              most=1000),
    "optimizer_bytes": Assumption(32, 20, 48, "bytes moved per parameter that AdamW updates", _CHOSEN, most=1000),
    "prefetch": Assumption(0.5, 0.0, 1.0, "share of computation that hides gathered weights and reduced gradients",
                           f"{_CHOSEN}: FSDP2 gathers a layer ahead, but the host waits once per layer to learn how"
                           " many rows go where", most=1.0),
    "last_combine": Assumption(0.0, 0.0, 1.0, "share of the last layer's shared expert that hides its combine",
                               "FarSkip paper 4.1: the last all-to-all forward and the first backward are not hidden;"
                               " fcsd starts it before the shared expert, which would be 1", most=1.0),
    "imbalance": Assumption(1.0, 1.0, 5.1, "rows of the busiest rank over the mean: experts and exchanges",
                            f"{_CHOSEN}: even routing; deepspeedai/DeepSpeed issue 8213: 2.6 to 5.1 in supervised"
                            " fine-tuning on 16 H100; --routing reads a model's own", least=1.0),
}  # fmt: skip

WITHOUT_AITER = {"gemm": 2.0, "fp8_grouped": 3.0, "fused_core": 14.0}
"""How many times as long the same work takes on an MI300X with FP8 weights without AMD's
AITER kernels, by the assumption that prices it: rocm.blogs.amd.com, DeepSeekR1-Part2
(March 2025), averages of block-scale matmuls, block-scale fused MoE and attention in
prefill. vLLM uses AITER only with VLLM_ROCM_USE_AITER=1 (vllm-project/vllm issue 56945).
"""

Values = Mapping[str, float]


ALL_REDUCES: dict[str, Way] = {"all_reduce_us": "engine", "side_us": "side"}
"""Assumptions whose value and range depend on what is sent (`Planned.ranges`), and who
sends it.
"""


def default_values() -> dict[str, float]:
    """Return the value of each assumption that does not depend on the plan."""
    return {
        name: assumption.value
        for name, assumption in ASSUMPTIONS.items()
        if name not in ALL_REDUCES
    }
