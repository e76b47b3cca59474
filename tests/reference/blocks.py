"""FarSkip forward passes of families whose layers are one branch each, from the
equations; `tests.reference.adapted` hands them on.

    o_k = o_{k-1} + f_k(x_k)
    x_k = o_{k-1} - routed_{k-1}   layers k-1 and k FarSkip, k-1 MoE, k not, attention partial
          o_{k-1} - routed_{k-1}   the same, both MoE, k outdated
          o_{k-2}                  layers k-1 and k FarSkip, only k MoE, k outdated
          o_{k-1}                  otherwise
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.reference.parts import _grouped, _routed, is_outdated


def _squared(x: Tensor) -> Tensor:
    return torch.relu(x) ** 2


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    return _squared(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T


def _experts(block: Any, config: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of routed and of shared experts; x is N x D. The routed ones
    work in a space of their own where the model has one."""
    router = _grouped(x, block.gate, config, scale=config.routed_scaling_factor)
    up, down = block.experts.up_proj, block.experts.down_proj
    latent = x
    if config.moe_latent_size is not None:
        latent = x @ block.fc1_latent_proj.weight.T
    routed = _routed(latent, *router, lambda e, t: _squared(t @ up[e].T) @ down[e].T)
    if config.moe_latent_size is not None:
        routed = routed @ block.fc2_latent_proj.weight.T
    return routed, _mlp(block.shared_experts, x)


def block_streams(
    stack: Any,
    config: Any,
    o: Tensor,
    arguments: list[dict[str, Any]],
    layers: Sequence[int],
    attention: str,
    mlp: str | Sequence[int],
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return what `tests.reference.adapted.adapted_streams` does, for Nemotron-H."""
    kinds = [*config.layers_block_type, ""]
    streams, rests = [o], list[Tensor | None]()
    for k, layer in enumerate(stack):
        read, own = o, arguments[k]
        if k and rests[k - 1] is not None:
            read = rests[k - 1]
        x = layer.norm(read)
        rest = o
        if kinds[k] == "moe":
            routed, shared = (
                part.view(o.shape)
                for part in _experts(layer.mixer, config, x.flatten(0, 1))
            )
            rest = o + shared
            o = rest + routed
        elif kinds[k] == "mlp":
            o = o + _mlp(layer.mixer, x)
        elif kinds[k] == "linear_attention":
            o = o + layer.mixer(x, attention_mask=own["attention_mask"])
        else:
            o = o + layer.mixer(x, attention_mask=own["attention_mask"])[0]
        streams.append(o)
        wanted = (
            is_outdated(k + 1, layers, mlp)
            if kinds[k + 1] == "moe"
            else attention == "partial" and kinds[k] == "moe"
        )
        rests.append(rest if wanted and {k, k + 1} <= set(layers) else None)
    return streams, rests
