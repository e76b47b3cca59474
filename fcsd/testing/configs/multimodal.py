"""Tiny configurations of `fcsd.families.multimodal`.

The entry of a wrapper has `text_config`, to which the common sizes and overrides are added, and tiny towers.
"""

from typing import Any

from fcsd.testing.configs.standard import TINY as STANDARD

IMAGE = 99
"""Token id of a piece of an image; the tokens of text are below it."""

VOCABULARY = 104

TINY: dict[str, dict[str, Any]] = {
    "llama4": {
        "text_config": {**STANDARD["llama4_text"], "vocab_size": VOCABULARY},
        "vision_config": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 4,
            "projector_input_dim": 20,
            "projector_output_dim": 20,
            "vision_output_dim": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "image_token_index": IMAGE,
        "boi_token_index": IMAGE + 1,
        "eoi_token_index": IMAGE + 2,
    },
}
