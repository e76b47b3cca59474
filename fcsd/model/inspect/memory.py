"""Compute the bytes that serving needs. Standard library only.

Serving holds the weights and a key-value cache, both in bfloat16. Multi-head latent
attention is assumed to cache its latent, `kv_lora_rank + qk_rope_head_dim` numbers a
token and layer, as in transformers, vLLM and SGLang.

Not covered: training, whose memory depends on the recipe (`fcsd estimate`).
"""

from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_TOKENS = 1024
_WITHOUT_KEYS = ("linear_attention", "conv", "mamba", "moe")


def cache_bytes(config: Any, num_tokens: int = CACHE_TOKENS) -> int | None:
    """Compute the bytes of one sequence's key-value cache in bfloat16; None if the
    config does not say.

    config: that of the decoder layers. Its `layer_types` says which layers cache only a
    window (`sliding_window`, `attention_chunk_size`) and which cache no keys and values
    at all (linear attention, convolution, mamba). State that does not grow with the
    text and the keys of sparse attention's indexers are not counted.
    """
    kinds = (
        getattr(config, "layer_types", None)
        or ["full_attention"] * config.num_hidden_layers
    )
    layers = (
        getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    )
    numbers = 0
    for kind, layer in zip(kinds[: config.num_hidden_layers], layers, strict=False):
        if kind in _WITHOUT_KEYS:
            continue
        per_token = _numbers_per_token(layer)
        if per_token is None:
            return None
        # A window bounds the cache; without one it grows with the text.
        window = {
            "sliding_attention": getattr(layer, "sliding_window", None),
            "hybrid_sliding": getattr(layer, "sliding_window", None),
            "chunked_attention": getattr(layer, "attention_chunk_size", None),
        }.get(kind)
        numbers += per_token * min(num_tokens, window or num_tokens)
    return BYTES["bfloat16"] * numbers


def _numbers_per_token(config: Any) -> int | None:
    """Count the cached numbers per token and attention layer."""
    heads = getattr(config, "num_attention_heads", None)
    rank = getattr(config, "kv_lora_rank", None)
    # Multi-head latent attention: one latent for all heads, keys and values.
    if rank:
        return int(rank + config.qk_rope_head_dim)
    if not isinstance(heads, int):
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * kv_heads * head_dim)
