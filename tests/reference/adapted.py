"""FarSkip forward passes of the families in `fcsd.model.families.adapted`, written from
upstream's modeling files.

Like `tests.reference.reference`, this reads no `Family` and no rewired class, runs on
the *regular* model, and takes from it weights, norms, attention modules and the
arguments of its loop. One function per family computes a layer: what it adds to the
stream, and what is in the stream while its routed output is in flight.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, logsigmoid, silu, softmax
from transformers.cache_utils import KVSharingDict

from tests.reference import sources
from tests.reference import streams as hyper
from tests.reference.blocks import block_streams
from tests.reference.parts import (
    Step,
    _fused,
    _grouped,
    _mlp,
    _routed,
    _softmax_router,
    _swiglu,
    is_outdated,
    layer_arguments,
)

Arguments = dict[str, Any]

Layer = Callable[[Any, Any, Tensor, Tensor, bool, Arguments], Step]
"""(layer, config, o_{k-1}, what attention reads, whether the MLP side is outdated,
arguments of the loop) -> Step."""


def _glm_moe_dsa(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    score = (
        torch.sigmoid
        if config.model_type == "glm_moe_dsa"
        else lambda x: softmax(x, dim=-1)
    )
    attended, _, arguments["prev_topk_indices"] = layer.self_attn(
        hidden_states=layer.input_layernorm(a), **arguments
    )
    h = o + attended
    m = layer.post_attention_layernorm(o if outdated else h)
    if not hasattr(layer.mlp, "experts"):
        return h + _mlp(layer.mlp, m), None
    x = m.flatten(0, 1)
    router = _grouped(
        x, layer.mlp.gate, config, scale=config.routed_scaling_factor, score=score
    )
    shared = _mlp(layer.mlp.shared_experts, m)
    return h + shared + _routed(x, *router, _fused(layer.mlp.experts)).view(
        o.shape
    ), h + shared


def _afmoe(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    h = o + layer.post_attention_layernorm(attended)
    m = layer.pre_mlp_layernorm(o if outdated else h)
    if not hasattr(layer.mlp, "experts"):
        return h + layer.post_mlp_layernorm(_mlp(layer.mlp, m)), None
    x, block = m.flatten(0, 1), layer.mlp
    scores = torch.sigmoid(x @ block.router.gate.weight.T)
    indices = (
        (scores + block.expert_bias).topk(config.num_experts_per_tok, dim=-1).indices
    )
    weights = scores.gather(1, indices)
    weights = weights / weights.sum(-1, keepdim=True)
    out = _routed(x, indices, weights * config.route_scale, _fused(block.experts)).view(
        o.shape
    )
    return h + layer.post_mlp_layernorm(out + _mlp(block.shared_experts, m)), h


def _kolibri(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    h = o + layer.post_self_attn_layernorm(attended)
    m = layer.post_attention_layernorm(o if outdated else h)
    x, gate = m.flatten(0, 1), layer.mlp.gate
    scores = x @ gate.weight.T
    indices = (
        (scores + gate.e_score_correction_bias)
        .topk(config.num_experts_per_tok, dim=-1)
        .indices
    )
    weights = torch.sigmoid(scores.gather(1, indices))
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    out = _routed(x, indices, weights, _fused(layer.mlp.experts)).view(o.shape)
    return h + layer.post_mlp_layernorm(out + _mlp(layer.mlp.shared_experts, m)), h


def _axk1(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    h = o + layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    m = layer.post_attention_layernorm(o if outdated else h)
    if not hasattr(layer.mlp, "experts"):
        return h + _mlp(layer.mlp, m), None
    x, block = m.flatten(0, 1), layer.mlp
    router = _grouped(x, block.gate, config, scale=config.routed_scaling_factor)
    out = _routed(x, *router, _fused(block.experts)).view(o.shape) + _mlp(
        block.shared_experts, m
    )
    return h + block.post_mlp_layernorm(out), h


def _convolved(conv: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x plus the causal convolution over time of each channel; kernels are D x 1
    x W, the last tap is the present.
    """
    kernel = conv.conv1d.weight[:, 0]
    taps = kernel.shape[-1]
    kept = x if mask is None else x * mask[..., None]
    padded = torch.cat([torch.zeros_like(kept[:, : taps - 1]), kept], dim=1)
    length = x.shape[1]
    return x + torch.stack(
        [padded[:, k : k + length] * kernel[:, k] for k in range(taps)]
    ).sum(0)


