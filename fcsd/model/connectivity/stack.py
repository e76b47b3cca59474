"""Find the decoder layers of a model. Shipped in checkpoints, see `rewire`."""

from typing import Any

from torch import nn


def is_one_of(module: nn.Module, names: Any) -> bool:
    """Return whether a module's class has one of these names, or was made from such a
    class (FSDP2, the rewiring).
    """
    names = names if isinstance(names, tuple) else (names,)
    return any(cls.__name__ in names for cls in type(module).__mro__)


def decoder_layers(model: nn.Module, family: Any) -> nn.ModuleList:
    """Return the one ModuleList of the family's decoder layers (`get_decoder()` is not
    reliable: Llama4ForCausalLM)."""
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(is_one_of(layer, family.decoder_layer) for layer in module)
    ]
    if len(stacks) != 1:
        raise ValueError(
            f"{type(model).__name__}: {len(stacks)} stacks of {family.decoder_layer}"
            f" found, one is needed, as in transformers' {family.upstream}; rewire"
            " before anything wraps layers"
        )
    return stacks[0]
