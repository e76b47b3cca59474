"""FarSkip forward passes written from the equations, for tests: the routing, the
experts and the layers by hand.

Independent of the product: this reads no `Family` and no rewired class, and runs on the
*regular* model, from which it takes weights, norms, attention modules and the keyword
arguments that the model's loop passes to its layers. Attribute names are written out
below, each from upstream's modeling file.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softmax

from tests.reference.parts import (
    Parts,
    _fused,
    _mlp,
    _routed,
    _softmax_router,
    _swiglu,
    is_outdated,
    layer_arguments,
)

"""(routed output, shared output), each N x D."""


def _qwen3_moe(layer: Any, config: Any, x: Tensor) -> Parts:
    indices, weights = _softmax_router(
        layer, x, config.num_experts_per_tok, config.norm_topk_prob
    )
    return _routed(x, indices, weights, _fused(layer.mlp.experts)), torch.zeros_like(x)


def _qwen2_moe(layer: Any, config: Any, x: Tensor) -> Parts:
    indices, weights = _softmax_router(
        layer, x, config.num_experts_per_tok, config.norm_topk_prob
    )
    gate = torch.sigmoid(x @ layer.mlp.shared_expert_gate.weight.T)
    shared = gate * _mlp(layer.mlp.shared_expert, x)
    return _routed(x, indices, weights, _fused(layer.mlp.experts)), shared


def _lara_mini(layer: Any, config: Any, x: Tensor) -> Parts:
    indices, weights = _softmax_router(
        layer, x, config.num_experts_per_tok, config.norm_topk_prob
    )
    return _routed(x, indices, weights, _fused(layer.mlp.experts)), _mlp(
        layer.mlp.shared_expert, x
    )


def _mixtral(layer: Any, config: Any, x: Tensor) -> Parts:
    indices, weights = _softmax_router(layer, x, config.num_experts_per_tok, True)
    return _routed(x, indices, weights, _fused(layer.mlp.experts)), torch.zeros_like(x)


def _deepseek_v2(layer: Any, config: Any, x: Tensor) -> Parts:
    k, scale = config.num_experts_per_tok, config.routed_scaling_factor
    indices, weights = _softmax_router(layer, x, k, False, scale)
    return _routed(x, indices, weights, _fused(layer.mlp.experts)), _mlp(
        layer.mlp.shared_experts, x
    )


def _deepseek_v3(layer: Any, config: Any, x: Tensor) -> Parts:
    """Sigmoid scores; groups chosen by their two best biased scores, experts in them by
    biased score, weights unbiased."""
    gate = layer.mlp.gate
    scores = torch.sigmoid(x @ gate.weight.T)
    size = scores.shape[-1] // config.n_group
    indices = []
    for biased in (scores.detach() + gate.e_score_correction_bias).tolist():
        best_two = [
            sum(sorted(biased[g * size : (g + 1) * size])[-2:])
            for g in range(config.n_group)
        ]
        kept = sorted(range(config.n_group), key=lambda g: -best_two[g])[
            : config.topk_group
        ]
        # A.X K2 scores the experts of other groups as 0 and prefers them to its own
        # experts below 0; torch decides which of them.
        others = 0.0 if config.model_type == "axk2" else float("-inf")
        by = [score if e // size in kept else others for e, score in enumerate(biased)]
        chosen = (
            torch.tensor(by)
            .topk(config.num_experts_per_tok, sorted=False)
            .indices.tolist()
        )
        indices.append(chosen)
    weights = scores.gather(1, torch.tensor(indices))
    if config.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config.routed_scaling_factor
    routed = _routed(x, torch.tensor(indices), weights, _fused(layer.mlp.experts))
    shared = getattr(layer.mlp, "shared_experts", None)
    return routed, torch.zeros_like(x) if shared is None else _mlp(shared, x)


def _llama4(layer: Any, config: Any, x: Tensor) -> Parts:
    """The sigmoid of the router's logit scales the *input* of the expert; expert
    matrices are stored transposed.
    """
    block = layer.feed_forward
    logits, indices = (x @ block.router.weight.T).topk(
        config.num_experts_per_tok, dim=-1
    )
    experts = block.experts
    gates = torch.zeros(len(x), len(experts.down_proj)).scatter(
        1, indices, torch.sigmoid(logits)
    )
    into = gates[:, :, None] * x[:, None]
    routed = sum(
        (
            _swiglu(into[:, e] @ experts.gate_up_proj[e]) @ down
            for e, down in enumerate(experts.down_proj)
        ),
        torch.zeros_like(x),
    )
    return routed, _mlp(block.shared_expert, x)


def _gpt_oss(layer: Any, config: Any, x: Tensor) -> Parts:
    router, experts = layer.mlp.router, layer.mlp.experts
    logits, indices = (x @ router.weight.T + router.bias).topk(
        config.num_experts_per_tok, dim=-1
    )

    def expert(e: int, t: Tensor) -> Tensor:
        gate_up = t @ experts.gate_up_proj[e] + experts.gate_up_proj_bias[e]
        gate, up = gate_up[:, 0::2].clamp(max=7.0), gate_up[:, 1::2].clamp(-7.0, 7.0)
        return ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ experts.down_proj[
            e
        ] + experts.down_proj_bias[e]

    return _routed(x, indices, softmax(logits, dim=-1), expert), torch.zeros_like(x)


def _granite(layer: Any, config: Any, x: Tensor) -> Parts:
    block = layer.block_sparse_moe
    logits, indices = (x @ block.router.weight.T).topk(
        config.num_experts_per_tok, dim=-1
    )
    routed = _routed(x, indices, softmax(logits, dim=-1), _fused(block.experts))
    mlp = getattr(layer, "shared_mlp", None)
    if mlp is None:
        return routed, torch.zeros_like(x)
    return routed, _swiglu(x @ mlp.input_linear.weight.T) @ mlp.output_linear.weight.T


def _ernie(layer: Any, config: Any, x: Tensor) -> Parts:
    """Softmax; experts by biased probability, weights unbiased and normalised."""
    gate = layer.mlp.gate
    probabilities = softmax(x @ gate.weight.T, dim=-1)
    indices = (
        (probabilities + gate.moe_statics.e_score_correction_bias[0])
        .topk(config.moe_k, dim=-1)
        .indices
    )
    weights = probabilities.gather(1, indices)
    weights = weights / weights.sum(-1, keepdim=True)
    routed = _routed(x, indices, weights, _fused(layer.mlp.experts))
    if config.moe_num_shared_experts == 0:
        return routed, torch.zeros_like(x)
    return routed, _mlp(layer.mlp.shared_experts, x)


def _jamba(layer: Any, config: Any, x: Tensor) -> Parts:
    block = layer.feed_forward
    weights, indices = softmax(x @ block.router.weight.T, dim=-1).topk(
        config.num_experts_per_tok, dim=-1
    )
    return _routed(x, indices, weights, _fused(block.experts)), torch.zeros_like(x)


def _lfm2(layer: Any, config: Any, x: Tensor) -> Parts:
    """Sigmoid scores; experts by biased score, weights unbiased and normalised."""
    block = layer.feed_forward
    scores = torch.sigmoid(x @ block.gate.weight.T)
    indices = (
        (scores + block.expert_bias).topk(config.num_experts_per_tok, dim=-1).indices
    )
    chosen = scores.gather(1, indices)
    weights = (
        config.routed_scaling_factor * chosen / (chosen.sum(-1, keepdim=True) + 1e-6)
    )
    return _routed(x, indices, weights, _fused(block.experts)), torch.zeros_like(x)


def _phimoe(layer: Any, config: Any, x: Tensor) -> Parts:
    """SparseMixer-2 in evaluation mode: the best two experts, each weighted by a
    softmax over the experts near it.

    A score s is near a best score b when (b - s) / max(|s|, b) <= 2 * router_jitter_noise; the second softmax
    is without the first expert.
    """
    indices, weights = [], []
    for scores in x @ layer.mlp.router.weight.T:
        values = scores.detach().tolist()
        candidates = list(range(len(values)))
        for _ in range(2):
            best = max(candidates, key=lambda e: values[e])
            b = values[best]
            limit = 2 * config.router_jitter_noise
            near = [
                e
                for e in candidates
                if (b - values[e]) / max(abs(values[e]), b) <= limit
            ]
            weights.append(softmax(scores[near], dim=-1)[near.index(best)])
            indices.append(best)
            candidates.remove(best)
    routed = _routed(
        x,
        torch.tensor(indices).view(-1, 2),
        torch.stack(weights).view(-1, 2),
        _fused(layer.mlp.experts),
    )
    return routed, torch.zeros_like(x)


MOE: dict[str, Callable[[Any, Any, Tensor], Parts]] = {
    "qwen3_moe": _qwen3_moe, "qwen2_moe": _qwen2_moe, "deepseek_v2": _deepseek_v2, "deepseek_v3": _deepseek_v3,
    "instella_moe": _deepseek_v3, "glm4_moe": _deepseek_v3, "mixtral": _mixtral, "olmoe": _qwen3_moe,
    "llama4_text": _llama4, "gpt_oss": _gpt_oss, "granitemoe": _granite, "granitemoeshared": _granite,
    "granitemoe_swa": _granite, "granitemoehybrid": _granite, "axk2": _deepseek_v3, "deepseek_v32": _deepseek_v3,
    "dots1": _deepseek_v3, "ernie4_5_moe": _ernie, "exaone_moe": _deepseek_v3, "glm4_moe_lite": _deepseek_v3,
    "jamba": _jamba, "lara_mini": _lara_mini, "lfm2_moe": _lfm2, "mellum": _qwen3_moe, "mimo_v2_flash": _deepseek_v3,
    "phimoe": _phimoe, "qwen3_next": _qwen2_moe, "sarvam_mla": _deepseek_v3, "sarvam_moe": _deepseek_v3,
    "solar_open": _deepseek_v3,
}  # fmt: skip


def _is_moe(layer: Any) -> bool:
    return any(hasattr(child, "experts") for child in layer.children())


def _attention(layer: Any, x: Tensor, arguments: dict[str, Any]) -> Tensor:
    """Return the output of attention, or of what a hybrid has in its place."""
    recurrent = getattr(layer, "mamba", None) or getattr(layer, "linear_attn", None)
    if recurrent is not None:
        return recurrent(hidden_states=x, attention_mask=arguments["attention_mask"])
    if (conv := getattr(layer, "conv", None)) is not None:
        return conv(hidden_states=x, attention_mask=arguments["attention_mask"])
    return layer.self_attn(hidden_states=x, **arguments)[0]


def _norms(config: Any, layer: Any) -> tuple[nn.Module, nn.Module]:
    """Return (norm before attention, norm before the MLP)."""
    if config.model_type == "jamba":
        return layer.input_layernorm, layer.pre_ff_layernorm
    if config.model_type == "lfm2_moe":
        return layer.operator_norm, layer.ffn_norm
    return layer.input_layernorm, layer.post_attention_layernorm


def _dense(config: Any, layer: Any, x: Tensor) -> Tensor:
    if config.model_type == "lfm2_moe":
        w1, w2, w3 = (
            getattr(layer.feed_forward, name).weight for name in ("w1", "w2", "w3")
        )
        return (silu(x @ w1.T) * (x @ w3.T)) @ w2.T
    return _mlp(
        (
            layer.feed_forward
            if config.model_type in ("llama4_text", "jamba")
            else layer.mlp
        ),
        x,
    )


_FINAL_NORM = {"jamba": "final_layernorm", "lfm2_moe": "embedding_norm"}


def reference_forward(
    model: Any,
    input_ids: Tensor,
    layers: Sequence[int],
    attention: str = "partial",
    mlp: str | Sequence[int] = "outdated",
    **inputs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Return logits and streams of a regular model as if `layers` were FarSkip layers.

        o_k = o_{k-1} + attn_k(a) + shared_k(m) + routed_k(m)
        a   = o_{k-1} - routed_{k-1}   layer k FarSkip, layer k-1 a FarSkip MoE layer, attention partial
              o_{k-1}                  otherwise
        m   = o_{k-1}                  layer k FarSkip, mlp outdated or has k
              o_{k-1} + attn_k(a)      otherwise

    Args:
        model: a regular model in eval mode. Families that are not in `MOE` go to
            `tests.reference.surgery`.
        input_ids: B x T.
        layers: indices of the FarSkip layers.
        inputs: further model inputs (attention_mask, position_ids).

    Returns:
        (logits B x T x V, [o_0 … o_L] each B x T x D, before the final norm; o_0 is the
        embedding, a constant for autograd).
    """
    config = model.config
    # which imports its helpers from here
    from tests.reference.adapted import LAYERS, adapted_forward

    if config.model_type in LAYERS:
        return adapted_forward(model, input_ids, layers, attention, mlp, **inputs)
    if config.model_type not in MOE:
        from tests.reference.surgery import surgery_forward

        return surgery_forward(model, input_ids, layers, attention, mlp, **inputs)
    o, arguments = layer_arguments(model, input_ids, **inputs)
    streams = [o]
    in_flight: Tensor | None = None
    for k, layer in enumerate(model.model.layers):
        far = k in layers
        scale = (
            config.residual_multiplier
            if config.model_type.startswith("granite")
            else 1.0
        )
        a = (
            o - in_flight
            if far and attention == "partial" and in_flight is not None
            else o
        )
        in_norm, mlp_norm = _norms(config, layer)
        attended = scale * _attention(layer, in_norm(a), arguments[k])
        m = mlp_norm(o if is_outdated(k, layers, mlp) else o + attended)
        x = m.reshape(-1, m.shape[-1])
        if _is_moe(layer):
            routed, shared = (
                scale * part.view(o.shape)
                for part in MOE[config.model_type](layer, config, x)
            )
            in_flight = routed if far else None
            o = o + attended + shared + routed
        else:
            in_flight = None
            o = o + attended + scale * _dense(config, layer, x).view(o.shape)
        streams.append(o)
    logits = model.lm_head(
        getattr(model.model, _FINAL_NORM.get(config.model_type, "norm"))(o)
    )
    return logits / getattr(config, "logits_scaling", 1.0), streams
