"""Tiny configurations of `fcsd.model.families.adapted`."""

from typing import Any

from tests.reference.tiny.standard import (
    EXPERTS,
    FIRST_DENSE,
    GROUPS,
    LOCAL_EXPERTS,
    MLA,
    ROUTED_EXPERTS,
    TOWER,
)

_DEEPSEEK: dict[str, Any] = {
    **MLA, **ROUTED_EXPERTS, **GROUPS, **FIRST_DENSE, "routed_scaling_factor": 2.5,
}  # fmt: skip
INDEXER: dict[str, Any] = {
    "index_topk": 4,
    "index_head_dim": 16,
    # few make scores tie at 0, and a tie falls one way or the other
    "index_n_heads": 16,
    "indexer_types": ["full", "full", "shared", "full"],
}
_WINDOWS: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

TINY: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {**_DEEPSEEK, **INDEXER},
    "afmoe": {
        **EXPERTS, **_WINDOWS, "num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.5,
        "mup_enabled": True,
    },
    "kolibri1": {**EXPERTS, **_WINDOWS, "shared_expert_intermediate_size": 32, "norm_topk_prob": True},
    "axk1": _DEEPSEEK,
    "inkling_text": {
        **ROUTED_EXPERTS, **FIRST_DENSE, "n_shared_experts": 2, "route_scale": 8.0,
        "logits_mup_width_multiplier": 2.0, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 8, "sliding_window_size": 6, "d_rel": 4, "rel_extent": 8,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "cohere2_moe": {
        **_WINDOWS, **FIRST_DENSE, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24,
        "prefix_dense_intermediate_size": 48, "num_shared_experts": 2, "logit_scale": 1.5,
    },
    "beam": {**EXPERTS, **GROUPS, **_WINDOWS, **FIRST_DENSE},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "jetmoe": {
        "intermediate_size": 24, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "minimax": {
        "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "block_size": 4,
        "layer_types": ["full_attention", "linear_attention"] * 2, "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.7,
        "mlp_alpha_factor": 1.4, "mlp_beta_factor": 0.9,
    },
    "gemma4_text": {
        **_WINDOWS, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24, "enable_moe_block": True,
        "hidden_size_per_layer_input": 0, "global_head_dim": 8, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
    },
    "mistral_large4": {
        "text_config": {
            **_DEEPSEEK, **INDEXER,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
                "attention_factor": 1.0,
            },
        },
        "vision_config": {**TOWER, "model_type": "pixtral", "intermediate_size": 24, "head_dim": 8, "image_size": 16},
        "image_token_index": 99,
    },
    "muse_spark": {
        "text_config": {
            **LOCAL_EXPERTS, **_WINDOWS, **FIRST_DENSE, "moe_hidden_size": 20, "routed_scaling_factor": 1.5,
            "output_multiplier": 0.7,
        },
        "vision_config": {**TOWER, "intermediate_size": 24, "pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {
            "patch_sizes": [2, 2], "hidden_sizes": [8, 16], "depths": [1, 1], "num_hidden_layers": 2,
            "out_hidden_size": 32,
        },
        "out_hidden_size": 64, "projector_hidden_size": 24, "image_token_id": 99, "video_token_id": 100,
        "audio_token_id": 101,
    },
}  # fmt: skip

TINY["deepseek_v4"] = {
    **ROUTED_EXPERTS, "num_key_value_heads": 1, "head_dim": 16, "qk_rope_head_dim": 8, "q_lora_rank": 16,
    "o_groups": 2, "o_lora_rank": 8, "sliding_window": 6,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
    "index_topk": 2, "index_head_dim": 16, "index_n_heads": 16,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "hc_mult": 3, "hc_sinkhorn_iters": 4, "swiglu_limit": 1.5,
}  # fmt: skip
TINY["hy_v4"] = {
    **_DEEPSEEK, **INDEXER, "hc_mult": 3, "hc_magnitude": 1.7, "swiglu_limit": 1.5,
}  # fmt: skip
TINY["hy_v4_vl"] = {
    "text_config": {
        **TINY["hy_v4"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {
        **TOWER, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "spatial_merge_size": 2,
        "max_image_size": 32,
    },
    "image_token_id": 99, "video_token_id": 100,
}  # fmt: skip
TINY["nemotron_h"] = {
    **ROUTED_EXPERTS, **GROUPS,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "head_dim": 8, "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 16, "routed_scaling_factor": 1.5,
    "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 4,
    "tie_word_embeddings": False,
}  # fmt: skip
TINY["zaya"] = {
    "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 24, "head_dim": 8, "sliding_window": 6,
    "layer_types": ["hybrid", "hybrid_sliding"] * 2, "router_hidden_size": 16, "tie_word_embeddings": False,
}  # fmt: skip
TINY["qwen4_exp_text"] = {
    **EXPERTS, "shared_expert_intermediate_size": 32, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
    },
    "hc_count": 3, "hc_lowrank": 16, "ple_layer_ids": [3], "ngram_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 4, "split_ngram_parts": 2,
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}  # fmt: skip
TINY["glm5_next"] = {
    "text_config": {
        **_DEEPSEEK, **INDEXER, "qk_rope_head_dim": 0, "index_kpool": 2,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 3, "hc_sinkhorn_iters": 4, "swiglu_limit": 1.5,
    },
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "image_size": 16, "patch_size": 4,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 32, "projection_intermediate_size": 40,
    },
    "image_token_id": 99, "video_token_id": 100, "image_start_token_id": 101, "image_end_token_id": 102,
    "video_start_token_id": 103, "video_end_token_id": 104,
}  # fmt: skip

TINY["inkling2_text"] = {
    **ROUTED_EXPERTS, "route_scale": 2.0, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 8, "sliding_window_size": 6, "d_rel": 4, "rel_extent": 8, "n_layers_per_attn_res_block": 3,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2, "mlp_gate_softcap": 1.0, "mlp_up_softcap": 1.5,
    # Since transformers 5.24 the head has this many rows.
    "unpadded_vocab_size": 99,
}  # fmt: skip

TINY["inkling2"] = {
    "text_config": {**TINY["inkling2_text"], "unpadded_vocab_size": 106},
    "vision_config": {
        **TOWER, "spatial_merge_size": 2, "posemb_grid_size": 4, "projection_hidden_dim": 24, "text_hidden_size": 32,
    },
    "image_token_id": 99,
}  # fmt: skip

TINY["inkling_mm_model"] = {
    "text_config": TINY["inkling_text"],
    "vision_config": {**TOWER, "text_hidden_size": 32},
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": 32},
    "image_token_id": 99, "audio_token_id": 100, "image_bos_token_id": 101, "audio_bos_token_id": 102,
}  # fmt: skip
