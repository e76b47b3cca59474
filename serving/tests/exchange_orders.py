"""The order of a step of four layers whose experts are spread over data-parallel ranks,
written by hand.

`attention` is where it begins, `kernel` where its kernel does; `gather` and `scatter`
are vLLM's own exchange.
"""

# Every layer an MoE layer without shared experts: C runs beside attention up to its
# kernel, D from there on.
PLAIN = """
start dispatch.0 | attention 0 | kernel 0 | wait dispatch.0 | experts 0 | start combine.0
attention 1 | wait combine.0 | start dispatch.1 | kernel 1 | wait dispatch.1 | experts 1 | start combine.1
attention 2 | wait combine.1 | start dispatch.2 | kernel 2 | wait dispatch.2 | experts 2 | start combine.2
attention 3 | wait combine.2 | start dispatch.3 | kernel 3 | wait dispatch.3 | experts 3 | start combine.3
wait combine.3
"""

# Shared experts run beside C.
SHARED = """
start dispatch.0 | attention 0 | kernel 0 | wait dispatch.0 | experts 0 | start combine.0 | shared 0
attention 1 | wait combine.0 | start dispatch.1 | kernel 1 | wait dispatch.1 | experts 1 | start combine.1 | shared 1
attention 2 | wait combine.1 | start dispatch.2 | kernel 2 | wait dispatch.2 | experts 2 | start combine.2 | shared 2
attention 3 | wait combine.2 | start dispatch.3 | kernel 3 | wait dispatch.3 | experts 3 | start combine.3 | shared 3
wait combine.3
"""

# A selected dense layer exchanges nothing and leaves nothing in flight.
DENSE_FIRST = """
attention 0 | kernel 0 | mlp 0
start dispatch.1 | attention 1 | kernel 1 | wait dispatch.1 | experts 1 | start combine.1 | shared 1
attention 2 | wait combine.1 | start dispatch.2 | kernel 2 | wait dispatch.2 | experts 2 | start combine.2 | shared 2
attention 3 | wait combine.2 | start dispatch.3 | kernel 3 | wait dispatch.3 | experts 3 | start combine.3 | shared 3
wait combine.3
"""

# Layers 2 and 3 alone: before them vLLM exchanges itself.
HALF = """
attention 0 | kernel 0 | gather | scatter | attention 1 | kernel 1 | gather | scatter
start dispatch.2 | attention 2 | kernel 2 | wait dispatch.2 | experts 2 | start combine.2 | shared 2
attention 3 | wait combine.2 | start dispatch.3 | kernel 3 | wait dispatch.3 | experts 3 | start combine.3 | shared 3
wait combine.3
"""

# Layer 2 is regular: what is in flight ends with layer 1; layer 3 is alone, so its C
# runs beside its own kernel.
GAP = """
start dispatch.0 | attention 0 | kernel 0 | wait dispatch.0 | experts 0 | start combine.0 | shared 0
attention 1 | wait combine.0 | start dispatch.1 | kernel 1 | wait dispatch.1 | experts 1 | start combine.1 | shared 1
wait combine.1 | attention 2 | kernel 2 | gather | scatter
start dispatch.3 | attention 3 | wait dispatch.3 | experts 3 | start combine.3 | kernel 3 | shared 3 | wait combine.3
"""

ATTENTION_FULL = """
start dispatch.0 | attention 0 | wait dispatch.0 | experts 0 | start combine.0 | kernel 0 | shared 0 | wait combine.0
start dispatch.1 | attention 1 | wait dispatch.1 | experts 1 | start combine.1 | kernel 1 | shared 1 | wait combine.1
start dispatch.2 | attention 2 | wait dispatch.2 | experts 2 | start combine.2 | kernel 2 | shared 2 | wait combine.2
start dispatch.3 | attention 3 | wait dispatch.3 | experts 3 | start combine.3 | kernel 3 | shared 3 | wait combine.3
"""

MLP_FULL = """
attention 0 | kernel 0 | start dispatch.0 | shared 0 | wait dispatch.0 | experts 0 | start combine.0
attention 1 | kernel 1 | wait combine.0 | start dispatch.1 | shared 1 | wait dispatch.1 | experts 1 | start combine.1
attention 2 | kernel 2 | wait combine.1 | start dispatch.2 | shared 2 | wait dispatch.2 | experts 2 | start combine.2
attention 3 | kernel 3 | wait combine.2 | start dispatch.3 | shared 3 | wait dispatch.3 | experts 3 | start combine.3
wait combine.3
"""

# Layers 0 and 2 have linear attention, in which there is no kernel to split at: D of
# layer 2 runs beside its shared experts. Layer 0 waits for nothing and starts D first.
LINEAR = """
start dispatch.0 | attention 0 | wait dispatch.0 | experts 0 | start combine.0 | shared 0
attention 1 | wait combine.0 | start dispatch.1 | kernel 1 | wait dispatch.1 | experts 1 | start combine.1 | shared 1
attention 2 | wait combine.1 | start dispatch.2 | shared 2 | wait dispatch.2 | experts 2 | start combine.2
attention 3 | wait combine.2 | start dispatch.3 | kernel 3 | wait dispatch.3 | experts 3 | start combine.3 | shared 3
wait combine.3
"""

# As in `orders.BRANCHES`; mixers 0, 5 and 6 have no kernel to split at.
BRANCHES = """
start dispatch.1 | attention 0 | wait dispatch.1 | experts 1 | start combine.1 | shared 1
attention 2 | wait combine.1 | start dispatch.3 | kernel 2 | wait dispatch.3 | experts 3 | start combine.3 | shared 3
start dispatch.4 | shared 4 | wait dispatch.4 | experts 4 | start combine.4 | wait combine.3
attention 5 | wait combine.4
start dispatch.7 | attention 6 | wait dispatch.7 | experts 7 | start combine.7 | shared 7 | wait combine.7
"""

OF_CASE = {
    "qwen3_moe-all": PLAIN, "gpt_oss-all": PLAIN, "qwen2_moe-all": SHARED, "qwen2_moe-half": HALF,
    "qwen2_moe-gap": GAP, "qwen2_moe-attention_full": ATTENTION_FULL, "qwen2_moe-mlp_full": MLP_FULL,
    "deepseek_v3-all": DENSE_FIRST, "glm4_moe-all": DENSE_FIRST,
    "qwen3_next-all": LINEAR, "nemotron_h-all": BRANCHES,
}  # fmt: skip
