"""Tiny configurations of `fcsd.model.families.standard`, and what those of several
families have in common.
"""

from typing import Any

EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LOCAL_EXPERTS: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
ROUTED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
}  # fmt: skip
GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1}
FIRST_DENSE: dict[str, Any] = {
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]
}
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"] * 2}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
}  # fmt: skip
_WINDOWS: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
_GRANITE: dict[str, Any] = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.7, "embedding_multiplier": 1.3,
    "attention_multiplier": 0.35, "logits_scaling": 2.0,
}  # fmt: skip
_INDEXED: dict[str, Any] = {
    **MLA,
    **ROUTED_EXPERTS,
    **GROUPS,
    "index_topk": 4,
    "index_head_dim": 16,
    # with few heads many scores are 0 after their ReLU, and ties are broken by chance
    "index_n_heads": 16,
}

TINY: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "deepseek_v2": {
        **MLA,
        **ROUTED_EXPERTS,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v3": {**MLA, **ROUTED_EXPERTS, **GROUPS, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
    "instella_moe": {
        **MLA,
        **ROUTED_EXPERTS,
        "q_lora_rank": None,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe": {**ROUTED_EXPERTS, "first_k_dense_replace": 1, "head_dim": 8, "n_group": 1, "topk_group": 1},
    "sarvam_mla": {
        **MLA,
        **ROUTED_EXPERTS,
        **GROUPS,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "sarvam_moe": {
        **ROUTED_EXPERTS,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "tie_word_embeddings": False,
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
    "axk2": {**_INDEXED, "gated_norm_rank": 4},
    "bailing_hybrid": {
        **MLA,
        **LOCAL_EXPERTS,
        **GROUPS,
        **HYBRID,
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "num_mtp_layers": 0,
    },
    "deepseek_v32": {**_INDEXED, "first_k_dense_replace": 1},
    "dots1": {
        **ROUTED_EXPERTS,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "max_window_layers": 2,
        "sliding_window": 6,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
        "use_bias": True,
        "tie_word_embeddings": False,
    },
    "exaone_moe": {**EXPERTS, **GROUPS, "num_shared_experts": 2, "sliding_window": 6, "sliding_window_pattern": 2},
    "flint": {**EXPERTS, **_WINDOWS, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "glm4_moe_lite": {**MLA, **ROUTED_EXPERTS, **GROUPS},
    "granitemoe_swa": {**_GRANITE, "shared_intermediate_size": 32, "sliding_window": 6},
    "granitemoehybrid": {
        **_GRANITE,
        **HYBRID,
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 8},
    "hy_v3": {**EXPERTS, "num_shared_experts": 2, "head_dim": 8},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
    },
    "kimi_linear": {**MLA, **LOCAL_EXPERTS, **HYBRID, "q_lora_rank": None, "linear_head_dim": 8, "linear_num_heads": 4},
    "laguna": {
        **EXPERTS,
        **_WINDOWS,
        "shared_expert_intermediate_size": 32,
        "moe_routed_scaling_factor": 1.5,
        "num_attention_heads_per_layer": [4, 4, 2, 4],
    },
    "lara_mini": {
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": [
            "linear_attention",
            "sliding_attention",
            "linear_attention",
            "full_attention",
        ],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        **EXPERTS,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "tie_word_embeddings": False,
    },
    "mellum": {**EXPERTS, **_WINDOWS, **FIRST_DENSE},
    "mimo_v2_flash": {
        **_WINDOWS,
        **GROUPS,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 12,
        "v_head_dim": 8,
    },
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24, "head_dim": 8},
    "mistral4": {
        **MLA,
        **ROUTED_EXPERTS,
        **GROUPS,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "phimoe": {
        "num_local_experts": 4,
        "intermediate_size": 24,
        "lm_head_bias": True,
        "attention_bias": True,
        "sliding_window": 6,
    },
    "qwen3_next": {
        **EXPERTS,
        **HYBRID,
        "shared_expert_intermediate_size": 32,
        "head_dim": 8,
        "mlp_only_layers": [0],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "solar_open": {**ROUTED_EXPERTS, **GROUPS, "head_dim": 8},
}  # fmt: skip
