"""FarSkip layers of the families with hyper-connections, written from upstream's modeling
files; `tests.reference.adapted` calls them like those of other families.

O holds the streams of a layer, B x T x S x D. A hyper-connection computes for each token,
from streams that it is given: p, which mixes them into the vector that a branch reads; w,
which spreads the branch's output over them; and in two families C, which mixes the
streams that are kept.

    H  = Cᵀ O + w attn(p A)           p and w from A, C from O
    O' = Cᵀ H + w moe(p M)            p and w from M, C from H
    A  = O, or O without w routed of the layer before it
    M  = H, or Cᵀ O of the first line
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from tests.reference.parts import (
    Step,
    _fused,
    _grouped,
    _mlp,
    _routed,
    _softmax_router,
)


class Connection(NamedTuple):
    """p O (B x T x D), w (B x T x S) and, where a family has it, C (B x T x S x S)."""

    read: Tensor
    write: Tensor
    mix: Tensor | None


def _sinkhorn(module: Any, config: Any, streams: Tensor) -> Connection:
    """Compute the connection of DeepSeek-V4: C has rows and columns of sum 1."""
    flat = streams.flatten(2)
    normed = flat / (flat.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    size, eps = config.hc_mult, config.hc_eps
    values = normed @ module.fn.T
    scales = module.scale.repeat_interleave(torch.tensor([size, size, size * size]))
    values = values * scales + module.base
    read = torch.sigmoid(values[..., :size]) + eps
    write = 2 * torch.sigmoid(values[..., size : 2 * size])
    mix = values[..., 2 * size :].unflatten(-1, (size, size)).exp()
    mix = mix / mix.sum(-1, keepdim=True) + eps
    for number in range(2 * config.hc_sinkhorn_iters - 1):
        # columns first, and last
        mix = mix / (mix.sum(-1 if number % 2 else -2, keepdim=True) + eps)
    return Connection(torch.einsum("bts,btsd->btd", read, streams), write, mix)


def _independent(module: Any, config: Any, streams: Tensor) -> Connection:
    """Compute the connection of HY 4, which mixes no streams: what is projected is normed
    only afterwards.
    """
    flat, size = streams.flatten(2), config.hc_mult
    norm = (flat.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    values = (flat @ module.fn.T) / norm
    values = values * module.scale.repeat_interleave(size) + module.base
    read = torch.sigmoid(values[..., :size]) + config.hc_eps
    write = config.hc_magnitude * torch.sigmoid(values[..., size:]) + config.hc_eps
    return Connection(torch.einsum("bts,btsd->btd", read, streams), write, None)


def _normed_streams(norm: Any, eps: float, streams: Tensor) -> Tensor:
    normed = streams / (streams.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed * (1 + norm.weight).view(streams.shape[-2:])


def _gated_read(module: Any, config: Any, streams: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vector that is read, and the normed streams (B x T x S·D)."""
    size = config.hc_count
    normed = _normed_streams(module.hc_norm, config.rms_norm_eps, streams)
    flat = normed.flatten(2)
    low = silu(flat @ module.input_mix_weight_down.weight.T / size)
    gates = torch.sigmoid(low @ module.input_mix_weight_up.weight.T)
    return (gates.view_as(normed) * normed).mean(2), flat


def _gated(module: Any, config: Any, streams: Tensor) -> Connection:
    """Compute the connection of Qwen 4, which mixes no streams and weighs every channel
    of each of them.
    """
    read, flat = _gated_read(module, config, streams)
    values = flat @ module.block_inject_weight.weight.T / config.hc_count
    return Connection(read, 2 * torch.sigmoid(values), None)


def _kept(mix: Tensor | None, streams: Tensor) -> Tensor:
    return streams if mix is None else torch.einsum("btij,btid->btjd", mix, streams)


def _spread(write: Tensor, output: Tensor) -> Tensor:
    return torch.einsum("bts,btd->btsd", write, output.view(*write.shape[:2], -1))


