"""A rewired decoder layer. Self-contained (torch and standard library): it is shipped
in checkpoints.

The *class* of a rewired layer is replaced by a generated subclass whose `forward` calls
the family's `forward` with a substitute `self` in which the norms and the MoE block are
closures: only the inputs of the norms change, everything else is the family's code. No
module is added and no parameter moves. A layer whose routed output stays in flight
returns the pair (o_k, o_k - routed_k); the model's loop passes it on unchanged, and the
next layer's `__call__` splits it into two positional tensors, so that hooks and
re-entrant checkpointing see tensors. Without overlap o_k already contains routed_k, and
the pair only hides it from attention. o_k - routed_k is a sum without routed_k; nothing
is subtracted. Layers that are not the plain pre-norm layer have their equations in
`fcsd.model.families.Family`.

Class swap and not `layer.forward = …`: transformers wraps `cls.forward` for activation
checkpointing, an instance attribute would bypass it silently.
"""

import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LayerPlan:
    """The inputs and outputs of one rewired layer."""

    family: Any
    """The attribute names (`fcsd.model.families.Family`)."""
    outdated: bool
    """The MLP side reads the stream without attn_k; otherwise with it."""
    carry: bool
    """The next layer's attention reads o_k - routed_k, so this layer returns the pair."""
    block_shared: bool
    """The MoE block has been swapped for one that hands out its shared expert's output."""
    layer_shared: bool
    """A shared expert stands beside the MoE block."""
    shared_scale: float
    """Factor on the shared expert's output in the block's sum."""


class View:
    """A stand-in for `self`: reads fall through to the real module, except the overridden names."""

    # The checkpointing wrapper of GradientCheckpointingLayer asks for these; it is the
    # real layer that checkpoints.
    forward = None
    gradient_checkpointing = False

    def __init__(self, module: nn.Module, overrides: dict[str, Any]) -> None:
        self.__dict__.update(overrides)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        # twice as fast as getattr, which looks here last
        child = self._module._modules.get(name)
        return getattr(self._module, name) if child is None else child


