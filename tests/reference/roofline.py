"""A roofline by hand with which `fcsd plan` is compared (docs/plan.md): formulas for a
layer's operations, bytes and exchanges from the sizes in `config.json`, with published
figures of GPUs. It imports nothing from the planner.

It covers a step of training (FSDP2 over all GPUs, which also share the experts;
activation checkpointing), and the time between tokens of a server with data-parallel
attention.
"""

import math
from dataclasses import dataclass
from typing import Any

GEMM, GROUPED, FP8_GROUPED, CORE = 0.5, 0.4, 0.1, 0.35  # shares of the peak
MEMORY, LINK, INTERFACE = 0.65, 0.85, 0.8  # shares of a rate
LATENCY_S, SLOWDOWN = 20e-6, 0.15
DISPATCH_S, COMBINE_S = 27e-6, 36e-6  # of a server, beside the bytes
# Of a server: a matmul, attention and another kernel at least, and beside all kernels.
MATMUL_S, CORE_S, KERNEL_S, GAP_S = 5e-6, 12e-6, 2.5e-6, 400e-6
INTERFACE_BYTES_S = 50e9

# Peaks in bfloat16 and FP8, bytes per second of memory, and to a node's other GPUs.
GPUS = {
    "h100": (989.4e12, 1978.9e12, 3.35e12, 450e9),
    "mi300x": (1307.4e12, 2614.9e12, 5.3e12, 7 * 64e9 * 0.75),
}


@dataclass(frozen=True)
class Answer:
    """Seconds of a step whose exchanges block, of one with FarSkip, and of the best
    exact schedule; the share of communication in the first; tokens per GPU and step.
    """

    regular_s: float
    overlapped_s: float
    exact_s: float
    sent_s: float
    tokens: float

    @property
    def rate(self) -> float:
        """Tokens per second per GPU with FarSkip."""
        return self.tokens / self.overlapped_s


