"""The order of a step of four layers, written by hand: what runs while which sums are in flight."""

# Every layer an MoE layer without shared experts: R_k runs beside attention k+1, A_k
# beside the experts of k.
PLAIN = """
attention 0 | start attention.0 | experts 0 | start routed.0
wait attention.0 | attention 1 | start attention.1 | wait routed.0 | experts 1 | start routed.1
wait attention.1 | attention 2 | start attention.2 | wait routed.1 | experts 2 | start routed.2
wait attention.2 | attention 3 | start attention.3 | wait routed.2 | experts 3 | start routed.3
wait attention.3 | wait routed.3
"""

# Shared experts are summed with attention.
SHARED = """
attention 0 | shared 0 | start attention.0 | experts 0 | start routed.0
wait attention.0 | attention 1 | wait routed.0 | shared 1 | start attention.1 | experts 1 | start routed.1
wait attention.1 | attention 2 | wait routed.1 | shared 2 | start attention.2 | experts 2 | start routed.2
wait attention.2 | attention 3 | wait routed.2 | shared 3 | start attention.3 | experts 3 | start routed.3
wait attention.3 | wait routed.3
"""

# A selected dense layer takes one sum and leaves nothing in flight.
DENSE_FIRST = """
attention 0 | mlp 0 | start mlp.0 | wait mlp.0
attention 1 | shared 1 | start attention.1 | experts 1 | start routed.1
wait attention.1 | attention 2 | wait routed.1 | shared 2 | start attention.2 | experts 2 | start routed.2
wait attention.2 | attention 3 | wait routed.2 | shared 3 | start attention.3 | experts 3 | start routed.3
wait attention.3 | wait routed.3
"""

# The same without shared experts.
DENSE_FIRST_PLAIN = """
attention 0 | mlp 0 | start mlp.0 | wait mlp.0
attention 1 | start attention.1 | experts 1 | start routed.1
wait attention.1 | attention 2 | start attention.2 | wait routed.1 | experts 2 | start routed.2
wait attention.2 | attention 3 | start attention.3 | wait routed.2 | experts 3 | start routed.3
wait attention.3 | wait routed.3
"""

# The engine sums squares of queries and keys over ranks before each attention's kernel.
NORMED_QUERIES = """
all_reduce | attention 0 | start attention.0 | experts 0 | start routed.0
wait attention.0 | all_reduce | attention 1 | start attention.1 | wait routed.0 | experts 1 | start routed.1
wait attention.1 | all_reduce | attention 2 | start attention.2 | wait routed.1 | experts 2 | start routed.2
wait attention.2 | all_reduce | attention 3 | start attention.3 | wait routed.2 | experts 3 | start routed.3
wait attention.3 | wait routed.3
"""

# The engine sums squares over ranks before the last matmul of Mamba layers, 0 and 2.
MAMBA = """
attention 0 | all_reduce | shared 0 | start attention.0 | experts 0 | start routed.0
wait attention.0 | attention 1 | wait routed.0 | shared 1 | start attention.1 | experts 1 | start routed.1
wait attention.1 | attention 2 | all_reduce | wait routed.1 | shared 2 | start attention.2 | experts 2 | start routed.2
wait attention.2 | attention 3 | wait routed.2 | shared 3 | start attention.3 | experts 3 | start routed.3
wait attention.3 | wait routed.3
"""

# Mixers 0, 2 and 6 with the experts behind them, experts 4 and mixer 5 alone: experts 4 read the stream without those
# of 3; mixer 5 does so without theirs, and 6 reads mixer 5's sum.
BRANCHES = """
attention 0 | shared 1 | start attention.1 | experts 1 | start routed.1
wait attention.1 | attention 2 | wait routed.1 | shared 3 | start attention.3 | experts 3 | start routed.3
wait attention.3 | shared 4 | start shared.4 | experts 4 | start routed.4 | wait routed.3
wait shared.4 | attention 5 | start attention.5 | wait routed.4 | wait attention.5
attention 6 | shared 7 | start attention.7 | experts 7 | start routed.7
wait attention.7 | wait routed.7
"""

