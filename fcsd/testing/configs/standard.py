"""Tiny configurations of `fcsd.families.standard`."""

from typing import Any

MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_GRANITE: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 1.3,
    "attention_multiplier": 0.35,
    "logits_scaling": 2.0,
}

TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v2": {
        **MLA,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {
        **MLA,
        "q_lora_rank": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size": 24,
        "intermediate_size_mlp": 48,
        "head_dim": 8,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 16,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "granitemoe": _GRANITE,
    "granitemoeshared": {**_GRANITE, "shared_intermediate_size": 32},
}
