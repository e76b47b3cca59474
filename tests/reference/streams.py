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

from tests.reference.parts import Step, _routed


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

        def expert(e: int, t: Tensor) -> Tensor:
            gate, up = (t @ block.experts.gate_up_proj[e].T).chunk(2, dim=-1)
            return _limited(limit, gate, up) @ block.experts.down_proj[e].T

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


def _weighted_head(model: Any, streams: Tensor) -> Tensor:
    """Return the mix of the streams that the head reads in DeepSeek-V4."""
    module, config = model.hc_head, model.config
    flat = streams.flatten(2)
    normed = flat / (flat.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
    weights = torch.sigmoid(normed @ module.hc_fn.T * module.hc_scale + module.hc_base)
    return torch.einsum("bts,btsd->btd", weights + config.hc_eps, streams)


LAYERS: dict[str, Callable[[Any, Any, Tensor, Tensor, bool, dict[str, Any]], Step]] = {
    "deepseek_v4": _deepseek_v4,
}
"""As `tests.reference.adapted.LAYERS`."""

HEADS: dict[str, Callable[[Any, Tensor], Tensor]] = {"deepseek_v4": _weighted_head}
"""Model type -> the vector that the final norm reads: (decoder, streams) -> B x T x D."""
