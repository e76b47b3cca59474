"""Inputs with images for the tiny multimodal models."""

from typing import Any

import torch

from fcsd.model.families import FAMILIES
from tests.reference.tiny import TINY
from tests.reference.tiny.multimodal import IMAGE

_VIDEO_PATCH = 3 * 2 * 4 * 4

IMAGES: dict[str, tuple[int | None, int]] = {
    "llama4": (None, 4), "aria": (None, 4), "qwen3_5_moe": (_VIDEO_PATCH, 4), "minimax_m3_vl": (_VIDEO_PATCH, 4),
    "dots3_note": (3 * 4 * 4, 4), "glm4v_moe": (_VIDEO_PATCH, 4), "step3p7": (None, 4),
    "ernie4_5_vl_moe": (3 * 4 * 4, 4), "gemma4": (3 * 4 * 4, 4), "mistral_large4": (None, 4),
    "muse_spark": (_VIDEO_PATCH, 4), "inkling_mm_model": (_VIDEO_PATCH, 4), "deepseek_ocr2": (None, 145),
    "unlimited_ocr": (None, 7), "qwen4_exp": (_VIDEO_PATCH, 4), "hy_v4_vl": (3 * 4 * 4, 6),
    "glm5_next": (_VIDEO_PATCH, 4), "inkling2": (3 * 8 * 8, 4),
    "qwen3_vl_moe": (_VIDEO_PATCH, 4), "qwen3_omni_moe_thinker": (_VIDEO_PATCH, 4),
}  # fmt: skip
"""Wrapper -> (numbers in a patch; None if the processor gives whole images; tokens an image)."""


def inputs_of(model_type: str) -> dict[str, Any]:
    """Return two rows of nine tokens; for a wrapper, those of `image_inputs`."""
    if FAMILIES[model_type].multimodal:
        return image_inputs(model_type)
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": torch.randint(3, IMAGE, (2, 9), generator=generator)}


def image_inputs(
    model_type: str, seed: int = 0, num_text_tokens: int = 8
) -> dict[str, Any]:
    """Return two rows of text (ids 3 to 98) around one image each, at a different place
    in each row.

    Pixels are normal random numbers, with the shape and the names that the family's
    processor gives.
    """
    generator = torch.Generator().manual_seed(seed)
    patch_size, num_image_tokens = IMAGES[model_type]
    text = torch.randint(3, IMAGE, (2, num_text_tokens), generator=generator)
    image = torch.full((num_image_tokens,), IMAGE)
    places = (2, 4)
    input_ids = torch.stack(
        [
            torch.cat([row[:k], image, row[k:]])
            for row, k in zip(text, places, strict=True)
        ]
    )
    if patch_size is None:
        vision = TINY[model_type]["vision_config"]
        size = vision.get("image_size") or vision["sam_config"]["image_size"]
        images = {
            "input_ids": input_ids,
            "pixel_values": torch.randn(2, 3, size, size, generator=generator),
        }
        if model_type == "mistral_large4":  # takes images of several sizes in one batch
            images["image_sizes"] = torch.tensor([[size, size]] * 2)
        return images
    if model_type == "hy_v4_vl":  # a token ends each of the two rows of an image
        width = num_image_tokens - 2
        return {
            "input_ids": input_ids,
            "pixel_values": torch.randn(8 * width, patch_size, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, width]] * 2),
            "mm_token_type_ids": (input_ids == IMAGE).int(),
        }
    # one token per patch: frames, height, width, channels
    if model_type == "inkling_mm_model":
        patches = torch.randn(2 * num_image_tokens, 2, 4, 4, 3, generator=generator)
        return {"input_ids": input_ids, "pixel_values": patches}
    if model_type == "inkling2":  # four patches make a token
        return {
            "input_ids": input_ids,
            "pixel_values": torch.randn(8, 8, 8, 3, generator=generator),
            "image_grid_thw": torch.tensor([[1, 2, 2]] * 2),
        }
    patches = torch.randn(2 * 4 * num_image_tokens, patch_size, generator=generator)
    if model_type == "gemma4":  # a row of patches per image, with their positions
        places_of_patches = torch.cartesian_prod(
            torch.arange(num_image_tokens), torch.arange(4)
        ).flip(-1)
        return {
            "input_ids": input_ids,
            "pixel_values": patches.view(2, -1, patch_size),
            "image_position_ids": places_of_patches.expand(2, -1, -1),
        }
    inputs = {
        "input_ids": input_ids,
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, num_image_tokens]] * 2),
    }
    if model_type == "qwen3_omni_moe_thinker":  # finds images by the token before them
        for row, k in enumerate(places):
            input_ids[row, k - 1] = TINY[model_type]["vision_start_token_id"]
    elif "mrope_section" in TINY[model_type]["text_config"].get("rope_parameters", {}):
        inputs["mm_token_type_ids"] = (input_ids == IMAGE).int()
    if model_type == "ernie4_5_vl_moe":  # has experts of its own for images
        inputs["moe_mm_token_type_ids"] = (input_ids == IMAGE).int()
    return inputs
