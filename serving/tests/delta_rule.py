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
    channels, states = layer.kv_cache[0].transpose(-1, -2), layer.kv_cache[1]
    kept = layer.conv1d.weight.shape[-1] - 1
    rows = torch.arange(len(mixed_qkv))
    of_drafts = rows
    if steps.spec_sequence_masks is not None and steps.num_prefills + steps.num_decodes:
        of_drafts, rows = steps.spec_token_indx, steps.non_spec_token_indx
    is_new = [False] * steps.num_decodes
    if steps.num_prefills:
        is_new = [not known for known in steps.has_initial_state.tolist()]
    for k in range(steps.num_decodes + steps.num_prefills):
        begin, end = steps.non_spec_query_start_loc[k : k + 2]
        own, slot = rows[begin:end], steps.non_spec_state_indices_tensor[k]
        if is_new[k]:
            channels[slot], states[slot] = 0, 0
        mixed = convolve(
            mixed_qkv[own].T, channels[slot, :, :kept], layer.conv1d.weight
        )
        mixed = torch.nn.functional.silu(mixed)
        core_attn_out[own] = _attend(layer, mixed.T, b[own], a[own], states[slot])
    for k in range(steps.num_spec_decodes):
        begin, end = steps.spec_query_start_loc[k : k + 2]
        own, slots = of_drafts[begin:end], steps.spec_state_indices_tensor[k]
        accepted = int(steps.num_accepted_tokens[k])
        mixed = _convolve_drafts(
            mixed_qkv[own].T, channels[slots[0]], layer.conv1d.weight, accepted
        )
        # The state behind each token, to go on from the last one that is accepted.
        state = states[slots[accepted - 1]].clone()
        for t, row in enumerate(own):
            core_attn_out[row] = _attend(
                layer, mixed.T[t : t + 1], b[row][None], a[row][None], state
            )
            states[slots[t]] = state


def _convolve_drafts(
    x: torch.Tensor, buffer: torch.Tensor, weight: torch.Tensor, accepted: int
) -> torch.Tensor:
    """Convolve a request's last token and drafts. buffer: has the tokens of the step before,
    of which `accepted` count, behind those that these were convolved with.
    """
    before = buffer[:, accepted - 1 :]
    whole = torch.cat([before[:, : weight.shape[-1] - 1], x], -1)
    buffer.copy_(torch.cat([before[:, 1 : 1 + buffer.shape[-1] - x.shape[-1]], x], -1))
    out = torch.nn.functional.conv1d(whole[None], weight, groups=len(x))[0]
    return torch.nn.functional.silu(out)


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
