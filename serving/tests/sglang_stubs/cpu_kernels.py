"""Stand-ins for what SGLang computes with kernels for GPUs only. The processes of an
engine import this module together with the script that starts it.
"""

from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.models import minimax_m2


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


minimax_m2.rms_sumsq_serial = _sums_of_squares
minimax_m2.rms_apply_serial = _scale
