"""Parameters of a model on the meta device, by what they are for."""

from typing import Any

from torch import nn

from fcsd.connectivity.rewire import decoder_layers
from fcsd.families import Family

PARTS = (
    "embeddings",
    "lm_head",
    "attention",
    "dense_mlp",
    "shared_experts",
    "routed_experts",
    "router",
    "norms",
    "other",
)
"""`attention` is every sequence mixer of the decoder layers; `other` is outside them: a vision tower, say."""


def count_parameters(model: Any, family: Family, experts_per_token: int | None) -> dict[str, Any]:
    """Exact numbers of parameters.

    Args:
        model: a regular model of the family; it may lie on the meta device.
        experts_per_token: routed experts that one token uses; None where the config does not say.

    Returns:
        {"total", "active", "parts": part -> {"total", "active"}}. Tied matrices count once. Active is what one
        text token uses: all but the routed experts that were not chosen for it, and but the towers of a
        multimodal model; None where that is not known. Router biases that are buffers are no parameters.
    """
    stack = decoder_layers(model, family)
    seen: set[int] = set()
    total = dict.fromkeys(PARTS, 0)
    unused = 0

    def add(part: str, module: Any) -> None:
        for parameter in module.parameters() if isinstance(module, nn.Module) else [module]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                total[part] += parameter.numel()

    def add_block(block: Any) -> None:
        nonlocal unused
        for name in (family.block_shared, family.block_gate):
            if name and getattr(block, name, None) is not None:
                add("shared_experts", getattr(block, name))
        for name, parameter in block.named_parameters():
            if id(parameter) in seen:
                continue
            is_expert = "experts" in name.split(".") or parameter.ndim == 3
            if is_expert and experts_per_token is not None:
                # Experts are one tensor each kind, its first dimension is the expert.
                unused += parameter.numel() - parameter.numel() // parameter.shape[0] * experts_per_token
            add("routed_experts" if is_expert else "router", parameter)

    add("embeddings", model.get_input_embeddings())
    if model.get_output_embeddings() is not None:
        add("lm_head", model.get_output_embeddings())
    for layer in stack:
        block = getattr(layer, family.moe)
        if type(block).__name__ == family.moe_block:
            add_block(block)
        else:
            add("dense_mlp", block)
        if family.layer_shared and getattr(layer, family.layer_shared, None) is not None:
            add("shared_experts", getattr(layer, family.layer_shared))
        for name, child in layer.named_children():
            is_norm = all(parameter.ndim <= 1 for parameter in child.parameters())
            add("norms" if is_norm or name in (family.in_norm, family.mlp_norm) else "attention", child)
        add("norms", layer)  # what lies on the layer itself
    for name, parameter in model.named_parameters():
        add("norms" if name.endswith("norm.weight") and parameter.ndim == 1 else "other", parameter)
    active: dict[str, int | None] = dict(total)
    active["routed_experts"] = None if experts_per_token is None else total["routed_experts"] - unused
    if family.multimodal:
        active["other"] = 0
    return {
        "total": sum(total.values()),
        "active": None if experts_per_token is None else sum(number or 0 for number in active.values()),
        "parts": {part: {"total": total[part], "active": active[part]} for part in PARTS if total[part]},
    }


def add_to(parameters: dict[str, Any], part: str, number: int) -> dict[str, Any]:
    """The same numbers with `number` more parameters in `part`, which every token uses."""
    old = parameters["parts"].get(part, {"total": 0, "active": 0})
    more = {"total": old["total"] + number, "active": old["active"] + number}
    active = parameters["active"]
    return {
        "total": parameters["total"] + number,
        "active": None if active is None else active + number,
        "parts": parameters["parts"] | {part: more},
    }
