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
    **MLA,
    **ROUTED_EXPERTS,
    **GROUPS,
    **FIRST_DENSE,
    "routed_scaling_factor": 2.5,
}
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
        **EXPERTS,
        **_WINDOWS,
        "num_dense_layers": 1,
        "num_shared_experts": 2,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "kolibri1": {
        **EXPERTS,
        **_WINDOWS,
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "axk1": _DEEPSEEK,
    "inkling_text": {
        **ROUTED_EXPERTS,
        **FIRST_DENSE,
        "n_shared_experts": 2,
        "route_scale": 8.0,
        "logits_mup_width_multiplier": 2.0,
        "head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "sliding_window_size": 6,
        "d_rel": 4,
        "rel_extent": 8,
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "cohere2_moe": {
        **_WINDOWS,
        **FIRST_DENSE,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "prefix_dense_intermediate_size": 48,
        "num_shared_experts": 2,
        "logit_scale": 1.5,
    },
    "beam": {**EXPERTS, **GROUPS, **_WINDOWS, **FIRST_DENSE},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "jetmoe": {
        "intermediate_size": 24,
        "kv_channels": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "minimax": {
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "block_size": 4,
        "layer_types": ["full_attention", "linear_attention"] * 2,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 1.2,
        "linear_attn_beta_factor": 0.7,
        "mlp_alpha_factor": 1.4,
        "mlp_beta_factor": 0.9,
    },
    "gemma4_text": {
        **_WINDOWS,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 8,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
    },
    "mistral_large4": {
        "text_config": {
            **_DEEPSEEK,
            **INDEXER,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.0,
            },
        },
        "vision_config": {
            **TOWER,
            "model_type": "pixtral",
            "intermediate_size": 24,
            "head_dim": 8,
            "image_size": 16,
        },
        "image_token_index": 99,
    },
    "muse_spark": {
        "text_config": {
            **LOCAL_EXPERTS,
            **_WINDOWS,
            **FIRST_DENSE,
            "moe_hidden_size": 20,
            "routed_scaling_factor": 1.5,
            "output_multiplier": 0.7,
        },
        "vision_config": {
            **TOWER,
            "intermediate_size": 24,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "audio_config": {
            "patch_sizes": [2, 2],
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "out_hidden_size": 32,
        },
        "out_hidden_size": 64,
        "projector_hidden_size": 24,
        "image_token_id": 99,
        "video_token_id": 100,
        "audio_token_id": 101,
    },
}

TINY["deepseek_v4"] = {
    **ROUTED_EXPERTS,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 6,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {
        "compressed_sparse_attention": 2,
        "heavily_compressed_attention": 3,
    },
    "index_topk": 2,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
}

TINY["inkling_mm_model"] = {
    "text_config": TINY["inkling_text"],
    "vision_config": {
        **TOWER,
        "text_hidden_size": 32,
    },
    "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8, "text_hidden_size": 32},
    "image_token_id": 99,
    "audio_token_id": 100,
    "image_bos_token_id": 101,
    "audio_bos_token_id": 102,
}
