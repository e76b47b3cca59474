"""Parameters of a model on the meta device, by what they are for."""

from typing import Any

from fcsd.model.connectivity.rewire import decoder_layers
from fcsd.model.families import Family

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


def count_parameters(
    model: Any, family: Family, num_experts: int | None, experts_per_token: int | None
) -> dict[str, Any]:
    """Count the parameters exactly.

    Args:
        model: a regular model of the family; it may lie on the meta device.
        num_experts: routed experts of a layer; None takes the first dimension of the experts' tensors.
        experts_per_token: routed experts that one token uses; None where the config does not say.

    Returns:
        {"total", "active", "parts": part -> {"total", "active"}}. Tied matrices count once. Active is what one
        text token uses: all but the routed experts that were not chosen for it, and but the towers of a
        multimodal model; None where that is not known. Router biases that are buffers are no parameters.
    """
    stack = decoder_layers(model, family)
    seen: set[int] = set()
    total = dict.fromkeys(PARTS, 0)
    unused = dict.fromkeys(PARTS, 0)

    def add(part: str, parameter: Any, *, routed: bool = False) -> None:
        if id(parameter) in seen:
            return
        seen.add(id(parameter))
        total[part] += parameter.numel()
        if routed and experts_per_token is not None:
            known = num_experts and parameter.shape[0] % num_experts == 0  # some hold experts side by side
            count = num_experts if known else parameter.shape[0]
            unused[part] += parameter.numel() - parameter.numel() // count * experts_per_token

    def add_all(part: str, module: Any) -> None:
        for parameter in module.parameters() if module is not None else ():
            add(part, parameter)

    def add_block(block: Any) -> None:
        for name in (family.block_shared, family.block_gate):
            add_all("shared_experts", getattr(block, name, None) if name else None)
        for name, parameter in block.named_parameters():
            of_all = parameter.ndim == 1 and "norm" in name  # one norm for the output of all experts
            routed = not of_all and ("experts" in name.split(".") or parameter.ndim == 3)
            add("routed_experts" if routed else "router", parameter, routed=routed)

    add_all("embeddings", model.get_input_embeddings())
    add_all("lm_head", model.get_output_embeddings())
    for layer in stack:
        block = getattr(layer, family.moe)
        if type(block).__name__ == family.moe_block:
            add_block(block)
        else:
            add_all("dense_mlp", block)
        add_all("shared_experts", getattr(layer, family.layer_shared, None) if family.layer_shared else None)
        for name, child in layer.named_children():
            for inner, parameter in child.named_parameters():
                if all(tensor.ndim <= 1 for tensor in child.parameters()) and "norm" in name:
                    add("norms", parameter)
                elif name in ("router", "mlp", "feed_forward"):
                    add("router" if name == "router" else "dense_mlp", parameter)
                else:  # a mixer may choose among experts too (JetMoE)
                    add("attention", parameter, routed="experts" in inner.split(".") and parameter.ndim == 3)
    for name, parameter in model.named_parameters():
        is_norm = parameter.ndim == 1 and "norm" in ".".join(name.split(".")[-2:])
        add("norms" if is_norm and not family.multimodal else "other", parameter)
    active = {part: total[part] - unused[part] for part in PARTS}
    if family.multimodal:
        active["other"] = 0
    known = experts_per_token is not None
    return {
        "total": sum(total.values()),
        "active": sum(active.values()) if known else None,
        "parts": {
            part: {
                "total": total[part],
                "active": active[part] if known or part != "routed_experts" else None,
            }
            for part in PARTS
            if total[part]
        },
    }
