"""Attach the overlapped runtime to a rewired model, and detach it."""

import os
from typing import Any, Literal

import torch
from torch import nn

from fcsd.base.errors import UserError
from fcsd.model.connectivity.stack import decoder_layers, is_one_of
from fcsd.model.families import family_of
from fcsd.model.families.family import Family
from fcsd.model.families.overlap import kept_inside, refusal
from fcsd.parallel.overlap.attention import asks_registry, wrap_registry
from fcsd.parallel.overlap.layer import LayerRuntime, check_checkpointing, runtimes
from fcsd.parallel.overlap.schedule import Split
from fcsd.parallel.overlap.support import check_transformers

OverlappedPasses = Literal["full", "forward", "blocking"]
_OVERLAPS: dict[str, tuple[bool, bool]] = {
    "full": (True, True),
    "forward": (True, False),
    "blocking": (False, False),
}


def attach(
    model: Any,
    overlap: OverlappedPasses = "full",
    *,
    split: Split | None = None,
    transport: Any = None,
) -> int:
    """Make the rewired layers of a model overlap their exchanges with their
    computation; all ranks call this.

    overlap: "blocking" computes the same in the same order, but waits for each exchange
    at once. split: where attention is cut; None: in the middle if possible, else after
    it. transport: makes a `Transport` for a process group.

    Returns:
        The number of MoE layers that overlap.

    Raises:
        UserError: the runtime is attached already; no layer is rewired; the experts are
            not spread by `farskip`.
    """
    name, family = type(model).__name__, family_of(model.config)
    if next(runtimes(model), None) is not None:
        raise UserError(f"{name}: overlap is attached already; detach it first")
    check(model, split)
    check_connections(next(model.parameters()).device)
    rewired: list[tuple[Any, LayerRuntime]] = [
        (layer, _runtime(family, layer, k, split))
        for k, layer in enumerate(decoder_layers(model, family))
        if getattr(layer, "farskip_plan", None) is not None
    ]
    num_overlapping = sum(runtime.ep is not None for _, runtime in rewired)
    if not num_overlapping:
        raise UserError(
            f"{name}: no MoE layer is both rewired and distributed by ep_implementation"
            " 'farskip', so nothing can overlap; use --overlap off"
        )
    wrap_registry()
    # Only now, when nothing can be refused any more, is the model changed.
    for layer, runtime in rewired:
        if runtime.ep is not None:
            runtime.ep.open(runtime.index, _OVERLAPS[overlap], transport)
        layer.farskip_runtime = runtime
    return num_overlapping


def check(model: Any, split: Split | None = None) -> None:
    """Raise UserError if a model cannot overlap for a reason that does not depend on
    its weights.

    `check(load_model(folder, connectivity=…, weights=False), "core")` finds such a
    reason before they are loaded: a family or configuration that is refused, layers
    that are compiled as a whole or checkpointed re-entrantly, a split that attention
    does not have. `attach` checks the same.
    """
    family = family_of(model.config)
    if (reason := refusal(family, model.config)) is not None:
        raise UserError(
            f"{type(model).__name__}: cannot overlap: {reason}; use --overlap off"
        )
    check_transformers()
    for k, layer in enumerate(decoder_layers(model, family)):
        if getattr(layer, "farskip_plan", None) is None:
            continue
        # A compiled layer is one graph, which no exchange can interrupt.
        if layer._compiled_call_impl is not None:
            raise UserError(
                f"layer {k} is compiled as a whole; compile attention and MLPs inside"
                " of it, or use --overlap off"
            )
        check_checkpointing(layer)
        if split == "core" and _attention(family, layer) is None:
            raise UserError(
                f"split core: attention of layer {k} uses no attention registry (eager"
                " or linear attention); use end"
            )


def _attention(family: Family, layer: Any) -> str | None:
    """Return the name of the layer's attention module if it can be cut in the middle."""
    other_modules = {family.moe, family.in_norm, family.mlp_norm, family.layer_shared}
    children = (
        (name, child)
        for name, child in layer._modules.items()
        if name not in other_modules
    )
    return next((name for name, child in children if asks_registry(child)), None)


def check_connections(device: torch.device) -> None:
    """Raise UserError if a GPU would run exchanges after the computation that should
    hide them.
    """
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise UserError(
            "CUDA_DEVICE_MAX_CONNECTIONS=1: would run each exchange after the"
            " computation that it should overlap; unset it"
        )


def attach_loaded(model: Any, overlap: OverlappedPasses) -> None:
    """Attach overlap to a model that was just loaded with `IMPLEMENTATION`.

    A model that cannot overlap, or has no rewired layer (a regular teacher), is left
    blocking.
    """
    rewired = any(
        getattr(module, "farskip_plan", None) is not None for module in model.modules()
    )
    if rewired and refusal(family_of(model.config), model.config) is None:
        attach(model, overlap)


def detach(model: nn.Module) -> None:
    """Give every layer back its plain rewired forward pass, which waits for its
    exchanges."""
    for module in model.modules():
        module.__dict__.pop("farskip_runtime", None)


def _runtime(
    family: Family, layer: Any, index: int, split: Split | None
) -> LayerRuntime:
    # The block may be an MLP: some layers of a model are dense.
    block = getattr(layer, family.moe)
    attention = _attention(family, layer)
    chosen: Split = split or ("core" if attention is not None else "end")
    ep = getattr(getattr(block, "experts", None), "farskip_ep", None)
    moe, crosses = is_one_of(block, family.moe_block), kept_inside(family) is None
    if ep is None or not moe:
        # An MoE block whose experts are not sharded has nothing to send; its layer
        # returns the pair of streams, as without a runtime.
        return LayerRuntime(None, family, chosen, index, block_only=moe or not crosses)
    return LayerRuntime(ep, family, chosen, index, attention, not crosses)
