"""Parts that several hand-written references share: MLPs, fused experts, routers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softmax

Parts = tuple[Tensor, Tensor]

Step = tuple[Tensor, Tensor | None]
"""(o_k, o_k without what is in flight; None after a dense layer), each B x T x D; with
hyper-connections B x T x S x D."""


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    return linear(
        silu(linear(x, gate.weight, gate.bias)) * linear(x, up.weight, up.bias),
        down.weight,
        down.bias,
    )


def _routed(
    x: Tensor, indices: Tensor, weights: Tensor, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """sum_k weights[n, k] · expert_{indices[n, k]}(x[n]); indices and weights are N x
    K, `expert` takes N x D.
    """
    experts = int(indices.max()) + 1
    gates = torch.zeros(len(x), experts, dtype=weights.dtype).scatter_add(
        1, indices, weights
    )
    return torch.stack([gates[:, e, None] * expert(e, x) for e in range(experts)]).sum(
        0
    )


def _fused(experts: Any) -> Callable[[int, Tensor], Tensor]:
    return lambda e, x: _swiglu(x @ experts.gate_up_proj[e].T) @ experts.down_proj[e].T


def _softmax_router(
    layer: Any, x: Tensor, k: int, normalise: bool, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    weights, indices = softmax(x @ layer.mlp.gate.weight.T, dim=-1).topk(k, dim=-1)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return indices, weights * scale


def _grouped(
    x: Tensor,
    gate: Any,
    config: Any,
    *,
    scale: float = 1.0,
    score: Callable[..., Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:
    """Choose groups by their two best biased scores, and experts in them by biased
    score; unbiased weights sum to 1.
    """
    scores = score(x @ gate.weight.T)
    bias = getattr(gate, "e_score_correction_bias", torch.zeros(scores.shape[-1]))
    size = scores.shape[-1] // config.n_group
    chosen = []
    for biased in (scores.detach() + bias).tolist():
        best_two = [
            sum(sorted(biased[g * size : (g + 1) * size])[-2:])
            for g in range(config.n_group)
        ]
        kept = sorted(range(config.n_group), key=lambda g: -best_two[g])[
            : config.topk_group
        ]
        candidates = [e for g in kept for e in range(g * size, (g + 1) * size)]
        chosen.append(
            sorted(candidates, key=lambda e: -biased[e])[: config.num_experts_per_tok]
        )
    indices = torch.tensor(chosen)
    weights = scores.gather(1, indices)
    return indices, scale * weights / weights.sum(-1, keepdim=True)


_known: dict[tuple[int, ...], Any] | None = None


@contextlib.contextmanager
def arguments_computed_once() -> Iterator[None]:
    """Keep the layers' arguments for references of one model that get the same tensors;
    the model stays unchanged and regular meanwhile.
    """
    global _known
    _known = {}
    try:
        yield
    finally:
        _known = None


def layer_arguments(
    model: Any, input_ids: Tensor, *, stack: nn.ModuleList | None = None, **inputs: Any
) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return (input of the first layer, keyword arguments of every layer) of the
    regular model's own loop.

    `stack` is `model.model.layers` unless given.
    """
    layers = model.model.layers if stack is None else stack
    first, arguments = computed_once(
        lambda: _layer_arguments(model, input_ids, layers, inputs),
        model,
        input_ids,
        *inputs.values(),
    )
    return first, [dict(each) for each in arguments]


def computed_once(find: Callable[[], Any], *on: Any) -> Any:
    """Return the result of `find`; inside `arguments_computed_once`, call it only once
    for the same objects.
    """
    key = tuple(map(id, on))
    if _known is None:
        return find()
    if key not in _known:
        _known[key] = find()
    return _known[key]


def _layer_arguments(
    model: Any, input_ids: Tensor, stack: nn.ModuleList, inputs: dict[str, Any]
) -> tuple[Tensor, list[dict[str, Any]]]:
    first: list[Tensor] = []
    arguments: list[dict[str, Any]] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first.append(args[0].clone())
        arguments.append(dict(kwargs))

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in stack]
    try:
        with torch.no_grad():
            model(input_ids, use_cache=False, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return first[0], arguments


def is_outdated(k: int, layers: Sequence[int], mlp: str | Sequence[int]) -> bool:
    """Tell whether the MLP side of layer k reads the stream before its attention."""
    return k in layers and (mlp == "outdated" if isinstance(mlp, str) else k in mlp)