def _layer(
    connect: Callable[[str, Tensor], Connection],
    attention: Callable[[Tensor], Tensor],
    mlp: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    o: Tensor,
    a: Tensor,
    outdated: bool,
) -> Step:
    """Compute the equations above.

    mlp: returns (shared output, routed output), or (output, None) of a dense MLP.
    """
    kept = _kept(connect("attention", o).mix, o)
    before = connect("attention", a)
    h = kept + _spread(before.write, attention(before.read))
    before = connect("mlp", kept if outdated else h)
    always, routed = mlp(before.read)
    rest = _kept(connect("mlp", h).mix, h) + _spread(before.write, always)
    if routed is None:
        return rest, None
    return rest + _spread(before.write, routed), rest


def _limited(limit: float, gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def _limited_experts(block: Any, limit: float) -> Callable[[int, Tensor], Tensor]:
    def expert(e: int, t: Tensor) -> Tensor:
        gate, up = (t @ block.experts.gate_up_proj[e].T).chunk(2, dim=-1)
        return _limited(limit, gate, up) @ block.experts.down_proj[e].T

    return expert


def _deepseek_v4(
    layer: Any,
    config: Any,
    o: Tensor,
    a: Tensor,
    outdated: bool,
    arguments: dict[str, Any],
) -> Step:
    arguments = dict(arguments)
    ids = arguments.pop("input_ids")
    modules = {"attention": layer.attn_hc, "mlp": layer.ffn_hc}
    block, limit = layer.mlp, config.swiglu_limit

    def mlp(x: Tensor) -> tuple[Tensor, Tensor]:
        x = layer.post_attention_layernorm(x).flatten(0, 1)
        scores = softplus(x @ block.gate.weight.T).sqrt()
        if config.mlp_layer_types[layer.layer_idx] == "hash_moe":
            indices = block.gate.tid2eid[ids.flatten()]
        else:
            biased = scores + block.gate.e_score_correction_bias
            indices = biased.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, indices)
        weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
        expert = _limited_experts(block, limit)
        shared = block.shared_experts
        hidden = _limited(
            limit, x @ shared.gate_proj.weight.T, x @ shared.up_proj.weight.T
        )
        return hidden @ shared.down_proj.weight.T, _routed(x, indices, weights, expert)

    return _layer(
        lambda side, streams: _sinkhorn(modules[side], config, streams),
        lambda x: layer.self_attn(layer.input_layernorm(x), **arguments)[0],
        mlp,
        o,
        a,
        outdated,
    )


