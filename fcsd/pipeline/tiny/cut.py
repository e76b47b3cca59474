"""Cut the sizes of a configuration, so that a model of the same structure is built in
seconds on a CPU.

Sizes are found by the names of fields; a size that is already small is kept. Kinds of
layers, norms, biases, scales and activations stay those of the configuration, and each
kind of layer is among the few that remain.
"""

import itertools
import math
import re
from typing import Any

from transformers import PreTrainedConfig

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(num_experts|.*routed_experts|.*local_experts|moe_num_experts)", 8),
    (
        r"(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts)",
        2,
    ),
    (r"(n_groups?|num_expert_group)", 2),
    (r"(topk_group|first_k_dense_replace|num_dense_layers|moe_layer_start_index)", 1),
    (
        r"(attn_layer_offset|decoder_sparse_step|moe_layer_interval|temporal_patch_size)",
        2,
    ),
    (r"attn_layer_period", 4),
    (r".*(lora_rank|norm_rank|dt_rank)", 16),
    (r"mamba_d_head", 32),
    (r"(.*d_state|ssm_state_size|d_rel)", 8),
    (r".*(key_value_heads|kv_n_heads|num_key_heads)", 2),
    (r".*(attention_heads|n_heads|num_heads|num_value_heads)(_per_layer)?", 4),
    (
        r".*(hidden_size|hidden_sizes|input_size|d_model|(?<!_head)(?<!rotary)_dim|_channels)",
        64,
    ),
    (r".*(intermediate_size.*|mlp_dim|conv_output_size)", 48),
    (
        r".*(sliding_window|sliding_window_size|chunk_size|block_size|index_topk|index_topk_blocks|rel_extent)",
        8,
    ),
    (r"index_kpool", 4),
    (r"image_size", 32),
    (r"depths", 1),
)
"""Pattern of a field's name -> the largest value after the cut."""

_HEAD_DIMS = r"(.*head_dim|rotary_dim|kv_channels)"

_LAYERS = ("num_hidden_layers", "n_layers", "depth", "encoder_layers")
_TOWER_LAYERS = 2
_NUMBERS_OF_LAYERS = ("_indexes", "moe_layers", "only_layers", "source_layers")
"""Endings of the names of lists that contain layer indices; any other list with as many
items as the model has layers contains one value per layer.
"""

