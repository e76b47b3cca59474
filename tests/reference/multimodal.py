"""FarSkip forward passes of multimodal wrappers, written from the equations, for tests.

Like `tests.reference.reference`, this reads no `Family` and no rewired class, and runs
on the *regular* model, from which it takes the merged embeddings of text and images,
weights, norms, attention modules and the keyword arguments of the layers. Routing,
experts, dense MLPs and the additions of DeepStack between layers are written by hand;
layers that are not the plain pre-norm layer come from `tests.reference.adapted`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

from tests.reference import sources
from tests.reference.adapted import LAYERS
from tests.reference.adapted import WRAPPERS as ADAPTED_WRAPPERS
from tests.reference.parts import computed_once, is_outdated
from tests.reference.streams import HEADS

Parts = tuple[Tensor, Tensor]
"""(routed output, shared output), each N x D."""


def _mlp(mlp: Any, x: Tensor, limit: float = float("inf")) -> Tensor:
    """`limit` clamps the factors: silu(gate) from above, up on both sides."""
    gate, up = silu(linear(x, mlp.gate_proj.weight)), linear(x, mlp.up_proj.weight)
    return linear(gate.clamp(max=limit) * up.clamp(-limit, limit), mlp.down_proj.weight)


def _swiglu(gate_up: Tensor, limit: float = float("inf")) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _swiglu_oai(gate_up: Tensor, limit: float = 7.0, alpha: float = 1.702) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _routed(
    x: Tensor,
    weights: Tensor,
    experts: Any,
    activation: Callable[[Tensor], Tensor] = _swiglu,
) -> Tensor:
    """Run every expert on every token; sum_e weights[n, e] · expert_e(x[n]). `weights`
    is N x E, 0 if not chosen."""
    hidden = activation(torch.einsum("nd,efd->nef", x, experts.gate_up_proj))
    return torch.einsum("ne,nef,edf->nd", weights, hidden, experts.down_proj)


def _chosen(
    values: Tensor, by: Tensor, k: int, normalise: bool, scale: float = 1.0
) -> Tensor:
    """Return N x E: `values` where `by` is among the k largest, else 0; normalised to
    sum 1 if asked, times scale."""
    kept = torch.zeros_like(values).scatter(1, by.topk(k, dim=-1).indices, 1.0) * values
    return (kept / kept.sum(-1, keepdim=True) if normalise else kept) * scale


def _llama4(layer: Any, config: Any, x: Tensor) -> Parts:
    """The sigmoid of the logit scales the input of an expert; matrices are stored
    transposed.
    """
    block = layer.feed_forward
    logits = x @ block.router.weight.T
    scores = _chosen(torch.sigmoid(logits), logits, config.num_experts_per_tok, False)
    into = scores[:, :, None] * x[:, None, :]
    hidden = _swiglu(torch.einsum("ned,edf->nef", into, block.experts.gate_up_proj))
    routed = torch.einsum("nef,efd->nd", hidden, block.experts.down_proj)
    return routed, _mlp(block.shared_expert, x)


def _aria(layer: Any, config: Any, x: Tensor) -> Parts:
    """Take the softmax over the chosen logits; matrices are stored transposed."""
    block = layer.mlp
    logits = x @ block.router.weight.T
    probabilities = softmax(logits, dim=-1)
    weights = _chosen(probabilities, logits, config.moe_topk, True)
    hidden = _swiglu(torch.einsum("nd,edf->nef", x, block.experts.gate_up_proj))
    routed = torch.einsum("ne,nef,efd->nd", weights, hidden, block.experts.down_proj)
    return routed, _mlp(block.shared_experts, x)


def _softmax_normalised(layer: Any, config: Any, x: Tensor) -> Parts:
    probabilities = softmax(x @ layer.mlp.gate.weight.T, dim=-1)
    weights = _chosen(probabilities, probabilities, config.num_experts_per_tok, True)
    return _routed(x, weights, layer.mlp.experts), torch.zeros_like(x)


def _softmax(layer: Any, config: Any, x: Tensor) -> Parts:
    probabilities = softmax(x @ layer.mlp.gate.weight.T, dim=-1)
    weights = _chosen(probabilities, probabilities, config.num_experts_per_tok, False)
    return _routed(x, weights, layer.mlp.experts), torch.zeros_like(x)


def _qwen3_5(layer: Any, config: Any, x: Tensor) -> Parts:
    routed, _ = _softmax_normalised(layer, config, x)
    gate = torch.sigmoid(x @ layer.mlp.shared_expert_gate.weight.T)
    return routed, gate * _mlp(layer.mlp.shared_expert, x)


def _ocr(layer: Any, config: Any, x: Tensor) -> Parts:
    routed, _ = _softmax(layer, config, x)
    return routed * config.routed_scaling_factor, _mlp(layer.mlp.shared_experts, x)


def _sigmoid_groups(layer: Any, config: Any, x: Tensor) -> Parts:
    """Sigmoid scores; groups chosen by their two best biased scores, then experts by
    biased score.
    """
    gate = layer.mlp.gate
    scores = torch.sigmoid(x @ gate.weight.T)
    biased = scores + gate.e_score_correction_bias
    groups = biased.view(len(x), config.n_group, -1)
    best_two = groups.topk(2, dim=-1).values.sum(-1)
    kept = torch.full_like(best_two, float("-inf")).scatter(
        1, best_two.topk(config.topk_group).indices, 0.0
    )
    by = (groups + kept[:, :, None]).view_as(biased)
    weights = _chosen(
        scores, by, config.num_experts_per_tok, True, config.routed_scaling_factor
    )
    return _routed(x, weights, layer.mlp.experts), _mlp(layer.mlp.shared_experts, x)


def _sigmoid_weights(layer: Any, config: Any, x: Tensor, scale: float) -> Tensor:
    gate = layer.mlp.gate
    scores = torch.sigmoid(x @ gate.weight.T)
    by = scores + gate.e_score_correction_bias
    return _chosen(scores, by, config.num_experts_per_tok, True, scale)


def _minimax_m3(layer: Any, config: Any, x: Tensor) -> Parts:
    weights = _sigmoid_weights(layer, config, x, config.routed_scaling_factor)
    return _routed(x, weights, layer.mlp.experts, _swiglu_oai), _minimax_m3_mlp(
        layer.mlp.shared_experts, x
    )


def _minimax_m3_mlp(mlp: Any, x: Tensor) -> Tensor:
    return linear(_swiglu_oai(linear(x, mlp.gate_up_proj.weight)), mlp.down_proj.weight)


def _limit(limits: Sequence[float], k: int) -> float:
    """Step 3.7 has a limit per layer; 0 means none."""
    return limits[k] or float("inf")


def _step3p7(layer: Any, config: Any, x: Tensor) -> Parts:
    k = layer.self_attn.layer_idx
    weights = _sigmoid_weights(layer, config, x, config.moe_router_scaling_factor)
    limit = _limit(config.swiglu_limits, k)
    routed = _routed(
        x, weights, layer.mlp.experts, lambda gate_up: _swiglu(gate_up, limit)
    )
    return routed, _mlp(
        layer.mlp.shared_experts, x, _limit(config.swiglu_limits_shared, k)
    )


def _ernie(layer: Any, config: Any, x: Tensor, is_image: Tensor) -> Parts:
    """Tokens of text and pieces of images each have their own router and experts; both
    use the same shared experts.
    """

    def routed(block: Any) -> Tensor:
        probabilities = softmax(x @ block.gate.weight.T, dim=-1)
        by = probabilities + block.gate.moe_statics.e_score_correction_bias
        return _routed(x, _chosen(probabilities, by, config.moe_k, True), block.experts)

    both = torch.where(
        is_image[:, None], routed(layer.mlp.vision_moe), routed(layer.mlp.text_moe)
    )
    return both, _mlp(layer.mlp.shared_experts, x)


MULTIMODAL_MOE: dict[str, Callable[..., Parts]] = {
    "llama4": _llama4, "aria": _aria, "qwen3_5_moe": _qwen3_5, "minimax_m3_vl": _minimax_m3,
    "dots3_note": _sigmoid_groups, "glm4v_moe": _sigmoid_groups, "step3p7": _step3p7, "ernie4_5_vl_moe": _ernie,
    "deepseek_ocr2": _ocr, "unlimited_ocr": _ocr, "qwen3_vl_moe": _softmax_normalised,
    "qwen3_omni_moe_thinker": _softmax_normalised,
}  # fmt: skip


ADAPTED = ADAPTED_WRAPPERS | {"gemma4": LAYERS["gemma4_text"]}


def _dense(model_type: str, config: Any, layer: Any, x: Tensor) -> Tensor:
    if model_type == "llama4":
        return _mlp(layer.feed_forward, x)
    if model_type == "minimax_m3_vl":
        return _minimax_m3_mlp(layer.mlp, x)
    if model_type == "step3p7":
        return _mlp(
            layer.mlp, x, _limit(config.swiglu_limits_shared, layer.self_attn.layer_idx)
        )
    return _mlp(layer.mlp, x)


def _attention(layer: Any, x: Tensor, arguments: dict[str, Any]) -> Tensor:
    if (linear_attention := getattr(layer, "linear_attn", None)) is not None:
        return linear_attention(
            hidden_states=x, attention_mask=arguments["attention_mask"]
        )
    return layer.self_attn(hidden_states=x, **arguments)[0]


def text_stack(model: Any) -> tuple[Any, Any]:
    """Return (module with the decoder `layers` and the final `norm`, LM head) of a wrapper."""
    if model.config.model_type in ("llama4", "farskip_llama4"):
        return model.language_model.model, model.language_model.lm_head
    return model.model.language_model, model.lm_head


def _captured(
    model: Any, stack: Any, inputs: dict[str, Any]
) -> tuple[Tensor, list[dict[str, Any]], list[tuple[Tensor, Tensor]]]:
    """Return (input of the first layer, keyword arguments of every layer, what
    DeepStack adds) of the model's own loop."""
    first: list[Tensor] = []
    arguments: list[dict[str, Any]] = []
    visual: list[tuple[Tensor, Tensor]] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first.append(args[0])
        arguments.append(dict(kwargs))

    def keep_visual(hidden_states: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        visual.append((mask, features))
        return hidden_states

    hooks = [
        layer.register_forward_pre_hook(keep, with_kwargs=True)
        for layer in stack.layers
    ]
    if deepstack := hasattr(stack, "_deepstack_process"):
        stack._deepstack_process = keep_visual
    try:
        model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
        if deepstack:
            del stack._deepstack_process
    return first[0], arguments, visual


def multimodal_reference_forward(
    model: Any,
    layers: Sequence[int],
    attention: str = "partial",
    mlp: str | Sequence[int] = "outdated",
    **inputs: Any,
) -> tuple[Tensor, list[Tensor]]:
    """Return the logits and streams of a regular wrapper as if `layers` of its text
    stack were FarSkip layers.

        o_k = o_{k-1} + attn_k(a) + shared_k(m) + routed_k(m) + v_k
        a   = o_{k-1} - routed_{k-1}   layer k FarSkip, layer k-1 a FarSkip MoE layer, attention partial
              o_{k-1}                  otherwise
        m   = o_{k-1}                  layer k FarSkip, mlp outdated
              o_{k-1} + attn_k(a)      otherwise

    o_0 are the embeddings with images in their places; v_k are the visual features that
    DeepStack adds after layer k (0 elsewhere), which are nobody's output and are
    therefore never in flight.

    Args:
        model: a regular wrapper of a family in `MULTIMODAL_MOE`, in eval mode.
        layers: indices of the FarSkip layers.
        inputs: the arguments of the model (input_ids, pixel_values, …).

    Returns:
        (logits B x T x V, [o_0 and the output of every layer, without v_k] each B x T x
        D).
    """
    model_type, config = model.config.model_type, model.config.get_text_config()
    stack, lm_head = text_stack(model)
    o, arguments, visual = computed_once(
        lambda: _captured(model, stack, inputs), model, *inputs.values()
    )
    arguments = [dict(each) for each in arguments]
    is_image = None
    if model_type == "ernie4_5_vl_moe":
        types = arguments[0].get("moe_mm_token_type_ids")
        for one in arguments:
            one.pop("moe_mm_token_type_ids", None)
        is_image = (
            torch.zeros(o[..., 0].numel(), dtype=torch.bool)
            if types is None
            else types.bool().flatten()
        )
    side: dict[str, Any] = (
        {"prev_topk_indices": None} if "prev_topk_indices" in arguments[0] else {}
    )
    if model_type == "inkling2":
        side[sources.BLOCKS] = []
    streams = [o]
    in_flight: Tensor | None = None
    for k, layer in enumerate(stack.layers):
        far = k in layers
        a = (
            o - in_flight
            if far and attention == "partial" and in_flight is not None
            else o
        )
        if model_type in ADAPTED:
            own = arguments[k] | side
            new, rest = ADAPTED[model_type](
                layer, config, o, a, is_outdated(k, layers, mlp), own
            )
            in_flight, o = (new - rest if far and rest is not None else None), new
            side = {name: own[name] for name in side}
            streams.append(o)
            continue
        attended = _attention(layer, layer.input_layernorm(a), arguments[k])
        m = layer.post_attention_layernorm(
            o if is_outdated(k, layers, mlp) else o + attended
        )
        x = m.reshape(-1, m.shape[-1])
        if any(
            hasattr(child, "experts") or hasattr(child, "text_moe")
            for child in layer.children()
        ):
            block = MULTIMODAL_MOE[model_type]
            images = () if is_image is None else (is_image,)
            routed, shared = (
                part.view(o.shape) for part in block(layer, config, x, *images)
            )
            in_flight = routed if far else None
            o = o + attended + shared + routed
        else:
            in_flight = None
            o = o + attended + _dense(model_type, config, layer, x).view(o.shape)
        streams.append(o)
        if k < len(visual):
            mask, features = visual[k]
            o = o.masked_scatter(mask[..., None], o[mask] + features)
    if model_type in HEADS:
        return lm_head(HEADS[model_type](stack, config, o)), streams
    if model_type == "inkling2":
        normed = sources.head(stack, config, streams)
    else:
        normed = stack.norm(o)
    logits = lm_head(normed / getattr(config, "logits_mup_width_multiplier", 1.0))
    logits = logits * getattr(config, "output_multiplier", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap), streams
