"""The rewiring of a model's decoder layers. Self-contained (torch and standard library): it is shipped in
checkpoints.

    o_k = o_{k-1} + attn_k(a) + shared_k(m) + routed_k(m)

`a` and `m` are as in `fcsd.connectivity.spec.Connectivity`. The *class* of a rewired layer is swapped for a
generated subclass whose `forward` re-enters the family's own `forward` with a stand-in `self` in which the
norms and the MoE block are closures: what the norms read is what changes, everything else is the family's
code. No module is added and no parameter moves. A layer whose routed output stays in flight returns the pair
(o_k, o_k - routed_k); the model's loop hands it on unchanged, and the next layer's `__call__` takes it apart
into two positional tensors, so that hooks and re-entrant checkpointing see tensors. o_k - routed_k is summed
up without routed_k, never subtracted.

Class swap and not `layer.forward = …`: transformers wraps `cls.forward` for activation checkpointing, an
instance attribute would bypass it silently. For the same reason rewiring comes before anything that sets
`forward` on instances.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LayerPlan:
    """What one rewired layer does; the names are the family's attributes."""

    in_norm: str
    mlp_norm: str
    moe: str
    outdated: bool
    """The MLP side reads o_{k-1}; otherwise o_{k-1} + attn_k."""
    carry: bool
    """The next layer's attention reads o_k - routed_k, so this layer returns the pair."""
    block_shared: str | None = None
    layer_shared: str | None = None
    residual_multiplier: str | None = None


class _View:
    """A stand-in for `self`: reads fall through to the real module, except the overridden names."""

    forward = None  # the checkpointing wrapper of GradientCheckpointingLayer asks for type(self).forward

    def __init__(self, module: nn.Module, overrides: dict[str, Any]) -> None:
        self.__dict__.update(overrides)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _generated(base: type, kind: str, namespace: dict[str, Any]) -> type:
    """A subclass with the same name (policies of FSDP, accelerate and DeepSpeed match on it) that pickles by
    path.

    The qualified name has no dots, because pickle splits it there; `__getattr__` below finds the class again.
    """
    cls = type(base.__name__, (base,), {**namespace, "farskip_base": base})
    cls.__module__ = __name__
    cls.__qualname__ = f"{kind}:{base.__module__.replace('.', '>')}:{base.__qualname__}"
    return cls


_CLASSES: dict[tuple[type, str], type] = {}


def block_class(base: type, shared: str, gate: str | None, in_place: bool) -> type:
    """The MoE block that returns (the family's own output, output of its shared expert).

    The shared expert's output is caught on its way into the sum. `in_place`: the family adds the routed output
    into it, so the sum gets a copy.
    """
    kind = f"FarSkipBlock/{shared}/{gate or ''}/{int(in_place)}"
    if (base, kind) in _CLASSES:
        return _CLASSES[base, kind]
    base_forward: Any = base.forward  # type: ignore[attr-defined]

    def forward(
        self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, torch.Tensor]:
        shared_output: Any = None
        gate_output: Any = None

        def shared_expert(x: torch.Tensor) -> torch.Tensor:
            nonlocal shared_output
            shared_output = getattr(self, shared)(x)
            return shared_output.clone() if in_place else shared_output

        def shared_gate(x: torch.Tensor) -> torch.Tensor:
            nonlocal gate_output
            gate_output = getattr(self, str(gate))(x)
            return gate_output

        overrides: dict[str, Any] = {shared: shared_expert} | ({gate: shared_gate} if gate else {})
        out = base_forward(_View(self, overrides), hidden_states, *args, **kwargs)
        return out, shared_output if gate is None else torch.sigmoid(gate_output) * shared_output

    # A hub kernel chosen by this name would replace `forward`, and with it the split.
    namespace = {"forward": forward, "kernel_layer_name": "FarSkipNoHubKernel"}
    _CLASSES[base, kind] = _generated(base, kind, namespace)
    return _CLASSES[base, kind]


