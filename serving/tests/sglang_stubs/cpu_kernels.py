"""Stand-ins for what SGLang computes with kernels for GPUs only. The processes of an
engine import this module together with the script that starts it.
"""

import itertools
from typing import Any

import torch
from delta_rule import convolve, recur
from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.layers.attention.linear.kernels import gdn_triton
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models import lfm2_moe, minimax_m2, qwen2_moe, qwen3_5


def _with_sinks(sinks: torch.Tensor) -> Any:
    """Return attention in which each head leaves a part of its weight to a sink (H,)."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        enable_gqa: bool,
        scale: float,
        is_causal: bool,
    ) -> torch.Tensor:
        if enable_gqa:
            group = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], 3).softmax(3)[..., :-1] @ value

    return attend


def _taking_sinks(forward: Any) -> Any:
    def with_sinks(
        self: Any, *given: Any, sinks: torch.Tensor | None = None, **named: Any
    ) -> Any:
        stock = torch_native_backend.scaled_dot_product_attention
        if sinks is not None:
            torch_native_backend.scaled_dot_product_attention = _with_sinks(sinks)
        try:
            return forward(self, *given, **named)
        finally:
            torch_native_backend.scaled_dot_product_attention = stock

    return with_sinks


def _expanding_latents(forward: Any) -> Any:
    """Return a forward of prompts that also takes MLA's keys and values, which are not
    those of the cache.
    """

    def with_latents(
        self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *rest: Any, **named: Any
    ) -> Any:  # fmt: skip
        cached = self.token_to_kv_pool.get_key_buffer(layer.layer_id).shape[-1]
        if cached == layer.qk_head_dim:
            return forward(self, q, k, v, layer, batch, *rest, **named)
        assert not any(batch.extend_prefix_lens)
        lengths = batch.extend_seq_lens.tolist()
        queries, keys, values = (
            x.view(x.shape[0], layer.tp_q_head_num, -1).split(lengths) for x in (q, k, v)
        )  # fmt: skip
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1) for x in sequence),
                is_causal=True,
                scale=layer.scaling,
            ).transpose(0, 1)
            for sequence in zip(queries, keys, values, strict=True)
        ]
        return torch.cat(outputs).flatten(1)

    return with_latents


TorchNativeAttnBackend.forward_decode = _taking_sinks(
    TorchNativeAttnBackend.forward_decode
)
TorchNativeAttnBackend.forward_extend = _expanding_latents(
    _taking_sinks(TorchNativeAttnBackend.forward_extend)
)
# SGLang starts gpt_oss with certain backends only.
ATTENTION_BACKENDS["triton"] = ATTENTION_BACKENDS["torch_native"]


def _sums_of_squares(*tensors: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row (B, …), one tensor after the other."""
    return torch.cat([x.float().square().sum(1) for x in tensors])


def _scale(
    x1: torch.Tensor,
    x2: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    sums: torch.Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, ...]:
    """Return RMSNorm of rows whose sums of squares run over all ranks."""
    return tuple(
        x * (total[:, None] / (x.shape[1] * ranks) + eps).rsqrt() * weight
        for x, weight, total in zip(
            (x1, x2), (w1, w2), sums[: 2 * len(x1)].view(2, -1), strict=True
        )
    )


def _add_gated(
    hidden_states: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor
) -> None:  # fmt: skip
    """Add shared experts, scaled by their gate, in regular layers."""
    out += (hidden_states @ gate).sigmoid()[:, None] * shared


qwen2_moe.fused_gate_sigmoid_mul_add = _add_gated
minimax_m2.rms_sumsq_serial = _sums_of_squares
minimax_m2.rms_apply_serial = _scale


# ---- convolutions, and linear attention of Qwen's hybrid models


def _convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Convolve the channels (channels, tokens) of each request."""
    parts = []
    for k, (begin, end) in enumerate(_spans(query_start_loc)):
        kept = conv_states[cache_indices[k]]
        if not has_initial_state[k]:
            kept.zero_()
        parts.append(convolve(x[:, begin:end], kept, weight[:, None]))
    return _activated(torch.cat(parts, 1), activation)


def _convolve_tokens(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: None,
    activation: str | None,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve the channels (requests, channels) of one token for each request."""
    parts = [
        convolve(row[:, None], conv_states[slot], weight[:, None])[:, 0]
        for row, slot in zip(x, conv_state_indices, strict=True)
    ]
    return _activated(torch.stack(parts), activation)


def _activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return x if activation is None else torch.nn.functional.silu(x)


def _gates(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of the decay and beta."""
    log_decay = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    return log_decay[None], b.sigmoid()[None]


def _extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Compute the recurrence of each request of a packed batch (1, tokens, heads, …)."""
    outputs = [
        recur(
            *(x[0, begin:end] for x in (q, k, v)),
            g[0, begin:end].exp(),
            beta[0, begin:end],
            initial_state[slot],
        )
        for (begin, end), slot in zip(
            _spans(cu_seqlens), initial_state_indices, strict=True
        )
    ]
    return torch.cat(outputs)[None], None, None


def _update(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    log_decay, beta = _gates(A_log, a, b, dt_bias)
    state = {
        "initial_state": initial_state_source,
        "initial_state_indices": initial_state_indices,
    }
    return _extend(q, k, v, log_decay, beta, cu_seqlens=cu_seqlens, **state)[0]


def _norm_gated(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *_: Any, eps: float, **__: Any
) -> torch.Tensor:  # fmt: skip
    """Return RMSNorm of x, gated by SiLU."""
    normed = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    return normed * torch.nn.functional.silu(gate)


def _norm_of_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, ...]:
    """Return queries and keys, a row for each head, after an RMSNorm that scales with
    1 + weight.
    """
    return tuple(
        torch.nn.functional.rms_norm(
            x.reshape(-1, head_dim), (head_dim,), 1 + weight, eps
        )
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def _norm_of_gated_heads(
    q_gate: torch.Tensor, k: torch.Tensor, *norm: Any
) -> tuple[torch.Tensor, ...]:
    """Return the same of queries that stand beside their gate in each head, and the gate."""
    *weights, head_dim, heads = norm
    q, gate = q_gate.view(len(q_gate), heads, 2 * head_dim).chunk(2, -1)
    return *_norm_of_heads(q, k, *weights, head_dim), gate.reshape(-1, head_dim)


def _multiply_by_sigmoid(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.mul_(gate.reshape(x.shape).sigmoid())


def _spans(starts: torch.Tensor) -> list[tuple[int, int]]:
    bounds = starts.tolist()
    return list(itertools.pairwise(bounds))


for module in (gdn_backend, lfm2_moe):
    module.causal_conv1d_fn = _convolve_prompts
    module.causal_conv1d_update = _convolve_tokens
gdn_backend.fused_gdn_gating = _gates
gdn_triton.chunk_gated_delta_rule = _extend
gdn_triton.fused_sigmoid_gating_delta_rule_update = _update
fused_norm_gate.rms_norm_gated = _norm_gated
layernorm_gated.layernorm_fn = lambda x, weight, bias, *, z, **options: _norm_gated(
    x, z, weight, **options
)
qwen3_5._GDN_FUSED_QKVZBA_RATIOS = ()  # SGLang then splits them in torch
qwen3_5.fused_qk_gemma_rmsnorm = _norm_of_heads
qwen3_5.fused_qk_gemma_rmsnorm_with_gate = _norm_of_gated_heads
qwen3_5._fused_sigmoid_mul_cpu = _multiply_by_sigmoid
