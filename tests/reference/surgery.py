"""FarSkip forward passes from the equations, for every family: the layers by hand, on
the regular model's own modules.

Norms, mixers (attention or what a hybrid has in its place) and MoE blocks are called as
modules of the *regular* model, and the routed output is the output of a block minus
that of its shared expert: `routed = moe(m) - shared(m)`. The names come from the
`Family`, so a wrong name there shows only as far as the modules of a model differ;
`tests.reference.reference` shares no names with the product.

Not covered: layers that are not the plain pre-norm layer.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fcsd.model.families import FAMILIES, Family, text_config
from tests.reference.parts import is_outdated, layer_arguments

_MIXERS = ("self_attn", "linear_attn", "mamba", "conv")
_FINAL_NORMS = ("norm", "final_layernorm", "embedding_norm")


def decoder(model: Any, family: Family) -> Any:
    """Return the module whose `layers` are the family's decoder layers."""
    names = (
        family.decoder_layer
        if isinstance(family.decoder_layer, tuple)
        else (family.decoder_layer,)
    )
    for module in model.modules():
        layers = getattr(module, "layers", None)
        if (
            isinstance(layers, torch.nn.ModuleList)
            and type(layers[0]).__name__ in names
        ):
            return module
    raise ValueError(
        f"{type(model).__name__} has no layers of class {' or '.join(names)}"
    )


def _present(module: Any, names: Sequence[str]) -> str:
    (name,) = (name for name in names if getattr(module, name, None) is not None)
    return name


def _mix(layer: Any, x: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the mixer's output. Recurrent mixers take the arguments that their
    signature names and those that the layer passes through.
    """
    mixer = getattr(layer, _present(layer, _MIXERS))
    accepted = inspect.signature(type(mixer).forward).parameters
    if "position_embeddings" not in accepted and "position_ids" not in accepted:
        taken = inspect.signature(type(layer).forward).parameters
        arguments = {
            name: value
            for name, value in arguments.items()
            if name in accepted or name not in taken
        }
        if not any(one.kind is one.VAR_KEYWORD for one in accepted.values()):
            arguments = {
                name: value for name, value in arguments.items() if name in accepted
            }
    out = mixer(hidden_states=x, **arguments)
    return out[0] if isinstance(out, tuple) else out


def _moe(layer: Any, family: Family, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (routed, shared) of an MoE layer; `x` is B x T x D."""
    block = getattr(layer, family.moe)
    out = block(x.clone())
    out = (out[0] if isinstance(out, tuple) else out).view(x.shape)
    beside = getattr(layer, family.layer_shared) if family.layer_shared else None
    if beside is not None:
        return out, beside(x)
    inside = getattr(block, family.block_shared) if family.block_shared else None
    if inside is None:
        return out, torch.zeros_like(x)
    shared = inside(x)
    if family.block_gate:
        shared = torch.sigmoid(getattr(block, family.block_gate)(x)) * shared
    return out - shared, shared


def surgery_forward(
    model: Any,
    input_ids: Tensor,
    layers: Sequence[int],
    attention: str = "partial",
    mlp: str | Sequence[int] = "outdated",
    **inputs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Like `tests.reference.reference.reference_forward`, for every family with the
    plain pre-norm layer.
    """
    family = FAMILIES[model.config.model_type]
    stack = decoder(model, family)
    o, arguments = layer_arguments(model, input_ids, stack=stack.layers, **inputs)
    streams = [o]
    in_flight: Tensor | None = None
    for k, layer in enumerate(stack.layers):
        far = k in layers
        scale = (
            getattr(layer, family.residual_multiplier)
            if family.residual_multiplier
            else 1.0
        )
        a = (
            o - in_flight
            if far and attention == "partial" and in_flight is not None
            else o
        )
        attended = scale * _mix(
            layer, getattr(layer, str(family.in_norm))(a), arguments[k]
        )
        m = getattr(layer, str(family.mlp_norm))(
            o if is_outdated(k, layers, mlp) else o + attended
        )
        if type(getattr(layer, family.moe)).__name__ == family.moe_block:
            routed, shared = (scale * part for part in _moe(layer, family, m))
            in_flight = routed if far else None
            o = o + attended + shared + routed
        else:
            in_flight = None
            o = o + attended + scale * getattr(layer, family.moe)(m)
        streams.append(o)
    logits = model.get_output_embeddings()(
        getattr(stack, _present(stack, _FINAL_NORMS))(o)
    )
    return logits / getattr(
        text_config(model.config, family), "logits_scaling", 1.0
    ), streams
