"""Tiny configurations of `fcsd.model.families.multimodal`.

The entry of a wrapper has `text_config`, to which the common sizes and overrides are
added, and tiny towers.
"""

from typing import Any

from tests.reference.tiny.adapted import TINY as ADAPTED
from tests.reference.tiny.standard import (
    EXPERTS,
    FIRST_DENSE,
    GROUPS,
    HYBRID,
    MLA,
    ROUTED_EXPERTS,
    TOWER,
)
from tests.reference.tiny.standard import TINY as STANDARD

IMAGE = 99
"""Token id of a piece of an image; the tokens of text are below it."""

_MROPE: dict[str, Any] = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_PATCHES: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_OCR: dict[str, Any] = {
    **ROUTED_EXPERTS, **FIRST_DENSE, "n_shared_experts": 2, "num_key_value_heads": 4,
}  # fmt: skip
_SAM: dict[str, Any] = {
    **TOWER, "output_channels": 12, "image_size": 32, "window_size": 3, "global_attn_indexes": [1], "mlp_dim": 24,
    "downsample_channels": [14, 16],
}  # fmt: skip
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
}
_START_END_TOKENS = {
    "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "image_start_token_id": IMAGE + 2,
    "image_end_token_id": IMAGE + 3, "video_start_token_id": IMAGE + 4, "video_end_token_id": IMAGE + 5,
}  # fmt: skip

_TEXT: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 2, "intermediate_size": 24},
    "qwen3_5_moe_text": {
        **EXPERTS, "shared_expert_intermediate_size": 32, "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, **HYBRID,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
        },
    },
    "minimax_m3_vl_text": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24, "dense_intermediate_size": 48,
        "shared_intermediate_size": 32, "routed_scaling_factor": 1.5, "head_dim": 8, "rotary_dim": 4, **FIRST_DENSE,
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2,
        "index_local_blocks": 1,
    },
    "dots3_note_text": {
        **MLA, **ROUTED_EXPERTS, **GROUPS, **FIRST_DENSE, "shared_experts_intermediate_size": 32,
        "routed_scaling_factor": 1.5, "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "use_dsa": False, "sliding_window": 8, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2,
        "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
        "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 8,
    },
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    **_TEXT,
    "llama4": {
        "text_config": STANDARD["llama4_text"],
        "vision_config": {
            **TOWER, "intermediate_size": 64, "image_size": 16, "projector_input_dim": 20, "projector_output_dim": 20,
            "vision_output_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "image_token_index": IMAGE, "boi_token_index": IMAGE + 1, "eoi_token_index": IMAGE + 2,
    },
    "aria": {
        "text_config": _TEXT["aria_text"],
        "vision_config": {**TOWER, "model_type": "idefics3_vision", "intermediate_size": 24, "image_size": 16},
        "projector_patch_to_query_dict": {16: 4}, "image_token_index": IMAGE,
    },
    "qwen3_5_moe": {
        "text_config": _TEXT["qwen3_5_moe_text"],
        "vision_config": {**_PATCHES, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "minimax_m3_vl": {
        "text_config": _TEXT["minimax_m3_vl_text"],
        "vision_config": {**TOWER, "hidden_size": 24, "intermediate_size": 32, "image_size": 16},
        "projector_hidden_size": 20, "image_token_index": IMAGE, "video_token_index": IMAGE + 1,
    },
    "dots3_note": {
        "text_config": _TEXT["dots3_note_text"],
        "vision_config": {
            **TOWER, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse"], "num_local_experts": 4, "num_experts_per_tok": 2,
            "adapter_in_dim": 32, "adapter_out_dim": 32,
        },
        "audio_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "feature_size": 16, "downsample_hidden_size": 8, "adapter_input_size": 16, "adapter_out_dim": 32,
        },
        "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "audio_token_id": IMAGE + 2,
    },
    "glm4v_moe": {
        "text_config": {
            **_MROPE, **ROUTED_EXPERTS, "first_k_dense_replace": 1, **GROUPS, "routed_scaling_factor": 1.5,
        },
        "vision_config": {**_PATCHES, "image_size": 16}, **_START_END_TOKENS,
    },
    "qwen4_exp": {
        "text_config": ADAPTED["qwen4_exp_text"],
        "vision_config": {**_PATCHES, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "gemma4": {
        "text_config": ADAPTED["gemma4_text"],
        "vision_config": {
            **TOWER, "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16,
            "pooling_kernel_size": 2, "position_embedding_size": 8,
        },
        "audio_config": None, "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "audio_token_id": IMAGE + 2,
        "boi_token_id": IMAGE + 3, "eoi_token_id": IMAGE + 4, "boa_token_id": IMAGE + 5, "eoa_token_index": IMAGE + 6,
        "tie_word_embeddings": False,
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "num_attention_heads": 2, "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
            "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_intermediate_size": [24, 16],
            **FIRST_DENSE, "tie_word_embeddings": False,
        },
        "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4},
        **_START_END_TOKENS, "tie_word_embeddings": False,
    },
    "step3p7": {
        "text_config": {
            **FIRST_DENSE,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 8, "num_sliding_attention_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "share_expert_dim": 32, "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0.0, 0.0, 0.0, 0.5], "swiglu_limits_shared": [0.0, 0.0, 0.4, 0.0], "head_dim": 8,
        },
        "vision_config": {**TOWER, "mlp_ratio": 2.0, "image_size": 32, "max_position_embeddings": 64},
        "image_token_id": IMAGE,
    },
    "deepseek_ocr2": {
        "text_config": {**_OCR, "routed_scaling_factor": 1.5},
        "vision_config": {
            "sam_config": _SAM,
            "encoder_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
        },
        "image_token_id": IMAGE,
    },
    "unlimited_ocr": {
        "text_config": {**_OCR, "n_group": 1, "topk_group": 1, "sliding_window": 8},
        "vision_config": {
            "sam_config": _SAM,
            "encoder_config": {
                "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 8, "patch_size": 4,
            },
        },
        "image_token_id": IMAGE,
    },
    "qwen3_vl_moe": {
        "text_config": {**_MROPE, **EXPERTS, "head_dim": 8, "tie_word_embeddings": False},
        "vision_config": {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_TOKENS,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": {**_MROPE, **EXPERTS, "head_dim": 8},
        "vision_config": {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        "audio_config": {
            "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24,
            "num_mel_bins": 16, "downsample_hidden_size": 8, "output_dim": 32, "max_source_positions": 20,
            "n_window": 4,
        },
        "image_token_id": IMAGE, "video_token_id": IMAGE + 1, "audio_token_id": IMAGE + 2,
        "audio_start_token_id": IMAGE + 3, "user_token_id": IMAGE + 4, "vision_start_token_id": IMAGE + 5,
    },
}  # fmt: skip
