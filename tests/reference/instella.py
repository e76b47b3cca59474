"""Instella-MoE written out by hand from the equations, tensor by tensor, on the names
of a checkpoint. No class of transformers or of fcsd takes part.

N is an RMS norm, F the full stream, P the stream without the routed output; F = P =
embeddings before layer 0:

    x  = N_in(P)                                   a FarSkip layer; a regular one reads F
    q  = W_q x in heads of (nope | rope);  [c | r] = W_kva x;  [kn | v] = W_kvb N_kva(c) in heads of (nope | value)
    s  = softmax(sigma (qn.kn + rot(qr).rot(r)), causal);   y = s v
    a  = W_o (y * sigmoid(W_g x))
    u  = N_post(F)                                 a FarSkip layer; a regular one reads F + a
    P' = F + a + shared(u);  F' = P' + routed(u)   dense layer: P' = F' = F + a + mlp(u)
    logits = W_lm N(F)

    sigma = (nope + rope)^-1/2 (0.1 m ln factor + 1)^2    m: mscale_all_dim
    g = sigmoid(W_r u); the best by g + bias; weights g / (sum + 1e-20) * routed_scaling_factor

`WRONG` lists misreadings of these lines; each is one word of `wrong`.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from fcsd.model.inspect.shipped import CONFIGS

WRONG = (
    "gate reads the full stream", "gate before the norm", "gate behind o_proj", "gate per head", "no mscale",
    "MoE reads behind attention", "partial stream into the final norm",
)  # fmt: skip


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def yarn(rope: Mapping[str, Any], dim: int) -> Tensor:
    """Return the angle per position of each of dim/2 pairs (arXiv 2309.00071):
    interpolated below beta_slow rotations over the original length, as trained above
    beta_fast, a ramp between."""
    theta, length, factor = (
        rope["rope_theta"],
        rope["original_max_position_embeddings"],
        rope["factor"],
    )

    def pair(rotations: float) -> float:
        return (
            dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        )

    low = max(math.floor(pair(rope.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair(rope.get("beta_slow", 1))), dim - 1)
    angles = []
    for k in range(dim // 2):
        plain = theta ** (-2 * k / dim)
        ramp = min(max((k - low) / max(high - low, 0.001), 0), 1)
        angles.append(plain / factor * ramp + plain * (1 - ramp))
    return torch.tensor(angles, dtype=torch.float64)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Return pairs (x_0, x_1), (x_2, x_3), … turned by their angle; x is … T x dim,
    angles T x dim/2.
    """
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


def sigma(config: Mapping[str, Any]) -> float:
    """Return the factor on the attention scores: 0.16562688 in the published models."""
    rope = config["rope_parameters"]
    scale: float = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    if rope is not None and (mscale := rope.get("mscale_all_dim")):
        scale *= (0.1 * mscale * math.log(rope["factor"]) + 1) ** 2
    return scale