def _sigmoid_groups(
    layer: Any, config: Any, dense: Callable[[Any, Tensor], Tensor]
) -> Callable[[Tensor], tuple[Tensor, Tensor | None]]:
    """Return the MLP of a layer whose experts are chosen as DeepSeek-V3's are, dense or
    not."""
    block = layer.mlp

    def mlp(x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = layer.post_attention_layernorm(x).flatten(0, 1)
        if not hasattr(block, "experts"):
            return dense(block, x), None
        router = _grouped(x, block.gate, config, scale=config.routed_scaling_factor)
        expert = _limited_experts(block, config.swiglu_limit)
        return dense(block.shared_experts, x), _routed(x, *router, expert)

    return mlp


def _hy_v4(
    layer: Any,
    config: Any,
    o: Tensor,
    a: Tensor,
    outdated: bool,
    arguments: dict[str, Any],
) -> Step:
    modules = {"attention": layer.attn_hc, "mlp": layer.ffn_hc}

    def attention(x: Tensor) -> Tensor:
        attended, _, arguments["prev_topk_indices"] = layer.self_attn(
            hidden_states=layer.input_layernorm(x), **arguments
        )
        return attended  # type: ignore[no-any-return]

    return _layer(
        lambda side, streams: _independent(modules[side], config, streams),
        attention,
        _sigmoid_groups(layer, config, _mlp),
        o,
        a,
        outdated,
    )


def _glm5_next(
    layer: Any,
    config: Any,
    o: Tensor,
    a: Tensor,
    outdated: bool,
    arguments: dict[str, Any],
) -> Step:
    modules = {"attention": layer.attn_hc, "mlp": layer.ffn_hc}
    before = arguments.pop("prev_topk_indices")

    def attention(x: Tensor) -> Tensor:
        x = layer.input_layernorm(x)
        arguments["prev_topk_indices"] = None
        if layer.block_type == "linear_attention":
            mask = arguments["attention_mask"]
            return layer.self_attn(hidden_states=x, attention_mask=mask)  # type: ignore[no-any-return]
        attended, _, arguments["prev_topk_indices"] = layer.self_attn(
            hidden_states=x, **arguments | {"prev_topk_indices": before}
        )
        return attended  # type: ignore[no-any-return]

    def dense(mlp: Any, x: Tensor) -> Tensor:
        gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
        return _limited(config.swiglu_limit, gate, up) @ mlp.down_proj.weight.T

    return _layer(
        lambda side, streams: _sinkhorn(modules[side], config, streams),
        attention,
        _sigmoid_groups(layer, config, dense),
        o,
        a,
        outdated,
    )


def _qwen4_exp(
    layer: Any,
    config: Any,
    o: Tensor,
    a: Tensor,
    outdated: bool,
    arguments: dict[str, Any],
) -> Step:
    """The layers have their streams side by side: B x T x S·D. Embeddings of n-grams,
    where a layer has them, are weighed by what attention reads.
    """
    modules = {
        "attention": layer.attn_hyper_connection,
        "mlp": layer.mlp_hyper_connection,
    }
    if layer.ple is not None:
        more = layer.ple(
            a, arguments["ple_input_ids"], None, conv_mask=arguments["conv_mask"]
        )
        o, a = o + more, a + more

    def attention(x: Tensor) -> Tensor:
        if layer.layer_type == "linear_attention":
            return layer.linear_attn(x, attention_mask=arguments["conv_mask"])  # type: ignore[no-any-return]
        return layer.self_attn(  # type: ignore[no-any-return]
            x, arguments["position_embeddings"], arguments["attention_mask"]
        )[0]

    def mlp(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(0, 1)
        router = _softmax_router(
            layer, x, config.num_experts_per_tok, config.norm_topk_prob
        )
        gate = torch.sigmoid(x @ layer.mlp.shared_expert_gate.weight.T)
        shared = gate * _mlp(layer.mlp.shared_expert, x)
        return shared, _routed(x, *router, _fused(layer.mlp.experts))

    streams = (each.unflatten(-1, (config.hc_count, -1)) for each in (o, a))
    whole, rest = _layer(
        lambda side, streams: _gated(modules[side], config, streams),
        attention,
        mlp,
        *streams,
        outdated,
    )
    assert rest is not None
    return whole.flatten(2), rest.flatten(2)


def _weighted_head(model: Any, config: Any, streams: Tensor) -> Tensor:
    """Mix the streams as DeepSeek-V4 and HY 4 do, and norm the result."""
    module = model.hc_head
    flat = streams.flatten(2)
    norm = (flat.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    values = (flat @ module.hc_fn.T) / norm * module.hc_scale + module.hc_base
    weights = torch.sigmoid(values) + config.hc_eps
    return model.norm(torch.einsum("bts,btsd->btd", weights, streams))  # type: ignore[no-any-return]


def _mean_head(model: Any, config: Any, streams: Tensor) -> Tensor:
    return model.norm(streams.mean(2))  # type: ignore[no-any-return]


def _gated_head(model: Any, config: Any, streams: Tensor) -> Tensor:
    streams = streams.unflatten(-1, (config.hc_count, -1))
    return _gated_read(model.hyper_connection_mixer, config, streams)[0]


LAYERS: dict[str, Callable[[Any, Any, Tensor, Tensor, bool, dict[str, Any]], Step]] = {
    "deepseek_v4": _deepseek_v4,
    "hy_v4": _hy_v4,
    "qwen4_exp_text": _qwen4_exp,
}
"""As `tests.reference.adapted.LAYERS`."""

WRAPPERS: dict[
    str, Callable[[Any, Any, Tensor, Tensor, bool, dict[str, Any]], Step]
] = {
    "glm5_next": _glm5_next,
    "hy_v4_vl": _hy_v4,
    "qwen4_exp": _qwen4_exp,
}
"""The same for multimodal wrappers."""

HEADS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "deepseek_v4": _weighted_head, "hy_v4": _weighted_head, "hy_v4_vl": _weighted_head, "qwen4_exp_text": _gated_head,
    "qwen4_exp": _gated_head, "glm5_next": _mean_head,
}  # fmt: skip
"""Model type -> what the LM head reads: (module with the layers, config, streams) ->
B x T x D.
"""
