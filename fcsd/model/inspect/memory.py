"""Compute the bytes that serving needs. Standard library only.

Serving holds the weights and a key-value cache, both in bfloat16. Multi-head latent
attention is assumed to cache its latent, `kv_lora_rank + qk_rope_head_dim` numbers a
token and layer, as in transformers, vLLM and SGLang.

Not covered: training, whose memory depends on the recipe (`fcsd estimate`).
"""

from typing import Any

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CACHE_TOKENS = 1024
_WITHOUT_KEYS = ("linear_attention", "conv", "mamba", "mlp", "moe")


def cache_bytes(config: Any, num_tokens: int = CACHE_TOKENS) -> int | None:
    """Compute the bytes of one sequence's key-value cache in bfloat16; None if the
    config does not say.

    config: the decoder layers' config. Its `layer_types` says which layers cache only a
    window (`sliding_window`, `attention_chunk_size`), which one entry for several tokens
    beside a window (`compress_rates`), and which no keys and values at all (linear
    attention, convolution, mamba). State that does not grow with the
    text and the keys of sparse attention's indexers are not counted.
    """
    layers = layer_cache_bytes(config, num_tokens)
    return None if layers is None else sum(layers)


def layer_cache_bytes(config: Any, num_tokens: int) -> list[int] | None:
    """Compute `cache_bytes` layer by layer."""
    by_layer = []
    windows = attention_windows(config)
    for (kind, layer), window in zip(_layers(config), windows, strict=True):
        per_token = 0 if kind in _WITHOUT_KEYS else _numbers_per_token(layer)
        if per_token is None:
            return None
        # A window bounds the cache; without one it grows with the text.
        num_kept = min(num_tokens, window or num_tokens)
        if rate := (getattr(layer, "compress_rates", None) or {}).get(kind):
            num_kept = num_tokens // rate + min(num_tokens, layer.sliding_window)
        by_layer.append(BYTES["bfloat16"] * per_token * num_kept)
    return by_layer


def attention_windows(config: Any) -> list[int | None]:
    """Return the tokens that attention sees at most, layer by layer; None: all."""
    names = {
        "sliding_attention": "sliding_window",
        "hybrid_sliding": "sliding_window",
        "chunked_attention": "attention_chunk_size",
    }
    return [
        getattr(layer, names[kind], None) if kind in names else None
        for kind, layer in _layers(config)
    ]


def selected_tokens(config: Any) -> list[int | None]:
    """Return the tokens that an indexer selects at most for each query of a layer's
    sparse attention, layer by layer; None: attention is not sparse.
    """
    return [
        getattr(layer, "index_topk", None) if kind == "indexed_attention" else None
        for kind, layer in _layers(config)
    ]


def _layers(config: Any) -> list[tuple[str, Any]]:
    """Return the kind of each layer's attention, and its config."""
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * num_layers
    return list(zip(kinds[:num_layers], layer_configs(config), strict=False))


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer; the model's own where all layers share it."""
    return (
        getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    )


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
    # DeepSeek-V4's keys are its values.
    tensors = 1 if getattr(config, "compress_rates", None) else 2
    return int(tensors * kv_heads * head_dim)
