"""Gated delta rule (linear attention of Qwen3-Next and Qwen3.5) in float32, by its equations.

vLLM's kernel for CPUs takes bfloat16 alone; here it is stood in for, so that tokens can be
compared. Projections, states and their slots, norms and sums stay vLLM's. `cpu_kernels` has
the same for SGLang.
"""

from typing import Any

import torch
from torch.nn.functional import normalize, softplus


def stand_in() -> None:
    """Put the equations in the place of vLLM's kernel, before a model is made."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType

    # vLLM reads the operator's schema from here
    _core.__annotations__["layer_name"] = LayerNameType
    gdn_attention.cpu_gdn_attention_core = _core


def _core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: Any,
) -> None:
    """Compute what vLLM's operator of this signature computes, one request after the other."""
    from vllm.forward_context import get_forward_context
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    if context.attn_metadata is None:  # a step that only measures memory
        return
    layer: Any = context.no_compile_layers[_resolve_layer_name(layer_name)]
    steps: Any = context.attn_metadata[layer.prefix]
    starts = steps.non_spec_query_start_loc.tolist()
    slots = steps.non_spec_state_indices_tensor.tolist()
    is_new = [False] * steps.num_decodes
    if steps.num_prefills:
        is_new = [not kept for kept in steps.has_initial_state.tolist()]
    channels, states = layer.kv_cache[0].transpose(-1, -2), layer.kv_cache[1]
    for k in range(steps.num_decodes + steps.num_prefills):
        own = slice(starts[k], starts[k + 1])
        if is_new[k]:
            channels[slots[k]], states[slots[k]] = 0, 0
        mixed = convolve(mixed_qkv[own].T, channels[slots[k]], layer.conv1d.weight)
        mixed = torch.nn.functional.silu(mixed)
        core_attn_out[own] = _attend(layer, mixed.T, b[own], a[own], states[slots[k]])


def convolve(x: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor) -> Any:
    """Convolve channels with those of the tokens before, and keep the last of them."""
    whole = torch.cat([kept, x], -1)
    kept.copy_(whole[:, -kept.shape[-1] :])
    return torch.nn.functional.conv1d(whole[None], weight, groups=len(x))[0]


def _attend(
    layer: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, state: Any
) -> torch.Tensor:
    """Return the outputs of one request's tokens, and bring its state (heads, values,
    keys) up to date.
    """
    query, key, value = (part[0] for part in layer.rearrange_mixed_qkv(mixed))
    decay = (-layer.A_log.exp() * softplus(a + layer.dt_bias)).exp()
    return recur(query, key, value, decay, b.sigmoid(), state)


def recur(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs (tokens, heads, values) of one request, and bring its state
    (heads, values, keys) up to date. decay, beta: (tokens, heads).
    """
    groups = value.shape[1] // query.shape[1]
    query, key = (
        normalize(x, dim=-1, eps=1e-6).repeat_interleave(groups, 1)
        for x in (query, key)
    )
    rows = []
    for t in range(len(value)):
        state *= decay[t, :, None, None]
        missing = value[t] - torch.einsum("hvk,hk->hv", state, key[t])
        state += torch.einsum("hv,hk->hvk", missing * beta[t, :, None], key[t])
        rows.append(torch.einsum("hvk,hk->hv", state, query[t]))
    return torch.stack(rows) / key.shape[-1] ** 0.5