class CalledView(View):
    """A stand-in for a module that is called, and whose attributes are read as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class StreamPair(tuple[torch.Tensor, torch.Tensor]):
    """(o_k, o_k - routed_k) in a model whose loop also reads o_k itself: what it asks
    the stream for, it gets of o_k.
    """

    __slots__ = ()

    @property
    def device(self) -> torch.device:
        return self[0].device

    def unsqueeze(self, dim: int) -> torch.Tensor:
        return self[0].unsqueeze(dim)


def _generated(base: type, kind: str, namespace: dict[str, Any]) -> type:
    """Return a subclass with the same name (policies of FSDP, accelerate and DeepSpeed
    match on it) that pickles by path.

    The qualified name has no dots, because pickle splits it there; `__getattr__` below
    finds the class again.
    """
    cls = type(base.__name__, (base,), {**namespace, "farskip_base": base})
    cls.__module__ = __name__
    cls.__qualname__ = f"{kind}:{base.__module__.replace('.', '>')}:{base.__qualname__}"
    return cls


class _SharedOutput:
    """A shared expert's output before the block's sum: the family's operations on it
    are recorded, so that they run only once.
    """

    def __init__(self, output: torch.Tensor) -> None:
        self.output = self.sum = output

    @classmethod
    def __torch_function__(
        cls, multiply: Any, types: Any, args: Any, kwargs: Any = None
    ) -> torch.Tensor:
        """Multiply by the gate. torch calls this first; before it would call `__rmul__`
        it raises, which takes 20 microseconds.
        """
        gate, shared = args
        shared.output = multiply(gate, shared.output)
        return shared.output

    def add_(self, routed: torch.Tensor) -> "_SharedOutput":
        self.sum = (self.output + routed).to(self.output.dtype)
        return self


@functools.cache
def block_class(base: type, shared: str, gate: str | None, in_place: bool) -> type:
    """Return the MoE block that returns the family's own outputs and behind them that of
    its shared expert.

    The shared expert's output is caught on its way into the sum. `in_place`: the family
    adds the routed output into it. `gate`: its sigmoid multiplies it. Eager code
    without gradients makes nothing twice for that. With gradients, the gated product is
    computed twice, because one product for both sums would change the order of
    summation. A compiler cannot follow the substitute, and removes the duplicate by
    itself.
    """
    base_forward: Any = base.forward  # type: ignore[attr-defined]

    def forward(
        self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.farskip_split:
            return base_forward(self, hidden_states, *args, **kwargs)
        shared_output: Any = None
        gate_output: Any = None
        stand_in = (in_place or gate) and not (
            torch.is_grad_enabled() or torch.compiler.is_compiling()
        )

        def shared_expert(x: torch.Tensor) -> Any:
            nonlocal shared_output
            shared_output = getattr(self, shared)(x)
            if stand_in:
                shared_output = _SharedOutput(shared_output)
                return shared_output
            return shared_output.clone() if in_place else shared_output

        def shared_gate(x: torch.Tensor) -> torch.Tensor:
            nonlocal gate_output
            gate_output = getattr(self, str(gate))(x)
            return gate_output

        twice = gate and not stand_in
        overrides: dict[str, Any] = {shared: shared_expert}
        if twice:
            overrides[str(gate)] = shared_gate
        out = base_forward(View(self, overrides), hidden_states, *args, **kwargs)
        if stand_in and in_place:
            # The family took the stand-in for a tensor: the sum lies in it.
            out = shared_output.sum, *out[1:]
        if stand_in:
            shared_output = shared_output.output
        elif twice:
            shared_output = torch.sigmoid(gate_output) * shared_output
        # Behind the family's own outputs, which transformers records by their index.
        return (*out, shared_output) if isinstance(out, tuple) else (out, shared_output)

    # A hub kernel chosen by this name would replace `forward`, and with it the split.
    namespace = {
        "forward": forward,
        "farskip_split": True,
        "kernel_layer_name": "FarSkipNoHubKernel",
    }
    return _generated(
        base, f"FarSkipBlock/{shared}/{gate or ''}/{int(in_place)}", namespace
    )


class LayerPass:
    """One forward pass of a rewired layer: the calls that its stand-in `self` answers."""

    def __init__(
        self,
        layer: Any,
        o: torch.Tensor,
        attention_input: torch.Tensor | None,
        arguments: dict[str, Any],
        sources: torch.Tensor | None = None,
    ) -> None:
        """Take the arguments of a pass. sources: the streams of earlier blocks, where
        the family's layout is sources.
        """
        self.layer = layer
        self.sources: Any = sources
        self.arguments = arguments
        self.plan: Any = layer.farskip_plan
        self.family = self.plan.family
        self.norms = getattr(layer, self.family.norms) if self.family.norms else layer
        self.o = o
        self.a = o if attention_input is None else attention_input
        self.normed: Any = None
        self.after_attention: Any = None
        self.shared_output: Any = None
        self.connections: dict[int, dict[str, Any]] = {}
        # Set by a runtime that computes the MoE block's connection before attention.
        self.early_connection: dict[str, Any] | None = None

    def norm(self, name: str | None, x: torch.Tensor) -> Any:
        return getattr(self.norms, name)(x) if name else x

    def kept(self, side: int, stream: torch.Tensor) -> torch.Tensor:
        """Return the result of a side's residual connection for `stream` if its branch
        returns zero.
        """
        if self.family.layout == "streams":
            mix = self.connections[side].get("mix")
            if mix is None:
                return stream
            return torch.matmul(mix.to(stream.dtype).transpose(-1, -2), stream)
        rule, name = self.family.residual, self.family.residual_names[side]
        if name is None:
            return stream
        value = getattr(self.layer, name)
        if rule == "gate":
            return value(stream, torch.zeros_like(stream))
        if rule == "scale":
            return value(torch.zeros_like(stream), stream)
        return stream * (math.sqrt((value - 1) / value) if rule == "depth" else value)

    def overrides(self) -> dict[str, Any]:
        family, plan = self.family, self.plan
        if family.layout == "post_norm":
            sides = {family.attention: self.attention, family.moe: self.moe}
            return sides | ({family.in_norm: self.in_norm} if family.in_norm else {})
        if family.layout == "streams":
            return self.stream_overrides()
        if family.layout == "sources":
            return self.source_overrides()
        norms: dict[str, Any] = {family.in_norm: self.in_norm}
        if family.layout == "blocks":
            norms = self.with_attributes(norms)
            return norms | ({family.moe: self.moe} if self.plan.block_shared else {})
        if family.layout == "parallel":
            return norms | {family.attention: self.attention, family.moe: self.moe}
        several = isinstance(family.mlp_norm, tuple)
        for name in family.mlp_norm if several else (family.mlp_norm,):
            norms[name] = functools.partial(self.mlp_norm, name)
        if family.norms:
            stand_in = View(self.norms, norms)
            forward = functools.partial(type(self.norms).forward, stand_in)
            norms = {family.norms: forward}
        if plan.carry and plan.layer_shared:
            norms[family.layer_shared] = self.layer_shared
        if family.residual == "scale":
            norms = self.with_attributes(norms)
            norms[family.residual_names[0]] = self.sum_after_attention
        return norms | ({family.moe: self.moe} if plan.block_shared else {})

    def with_attributes(self, norms: dict[str, Any]) -> dict[str, Any]:
        """Return stand-ins for norms whose attributes the layer reads as well: the dtype
        of their weights, to which it casts a float32 stream."""
        return {
            name: CalledView(getattr(self.norms, name), {"call": call})
            for name, call in norms.items()
        }

    def stream_overrides(self) -> dict[str, Any]:
        family = self.family
        before_attention, before_moe = family.connections
        calls: dict[str, Any] = {
            before_attention: self.attention_connection,
            before_moe: self.moe_connection,
        }
        branch = family.stream_branch
        if branch and getattr(self.layer, branch) is not None:
            calls[branch] = self.stream_branch
        return calls | ({family.moe: self.moe} if self.plan.block_shared else {})

    def source_overrides(self) -> dict[str, Any]:
        before_attention, before_moe = self.family.connections
        calls: dict[str, Any] = {before_moe: self.moe_source}
        if getattr(self.layer, before_attention) is not None:
            calls[before_attention] = self.attention_source
        return calls

    def mixed(self, side: int, stream: torch.Tensor) -> Any:
        """Mix the streams of earlier blocks with this one."""
        return getattr(self.layer, self.family.connections[side])(self.sources, stream)

    def attention_source(self, sources: torch.Tensor, x: torch.Tensor) -> Any:
        return self.mixed(0, self.a)

    def moe_source(self, sources: torch.Tensor, h: torch.Tensor) -> Any:
        """Mix what the MLP's branch reads. Where a block begins, the stream without
        attention is empty, and o is one of `sources` already."""
        self.after_attention = h.to(self.o.dtype)
        if self.plan.outdated:
            return self.mixed(1, self.o)
        return getattr(self.layer, self.family.connections[1])(sources, h)

    def stream_branch(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run a branch before attention, which reads what attention reads, and add its
        output to both members of the pair, as the layer does to the streams.
        """
        out = getattr(self.layer, self.family.stream_branch)(self.a, *args, **kwargs)
        whole = self.a is self.o
        self.o = self.o + out
        self.a = self.o if whole else self.a + out
        return out

    def attention_connection(self, x: torch.Tensor) -> tuple[Any, ...]:
        return self.connect(0, self.a, self.o)

    def moe_connection(self, h: torch.Tensor) -> tuple[Any, ...]:
        self.after_attention = h
        if not self.plan.outdated:
            return self.connect(1, h, h)
        return self.connect(1, self.kept(0, self.o), h)

    def connection(self, side: int, streams: torch.Tensor) -> dict[str, Any]:
        """Return what a hyper-connection computes from these streams, by name."""
        module = getattr(self.layer, self.family.connections[side])
        return dict(zip(self.family.connection_returns, module(streams), strict=True))

    def connect(
        self, side: int, read: torch.Tensor, whole: torch.Tensor
    ) -> tuple[Any, ...]:
        """Return what a hyper-connection returns if its branch reads the streams `read`
        and its residual connection keeps the streams `whole`.

        What belongs to the branch (its input, and how its output is spread) is computed
        from what the branch reads; what belongs to the residual connection from the
        streams that it keeps.
        """
        early = self.early_connection if side and read is not whole else None
        values = self.connection(side, read) if early is None else early
        if read is not whole:
            if "mix" in values:
                values["mix"] = self.connection(side, whole)["mix"]
            if "streams" in values:
                values["streams"] = whole
        self.connections[side] = values
        return tuple(values.values())

    def spread(self, side: int, output: torch.Tensor) -> torch.Tensor:
        """Return what the output of a branch adds to the streams."""
        write = self.connections[side]["write"]
        output = output.reshape(*write.shape[:-1], 1, output.shape[-1])
        return (write.unsqueeze(-1) * output).reshape(self.o.shape)

    def in_norm(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.family.layout == "post_norm" else self.a.to(x.dtype)
        out = getattr(self.norms, self.family.in_norm)(x)
        if x is self.o:
            self.normed = out
        return out

    def normed_stream(self, x: torch.Tensor) -> torch.Tensor:
        """Return in_norm of a stream, computed once for all its readers; with gradients
        each computes it, because one gradient for all would be summed in another
        order."""
        if x is self.o and self.normed is not None and not torch.is_grad_enabled():
            return self.normed
        return self.norm(self.family.in_norm, x)

    def sum_after_attention(
        self, branch: torch.Tensor, stream: torch.Tensor
    ) -> torch.Tensor:
        """Keep the stream after attention as its residual connection returns it; the norm
        after it may read it in a narrower dtype."""
        name = self.family.residual_names[0]
        self.after_attention = getattr(self.layer, name)(branch, stream)
        return self.after_attention

    def mlp_norm(self, name: str, h: torch.Tensor) -> Any:
        if self.after_attention is None:
            # the residual connection after attention is already in it
            self.after_attention = h
        norm = getattr(self.norms, name)
        if not self.plan.outdated:
            return norm(h)
        stream = self.o if self.family.residual == "sum" else self.kept(0, self.o)
        stream = stream.to(h.dtype)
        return norm(stream if stream.shape == h.shape else stream.reshape(h.shape))

    def attention(self, *args: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if self.family.layout == "post_norm":
            hidden_states = self.normed_stream(self.a)
        out = getattr(self.layer, self.family.attention)(
            *args, hidden_states=hidden_states, **kwargs
        )
        if self.family.layout == "parallel" and self.plan.carry:
            self.after_attention = self.o + out[0]
        return out

    def moe(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        family = self.family
        if family.layout == "parallel":
            x = self.normed_stream(self.o)
        if family.layout == "post_norm":
            self.after_attention = x
            if self.plan.outdated:
                x = self.norm(family.mlp_norm, self.kept(0, self.normed_stream(self.o)))
        if family.moe_argument:
            args = (self.arguments.get(family.moe_argument),)
        out = getattr(self.layer, family.moe)(x, *args, **kwargs)
        if self.plan.block_shared:
            *own, self.shared_output = out
            out = own[0] if len(own) == 1 else tuple(own)
        return out[0] if family.moe_argument else out

    def layer_shared(self, x: torch.Tensor) -> torch.Tensor:
        self.shared_output = getattr(self.layer, self.family.layer_shared)(x)
        return self.shared_output

    def partial(self) -> torch.Tensor:
        """Return o_k - routed_k; where a layer is one branch without experts, o_{k-1}."""
        rest = self.o if self.family.layout == "blocks" else self.after_attention
        if self.family.residual != "sum" or self.family.layout == "streams":
            rest = self.kept(1, rest)
        if self.shared_output is None:
            return rest
        shared_output = self.shared_output
        if self.family.layout == "streams":
            return (rest + self.spread(1, shared_output)).to(rest.dtype)
        if shared_output.shape != rest.shape:
            shared_output = shared_output.reshape(rest.shape)
        if self.plan.shared_scale != 1:
            shared_output = shared_output * self.plan.shared_scale
        if self.family.residual_multiplier:
            multiplier = getattr(self.layer, self.family.residual_multiplier)
            shared_output = shared_output * multiplier
        return rest + shared_output


def side_value(side: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the model's loop passes to a layer as `side`: by name, or in the first
    place after the stream.
    """
    return kwargs[side] if side in kwargs else args[0]


def with_side_value(
    side: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a layer's arguments with another value of `side`, in the place that the
    loop gave it: re-entrant checkpointing has gradients only for tensors by position.
    """
    if side in kwargs:
        return args, kwargs | {side: value}
    return (value, *args[1:]), kwargs


@functools.cache
def layer_class(base: type) -> type:
    """Return the decoder layer that follows its `farskip_plan`; without one (an MTP
    layer, say) it is the regular layer."""
    base_forward: Any = base.forward  # type: ignore[attr-defined]
    base_call: Any = base.__call__  # type: ignore[operator]

    def __call__(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.farskip_plan is None:
            return base_call(self, hidden_states, *args, **kwargs)
        plan: Any = self.farskip_plan
        # In these models the loop reads the stream itself, too.
        is_read = plan.family.layout == "sources" and plan.carry
        if self.farskip_runtime is not None:
            out = self.farskip_runtime.call(
                self, base_call, hidden_states, *args, **kwargs
            )
            return StreamPair(out) if is_read else out
        o, attention_input = hidden_states, None
        if isinstance(hidden_states, tuple):
            o, attention_input = hidden_states
        side = plan.family.side_output
        if side and isinstance(value := side_value(side, args, kwargs), tuple):
            attention_input, value = value
            args, kwargs = with_side_value(side, args, kwargs, value)
        out = base_call(self, o, attention_input, *args, **kwargs)
        if side and plan.carry:
            o, partial, side_output = out
            # The loop passes the second value on as `side`.
            return o, (partial, side_output)
        return StreamPair(out) if is_read else out

    def forward(self: Any, o: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        plan: Any = self.farskip_plan
        if plan is None:
            return base_forward(self, o, *args, **kwargs)
        if self.farskip_runtime is not None:
            return self.farskip_runtime.forward(self, base_forward, o, *args, **kwargs)
        sources = args[1:2] if plan.family.layout == "sources" else ()
        run = LayerPass(self, o, args[0], kwargs, *sources)
        out = base_forward(View(self, run.overrides()), o, *args[1:], **kwargs)
        if not plan.carry:
            return out
        if isinstance(out, tuple):
            # Flat also with a second output: re-entrant checkpointing sees no tensors
            # inside tuples.
            o, side_output = out
            return o, run.partial(), side_output
        return out, run.partial()

    # Computes the layer in another order, with overlapped communication
    # (`fcsd.parallel.overlap`).
    namespace = {
        "__call__": __call__,
        "forward": forward,
        "farskip_plan": None,
        "farskip_runtime": None,
    }
    return _generated(base, "FarSkipLayer", namespace)


def __getattr__(qualname: str) -> Any:
    """Return a generated class, which pickle looks up by its qualified name."""
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
