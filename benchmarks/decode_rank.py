"""One tensor-parallel rank's share of a Qwen3-MoE, for `benchmarks.decode_step`: random
weights, a paged cache, the blocks of its layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

PAGE = 256
"""Tokens of a page; flash-attn takes multiples of 256 only."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one rank's share of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    vocab: int
    eps: float
    theta: float
    normalised: bool


def shape_of(config: dict[str, Any], ranks: int) -> Shape:
    """Return a rank's share of a Qwen3-MoE, whose every layer has routed experts."""
    if config["model_type"] != "qwen3_moe":
        raise SystemExit(f"--config: {config['model_type']}; only qwen3_moe is built")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise SystemExit("--config: has layers without routed experts")
    kv_heads = config["num_key_value_heads"]
    split = ("num_attention_heads", "moe_intermediate_size", "vocab_size")
    if uneven := [name for name in split if config[name] % ranks]:
        raise SystemExit(f"--ranks {ranks}: does not divide {uneven[0]}")
    if kv_heads % ranks and ranks % kv_heads:
        raise SystemExit(f"--ranks {ranks}: neither divides num_key_value_heads nor is")
    return Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"] // ranks,
        # With fewer heads than ranks, several ranks keep the same one.
        kv_heads=max(1, kv_heads // ranks),
        head_dim=config["head_dim"],
        experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        inner=config["moe_intermediate_size"] // ranks,
        vocab=config["vocab_size"] // ranks,
        eps=config["rms_norm_eps"],
        theta=config["rope_theta"],
        normalised=config["norm_topk_prob"],
    )


