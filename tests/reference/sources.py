"""FarSkip layers of Inkling 2, whose branches read a mix of the streams after earlier
blocks of layers; `tests.reference.adapted` calls them like those of other families.

B holds the streams with which earlier blocks of layers ended (and the embeddings); o is
the sum of the layers of this block so far. For each query q of a branch, with n = s / rms(s):

    mix(B, o) = sum over s in B and o of softmax(q n / sqrt(D)) n

    h  = r + conv attn(mix(B, a))          r = o; 0 where a block begins
    o' = h + conv routed(mix(S, s))
    a  = o, or o without conv routed of the layer before it
    S, s = B, h; where a block begins, B and o, h; in a FarSkip layer B, o

Where a block begins, o joins B after the layer.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax

from tests.reference.parts import Step, _routed

BLOCKS = "blocks"
"""Name under which a layer finds B among its arguments, and leaves the next one's."""


def mix(module: Any, blocks: list[Tensor], o: Tensor) -> list[Tensor]:
    """Return a mix for each query of the module."""
    sources = torch.stack([*blocks, o], dim=-2)
    mean = sources.pow(2).mean(-1, keepdim=True)
    sources = sources / (mean + module.norm.eps).sqrt()
    queries = module.query.view(-1, sources.shape[-1])
    scores = torch.einsum("qd,btsd->bqts", queries, sources) / math.sqrt(o.shape[-1])
    mixed = torch.einsum("bqts,btsd->qbtd", softmax(scores, dim=-1), sources)
    return list(mixed)


def _convolved(conv: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x plus the causal convolution over time of each channel, over the root of
    the number of summands; the last tap is the present.
    """
    kernel = conv.conv1d.weight[:, 0]
    taps, length = kernel.shape[-1], x.shape[1]
    kept = x if mask is None else x * mask[..., None]
    padded = torch.cat([torch.zeros_like(kept[:, : taps - 1]), kept], dim=1)
    parts = [padded[:, k : k + length] * kernel[:, k] for k in range(taps)]
    return (x + torch.stack(parts).sum(0)) / math.sqrt(taps + 1)


def _experts(block: Any, config: Any, x: Tensor) -> Tensor:
    """Choose by biased sigmoids; weights are the unbiased ones, with sum route_scale."""
    gate_cap, up_cap = config.mlp_gate_softcap, config.mlp_up_softcap
    scores = torch.sigmoid(x @ block.gate.weight.T)
    biased = scores + block.gate.e_score_correction_bias
    indices = biased.topk(config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(1, indices)
    weights = config.route_scale * weights / weights.sum(-1, keepdim=True)

    def expert(e: int, t: Tensor) -> Tensor:
        gate, up = (t @ block.experts.gate_up_proj[e].T).chunk(2, dim=-1)
        gate = gate_cap * torch.tanh(gate / gate_cap) * torch.sigmoid(gate)
        up = up_cap * torch.tanh(up / up_cap)
        return (gate * up) @ block.experts.down_proj[e].T

    return _routed(x, indices, weights, expert)


def inkling2(
    layer: Any,
    config: Any,
    o: Tensor,
    a: Tensor,
    outdated: bool,
    arguments: dict[str, Any],
) -> Step:
    """As `tests.reference.adapted.Layer`."""
    blocks, index = arguments.pop(BLOCKS), layer.self_attn.layer_idx
    begins = index % config.n_layers_per_attn_res_block == 0
    is_full = config.layer_types[index] == "hybrid"
    reads = [a] * (3 if is_full else 1)
    if index:
        reads = mix(layer.attention_input, blocks, a)
    if is_full:
        query, key, value = reads
        given = {
            "hidden_states": layer.q_input_layernorm(query),
            "key_hidden_states": layer.k_input_layernorm(key),
            "value_hidden_states": layer.v_input_layernorm(value),
        }
    else:
        given = {"hidden_states": layer.input_layernorm(reads[0])}
    attended = layer.self_attn(**given, **arguments)[0]
    mask = arguments["conv_mask"]
    attended = _convolved(layer.post_attention_convolution, attended, mask)
    h = attended if begins else o + attended
    after = [*blocks, o] if begins else blocks
    sources, last = (blocks, o) if outdated else (after, h)
    m = layer.post_attention_layernorm(mix(layer.mlp_input, sources, last)[0])
    routed = _experts(layer.mlp, config, m.flatten(0, 1)).view(o.shape)
    arguments[BLOCKS] = after
    return h + _convolved(layer.post_mlp_convolution, routed, mask), h


def head(model: Any, config: Any, streams: list[Tensor]) -> Tensor:
    """Return what the LM head reads: the norm of a last mix."""
    size = config.n_layers_per_attn_res_block
    return model.norm(mix(model.final_input, streams[:-1:size], streams[-1])[0])  # type: ignore[no-any-return]
