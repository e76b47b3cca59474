"""The rewiring of a model's decoder layers. Self-contained with `stack` and `layer`: they
are shipped in checkpoints, as one text.

    o_k = o_{k-1} + attn_k(a) + shared_k(m) + routed_k(m)

`a` and `m` are as in `fcsd.model.connectivity.spec.Connectivity`;
`fcsd.model.connectivity.layer` computes them. Rewiring comes before anything that sets
`forward` on instances, which would bypass the class of a rewired layer.
"""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from fcsd.model.connectivity.layer import LayerPlan, block_class, layer_class
from fcsd.model.connectivity.stack import decoder_layers, is_one_of

_OWN_FORWARD = (
    "has its own `forward` (from device_map, accelerate hooks or kernels), which would"
    " bypass the rewiring; convert the model before them, or load it with"
    " fcsd.model.connectivity.load_model"
)


def _edit_streams(model: Any, method: str, hidden_states: Any, *args: Any) -> Any:
    """Return the model's own edit of the stream between layers, on both members of the pair."""
    edit = getattr(type(model), method)
    if isinstance(hidden_states, tuple):
        return tuple(edit(model, stream, *args) for stream in hidden_states)
    return edit(model, hidden_states, *args)


def rewired_layers(stack: nn.ModuleList) -> Iterator[int]:
    """Return the indices of the rewired layers of a stack."""
    return (
        k
        for k, layer in enumerate(stack)
        if getattr(layer, "farskip_plan", None) is not None
    )


def pipeline_cuts(stack: nn.ModuleList) -> list[int]:
    """Return the layers before which nothing is in flight: a pipeline whose stages hand
    on one tensor may be cut there."""
    plans: list[Any] = [getattr(layer, "farskip_plan", None) for layer in stack]
    return [
        k for k in range(1, len(stack)) if not (plans[k - 1] and plans[k - 1].carry)
    ]


class StageError(ValueError):
    """A stage of a pipeline begins where a routed output is in flight."""


def check_stages(stack: nn.ModuleList, num_stages: int) -> None:
    """Raise StageError if the cut of the installed transformers into stages separates a
    pair of tensors.
    """
    from transformers.distributed.pipeline_parallel import PipelineStage

    cuts, stages = pipeline_cuts(stack), cast(Any, SimpleNamespace(pp_size=num_stages))
    for stage in range(1, num_stages):
        k = PipelineStage.layer_range_for_rank(stages, stage, len(stack))[0]
        if k and k not in cuts:
            raise StageError(
                f"pipeline of {num_stages} stages: one begins at layer {k}, where the"
                f" routed output of layer {k - 1} is in flight, but a stage passes on"
                f" one tensor; leave layer {k} regular"
                + (f", or cut only before layers {cuts}" if cuts else "")
            )


def unrewire(model: nn.Module) -> None:
    """Give every rewired module its own class back; the model is then bit-identical to
    the original.

    Raises:
        ValueError: `forward` is set on an instance, which would go on calling the
            rewired class.
    """
    for module in model.modules():
        if "farskip_base" in vars(type(module)) and "forward" in vars(module):
            raise ValueError(f"a {type(module).__name__} {_OWN_FORWARD}")
    for module in model.modules():
        for name, value in tuple(vars(module).items()):
            if isinstance(value, functools.partial) and value.func is _edit_streams:
                delattr(module, name)
        if "farskip_base" in vars(type(module)):
            module.__dict__.pop("farskip_plan", None)
            module.__dict__.pop("farskip_runtime", None)
            module.__class__ = type(module).farskip_base  # type: ignore[attr-defined]


@contextlib.contextmanager
def regular(model: nn.Module) -> Iterator[None]:
    """Within the context, make every rewired layer compute the same as the original's,
    with the same weights.

    Classes, hooks and parameters stay in place: this is for a pass in between, under
    FSDP2 and PEFT too.
    """
    layers: list[tuple[Any, Any]] = []
    blocks: list[Any] = []
    for module in model.modules():
        if (plan := getattr(module, "farskip_plan", None)) is not None:
            layers.append((module, plan))
        elif getattr(module, "farskip_split", False):
            blocks.append(module)
    try:
        for layer, _ in layers:
            layer.farskip_plan = None
        for block in blocks:
            block.farskip_split = False
        yield
    finally:
        for layer, plan in layers:
            layer.farskip_plan = plan
        for block in blocks:
            del block.farskip_split