class Layer(NamedTuple):
    """Weights of a layer, and the rank's part of its cache: place, key or value, head."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    out: torch.Tensor
    experts_norm: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    cache: torch.Tensor


class Rank:
    """One rank's weights and cache, and the blocks of its layers.

    Every request has `length` tokens, the last of which is being decoded; its pages lie
    anywhere in the pool.
    """

    def __init__(
        self, shape: Shape, batch: int, length: int, attention: str, made: dict
    ):
        if length % PAGE:
            raise SystemExit(f"--length {length}: must be a multiple of {PAGE}")
        self.shape, self.batch, self.length, self.made = shape, batch, length, made
        s, device = shape, made["device"]
        generator = torch.Generator(device).manual_seed(0)

        def random_(*size: int, mean: float = 0.0, std: float = 0.0) -> torch.Tensor:
            # Without std, what a matrix makes is as large as what it reads.
            std = std or size[-1] ** -0.5
            return torch.empty(size, **made).normal_(mean, std, generator=generator)

        def norm(size: int) -> torch.Tensor:
            return random_(size, mean=1.0, std=0.1)

        pages = batch * length // PAGE
        order = torch.randperm(pages, generator=generator, device=device)
        self.table = order.view(batch, -1).int()
        self.lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        self.last = order.view(batch, -1)[:, -1] * PAGE + PAGE - 1
        inverse = s.theta ** (-torch.arange(0, s.head_dim, 2).double() / s.head_dim)
        angle = ((length - 1) * inverse).repeat(2)
        self.cos, self.sin = angle.cos().to(**made), angle.sin().to(**made)
        self.embedded = random_(batch, s.hidden, std=1.0)
        self.norm, self.head = norm(s.hidden), random_(s.vocab, s.hidden)
        self.layers = [
            Layer(
                norm(s.hidden),
                random_((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
                norm(s.head_dim),
                norm(s.head_dim),
                random_(s.hidden, s.heads * s.head_dim),
                norm(s.hidden),
                random_(s.experts, s.hidden),
                random_(s.experts, 2 * s.inner, s.hidden),
                random_(s.experts, s.hidden, s.inner),
                random_(pages * PAGE, 2, s.kv_heads, s.head_dim, std=1.0),
            )
            for _ in range(s.layers)
        ]
        # Shapes of another batch would add up to dynamo's limit, beyond which it stops
        # to compile.
        torch.compiler.reset()
        fuse = torch.compile if device == "cuda" else lambda piece, **_: piece
        pieces = (add_and_norm, queries_and_keys, route, activate, collect, merge)
        self.fused = SimpleNamespace(
            **{piece.__name__: fuse(piece, dynamic=False) for piece in pieces}
        )
        self.core = ATTENTION[attention](self)

    def add_and_norm(
        self, stream: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fused.add_and_norm(stream, addend, weight, self.shape.eps)

    def attend(self, layer: Layer, read: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of attention's output."""
        queries, written = self.fused.queries_and_keys(
            F.linear(read, layer.qkv),
            layer.q_norm,
            layer.k_norm,
            self.cos,
            self.sin,
            self.shape.kv_heads,
            self.shape.eps,
        )
        layer.cache.index_copy_(0, self.last, written)
        keys, values = layer.cache.unflatten(0, (-1, PAGE)).unbind(2)
        return F.linear(self.core(queries, keys, values).flatten(1), layer.out)

    def experts(self, layer: Layer, read: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the routed experts' output."""
        rows, weights, inverse, offsets = self.fused.route(
            read,
            F.linear(read, layer.router),
            self.shape.top_k,
            self.shape.normalised,
        )
        up = F.grouped_mm(rows, layer.gate_up.transpose(-2, -1), offs=offsets)
        down = F.grouped_mm(
            self.fused.activate(up), layer.down.transpose(-2, -1), offs=offsets
        )
        return self.fused.collect(down, inverse, weights)


def add_and_norm(
    stream: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if addend is not None:
        stream = stream + addend
    return stream, F.rms_norm(stream, weight.shape, weight, eps)


def queries_and_keys(
    qkv: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries (B, heads, head_dim), and what goes into the cache."""
    heads = qkv.unflatten(1, (-1, q_norm.shape[0]))
    sizes = (heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads)
    queries, keys, values = heads.split(sizes, 1)

    def placed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, weight.shape, weight, eps)
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    written = torch.stack((placed(keys, k_norm), values), 1)
    return placed(queries, q_norm).contiguous(), written


def route(
    read: torch.Tensor, logits: torch.Tensor, top_k: int, normalised: bool
) -> tuple[torch.Tensor, ...]:
    """Return a row for each token and chosen expert, sorted by experts; the weights (B,
    K), the rows' places in that order, and where each expert's rows end.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    weights, chosen = logits.softmax(-1, dtype=exact).topk(top_k, -1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = chosen.flatten()
    order = flat.argsort()
    places = torch.arange(flat.shape[0], device=flat.device)
    inverse = torch.empty_like(order).scatter(0, order, places)
    experts = torch.arange(logits.shape[1], device=flat.device)
    ends = (flat[:, None] <= experts).sum(0, dtype=torch.int32)
    return read[order // top_k], weights, inverse, ends


def activate(up: torch.Tensor) -> torch.Tensor:
    gate, linear = up.chunk(2, -1)
    return F.silu(gate) * linear


def collect(
    down: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    rows = down[inverse].unflatten(0, weights.shape)
    return (rows * weights.unsqueeze(-1)).sum(1).to(down.dtype)


def merge(out: torch.Tensor, lse: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Join the parts of `decode_kernels.paged_attention`."""
    joined = (lse.softmax(1).unsqueeze(-1) * out).sum(1)
    group = queries.shape[0] * queries.shape[1] // joined.shape[0]
    return joined[:, :group].reshape(queries.shape).to(queries.dtype)


# ---- attention


def with_flash_attn(rank: Rank) -> Callable[..., torch.Tensor]:
    from flash_attn import flash_attn_with_kvcache

    def run(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        facts = {"cache_seqlens": rank.lengths, "block_table": rank.table}
        return flash_attn_with_kvcache(queries[:, None], keys, values, **facts)[:, 0]

    return run


def with_flashinfer(rank: Rank) -> Callable[..., torch.Tensor]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=rank.made["device"])
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
    ends = torch.arange(rank.batch + 1, dtype=torch.int32) * rank.table.shape[1]
    wrapper.plan(
        ends.to(rank.table.device),
        rank.table.flatten(),
        torch.full_like(rank.lengths, PAGE),
        rank.shape.heads,
        rank.shape.kv_heads,
        rank.shape.head_dim,
        PAGE,
        q_data_type=rank.made["dtype"],
        kv_data_type=rank.made["dtype"],
    )
    return lambda queries, keys, values: wrapper.run(queries, (keys, values))


def with_triton(rank: Rank) -> Callable[..., torch.Tensor]:
    from benchmarks.decode_kernels import paged_attention

    sms = torch.cuda.get_device_properties().multi_processor_count

    def run(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        parts = paged_attention(queries, keys, values, rank.table, sms)
        return rank.fused.merge(*parts, queries)

    return run


def gathered(rank: Rank) -> Callable[..., torch.Tensor]:
    """torch's attention over a copy of the pages, which takes longer than a kernel that
    reads them in place.
    """

    def run(
        queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        whole = (x[rank.table].flatten(1, 2).transpose(1, 2) for x in (keys, values))
        return F.scaled_dot_product_attention(
            queries.unsqueeze(2), *whole, enable_gqa=True
        ).squeeze(2)

    return run


ATTENTION: dict[str, Callable[[Rank], Callable[..., torch.Tensor]]] = {
    "flash_attn": with_flash_attn,
    "flashinfer": with_flashinfer,
    "triton": with_triton,
    "gathered": gathered,
}
