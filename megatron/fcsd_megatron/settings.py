"""Translate a checkpoint's config to fields of Megatron's TransformerConfig. Does not
import Megatron.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.nn.functional import silu

from fcsd.base.errors import UserError
from fcsd.model.families import base_model_type

FAMILIES = ("qwen3_moe", "deepseek_v3")

_COMMON: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation_func": silu,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "qk_layernorm": True,
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
}


def settings_of(config: Any, mask: Sequence[bool], where: str) -> dict[str, Any]:
    """Return the fields of a TransformerConfig with which Megatron computes the same as
    transformers.

    Args:
        config: config object of transformers, with its defaults filled in.
        mask: one entry per layer, True for an MoE layer.
        where: the checkpoint's name in errors.

    Raises:
        UserError: a family or a setting that Megatron's local layers do not have.
    """
    family = base_model_type(config.model_type)
    if family not in FAMILIES:
        raise UserError(
            f"{where}: model type '{family}' is not supported in Megatron-Core;"
            f" supported: {' and '.join(FAMILIES)}"
        )
    _check(config, where, _SAME)
    settings = {
        **_COMMON,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        "init_method_std": config.initializer_range,
        "num_moe_experts": config.num_local_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_layer_freq": [int(is_moe) for is_moe in mask],
    }
    return settings | (_qwen3_moe if family == "qwen3_moe" else _deepseek_v3)(
        config, where
    )


def rotary_of(config: Any) -> dict[str, Any]:
    """Return GPTModel's arguments for rotary positions; latent attention ignores them
    and computes its own.
    """
    return {
        "position_embedding_type": "rope",
        "rotary_base": config.rope_parameters["rope_theta"],
    }


_Rule = tuple[Callable[[Any], bool], str]
_SAME: dict[str, _Rule] = {
    "hidden_act": (lambda value: value == "silu", "only silu is supported"),
    "tie_word_embeddings": (
        lambda value: not value,
        "tied embeddings are not supported",
    ),
    "attention_bias": (
        lambda value: not value,
        "only attention without biases is supported",
    ),
    "attention_dropout": (
        lambda value: not value,
        "only attention without dropout is supported",
    ),
    "quantization_config": (
        lambda value: value is None,
        "quantised weights are not supported; run `fcsd dequantize` first",
    ),
}
_QWEN3_MOE: dict[str, _Rule] = {
    "use_sliding_window": (
        lambda value: not value,
        "sliding windows are not supported",
    ),
}
_DEEPSEEK_V3: dict[str, _Rule] = {
    "rope_interleave": (
        bool,
        "Megatron's latent attention rotates only interleaved pairs",
    ),
    "norm_topk_prob": (bool, "Megatron normalises the weights of a sigmoid router"),
}


def _check(config: Any, where: str, rules: dict[str, _Rule]) -> None:
    for name, (allowed, reason) in rules.items():
        if not allowed(value := getattr(config, name, None)):
            raise UserError(f"{where}: {name}: {value!r}: {reason}")


def _qwen3_moe(config: Any, where: str) -> dict[str, Any]:
    _check(config, where, _QWEN3_MOE)
    rope = config.rope_parameters
    if (
        rope.keys() - {"rope_theta", "rope_type"}
        or rope.get("rope_type", "default") != "default"
    ):
        raise UserError(
            f"{where}: rope_parameters: {rope!r} is not supported; supported:"
            " rope_type default with rope_theta"
        )
    return {
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        # Softmax over the chosen logits is softmax over all of them, normalised over
        # the chosen.
        "moe_router_pre_softmax": not config.norm_topk_prob,
    }


def _deepseek_v3(config: Any, where: str) -> dict[str, Any]:
    _check(config, where, _DEEPSEEK_V3)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_shared_expert_intermediate_size": (
            config.moe_intermediate_size * (config.n_shared_experts or 0) or None
        ),
        **_groups(config, where),
        **_latent_rotary(config.rope_parameters, where),
    }


def _groups(config: Any, where: str) -> dict[str, Any]:
    """Return how experts are chosen by groups. transformers scores a group by its best
    two experts, Megatron by its best K/g.
    """
    if config.n_group in (None, 1) or config.topk_group == config.n_group:
        return {}
    if config.num_experts_per_tok // config.topk_group != 2:
        raise UserError(
            f"{where}: topk_group: {config.topk_group} with"
            f" {config.num_experts_per_tok} experts per token: Megatron would not score"
            " groups by two experts, as transformers does"
        )
    return {
        "moe_router_num_groups": config.n_group,
        "moe_router_group_topk": config.topk_group,
    }


_YARN = {
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
}
_YARN_SCALES = {"mscale", "mscale_all_dim"}


def _latent_rotary(rope: dict[str, Any], where: str) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    common = {
        "rotary_base": rope["rope_theta"],
        "rotary_percent": 1.0,
        "apply_rope_fusion": False,
    }
    if kind == "default":
        return {**common, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    scales = _YARN_SCALES & {name for name in rope if rope[name]}
    others = rope.keys() - _YARN - _YARN_SCALES
    if kind != "yarn" or others or len(scales) == 1:
        raise UserError(
            f"{where}: rope_parameters: {rope!r} is not supported; supported: default,"
            f" and yarn with {', '.join(sorted(_YARN))}, and with both or neither of"
            " mscale and mscale_all_dim"
        )
    return {
        **common,
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope.get("mscale") or 1.0,
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }
