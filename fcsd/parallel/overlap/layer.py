"""A rewired decoder layer whose attention and shared expert hide its dispatch and
combine.

No family's code is copied. The layer's own forward is entered twice with a stand-in
`self` (`View`). The first time it runs on the stream that attention reads, records the
output of each module, and is stopped at the norm before the MLP. The second time it
runs on the whole stream; the recorded outputs are returned again, and the MoE block is
a closure (`fcsd.parallel.overlap.block`).

    o_{k-1}   = partial_{k-1} + block(routed_{k-1})     once the combine of layer k-1 has arrived
    partial_k = o_{k-1} + attn_k(partial_{k-1}) + shared_k(o_{k-1})

A layer whose combine the next layer waits for returns `InFlight`, others return the
stream. `fcsd.parallel.overlap.schedule` defines the order of the steps. A layer with
other equations keeps its forward pass and its combine: only its block is run in steps,
which begin before its attention.

Not covered: models that cannot overlap (refused in `fcsd.parallel.overlap.attach`).
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fcsd.base.errors import UserError
from fcsd.model.connectivity.layer import (
    LayerPass,
    View,
    side_value,
    with_side_value,
)
from fcsd.model.families.family import Family
from fcsd.model.families.structure import checkpoints_reentrantly
from fcsd.parallel.overlap.attention import between
from fcsd.parallel.overlap.block import (
    BlockRun,
    Call,
    Handle,
    LeaveForward,
    Recorder,
    replay,
    stop,
)
from fcsd.parallel.overlap.experts import OverlappedEP
from fcsd.parallel.overlap.schedule import BLOCK, LayerFacts, Split, schedule


class InFlight(NamedTuple):
    """The output of a layer whose combine is still under way. ticket: of its exchange."""

    partial: Tensor
    ticket: Tensor
    handle: Handle


@dataclass
class LayerRuntime:
    """The overlapped forward pass that `attach` gives a rewired layer.

    ep: None for a dense layer. attention: name of the module that can be cut.
    block_only: the layer keeps its own forward pass and its combine. log: receives the
    steps of each forward pass, (layer, step).
    """

    ep: OverlappedEP | None
    # A rewired layer's plan has only the names that are shipped in checkpoints.
    family: Family
    split: Split
    index: int
    attention: str | None = None
    block_only: bool = False
    log: list[tuple[int, str]] | None = field(default=None, repr=False)

    def call(
        self,
        layer: Any,
        base_call: Callable[..., Any],
        hidden: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Unpack the previous layer's output, and call the layer.

        This runs outside hooks and checkpointing, which therefore see plain tensors as
        positional arguments.
        """
        in_flight = hidden if isinstance(hidden, InFlight) else None
        keeps = (
            layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()
        )
        if keeps:
            check_checkpointing(layer)
        block = getattr(layer, layer.farskip_plan.family.moe)
        # A layer whose output a hook reads cannot leave its combine in flight.
        handle = in_flight.handle if in_flight else None
        call = Call(handle, output_is_read(layer), keeps, plain=output_is_read(block))
        stream, ticket_or_input = hidden, None
        if isinstance(hidden, tuple):
            stream, ticket_or_input = hidden[:2]
        side, carry = layer.farskip_plan.family.side_output, layer.farskip_plan.carry
        # In families whose layers pass on a side output, that argument also carries
        # attention's input.
        if side and isinstance(value := side_value(side, args, kwargs), tuple):
            ticket_or_input, value = value
            args, kwargs = with_side_value(side, args, kwargs, value)
        out = base_call(layer, stream, ticket_or_input, call, *args, **kwargs)
        return (out[0], (out[1], out[2])) if side and carry else out

    def forward(
        self,
        layer: Any,
        base_forward: Callable[..., Any],
        stream: Tensor,
        ticket_or_input: Any,
        call: Call,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run the layer. stream, ticket_or_input: if the previous combine is in flight
        (`call.before`), the partial stream and its ticket; else the whole stream and
        attention's input (None: the stream).
        """
        call.passes += 1
        if self.block_only or call.plain:
            attention_input = ticket_or_input
            # These layers need the whole stream from the start.
            if call.before is not None:
                attention_input = stream
                stream = call.before.add(stream, call.arrive(ticket_or_input))
            return self._around_block(
                layer, base_forward, stream, attention_input, call, args, kwargs
            )
        return _LayerRun(self, layer, stream, ticket_or_input, call, kwargs).output(
            base_forward, args, kwargs
        )

    def note(self, step: str) -> None:
        """Log a step."""
        if self.log is not None:
            self.log.append((self.index, step))

    def _around_block(
        self,
        layer: Any,
        forward: Callable[..., Any],
        o: Tensor,
        attention_input: Any,
        call: Call,
        args: Any,
        kwargs: Any,
    ) -> Any:
        family: Any = self.family
        plan, run = layer.farskip_plan, None
        if self.ep is not None and not call.plain:
            # A block whose input waits for attention has only its shared expert to
            # overlap.
            steps = schedule(LayerFacts(split=self.split)) if plan.outdated else BLOCK
            run = BlockRun(
                self.ep, family, getattr(layer, family.moe), call, steps, self.note
            )
            if family.block_argument is not None:
                run.given = {family.block_argument: kwargs[family.block_argument]}

        # The family's forward calls this in place of its MoE block.
        def block(x: Any, *_: Any, **__: Any) -> Any:
            assert run is not None
            if plan.outdated:
                if family.layout == "post_norm":
                    rewired.after_attention = x
                run.until(None)
                if plan.block_shared:
                    rewired.shared_output = run.gated_shared()
                return run.output
            run.m = x
            run.until(None)
            return (run.output, run.gated_shared()) if plan.block_shared else run.output

        moe_override = {} if run is None else {family.moe: block}
        rewired = LayerPass(
            View(layer, moe_override),
            o,
            attention_input,
            kwargs,
            *(args[:1] if family.layout == "sources" else ()),
        )
        overrides = moe_override | rewired.overrides()
        attention_cut: Any = contextlib.nullcontext()
        if run is not None and plan.outdated:
            # The block's input does not depend on this layer's attention, so its
            # exchanges run beside it.
            if not run.one_piece():
                attention_cut = between(
                    getattr(layer, str(self.attention)),
                    lambda: run.pass_by("attention b"),
                )
            overrides |= _beside_attention(run, rewired, overrides, block)
        with attention_cut:
            out = forward(View(layer, overrides), o, *args, **kwargs)
        if not plan.carry:
            return out
        if isinstance(out, tuple):
            return out[0], rewired.partial(), out[1]
        return out, rewired.partial()


def _beside_attention(
    run: BlockRun, rewired: LayerPass, overrides: dict[str, Any], block: Any
) -> dict[str, Any]:
    """Return the overrides of a layer whose block runs beside its attention, and start
    the block if its input is known before the layer's forward pass begins.
    """
    family = rewired.family

    def begin() -> None:
        run.m = _block_input(rewired)
        one_piece = run.one_piece()
        run.pass_by("attention a")
        if one_piece:
            run.pass_by("attention b")

    if family.layout == "streams":
        # The block reads the streams as the connection before attention leaves them.
        connection = family.connections[0]
        before_attention = overrides[connection]

        def connect(x: Tensor) -> Any:
            values = before_attention(x)
            begin()
            return values

        calls: dict[str, Any] = {connection: connect, family.moe: block}
        if family.mlp_norm:
            calls[family.mlp_norm] = lambda _: run.m
        return calls
    begin()
    if family.layout == "sources":
        return {
            family.moe: block,
            family.connections[1]: lambda sources, h: (
                _after_attention(rewired, h.to(rewired.o.dtype), h),
            ),
            family.mlp_norm: lambda _: run.m,
        }
    if family.layout != "pre_norm":
        return {family.moe: block}
    return {
        family.moe: block,
        family.mlp_norm: lambda h: _after_attention(rewired, h, run.m),
    }


def _block_input(rewired: LayerPass) -> Any:
    """Return the input of the MoE block in a layer that keeps its own forward pass."""
    family = rewired.family
    if family.layout == "streams":
        rewired.early_connection = rewired.connection(1, rewired.kept(0, rewired.o))
        return rewired.norm(family.mlp_norm, rewired.early_connection["read"])
    if family.layout == "sources":
        (mixed,) = rewired.mixed(1, rewired.o)
        return rewired.norm(family.mlp_norm, mixed).to(rewired.o.dtype)
    stream = rewired.o
    if family.layout != "pre_norm":
        stream = rewired.normed_stream(stream)
    if family.layout == "parallel":
        return stream
    return rewired.norm(family.mlp_norm, rewired.kept(0, stream))


def _after_attention(rewired: LayerPass, stream: Tensor, value: Any) -> Any:
    """Keep the stream after attention, and return the value."""
    rewired.after_attention = stream
    return value


class _LayerRun(BlockRun):
    """One forward pass of a layer."""

    def __init__(
        self,
        runtime: LayerRuntime,
        layer: Any,
        stream: Tensor,
        ticket_or_input: Any,
        call: Call,
        kwargs: Any,
    ):
        self.runtime, self.layer = runtime, layer
        self.plan = layer.farskip_plan
        self.family = runtime.family
        incoming = call.before is not None
        self.ticket: Any = ticket_or_input if incoming else None
        attention_input = None if incoming else ticket_or_input
        self.rewired = LayerPass(layer, stream, attention_input, kwargs)
        self.outgoing = runtime.ep is not None and self.plan.carry and not call.reads
        facts = LayerFacts(
            runtime.ep is not None,
            incoming,
            self.outgoing,
            self.plan.outdated,
            runtime.split,
        )
        block = getattr(layer, self.family.moe)
        super().__init__(
            runtime.ep, self.family, block, call, schedule(facts), runtime.note
        )
        # Some families scale a branch before it is added to the stream.
        if self.family.residual_multiplier:
            self.multiplier = getattr(layer, self.family.residual_multiplier)
        self.modules: list[tuple[str, Any]] = []

    def output(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Enter the layer's forward twice, and return the layer's output."""
        family, layer, rewired = self.family, self.layer, self.rewired
        self.until("attention a")
        first_entry = {family.in_norm: rewired.in_norm, family.mlp_norm: stop}
        with contextlib.suppress(LeaveForward):
            forward(
                Recorder(layer, first_entry, self.modules, self._attention),
                rewired.a,
                *args,
                **kwargs,
            )
        # The second entry reads the whole stream: the previous combine must have
        # arrived.
        if self.steps and self.steps[0].name == "arrive":
            self.until(self.steps[1].name)
        second_entry = {
            family.in_norm: lambda x: x,
            family.mlp_norm: self._mlp_norm,
            family.moe: self._moe,
        }
        # A dense layer's forward returns here; an MoE layer's is stopped in its block.
        with contextlib.suppress(LeaveForward):
            return forward(
                View(layer, replay(self.modules) | second_entry),
                rewired.o,
                *args,
                **kwargs,
            )
        if self.again:
            return None  # the output of a recomputation is not used
        if self.outgoing:
            return InFlight(rewired.partial(), self.ticket, self.handle())
        return self.stream

    def _attention(self, child: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the attention module, with the steps between its two parts in the middle
        of the call.
        """
        self.pass_by("attention a")
        if self.steps[0].name == "attention b":
            self.pass_by("attention b")
            return child(*args, **kwargs)
        with between(child, lambda: self.pass_by("attention b")):
            return child(*args, **kwargs)

    def _mlp_norm(self, h: Tensor) -> Any:
        self.rewired.after_attention = h
        # The norm runs once, whichever step needs it first.
        if self.m is None:
            self.m = self.rewired.mlp_norm(self.family.mlp_norm, h)
        return self.m

    def _moe(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A dense MLP has no exchanges, and runs as the family wrote it.
        if self.runtime.ep is None:
            self.pass_by("mlp")
            return self.block(x, *args, **kwargs)
        # A recomputation ends before the combine, after which no tensor is kept for the
        # backward pass.
        self.until("finish combine" if self.again else None)
        raise LeaveForward

    # ---- the steps that concern more than the block

    def arrive(self) -> None:
        """Wait for the previous layer's combine, which makes the stream whole."""
        assert self.call.before is not None
        self.rewired.o = self.call.before.add(
            self.rewired.o, self.call.arrive(self.ticket)
        )

    def router(self) -> None:
        """Run norm and router."""
        if self.m is None:
            self.m = self.rewired.mlp_norm(self.family.mlp_norm, self.rewired.o)
        super().router()

    def shared_expert(self) -> None:
        """Compute the shared expert, in the block or beside it."""
        super().shared_expert()
        if self.has_shared:
            self.rewired.shared_output = self.gated_shared()
        elif self.plan.layer_shared:
            self.rewired.shared_output = getattr(self.layer, self.family.layer_shared)(
                self.m
            )

    def finish_combine(self) -> None:
        """Wait for this layer's own combine."""
        handle, partial = self.handle(), self.rewired.partial()
        stream = handle.add(partial, handle.arrive(self.ticket))
        self.stream = (stream, partial) if self.plan.carry else stream


def check_checkpointing(layer: Any) -> None:
    """Raise UserError for a layer that is checkpointed re-entrantly: overlap could not
    tell its recomputation from a first pass.
    """
    if checkpoints_reentrantly(layer):
        raise UserError(
            "overlap: re-entrant activation checkpointing is not supported;"
            " use gradient_checkpointing_kwargs {'use_reentrant': False}, or --overlap off"
        )


def output_is_read(module: nn.Module) -> bool:
    """Return whether a hook reads a module's output. FSDP2's hooks do not, those of
    transformers only while hidden states are collected.
    """
    return any(_hook_reads_output(hook) for hook in module._forward_hooks.values())


def _hook_reads_output(hook: Any) -> bool:
    if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
        return False
    if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
        from transformers.utils.output_capturing import _active_collector

        # The hook stays on every layer once any output has been collected.
        key = inspect.getclosurevars(hook).nonlocals["key"]
        return key in (_active_collector.get() or {})
    return True


def runtimes(model: nn.Module) -> Iterator[LayerRuntime]:
    """Yield the runtimes of the layers that have one, in order."""
    for module in model.modules():
        if (runtime := getattr(module, "farskip_runtime", None)) is not None:
            yield runtime