def layer_class(base: type) -> type:
    """The decoder layer that follows its `farskip_plan`; without one (an MTP layer, say) it is the regular
    layer."""
    kind = "FarSkipLayer"
    if (base, kind) in _CLASSES:
        return _CLASSES[base, kind]
    base_forward: Any = base.forward  # type: ignore[attr-defined]
    base_call: Any = base.__call__  # type: ignore[operator]

    def __call__(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.farskip_plan is None:
            return base_call(self, hidden_states, *args, **kwargs)
        o, attention_input = hidden_states if isinstance(hidden_states, tuple) else (hidden_states, None)
        return base_call(self, o, attention_input, *args, **kwargs)

    def forward(self: Any, o: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan: Any = self.farskip_plan
        if plan is None:
            return base_forward(self, o, *args, **kwargs)
        attention_input, args = args[0], args[1:]
        after_attention: Any = None
        shared_output: Any = None

        def in_norm(_: torch.Tensor) -> torch.Tensor:
            return getattr(self, plan.in_norm)(o if attention_input is None else attention_input)

        def mlp_norm(h: torch.Tensor) -> torch.Tensor:
            nonlocal after_attention
            after_attention = h  # o_{k-1} + attn_k, with the residual multiplier already in it
            return getattr(self, plan.mlp_norm)(o if plan.outdated else h)

        def moe(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal shared_output
            out, shared_output = getattr(self, plan.moe)(x, *args, **kwargs)
            return out

        def layer_shared(x: torch.Tensor) -> torch.Tensor:
            nonlocal shared_output
            shared_output = getattr(self, plan.layer_shared)(x)
            return shared_output

        overrides: dict[str, Any] = {plan.in_norm: in_norm, plan.mlp_norm: mlp_norm}
        if plan.carry and plan.block_shared:
            overrides[plan.moe] = moe
        if plan.carry and plan.layer_shared:
            overrides[plan.layer_shared] = layer_shared
        out = base_forward(_View(self, overrides), o, *args, **kwargs)
        if not plan.carry:
            return out
        if shared_output is None:
            return out, after_attention
        shared_output = shared_output.reshape(after_attention.shape)
        if plan.residual_multiplier:
            shared_output = shared_output * getattr(self, plan.residual_multiplier)
        return out, after_attention + shared_output

    namespace = {"__call__": __call__, "forward": forward, "farskip_plan": None}
    _CLASSES[base, kind] = _generated(base, kind, namespace)
    return _CLASSES[base, kind]


def __getattr__(qualname: str) -> Any:
    """Pickle looks generated classes up here by their qualified name."""
    kind, _, path = qualname.partition(":")
    module, _, name = path.partition(":")
    if name:
        base = getattr(importlib.import_module(module.replace(">", ".")), name)
        if kind == "FarSkipLayer":
            return layer_class(base)
        if kind.startswith("FarSkipBlock/"):
            _, shared, gate, in_place = kind.split("/")
            return block_class(base, shared, gate or None, in_place == "1")
    raise AttributeError(f"module {__name__!r} has no attribute {qualname!r}")


def decoder_layers(model: nn.Module, family: Any) -> nn.ModuleList:
    """The one ModuleList of the family's decoder layers (`get_decoder()` is not reliable:
    Llama4ForCausalLM)."""
    names = family.decoder_layer if isinstance(family.decoder_layer, tuple) else (family.decoder_layer,)
    found = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(type(layer).__name__ in names for layer in module)
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__}: {len(found)} stacks of {' or '.join(names)} found, one is"
            f" needed, as in transformers' {family.upstream}; rewire before FSDP or DeepSpeed wrap layers"
        )
    return found[0]


def rewired_layers(stack: nn.ModuleList) -> Iterator[int]:
    """Indices of the rewired layers of a stack."""
    return (k for k, layer in enumerate(stack) if getattr(layer, "farskip_plan", None) is not None)


def unrewire(model: nn.Module) -> None:
    """Give every rewired module its own class back; the model is then bit-identical to the original."""
    for module in model.modules():
        if "farskip_base" in vars(type(module)):
            module.__dict__.pop("farskip_plan", None)
            module.__class__ = type(module).farskip_base  # type: ignore[attr-defined]


def rewire(model: nn.Module, family: Any, farskip: dict[str, Any] | None) -> list[int]:
    """Rewire `model` in place, undoing an earlier rewiring first.

    Args:
        model: a model of the family that holds one decoder stack.
        family: the attribute names of the family (`fcsd.families.Family`).
        farskip: {"version": 1, "layers": indices, "attention": "partial" | "full", "mlp": "outdated" |
            "full"}.

    Returns:
        The indices of the rewired layers.

    Raises:
        ValueError: unknown version or side, index out of range, layers that are not the family's, or a layer
            whose `forward` is set on the instance (device_map, accelerate hooks, kernels), which would
            bypass the rewiring.
    """
    if not isinstance(farskip, dict) or farskip.get("version") != 1:
        raise ValueError(f"config.farskip: version 1 is needed, got {farskip!r}")
    attention, mlp = farskip["attention"], farskip["mlp"]
    if attention not in ("partial", "full") or mlp not in ("outdated", "full"):
        raise ValueError(f"config.farskip: unknown connectivity {farskip!r}")
    stack = decoder_layers(model, family)
    selected = set(farskip["layers"])
    if any(not isinstance(k, int) or not 0 <= k < len(stack) for k in selected):
        raise ValueError(f"config.farskip: layers {sorted(selected)} of a model with {len(stack)} layers")
    for k in sorted(selected):
        block = getattr(stack[k], family.moe)
        if "forward" in vars(stack[k]) or "forward" in vars(block):
            raise ValueError(
                f"layer {k} has its own `forward` (from device_map, accelerate hooks or kernels), which would"
                " bypass the rewiring; convert the model before them, or load it with"
                " fcsd.connectivity.load_model"
            )
    unrewire(model)
    for k in sorted(selected):
        layer: Any = stack[k]
        block = getattr(layer, family.moe)
        carry = attention == "partial" and type(block).__name__ == family.moe_block and k + 1 in selected
        has_layer_shared = family.layer_shared and getattr(layer, family.layer_shared) is not None
        has_block_shared = family.block_shared and getattr(block, family.block_shared, None) is not None
        if carry and has_block_shared:
            block.__class__ = block_class(
                type(block), family.block_shared, family.block_gate, family.shared_in_place
            )
        layer.__class__ = layer_class(type(layer))
        layer.farskip_plan = LayerPlan(
            in_norm=family.in_norm,
            mlp_norm=family.mlp_norm,
            moe=family.moe,
            outdated=mlp == "outdated",
            carry=carry,
            block_shared=family.block_shared if has_block_shared else None,
            layer_shared=family.layer_shared if has_layer_shared else None,
            residual_multiplier=family.residual_multiplier,
        )
    return sorted(selected)
