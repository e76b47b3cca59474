"""The planner's assumptions about a machine beyond its published figures: one table,
each value with its range and its source.

None is fitted to a speed-up or to a whole step. The values were chosen before any was
compared with a measured speed-up, except `fp8_grouped` and `WITHOUT_AITER`: they come
from published kernels, and were added when the planned serving was too fast. Those of a
server's kernels and exchanges (`distinct`, `fused_core`, `dispatch_us` to `gap_us`)
come from other sources than the traces that had shown what was missing
(`benchmarks/plan_kernels.py`). A cluster file replaces them (`assumptions: {gemm:
0.6}`); a plan from measured times needs few (`fcsd.planning.cost.measured`).
"""

import math
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
    "fused_core": Assumption(0.35, 0.12, 0.75, "share of the peak, fused attention, of the pairs that a causal mask"
                             " leaves", "arXiv 2407.08608 (H100): FlashAttention-2 0.35, FlashAttention-3 up to 0.75",
                             most=1.0),
    "hbm": Assumption(0.65, 0.40, 0.90, "share of the memory's bandwidth",
                      "vllm-project/vllm 53534 (B200, weights of a decoding step): cuBLAS 0.60 to 0.79, tuned up"
                      f" to 0.91; {_MI300X}: 0.81 at large arrays; scalarlm.com, memcpy on MI300X: 0.40 to 0.60",
                      most=1.0),
    "distinct": Assumption(1.0, 0.45, 1.0, "experts that a small batch reads, over those of independent, even routing",
                           "pegainfer, moe-bench-prompt-diversity.md (Kimi-K2, 8 ranks, 64 requests): 34.8 of 48 with"
                           " distinct prompts (even: 35.5), 15.9 with equal ones", most=1.0),
    "link": Assumption(0.85, 0.60, 1.00, "share of what a link within a node can carry",
                       "vllm-project/vllm 42324 (8 H100, an all-reduce of 64 MiB): 0.82; rows, physical over published:"
                       " DeepEP V1 0.84 (H800, of 160 GB/s), V2 0.71 (B200), HybridEP 0.58 to 0.71 (B200), ROCm/mori"
                       " 0.80 to 0.86, uccl 0.68 to 0.79 (8 MI300X)", most=1.0),
    "nic": Assumption(0.80, 0.45, 0.95, "share of a network interface",
                      "rows that leave a node: DeepEP's pages 0.87 to 0.92 (32 and 64 ranks, 0.43 at 16), HybridEP 0.45"
                      " to 0.89 (H100, 16 to 64 ranks)", most=1.0),
    "all_reduce_us": Assumption(11, 8.3, 18.7, "microseconds of an engine's own all-reduce of the plan's tokens, in"
                                " line", "by size, GPU and ranks: fcsd/planning/cost/collectives.py",
                                most=100_000),
    "side_us": Assumption(24, 20.7, 34, "microseconds of the same on a side stream, by NCCL or RCCL (vLLM's plugin runs"
                          " the engine's own kernels there, untimed)",
                          "by size, GPU and ranks: fcsd/planning/cost/collectives.py", most=100_000),
    "fused_norm_us": Assumption(3.2, 0, 4.8, "microseconds that an engine saves where it fuses a norm with the"
                                " all-reduce before it, in line; FarSkip's plugins cannot",
                                "TensorRT-LLM tech blog 1 (8 B200, DeepSeek-R1: 164 to 168 tokens/s, 2.82 of them a"
                                " step); least: vllm-project/vllm 22086 (2 H100); most: sgl-project/sglang 7621 (8"
                                " B200)", most=1000),
    "dispatch_us": Assumption(27, 9, 65, "fixed microseconds of a server's dispatch by rows, in addition to its bytes",
                              "between TensorRT-LLM tech blog 18 (8 to 32 GB200, 1 token: 18 to 20) and pplx-kernels (8"
                              " H100: 42); DeepEP's legacy page (16 to 128 ranks): within 22 % of this and its bytes;"
                              " least: ROCm/mori (8 MI355X, 31 with 22 of bytes); most: uccl (8 MI300X)", most=100_000),
    "combine_us": Assumption(36, 20, 92, "the same for its combine",
                             "the same: 31 to 33 and 42; within 22 %; 36 with bytes; 92", most=100_000),
    "latency_us": Assumption(20, 12, 47, "fixed microseconds of a training's exchange, a gather, or an all-reduce"
                             " without published times, in addition to its bytes; twice that between nodes",
                             "ROCm/mori (8 MI300X: 35 and 47 with 22 of bytes); NVIDIA/nccl 2094 (8 H100, all-reduce:"
                             " 33 is two of these)", most=100_000),
    "node_us": Assumption(50, 25, 75, "fixed microseconds of an all-reduce between nodes, in addition to its bytes",
                          "NVIDIA/nccl 1244 (46 to 48, 16 H20), 1453 (62 to 75, 16 H100; NCCL's model: 25)",
                          most=100_000),
    "matmul_us": Assumption(5, 3, 8, "least microseconds of a matmul of a server, captured in a graph",
                            "NVIDIA/TensorRT-LLM 13646 (B200, 7168 x 256: 3 with a kernel of its own, 8 with cuBLAS)",
                            most=1000),
    "core_us": Assumption(12, 7.6, 23, "least microseconds of a server's core of attention",
                          "vllm-project/vllm 43232 (a request of 1,024 tokens: 7.6 to 11), ROCm/aiter 2495 (12 on B300,"
                          " 23 on MI355X), flagos-ai/FlagGems 5849 (latent attention: 14)", most=1000),
    "kernel_us": Assumption(2.5, 1.4, 4.8, "least microseconds of any other kernel of a server",
                            "BBuf/AI-Infra-Auto-Driven-SKILLS 1 (Devstral-2, a dense model, 8 GPUs: norm 4.8,"
                            " quantisation 1.9, rotary 2.1, mean 2.7), neuralmagic/nm-vllm 332 (2 to 3)", most=1000),
    "gap_us": Assumption(400, 150, 1000, "microseconds of a server's step outside of its kernels: launch, sampling,"
                         " scheduling", "sglang-omni 760 (400 of 18.6 ms); least: vllm-project/vllm-xpu-kernels 509;"
                         " most: assumed", most=1_000_000),
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

ALL_REDUCES: dict[Way, str] = {"engine": "all_reduce_us", "side": "side_us"}
"""Assumptions whose value and range depend on what is sent (`Planned.ranges`), by who
sends it.
"""


def default_values() -> dict[str, float]:
    """Return the value of each assumption that does not depend on the plan."""
    return {
        name: assumption.value
        for name, assumption in ASSUMPTIONS.items()
        if name not in ALL_REDUCES.values()
    }