# A sum ends where a norm follows it: dense MLP and experts are one, attention's hides behind both.
NORMED = """
attention 0 | start attention.0 | shared 0 | experts 0 | start routed.0 | wait attention.0
attention 1 | start attention.1 | wait routed.0 | shared 1 | experts 1 | start routed.1 | wait attention.1
attention 2 | start attention.2 | wait routed.1 | shared 2 | experts 2 | start routed.2 | wait attention.2
attention 3 | start attention.3 | wait routed.2 | shared 3 | experts 3 | start routed.3 | wait attention.3
wait routed.3
"""

# Layer 2 is regular: what is in flight ends with layer 1; the engine sums twice itself.
GAP = """
attention 0 | start attention.0 | experts 0 | start routed.0
wait attention.0 | attention 1 | start attention.1 | wait routed.0 | experts 1 | start routed.1
wait attention.1 | wait routed.1
attention 2 | all_reduce | all_reduce
attention 3 | start attention.3 | experts 3 | start routed.3
wait attention.3 | wait routed.3
"""

# attention: full, with shared experts: nothing is in flight between layers.
ATTENTION_FULL = """
attention 0 | shared 0 | start attention.0 | experts 0 | start routed.0 | wait attention.0 | wait routed.0
attention 1 | shared 1 | start attention.1 | experts 1 | start routed.1 | wait attention.1 | wait routed.1
attention 2 | shared 2 | start attention.2 | experts 2 | start routed.2 | wait attention.2 | wait routed.2
attention 3 | shared 3 | start attention.3 | experts 3 | start routed.3 | wait attention.3 | wait routed.3
"""

# mlp: full, with shared experts: these take their own sum, except in the last layer of
# the run.
MLP_FULL = """
attention 0 | start attention.0 | wait attention.0 | shared 0 | start shared.0 | experts 0 | start routed.0
wait shared.0 | attention 1 | start attention.1 | wait routed.0 | wait attention.1
shared 1 | start shared.1 | experts 1 | start routed.1
wait shared.1 | attention 2 | start attention.2 | wait routed.1 | wait attention.2
shared 2 | start shared.2 | experts 2 | start routed.2
wait shared.2 | attention 3 | start attention.3 | wait routed.2 | wait attention.3
shared 3 | experts 3 | start routed.3 | wait routed.3
"""

OF_FAMILY = {
    **dict.fromkeys(("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe"), PLAIN),
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "llama4_text", "llama4"), SHARED),
    "granitemoeshared": SHARED, "granitemoehybrid": MAMBA,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_moe"), SHARED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "instella_moe"), DENSE_FIRST),
    "hunyuan_v1_moe": SHARED, "mimo_v2_flash": DENSE_FIRST_PLAIN,
    "ernie4_5_moe": DENSE_FIRST, "gemma4_text": NORMED, "gemma4": NORMED, "lfm2_moe": DENSE_FIRST_PLAIN,
    "minimax_m2": NORMED_QUERIES, "nemotron_h": BRANCHES,
}  # fmt: skip
"""Family -> order with all layers selected; the first layer of some families is dense."""

OF_CASE = {
    **{f"{family}-all": order for family, order in OF_FAMILY.items()},
    "qwen3_moe-gap": GAP,
    "qwen2_moe-attention_full": ATTENTION_FULL,
    "qwen2_moe-mlp_full": MLP_FULL,
}


def events(order: str, ranks: int) -> list[str]:
    """Return the events of a step; one rank has no sums of the engine's own."""
    sequence = [
        event.strip()
        for line in order.strip().splitlines()
        for event in line.split("|")
    ]
    return (
        ["all_reduce", *sequence]
        if ranks > 1
        else [event for event in sequence if event != "all_reduce"]
    )
