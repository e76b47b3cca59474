"""Find the body, the output head and the adapters of a model, and how its logits are
scaled.
"""

from typing import Any

from torch import nn

from fcsd.base.errors import UserError

LOGIT_SCALES = {
    "logits_scaling": -1, "logit_scale": 1, "logits_mup_width_multiplier": -1, "output_multiplier": 1,
}  # fmt: skip
"""Config field -> power: 1 multiplies the head's output, or the hidden states before it,
by the field; -1 divides by it.
"""


def head_scaling(config: Any) -> tuple[float, float | None]:
    """Return (logit_scale, softcap): the model's logits are softcap * tanh(logit_scale
    * head(h) / softcap).

    logit_scale: the config's field of `LOGIT_SCALES`, or its inverse; 1 without such a
    field. softcap: `final_logit_softcapping`, or None.
    """
    config = config.get_text_config()
    scale = 1.0
    for name, power in LOGIT_SCALES.items():
        if (value := getattr(config, name, None)) is not None:
            scale *= value**power
    return scale, getattr(config, "final_logit_softcapping", None)


def unpadded_vocab_size(config: Any) -> int | None:
    """Return the number of rows of the head that are tokens, if the config says so
    (inkling families); None: all.
    """
    config = config.get_text_config()
    size = getattr(config, "unpadded_vocab_size", None)
    # A vocabulary that was cut may be smaller.
    return None if size is None else min(size, config.vocab_size)


def head_and_body(model: Any) -> tuple[nn.Linear, nn.Module]:
    """Find the linear head and the module that computes its hidden states.

    They are called `lm_head` and `model`, in dbrx `transformer`. In llama4 they belong
    to its `language_model`.
    """
    owner = model
    if not hasattr(owner, "lm_head") and hasattr(model, "language_model"):
        owner = model.language_model
    head = getattr(owner, "lm_head", None)
    body = getattr(owner, "model", None) or getattr(owner, "transformer", None)
    if not isinstance(head, nn.Linear) or not isinstance(body, nn.Module):
        raise UserError(
            f"{type(model).__name__}: not a causal language model with a `model` and a"
            " linear `lm_head`; fcsd trains such models only"
        )
    return head, body


def output_head(model: nn.Module) -> nn.Linear:
    """Find the head of a causal language model, which may be inside DDP or a DeepSpeed
    engine.
    """
    return head_and_body(unwrapped(model))[0]


def unwrapped(model: nn.Module) -> Any:
    """Return the model inside DDP or a DeepSpeed engine, both of which call it `module`."""
    if isinstance(getattr(model, "module", None), nn.Module):
        return model.module
    return model


def checkpoints_reentrantly(module: Any) -> bool:
    """Return whether a module's activation checkpointing is the re-entrant one, whose
    first pass records no gradient.
    """
    if not getattr(module, "gradient_checkpointing", False):
        return False
    keywords = getattr(module._gradient_checkpointing_func, "keywords", {})
    return bool(keywords.get("use_reentrant", True))


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def has_adapters(model: nn.Module) -> bool:
    """Tell whether a model has adapters, which are then its only trained parameters."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def refuse_adapters(model: nn.Module, name: str) -> None:
    """Raise UserError for a model whose linear layers PEFT has replaced: their weights
    are not what the layers compute. name: of the model in errors.
    """
    # A layer that PEFT has replaced stays so when its adapter is deleted.
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise UserError(
            f"{name}: {type(model).__name__} has adapters of its own; give a model"
            " without them, or merged (merge_and_unload); fcsd adds those that it trains"
            " (peft_config in Python, `lora` in a recipe)"
        )


def refuse_offloaded(model: nn.Module, name: str) -> None:
    """Raise UserError for a model with weights that are not in memory. name: of the
    model in errors.
    """
    for weight, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(
                f"{name}: {weight} of {type(model).__name__} is not in the memory of a"
                " device (its device_map offloads it to the CPU or a disk); load it"
                " without device_map, or with one that offloads nothing"
            )