class Model:
    """Sizes of a model, in elements of weights by part of a layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.hidden = hidden = config["hidden_size"]
        self.layers = config["num_hidden_layers"]
        self.dense = config.get("first_k_dense_replace", 0)
        self.vocabulary = config["vocab_size"]
        self.experts = (
            config.get("num_local_experts")
            or config.get("num_experts")
            or config["n_routed_experts"]
        )
        self.chosen = config["num_experts_per_tok"]
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        self.expert = 3 * hidden * width
        self.shared = config.get("n_shared_experts", 0) * self.expert
        self.dense_mlp = 3 * hidden * config["intermediate_size"]
        self.router = hidden * self.experts
        self.groups = (config.get("n_group", 1), config.get("topk_group", 1))
        heads = config["num_attention_heads"]
        self.latent = "kv_lora_rank" in config
        if rank := config.get("kv_lora_rank"):
            rope, value = config["qk_rope_head_dim"], config["v_head_dim"]
            key = config["qk_nope_head_dim"] + rope
            queries = config["q_lora_rank"]
            self.attention_a = hidden * (queries + rank + rope)
            self.attention_a += queries * heads * key
            self.attention_a += rank * heads * (key - rope + value)
            self.cached = rank + rope
        else:
            key = value = config["head_dim"]
            kept = config["num_key_value_heads"] * key
            self.attention_a = hidden * (heads * key + 2 * kept)
            self.cached = 2 * kept
        self.attention_b = heads * value * hidden
        self.pair = 2 * heads * (key + value)
        # In gpt-oss every second layer sees only the last 128 tokens.
        window = config.get("sliding_window") if "layer_types" in config else None
        self.windows = window, None
        self.parameters = self.layers * (self.attention_a + self.attention_b)
        self.parameters += self.dense * self.dense_mlp + 2 * hidden * self.vocabulary
        self.parameters += (self.layers - self.dense) * (
            self.experts * self.expert + self.shared + self.router
        )

    def seen(self, length: int) -> float:
        """Return the mean over layers of the pairs that a causal mask and windows keep
        in a text.
        """
        pairs = [
            length**2 / 2 if window is None else window * length - window**2 / 2
            for window in self.windows
        ]
        return sum(pairs) / 2

    def ranks_hit(self, ranks: int) -> float:
        """Return the mean number of ranks that hold any of a token's experts, if
        experts are in order and each group is on whole ranks.
        """
        number, chosen_groups = self.groups
        share = chosen_groups / number
        experts, places = round(self.experts * share), round(ranks * share)
        missed = math.comb(experts - experts // places, self.chosen)
        return places * (1 - missed / math.comb(experts, self.chosen))


def exchange_s(
    rows: float,
    width: float,
    ranks: int,
    out: float,
    near_s: float = LATENCY_S,
    far_s: float = 2 * LATENCY_S,
) -> float:
    """Return the seconds of an all-to-all of `rows` rows of `width` bytes per rank."""
    near, far = 7 / ranks, 1 - 8 / ranks
    return max(
        near_s + rows * width * near / (out * LINK),
        far_s + rows * width * far / (INTERFACE_BYTES_S * INTERFACE),
    )


def with_hidden(compute: float, sent: float, hidden: float) -> float:
    """Return the seconds of a step in which some communication is hidden."""
    return compute + sent - hidden + SLOWDOWN * hidden


def training(
    config: dict[str, Any],
    gpu: str,
    ranks: int,
    length: int,
    rows: int,
    *,
    keeps: bool = True,
) -> Answer:
    """Return the step of `rows` texts of `length` tokens, one per micro-batch. keeps:
    memory suffices for two micro-batches in turn, which recompute nothing.
    """
    model = Model(config)
    peak, _, memory, out = GPUS[gpu]
    tokens, memory, number = length, memory * MEMORY, rows // ranks
    moe = model.layers - model.dense

    def matmul(weights: float, share: float = GEMM) -> float:
        return 2 * tokens * weights / (peak * share)

    stream = tokens * model.hidden * 2 / memory
    queries = matmul(model.attention_a)
    output = model.pair * model.seen(length) / (peak * CORE) + matmul(model.attention_b)
    sorting = 8 * model.chosen * stream
    experts = matmul(model.chosen * model.expert, GROUPED)
    shared = matmul(model.shared)
    forward = model.layers * (queries + output + 6 * stream)
    forward += moe * (matmul(model.router) + experts + shared + sorting)
    forward += model.dense * matmul(model.dense_mlp)
    logits = 3 * matmul(model.hidden * model.vocabulary)
    logits += 8 * 4 * tokens * model.vocabulary / memory
    once = 32 * model.parameters / ranks / memory
    # Forward, again, and backward, which takes twice as long.
    compute = number * (4 * forward + logits) + once
    width = 2 * model.hidden
    one = exchange_s(tokens * model.ranks_hit(ranks), width, ranks, out)
    # A recomputed layer dispatches again; its combine is not needed.
    sent = number * moe * 5 * one
    dispatch, combine = output, shared + queries
    hidden = 2 * min(one, dispatch) + min(one, 2 * dispatch)
    hidden += min(one, combine) + min(one, 2 * combine)
    # Two micro-batches in turn, which recompute nothing, each hide their exchanges
    # beside the other's computation.
    kept = number * (3 * forward + logits) + once
    pairs = (number - 1) * (
        min(2 * moe * one, forward) + min(2 * moe * one, 2 * forward)
    )
    return Answer(
        compute + sent,
        with_hidden(compute, sent, number * moe * hidden),
        min(
            compute + sent,
            with_hidden(kept, number * moe * 4 * one, pairs) if keeps else math.inf,
        ),
        sent,
        number * tokens,
    )


def decoding(
    config: dict[str, Any],
    gpu: str,
    ranks: int,
    length: int,
    requests: int,
    *,
    weights: tuple[float, float],
    fp8: bool,
    gathers: bool,
) -> Answer:
    """Return the step of a server with `requests` requests. weights: bytes per element
    of experts and of everything else. gathers: every rank receives all tokens, and no
    exact schedule other than the regular one runs; else a row goes to each expert.
    """
    model = Model(config)
    bfloat16, eight, memory, out = GPUS[gpu]
    peak, memory = (eight if fp8 else bfloat16), memory * MEMORY
    grouped = FP8_GROUPED if fp8 else GROUPED
    moe = model.layers - model.dense

    def step(tokens: float) -> tuple[float, float, float, float, float]:
        """Return the seconds of computation, and per layer the seconds of both
        exchanges, of its shared expert, and of what an even and an odd layer hide.
        """

        def matmul(elements: float) -> float:
            computing = 2 * tokens * elements / (peak * GEMM)
            return max(computing, elements * weights[1] / memory)

        stream = tokens * model.hidden * 2 / memory
        latent, eight_bits = int(model.latent), int(fp8)

        def step_s(
            matmul_s: float, passes_s: float, matmuls: int, others: int
        ) -> float:
            # In FP8, another kernel quantises the input.
            others += eight_bits
            return max(matmul_s, matmuls * MATMUL_S) + max(passes_s, others * KERNEL_S)

        # Latent attention has two matmuls and a norm more before it, and one behind.
        queries = step_s(matmul(model.attention_a), 0.0, 1 + 2 * latent, 3 + latent)
        outputs = []
        for window in model.windows:
            kept = tokens * min(length, window or length)
            cache = kept * model.cached * 2 / memory
            pairs = model.pair * kept / (bfloat16 * CORE)
            behind = step_s(matmul(model.attention_b), 0.0, 1 + latent, 0)
            outputs.append(max(cache, pairs, CORE_S) + behind)
        used = 1 - (1 - model.chosen / model.experts) ** (tokens * ranks)
        experts = max(
            2 * tokens * model.chosen * model.expert / (peak * grouped),
            used * model.experts / ranks * model.expert * weights[0] / memory,
        )
        shared = step_s(matmul(model.shared), 0.0, 2, 1) if model.shared else 0.0
        # Sorting: a quarter before the dispatch, half around the experts, a quarter
        # behind the combine.
        part = 2 * model.chosen * stream
        router = max(matmul(model.router), MATMUL_S) + max(
            6 * stream + part, 5 * KERNEL_S
        )
        experts = step_s(experts, 2 * part, 2, 3)
        compute = model.layers * (queries + sum(outputs) / 2)
        compute += moe * (router + experts + shared + max(part, KERNEL_S))
        dense = step_s(matmul(model.dense_mlp), 6 * stream, 2, 2)
        compute += model.dense * dense
        compute += matmul(model.hidden * model.vocabulary) + GAP_S
        # Rows in FP8 have a scale of four bytes for 128 elements.
        there, back = model.hidden * (1 + 4 / 128 if fp8 else 2), model.hidden * 2
        if gathers:
            rate = min(out * LINK, 8 * INTERFACE_BYTES_S * INTERFACE)
            both = [
                width * tokens * (ranks - 1) / rate + 2 * LATENCY_S
                for width in (there, back)
            ]
        else:
            rows = tokens * model.chosen
            both = [
                exchange_s(rows, width, ranks, out, fixed_s, fixed_s)
                for width, fixed_s in ((there, DISPATCH_S), (back, COMBINE_S))
            ]
        even, odd = (
            min(both[0], output) + min(both[1], shared + queries) for output in outputs
        )
        return compute, sum(both), shared, even, odd

    compute, sent, shared, even, odd = step(requests / ranks)
    hidden = moe * (even + odd) / 2
    regular = compute + moe * sent
    exact = [regular]
    if not gathers:
        twice, again, *_ = (2 * part for part in step(requests / ranks / 2))
        exact.append(with_hidden(twice, moe * again, min(moe * again, twice)))
    exact.append(with_hidden(compute, moe * sent, moe * min(sent, shared)))
    return Answer(
        regular,
        with_hidden(compute, moe * sent, hidden),
        min(*exact),
        moe * sent,
        requests / ranks,
    )