def check_field(family: Any, farskip: Any) -> None:
    """Raise ValueError for a `farskip` field of another version, with an unknown side,
    or with a side that changes nothing in this family."""
    if not isinstance(farskip, dict) or farskip.get("version") != 1:
        raise ValueError(f"config.farskip: version 1 is needed, got {farskip!r}")
    attention, mlp = farskip["attention"], farskip["mlp"]
    mlp_is_valid = mlp in ("outdated", "full") or (
        isinstance(mlp, list) and set(mlp) <= set(farskip["layers"])
    )
    if attention not in ("partial", "full") or not mlp_is_valid:
        raise ValueError(f"config.farskip: unknown connectivity {farskip!r}")
    if family.layout == "parallel" and attention == "full" and farskip["layers"]:
        raise ValueError(
            "attention: full changes nothing here, because attention and MLP of a layer"
            " read the same stream already; use attention: partial"
        )


def _is_outdated(k: int, mlp: Any) -> bool:
    return k in mlp if isinstance(mlp, list) else mlp == "outdated"


def _hands_on(stack: nn.ModuleList, k: int, family: Any, farskip: Any) -> bool:
    """Return whether the next layer, which is rewired, reads another stream than o_k."""
    is_moe, next_is_moe = (
        is_one_of(getattr(layer, family.moe), family.moe_block)
        for layer in (stack[k], stack[k + 1])
    )
    if family.layout == "blocks" and next_is_moe:
        return _is_outdated(k + 1, farskip["mlp"])
    return is_moe and farskip["attention"] == "partial"


def rewire(model: nn.Module, family: Any, farskip: Any) -> list[int]:
    """Rewire `model` in place, undoing an earlier rewiring first.

    Args:
        model: a model of the family that holds one decoder stack.
        family: the attribute names of the family (`fcsd.model.families.Family`).
        farskip: {"version": 1, "layers": indices, "attention": "partial" | "full", "mlp": "outdated" |
            "full" | indices of the outdated layers}.

    Returns:
        The indices of the rewired layers.

    Raises:
        ValueError: what `check_field` refuses, index out of range, layers that are not
            the family's, or a layer whose `forward` is set on the instance (device_map,
            accelerate hooks, kernels), which would bypass the rewiring.
    """
    check_field(family, farskip)
    stack = decoder_layers(model, family)
    selected = set(farskip["layers"])
    if any(not isinstance(k, int) or not 0 <= k < len(stack) for k in selected):
        raise ValueError(
            f"config.farskip: layers {sorted(selected)} of a model with {len(stack)}"
            " layers"
        )
    for k in sorted(selected):
        inner = (name for name in (family.moe, family.norms) if name)
        if any(
            "forward" in vars(module)
            for module in (stack[k], *(getattr(stack[k], n) for n in inner))
        ):
            raise ValueError(f"layer {k} {_OWN_FORWARD}")
    unrewire(model)
    mlp = farskip["mlp"]
    for k in sorted(selected):
        layer: Any = stack[k]
        block = getattr(layer, family.moe)
        carry = k + 1 in selected and _hands_on(stack, k, family, farskip)
        has_shared = (
            family.block_shared
            and getattr(block, family.block_shared, None) is not None
        )
        block_shared = bool(carry and family.additive and has_shared)
        if block_shared:
            block.__class__ = block_class(
                block.__class__,
                family.block_shared,
                family.block_gate,
                family.shared_in_place,
            )
        averaged = (
            family.shared_average
            and getattr(block, family.shared_average, None) == "average"
        )
        layer.__class__ = layer_class(layer.__class__)
        layer.farskip_plan = LayerPlan(
            family=family,
            outdated=_is_outdated(k, mlp),
            carry=carry,
            block_shared=block_shared,
            layer_shared=bool(
                family.layer_shared and getattr(layer, family.layer_shared) is not None
            ),
            shared_scale=0.5 if averaged else 1.0,
        )
    if family.stream_edit:
        # On the instance: transformers looks up what to record by the model's class,
        # which must not change.
        for module in model.modules():
            if getattr(module, "layers", None) is stack:
                setattr(
                    module,
                    family.stream_edit,
                    functools.partial(_edit_streams, module, family.stream_edit),
                )
    return sorted(selected)
