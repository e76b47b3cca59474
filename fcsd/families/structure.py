"""Find the body and the output head of a model, and how its logits are scaled."""

from __future__ import annotations

from typing import Any

from torch import nn

from fcsd.errors import UserError

# Families that leave the position ids out when they make their masks (transformers 5.23), so that packed
# examples would see each other. A test goes through all families.
MASKS_IGNORE_POSITIONS = {"gpt_oss", "afmoe"}


# Families in which packed examples see each other whatever the masks: a state or a convolution runs on through
# the row, or the family's own forward makes its masks and positions. They train on padded rows.
PACKING_LEAKS = {
    "bailing_hybrid",
    "ernie4_5_vl_moe",
    "glm4v_moe",
    "granitemoehybrid",
    "inkling_mm_model",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
}


# Fields of a model's configuration that its logits are multiplied (1) or divided (-1) by.
LOGIT_SCALES = {
    "logits_scaling": -1,
    "logit_scale": 1,
    "logits_mup_width_multiplier": -1,
    "output_multiplier": 1,
}


def head_scaling(config: Any) -> tuple[float, float | None]:
    """(logit_scale, softcap) of a family: its logits are softcap * tanh(logit_scale * head(h) / softcap).

    logit_scale: 1 / `logits_scaling` (granite families), `logit_scale` (cohere families), 1 /
    `logits_mup_width_multiplier` (inkling families, which divide the hidden states), or `output_multiplier`
    (muse families); else 1.
    softcap: `final_logit_softcapping` (gemma families, beam, muse families), else None.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    scale = 1.0
    for name, power in LOGIT_SCALES.items():
        if (value := getattr(config, name, None)) is not None:
            scale *= value**power
    return scale, getattr(config, "final_logit_softcapping", None)


def unpadded_vocab_size(config: Any) -> int | None:
    """How many rows of the head are tokens, where a family says so (inkling families); None: all."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "unpadded_vocab_size", None)


def head_and_body(model: Any) -> tuple[nn.Linear, nn.Module]:
    """The linear head and the module that gives its hidden states.

    They are called `lm_head` and `model`; `transformer` in dbrx; in llama4 they belong to its `language_model`.
    """
    owner = model
    if not hasattr(owner, "lm_head") and hasattr(model, "language_model"):
        owner = model.language_model
    head = getattr(owner, "lm_head", None)
    body = getattr(owner, "model", None) or getattr(owner, "transformer", None)
    if not isinstance(head, nn.Linear) or not isinstance(body, nn.Module):
        raise UserError(
            f"{type(model).__name__}: not a causal language model with a `model` and a linear `lm_head`; "
            "fcsd trains such models only"
        )
    return head, body


def output_head(model: nn.Module) -> nn.Linear:
    """The head of a causal language model, also inside DDP or a DeepSpeed engine."""
    return head_and_body(unwrapped(model))[0]


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP or a DeepSpeed engine, both of which call it `module`."""
    return model.module if isinstance(getattr(model, "module", None), nn.Module) else model