def _inkling(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    mask = arguments["conv_mask"]
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    h = o + _convolved(layer.attn_sconv, attended, mask)
    m = layer.post_attention_layernorm(o if outdated else h)
    if not hasattr(layer.mlp, "experts"):
        return h + _convolved(
            layer.mlp_sconv, layer.mlp.global_scale * _mlp(layer.mlp, m), mask
        ), None
    x, block = m.flatten(0, 1), layer.mlp
    gate, shared, routed = block.gate, block.shared_experts, config.n_routed_experts
    scores = x @ gate.weight.T
    biased = torch.sigmoid(scores[:, :routed]) + gate.e_score_correction_bias
    indices = biased.topk(config.num_experts_per_tok, dim=-1).indices
    always = torch.arange(routed, scores.shape[-1]).expand(len(x), -1)
    both = torch.cat([indices, always], dim=-1)
    chosen = scores.gather(1, both)
    weights = (
        softmax(logsigmoid(chosen), dim=-1) * config.route_scale * gate.global_scale
    )

    def expert(e: int, t: Tensor) -> Tensor:
        if e < routed:
            return _fused(block.experts)(e, t)
        e -= routed
        return (
            silu(t @ shared.gate_proj[e].T) * (t @ shared.up_proj[e].T)
        ) @ shared.down_proj[e].T

    return h + _convolved(
        layer.mlp_sconv, _routed(x, both, weights, expert).view(o.shape), mask
    ), h


def _flex_olmo(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """No norm before the branches, one after each."""
    h = o + layer.post_attention_layernorm(
        layer.self_attn(hidden_states=a, **arguments)[0]
    )
    x = (o if outdated else h).flatten(0, 1)
    router = _softmax_router(
        layer, x, config.num_experts_per_tok, config.norm_topk_prob
    )
    out = _routed(x, *router, _fused(layer.mlp.experts)).view(o.shape)
    return h + layer.post_feedforward_layernorm(out), h


def _cohere2(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """The MLP reads the layer's own input with either setting of its side."""
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    m = layer.input_layernorm(o)
    if not hasattr(layer.mlp, "experts"):
        return o + attended + _mlp(layer.mlp, m), None
    x = m.flatten(0, 1)
    scores, indices = (x @ layer.mlp.gate.weight.T).topk(
        config.num_experts_per_tok, dim=-1
    )
    if config.expert_selection_fn == "softmax":
        weights = softmax(scores, dim=-1)
    else:
        weights = torch.sigmoid(scores)
        weights = (
            weights / weights.sum(-1, keepdim=True)
            if config.norm_topk_prob
            else weights
        )
    routed = _routed(x, indices, weights, _fused(layer.mlp.experts)).view(o.shape)
    shared = (
        _mlp(layer.mlp.shared_experts, m)
        if config.num_shared_experts
        else torch.zeros_like(o)
    )
    if (
        config.num_shared_experts
        and config.shared_expert_combination_strategy == "average"
    ):
        routed, shared = routed / 2, shared / 2
    return o + attended + shared + routed, o + attended + shared


def _beam(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """The i-th sum of the model is branch/sqrt(i) + sqrt((i-1)/i) stream; attention of
    layer k (from 0) has i = 2k+2, its MLP i = 2k+3."""
    i = 2 * layer.self_attn.layer_idx + 2
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    old = math.sqrt((i - 1) / i) * o
    h = layer.post_attention_layernorm(attended) / math.sqrt(i) + old
    m = layer.pre_feedforward_layernorm(old if outdated else h)
    rest = math.sqrt(i / (i + 1)) * h
    if not hasattr(layer.mlp, "experts"):
        return layer.post_feedforward_layernorm(_mlp(layer.mlp, m)) / math.sqrt(
            i + 1
        ) + rest, None
    x = m.flatten(0, 1)
    router = _grouped(x, layer.mlp.gate, config, scale=config.routed_scaling_factor)
    out = _routed(x, *router, _fused(layer.mlp.experts)).view(o.shape)
    return layer.post_feedforward_layernorm(out) / math.sqrt(i + 1) + rest, rest


def _dbrx(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    inner, ffn = layer.norm_attn_norm, config.ffn_config
    h = o + inner.attn(hidden_states=inner.norm_1(a), **arguments)[0]
    x = inner.norm_2(o if outdated else h).flatten(0, 1)
    weights, indices = softmax(x @ layer.ffn.router.layer.weight.T, dim=-1).topk(
        ffn.moe_top_k, dim=-1
    )
    weights = weights / weights.norm(
        p=ffn.moe_normalize_expert_weights, dim=-1, keepdim=True
    )
    w1, v1, w2 = (
        weight.view(ffn.moe_num_experts, ffn.ffn_hidden_size, -1)
        for weight in (
            layer.ffn.experts.mlp.w1,
            layer.ffn.experts.mlp.v1,
            layer.ffn.experts.mlp.w2,
        )
    )
    routed = _routed(
        x, indices, weights, lambda e, t: (silu(t @ w1[e].T) * (t @ v1[e].T)) @ w2[e]
    )
    return h + routed.view(o.shape), h


def _jetmoe(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """The bias of the MoE block comes after its experts' sum, and is in flight with it."""
    h = o + layer.self_attention(hidden_states=layer.input_layernorm(a), **arguments)[0]
    x, block = (
        layer.post_attention_layernorm(o if outdated else h).flatten(0, 1),
        layer.mlp,
    )
    scores, indices = (x @ block.router.layer.weight.T).topk(
        config.num_experts_per_tok, dim=-1
    )

    def expert(e: int, t: Tensor) -> Tensor:
        return (
            _swiglu(t @ block.input_linear.weight[e].T)
            @ block.output_linear.weight[e].T
        )

    routed = _routed(x, indices, softmax(scores, dim=-1), expert) + block.bias
    return h + routed.view(o.shape), h


def _minimax(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """The sums are over the normed stream."""
    kind = config.layer_types[layer.layer_idx].removesuffix("_attention")
    alpha, beta = (
        getattr(config, f"{kind}_attn_{name}_factor") for name in ("alpha", "beta")
    )
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    old = alpha * layer.input_layernorm(o)
    y = layer.post_attention_layernorm(old + beta * attended)
    x = (layer.post_attention_layernorm(old) if outdated else y).flatten(0, 1)
    router = _softmax_router(layer, x, config.num_experts_per_tok, True)
    routed = _routed(x, *router, _fused(layer.mlp.experts)).view(o.shape)
    rest = config.mlp_alpha_factor * y
    return rest + config.mlp_beta_factor * routed, rest


def _gemma4(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """A dense MLP and the experts, each with its norms, both on the stream after attention."""
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    h = o + layer.post_attention_layernorm(attended)
    m = o if outdated else h

    def glu(gate: Tensor, up: Tensor) -> Tensor:
        return gelu(gate, approximate="tanh") * up

    x, mlp = layer.pre_feedforward_layernorm(m), layer.mlp
    dense = (
        glu(x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T)
        @ mlp.down_proj.weight.T
    )
    flat, router = m.flatten(0, 1), layer.router
    normed = flat / (flat.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    scores = (normed * router.scale / math.sqrt(flat.shape[-1])) @ router.proj.weight.T
    weights, indices = softmax(scores, dim=-1).topk(config.top_k_experts, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True) * router.per_expert_scale[indices]
    experts = layer.experts
    routed = _routed(
        layer.pre_feedforward_layernorm_2(flat),
        indices,
        weights,
        lambda e, t: (
            glu(*(t @ experts.gate_up_proj[e].T).chunk(2, dim=-1))
            @ experts.down_proj[e].T
        ),
    ).view(o.shape)
    both = layer.post_feedforward_layernorm_1(
        dense
    ) + layer.post_feedforward_layernorm_2(routed)
    scale = layer.layer_scalar
    return (h + layer.post_feedforward_layernorm(both)) * scale, h * scale


def _muse_spark(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """stream' = sqrt(1 - b^2) stream + b branch with a learned b per channel; the
    experts work in a space of their own, and each output is normed.
    """

    def mixed(gate: Any, stream: Tensor, branch: Tensor | float) -> Tensor:
        beta = torch.sigmoid(gate.gate / config.residual_gate_temperature)
        return (1 - beta**2).clamp(min=gate.eps).sqrt() * stream + beta * branch

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        x = x * (1 + weight)
        return x / (x.pow(2).mean(-1, keepdim=True) + config.post_norm_eps).sqrt()

    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    branch = (
        attended
        / (attended.pow(2).mean(-1, keepdim=True) + config.post_norm_eps).sqrt()
    )
    h = mixed(layer.post_attention_residual_gate, o, branch)
    old = mixed(layer.post_attention_residual_gate, o, 0.0)
    m = layer.pre_feedforward_layernorm(old if outdated else h)
    last, weight = (
        layer.post_feedforward_residual_gate,
        layer.post_feedforward_layernorm.weight,
    )
    if not hasattr(layer.mlp, "experts"):
        return mixed(last, h, normed(_mlp(layer.mlp, m), weight)), None
    x, block = m.flatten(0, 1), layer.mlp
    scores = torch.sigmoid(config.output_multiplier * (x @ block.gate.weight.T))
    indices = (
        (scores + block.gate.e_score_correction_bias)
        .topk(config.num_experts_per_tok, dim=-1)
        .indices
    )
    weights = scores.gather(1, indices)
    weights = weights / weights.sum(-1, keepdim=True)
    routed = _routed(
        block.pre_expert_norm(x @ block.pre_expert_proj.weight.T),
        indices,
        weights * config.routed_scaling_factor,
        lambda e, t: normed(
            _fused(block.experts)(e, t), block.experts.post_expert_norm.weight
        ),
    )
    out = (routed @ block.post_expert_proj.weight.T).view(o.shape)
    return mixed(last, h, normed(out, weight)), mixed(last, h, 0.0)


def _zaya(
    layer: Any, config: Any, o: Tensor, a: Tensor, outdated: bool, arguments: Arguments
) -> Step:
    """stream' = (branch + b) s + (stream + c) t with learned b, s, c, t per channel. A
    router adds its predecessor's state to its own, an MLP scores E experts and the
    choice of none, and one of the E + 1 is chosen."""

    def scaled(sums: Any, branch: Tensor | float, stream: Tensor) -> Tensor:
        branch = (branch + sums.hidden_states_bias) * sums.hidden_states_scale
        return branch + (stream + sums.residual_bias) * sums.residual_scale

    first, last = layer.post_attention_residual_scale, layer.post_mlp_residual_scale
    before = arguments.pop("prev_router_hidden_states")
    attended = layer.self_attn(hidden_states=layer.input_layernorm(a), **arguments)[0]
    h = scaled(first, attended, o)
    m = layer.post_attention_layernorm(scaled(first, 0.0, o) if outdated else h)
    gate, mlp = layer.mlp.gate, layer.mlp.gate.router_mlp
    state = m @ gate.down_proj.weight.T + gate.down_proj.bias
    if before is not None:
        state = state + before * gate.router_states_scale
    arguments["prev_router_hidden_states"] = state
    hidden = mlp.norm(state).flatten(0, 1)
    for linear in (mlp.fc1, mlp.fc2):
        hidden = gelu(hidden @ linear.weight.T + linear.bias)
    probabilities = softmax(hidden @ mlp.out_proj.weight.T, dim=-1)
    indices = (probabilities + gate.balancing_biases).argmax(-1, keepdim=True)
    weights = probabilities.gather(1, indices)
    skips = indices == config.num_experts
    routed = _routed(
        m.flatten(0, 1),
        indices.masked_fill(skips, 0),
        weights.masked_fill(skips, 0),
        _fused(layer.mlp.experts),
    ).view(o.shape)
    return scaled(last, routed, h), scaled(last, 0.0, h)


LAYERS: dict[str, Any] = {
    "glm_moe_dsa": _glm_moe_dsa, "afmoe": _afmoe, "kolibri1": _kolibri, "axk1": _axk1, "inkling_text": _inkling,
    "flex_olmo": _flex_olmo, "cohere2_moe": _cohere2, "beam": _beam, "dbrx": _dbrx, "jetmoe": _jetmoe,
    "minimax": _minimax, "gemma4_text": _gemma4, **hyper.LAYERS, "nemotron_h": block_streams,
    "zaya": _zaya, "inkling2_text": sources.inkling2,
}  # fmt: skip
"""Model type -> `Layer`; `block_streams` where each layer is one branch."""

WRAPPERS: dict[str, Layer] = {
    "mistral_large4": _glm_moe_dsa, "muse_spark": _muse_spark, "inkling_mm_model": _inkling,
    "inkling2": sources.inkling2, **hyper.WRAPPERS,
}  # fmt: skip
"""The same for multimodal wrappers."""


def _decoder(model: Any) -> tuple[Any, Any]:
    """Return (layers, final norm)."""
    if model.config.model_type == "dbrx":
        return model.transformer.blocks, model.transformer.norm_f
    if model.config.model_type == "nemotron_h":
        return model.model.layers, model.model.norm_f
    return model.model.layers, getattr(model.model, "norm", None)


def adapted_streams(
    model: Any,
    input_ids: Tensor,
    layers: Sequence[int],
    attention: str = "partial",
    mlp: str | Sequence[int] = "outdated",
    **inputs: Any,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return ([o_0 … o_L], [o_k without what is in flight after layer k, or None where
    nothing is; k from 1]).
    """
    stack, _ = _decoder(model)
    o, arguments = layer_arguments(model, input_ids, stack=stack, **inputs)
    step = LAYERS[model.config.model_type]
    if step is block_streams:
        return block_streams(stack, model.config, o, arguments, layers, attention, mlp)
    streams: list[Tensor] = [o]
    rests: list[Tensor | None] = []
    rest: Tensor | None = None
    handed_on: dict[str, Any] = (
        {"prev_topk_indices": None} if "prev_topk_indices" in arguments[0] else {}
    )
    if model.config.model_type == "zaya":
        handed_on["prev_router_hidden_states"] = None
    if step is sources.inkling2:
        handed_on[sources.BLOCKS] = []
    if "shared_kv_states" in arguments[0]:
        handed_on["shared_kv_states"] = KVSharingDict()
    for k, layer in enumerate(stack):
        far = k in layers
        own = arguments[k] | handed_on
        a = rest if far and attention == "partial" and rest is not None else o
        o, rest = step(layer, model.config, o, a, is_outdated(k, layers, mlp), own)
        handed_on = {name: own[name] for name in handed_on}
        rest = rest if far else None
        streams.append(o)
        rests.append(rest)
    return streams, rests


def adapted_forward(
    model: Any,
    input_ids: Tensor,
    layers: Sequence[int],
    attention: str = "partial",
    mlp: str | Sequence[int] = "outdated",
    **inputs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Like `tests.reference.reference.reference_forward`, for the families in
    `LAYERS`.
    """
    streams, _ = adapted_streams(model, input_ids, layers, attention, mlp, **inputs)
    config = model.config
    if config.model_type in hyper.HEADS:
        head = hyper.HEADS[config.model_type]
        return model.lm_head(head(model.model, config, streams[-1])), streams
    if LAYERS[config.model_type] is sources.inkling2:
        normed = sources.head(model.model, config, streams)
    else:
        normed = _decoder(model)[1](streams[-1])
    logits = model.lm_head(normed / getattr(config, "logits_mup_width_multiplier", 1.0))
    logits = logits * getattr(config, "logit_scale", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap), streams