def _attention(
    w: Mapping[str, Tensor],
    at: str,
    config: Mapping[str, Any],
    x: Tensor,
    gate: Tensor,
    wrong: str,
):
    heads, nope, rope = (
        config[name]
        for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    length, rank = x.shape[1], config["kv_lora_rank"]
    q = (x @ w[f"{at}.q_proj.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2)
    latent = x @ w[f"{at}.kv_a_proj_with_mqa.weight"].T
    c = _norm(latent[..., :rank], w[f"{at}.kv_a_layernorm.weight"], 1e-6)
    kv = (c @ w[f"{at}.kv_b_proj.weight"].T).unflatten(-1, (heads, -1)).transpose(1, 2)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * yarn(
        config["rope_parameters"], rope
    )
    turned_q, turned_k = (
        _rotated(q[..., nope:], angles),
        _rotated(latent[..., rank:], angles),
    )
    scores = q[..., :nope] @ kv[..., :nope].mT + turned_q @ turned_k[:, None].mT
    scale = (nope + rope) ** -0.5 if wrong == "no mscale" else sigma(config)
    scores = (scores * scale).masked_fill(
        torch.ones(length, length).triu(1).bool(), -math.inf
    )
    y = (scores.softmax(-1) @ kv[..., nope:]).transpose(1, 2)  # B x T x heads x value
    g = torch.sigmoid(gate @ w[f"{at}.gate_proj.weight"].T)
    out = w[f"{at}.o_proj.weight"].T
    if wrong == "gate behind o_proj":
        return y.flatten(-2) @ out * g
    if wrong == "gate per head":
        g = g[..., :heads].repeat_interleave(y.shape[-1], -1)
    return y.flatten(-2) * g @ out


def _swiglu(w: Mapping[str, Tensor], at: str, x: Tensor) -> Tensor:
    gate, up, down = (
        w[f"{at}.{name}_proj.weight"].T for name in ("gate", "up", "down")
    )
    return (silu(x @ gate) * (x @ up)) @ down


def _routed(
    w: Mapping[str, Tensor], at: str, config: Mapping[str, Any], u: Tensor
) -> Tensor:
    scores = torch.sigmoid(u @ w[f"{at}.gate.weight"].T)
    biased = scores + w[f"{at}.gate.e_score_correction_bias"]
    out = torch.zeros_like(u)
    for place in torch.cartesian_prod(*map(torch.arange, u.shape[:2])).tolist():
        row, best = tuple(place), biased[tuple(place)].argsort(descending=True)
        chosen = best[: config["num_experts_per_tok"]].tolist()
        weights = [float(scores[row][e]) for e in chosen]
        for e, weight in zip(chosen, weights, strict=True):
            part = _swiglu(w, f"{at}.experts.{e}", u[row])
            out[row] += (
                part * weight / (sum(weights) + 1e-20) * config["routed_scaling_factor"]
            )
    return out


def instella_logits(
    w: Mapping[str, Tensor],
    config: Mapping[str, Any],
    input_ids: Tensor,
    farskip: bool | range = True,
    wrong: str = "",
) -> Tensor:
    """Return the logits B x T x V from the tensors of a checkpoint, in float64.

    farskip: all layers, none, or a run of layers that begins at or before the first MoE
    layer.
    """
    assert wrong in ("", *WRONG)
    layers = range(config["num_hidden_layers"])
    far = farskip if isinstance(farskip, range) else layers if farskip else range(0)
    w = {name: tensor.double() for name, tensor in w.items()}
    eps = config["rms_norm_eps"]
    full = partial = w["model.embed_tokens.weight"][input_ids]
    for k in layers:
        at = f"model.layers.{k}"
        stream = partial if k in far else full
        first = w[f"{at}.input_layernorm.weight"]
        x = _norm(stream, first, eps)
        gate = {
            "gate reads the full stream": _norm(full, first, eps),
            "gate before the norm": stream,
        }.get(wrong, x)
        a = _attention(w, f"{at}.self_attn", config, x, gate, wrong)
        read = full if k in far and wrong != "MoE reads behind attention" else full + a
        u = _norm(read, w[f"{at}.post_attention_layernorm.weight"], eps)
        if k < config["first_k_dense_replace"]:
            full = partial = full + a + _swiglu(w, f"{at}.mlp", u)
        else:
            partial = full + a + _swiglu(w, f"{at}.mlp.shared_experts", u)
            full = partial + _routed(w, f"{at}.mlp", config, u)
    last = partial if wrong == "partial stream into the final norm" else full
    return _norm(last, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def published_config(**keys: Any) -> dict[str, Any]:
    """Return the values of a published `config.json` with toy sizes, and also `keys`;
    None removes a key.
    """
    raw: dict[str, Any] = json.loads(
        (CONFIGS / "Instella-MoE-16B-A3B-Think.json").read_text()
    )
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 48, "moe_intermediate_size": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "kv_lora_rank": 16, "qk_head_dim": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "vocab_size": 99,
    }  # fmt: skip
    code: dict[str, Any] = {
        "AutoConfig": "configuration_instella_moe.InstellaMoEConfig"
    }
    for key in [name for name, value in keys.items() if value is None]:
        raw.pop(key, None)
    known = {key: value for key, value in keys.items() if value is not None}
    code = {} if "auto_map" in keys else {"auto_map": code}
    return raw | sizes | code | known


def published_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the names of the published index with the shapes that follow from the
    sizes of a config: 5,344 names at the true sizes.
    """
    width, heads, rank = (
        config[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value = (
        config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    experts, thin = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "lm_head.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }

    def mlp(at: str, inner: int) -> dict[str, tuple[int, ...]]:
        shape = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        return {f"{at}.{name}_proj.weight": shape[name] for name in shape}

    for k in range(config["num_hidden_layers"]):
        at = f"model.layers.{k}"
        shapes |= {
            f"{at}.input_layernorm.weight": (width,),
            f"{at}.post_attention_layernorm.weight": (width,),
            f"{at}.self_attn.q_proj.weight": (heads * (nope + rope), width),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (rank + rope, width),
            f"{at}.self_attn.kv_a_layernorm.weight": (rank,),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
            f"{at}.self_attn.gate_proj.weight": (heads * value, width),
            f"{at}.self_attn.o_proj.weight": (width, heads * value),
        }
        if k < config["first_k_dense_replace"]:
            shapes |= mlp(f"{at}.mlp", config["intermediate_size"])
            continue
        shapes |= {
            f"{at}.mlp.gate.weight": (experts, width),
            f"{at}.mlp.gate.e_score_correction_bias": (experts,),
        }
        shapes |= mlp(f"{at}.mlp.shared_experts", thin * config["n_shared_experts"])
        for e in range(experts):
            shapes |= mlp(f"{at}.mlp.experts.{e}", thin)
    return shapes


def published_tensors(config: Mapping[str, Any], seed: int = 7) -> dict[str, Tensor]:
    """Return invented weights under the published names, in the published dtypes:
    bfloat16, biases of routers float32."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in published_shapes(config).items():
        x = torch.randn(shape, generator=draw, dtype=torch.float32)
        if name.endswith("bias"):
            tensors[name] = 0.3 * x
        else:
            tensors[name] = (
                1 + 0.2 * x if "norm" in name else 1.5 * x / shape[-1] ** 0.5
            ).bfloat16()
    return tensors


def write_published(
    folder: Path, tensors: Mapping[str, Tensor] | None = None, **keys: Any
) -> Path:
    """Write a checkpoint as AMD publishes it, with invented weights or with
    `tensors`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = published_config(**keys)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        dict(tensors or published_tensors(config)),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def logits_of(
    folder: Path, input_ids: Tensor, farskip: bool | range = True, wrong: str = ""
) -> Tensor:
    """Return `instella_logits` of a checkpoint as AMD publishes it."""
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = config["rope_scaling"] | {
        "rope_theta": config["rope_theta"]
    }
    return instella_logits(
        load_file(folder / "model.safetensors"), config, input_ids, farskip, wrong
    )