_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""Those of `fcsd.pipeline.tiny.models.tiny_tokenizer`."""


def cut_sizes(
    config: PreTrainedConfig, *, num_hidden_layers: int = 4, **changes: Any
) -> Any:
    """Return the configuration with its sizes cut: at most this many layers, of width
    64, with eight experts.

    changes: further fields; those of a wrapper's text config, if there is one.
    """
    inner = config.get_text_config()
    fields = config.to_dict()
    text = fields["text_config"] if inner is not config else fields
    cut = _cut(fields, {id(text): num_hidden_layers})
    section = cut["text_config"] if inner is not config else cut
    # Special tokens are those of the tiny tokenizer.
    cut |= {name: token for name, token in _TOKENS.items() if cut.get(name) is not None}
    section |= {
        inner.attribute_map.get(name, name): value
        for name, value in (_TOKENS | changes).items()
    }
    return type(config)(
        **{name: value for name, value in cut.items() if name != "model_type"}
    )


def _cut(
    fields: dict[str, Any], num_layers: dict[int, int], divisor: int = 0
) -> dict[str, Any]:
    """Cut one section, and those in it.

    num_layers: the number of layers after the cut, by id of the section. divisor: of
    the dimensions of heads; 0: computed from the section.
    """
    old = next(
        (fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), None
    )
    # The number of its layers is no field of Nemotron-H.
    if old is None and isinstance(kinds := fields.get("layers_block_type"), list):
        old = len(kinds)
    new = min(num_layers.get(id(fields), _TOWER_LAYERS), old or 0)
    chosen = _chosen(fields, old, new) if old else []
    # A common divisor preserves the sums and ratios of dimensions: parts with and
    # without rotation, partial rotations.
    dims = [
        value
        for name, value in fields.items()
        if re.fullmatch(_HEAD_DIMS, str(name)) and isinstance(value, int)
    ]
    divisor = divisor or max(1, math.gcd(*dims) // 16)
    section: dict[str, Any] = {}
    # Lists by layer keep the values of the chosen layers; lists of indices renumber
    # them.
    for name, value in fields.items():
        if name in _LAYERS:
            value = new
        elif name == "per_layer_config" and value:
            by_layer = {int(key): layer_fields for key, layer_fields in value.items()}
            value = {
                k: _cut(by_layer[layer], {}, divisor)
                for k, layer in enumerate(chosen)
                if layer in by_layer
            }
        elif isinstance(value, dict):
            value = _cut(value, num_layers)
        elif isinstance(value, list) and name.endswith(_NUMBERS_OF_LAYERS):
            value = [k for k, layer in enumerate(chosen) if layer in value]
        elif isinstance(value, list) and len(value) == old:
            value = [value[layer] for layer in chosen]
        elif re.fullmatch(_HEAD_DIMS, str(name)) and isinstance(value, int):
            value //= divisor
        section[name] = _small(name, value)
    for prefix in ("", "swa_"):
        keys, queries = f"{prefix}num_key_value_heads", f"{prefix}num_attention_heads"
        # Latent attention needs as many keys as queries.
        if keys in fields and fields[keys] == fields.get(queries):
            section[keys] = section[queries]
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := section.get(name), dict):
            section[name] = _rotation(rope, _head_dim(section), _head_dim(fields))
    return section


def _small(name: Any, value: Any) -> Any:
    """Return a field's value, or a list's values, limited to the largest for its name."""
    if isinstance(value, list):
        return [_small(name, item) for item in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return min(
        value,
        next(
            (
                largest
                for pattern, largest in _SIZES
                if re.fullmatch(pattern, str(name))
            ),
            value,
        ),
    )


def _rotation(rope: dict[str, Any], new: int, old: int) -> dict[str, Any]:
    """Shorten lists of values per frequency to the number of a head's frequencies.

    new, old: the dimension of a head.
    """
    rotation = dict(rope)
    for key in ("short_factor", "long_factor"):
        if key in rope:
            rotation[key] = rope[key][: len(rope[key]) * new // old]
    if "mrope_section" in rope:  # frequencies of time, height and width
        ends = [
            round(end * new / old)
            for end in itertools.accumulate(rope["mrope_section"], initial=0)
        ]
        rotation["mrope_section"] = [
            end - start for start, end in itertools.pairwise(ends)
        ]
    return rotation


def _head_dim(fields: dict[str, Any]) -> int:
    heads = fields.get("num_attention_heads") or 1
    return fields.get("head_dim") or fields.get("hidden_size", 1) // heads or 1


def _chosen(fields: dict[str, Any], old: int, new: int) -> list[int]:
    """Choose layers: the first of each kind, the last of all, and then any others."""
    # A layer's kind is its value in each list by layer, and its membership in each list
    # of indices.
    lists = [
        value
        for value in fields.values()
        if isinstance(value, list) and len(value) == old
    ]
    numbers = [
        value
        for name, value in fields.items()
        if str(name).endswith(_NUMBERS_OF_LAYERS) and value
    ]
    kinds = [
        (
            *(str(values[layer]) for values in lists if values not in numbers),
            *(layer in layer_numbers for layer_numbers in numbers),
        )
        for layer in range(old)
    ]
    firsts = sorted(
        {kind: layer for layer, kind in reversed(list(enumerate(kinds)))}.values()
    )
    first, *later_firsts = firsts
    chosen = [first, *later_firsts[-(new - 1) :]] if new > 1 else [first]
    following = [old - 1, *range(chosen[-1] + 1, old), *range(old)]
    return sorted(list(dict.fromkeys([*chosen, *following]))[:new])
