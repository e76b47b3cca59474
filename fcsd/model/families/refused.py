"""List the MoE families for which the connectivity has no meaning, with the reasons for
error messages.
"""

_PASSES = (
    "it runs some of its layers in several passes and begins each with a learned mix of"
    " the passes before, so that a layer follows different layers in one forward pass"
)
_BOTH_WAYS = (
    "it denoises blocks of tokens with attention in both directions, but conversion and"
    " training assume next-token prediction"
)
_ENCODER_DECODER = (
    "it is an encoder-decoder; the connectivity is for the layers of decoder-only"
    " language models"
)
_IMAGES = "it estimates poses in images and is not a language model"

REFUSED: dict[str, str] = {
    "bamba": (
        "its MLP is dense in transformers (the number of experts is fixed at 1), so no"
        " layer has experts"
    ),
    "diffusion_gemma": _BOTH_WAYS,
    "diffusion_gemma_text": _BOTH_WAYS,
    "doge": (
        "its experts are rows of an embedding that each token looks up by product keys:"
        " there is no expert network to send tokens to and no communication to overlap"
    ),
    "inkling2_loop": _PASSES,
    "inkling2_loop_text": _PASSES,
    "longcat_flash": (
        "its layers already add the MoE output one attention and one dense MLP later"
        " (shortcut-connected MoE), so its communication is overlapped by design"
    ),
    "nllb-moe": _ENCODER_DECODER,
    "openai_privacy_filter": (
        "it labels tokens with attention in both directions and is not a language model"
    ),
    "qwen3_omni_moe": (
        "it is a thinker, a talker and a vocoder in one checkpoint; save its thinker,"
        " the language model, as a separate checkpoint (model type"
        " qwen3_omni_moe_thinker) and convert that"
    ),
    "switch_transformers": _ENCODER_DECODER,
    "vitpose": _IMAGES,
    "vitpose_backbone": _IMAGES,
}
"""Model type -> reason, a clause that follows "cannot be converted: "."""

BROKEN: dict[str, dict[str, str]] = {
    "llama4": {
        "5.24.0": "the model fails in its forward pass: it reads a field, image_outputs,"
        " that its text model's output does not have"
    },
}
"""Model type -> release of transformers -> what fails there. A family is refused in a
release that breaks it; the release itself is not.
"""
