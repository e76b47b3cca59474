"""The MoE block of a layer in steps: router, dispatch, experts, combine, shared expert.

The block's own forward is entered with a stand-in `self` (`View`), stopped at its
experts, which shows what any router chose; and again for what it does with the experts'
output. No routing code is copied.

Not covered: when each step comes (`fcsd.parallel.overlap.schedule`); what is in flight
between layers (`fcsd.parallel.overlap.layer`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.model.connectivity.layer import View
from fcsd.model.families.capacity import capped
from fcsd.parallel.overlap.exchange import Exchange, Known
from fcsd.parallel.overlap.experts import Dispatch, OverlappedEP, Sizes
from fcsd.parallel.overlap.schedule import Step


@dataclass(frozen=True)
class Handle:
    """What brings a layer's routed output back. block: what its MoE block makes of it,
    (N, D) to (B, T, D).
    """

    dispatch: Dispatch
    exchange: Exchange
    block: Callable[[Tensor], Tensor]
    multiplier: float

    def arrive(self, token: Tensor) -> Tensor:
        """Wait; return the routed output as the experts give it."""
        return OverlappedEP.finish_combine(token, self.exchange, self.dispatch)

    def add(self, partial: Tensor, routed: Tensor) -> Tensor:
        """Return the whole stream."""
        added = self.block(routed).view(partial.shape)
        return partial + (added if self.multiplier == 1 else added * self.multiplier)


@dataclass
class Call:
    """One call of a layer, outside its checkpoint: what the first pass leaves for the
    recomputation.

    before: what is in flight from the layer before. passes: forward passes made. reads:
    somebody reads the layer's output, so it finishes its own combine; plain: its
    block's, so nothing of it overlaps. routed: what arrived from before; own_routed: of
    this layer's experts, where something in it is kept that depends on that; sizes: of
    the dispatch.
    """

    before: Handle | None
    reads: bool
    keeps: bool
    plain: bool = False
    passes: int = 0
    routed: Tensor | None = None
    own_routed: Tensor | None = None
    sizes: Sizes | None = None

    def arrive(self, token: Tensor) -> Tensor:
        """Return what arrives from the layer before; a recomputation knows it."""
        assert self.before is not None
        if self.passes > 1:
            return Known.apply(token, self.routed)  # type: ignore[no-any-return]
        routed = self.before.arrive(token)
        self.routed = routed.detach() if self.keeps else None
        return routed


class Stopped(Exception):
    """Leaves a family's forward where nothing behind it is wanted."""

    def __init__(self, *values: Any):
        super().__init__()
        self.values = values


def stop(*values: Any, **_: Any) -> Any:
    raise Stopped(*values)


class Recorder(View):
    """A stand-in that notes what each module gives: (name, output), in order. around:
    calls the first of them.
    """

    def __init__(
        self,
        module: nn.Module,
        overrides: dict[str, Any],
        tape: list[tuple[str, Any]],
        around: Callable[..., Any] | None = None,
    ):
        super().__init__(module, overrides)
        self.__dict__.update(_tape=tape, _around=around)

    def __getattr__(self, name: str) -> Any:
        child = self._module._modules.get(name)
        if child is None:
            return getattr(self._module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._around is not None and not self._tape:
                out = self._around(child, *args, **kwargs)
            else:
                out = child(*args, **kwargs)
            self._tape.append((name, out))
            return out

        return run


def replay(tape: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return for the modules on a tape functions that give what they gave."""
    outputs = list(tape)

    def give(name: str, *_: Any, **__: Any) -> Any:
        played, out = outputs.pop(0)
        if played != name:
            raise RuntimeError(
                f"a layer called {name} where it had called {played}: its forward is not repeatable"
            )
        return out

    return {name: lambda *a, _name=name, **k: give(_name, *a, **k) for name, _ in tape}


def detached(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(detached(each) for each in out)
    return out.detach() if isinstance(out, Tensor) else out


@dataclass
class BlockNames:
    """The MoE block of a family as the runtime enters it. forward: the family's own,
    without the rewiring's.
    """

    forward: Callable[..., Any]
    shared: str | None
    gate: str | None
    in_place: bool
    scaled: str | None = None


class BlockRun:
    """One pass through an MoE block: its steps, and what they hand to each other.

    m: (B, T, D), what the block reads. note: called for each step.
    """

    def __init__(
        self,
        ep: Any,
        names: Any,
        block: Any,
        call: Call,
        steps: tuple[Step, ...],
        note: Callable[[str], None],
    ):
        self.ep: OverlappedEP = ep
        self.names: BlockNames = names
        self.block, self.call, self.steps, self.note = block, call, list(steps), note
        self.again = call.passes > 1
        self.m: Any = None
        self.shared: Any = None
        self.gate: Any = None
        self.tape: list[tuple[str, Any]] = []
        self.chosen: Any = ()

    def until(self, name: str | None) -> None:
        """Run the steps before the one of this name; None: all that are left."""
        while self.steps and self.steps[0].name != name:
            step = self.steps.pop(0)
            self.note(step.name)
            getattr(self, step.name.replace(" ", "_"))()

    def pass_by(self, name: str) -> None:
        """Run the steps up to this one, whose work the caller does."""
        self.until(name)
        self.note(self.steps.pop(0).name)

    # ---- the steps

    def router(self) -> None:
        """Enter the block up to its experts; `chosen` is what they were called with."""
        overrides: dict[str, Any] = {"experts": stop}
        if self.names.shared:
            overrides[self.names.shared] = lambda x: x  # computed later
        if self.names.gate:
            overrides[self.names.gate] = lambda x: x[..., :1]
        if self.names.scaled:
            overrides[self.names.scaled] = self._choose
        try:
            self.names.forward(Recorder(self.block, overrides, self.tape), self.m)
        except Stopped as reached:
            self.chosen = capped(self.block.experts, reached.values)

    def _choose(self, x: Tensor) -> Any:
        """Read off the dense scores (N, all experts) of a router which experts each token has."""
        scores, logits = getattr(self.block, str(self.names.scaled))(x)
        chosen = scores.topk(self.block.top_k, dim=1)
        # Behind the experts the block sums over all of them; what arrives is that sum.
        self.tape.append(
            (str(self.names.scaled), (scores.new_ones(scores.shape[0], 1), logits))
        )
        raise Stopped(x, chosen.indices, chosen.values)

    def start_dispatch(self) -> None:
        """Send the tokens to their experts; a recomputation knows how many of them."""
        rows, experts, weights = self.chosen
        self.dispatch = self.ep.start_dispatch(rows, experts, weights, self.call.sizes)
        self.chosen = ()
        if self.call.keeps:
            self.call.sizes = self.dispatch.sizes

    def finish_dispatch(self) -> None:
        """Wait for the rows of this rank's experts."""
        self.rows, self.pairs = self.ep.finish_dispatch(self.dispatch)

    def experts(self) -> None:
        """Compute them."""
        self.rows = self.ep.run_experts(self.block.experts, self.rows, self.pairs)

    def start_combine(self) -> None:
        """Send the outputs back; a recomputation knows what has arrived, or that nobody
        reads it.
        """
        self.token, self.combine = self.ep.start_combine(
            self.rows, self.pairs, self.dispatch.sizes, absent=self.again
        )
        del self.rows, self.pairs

    def shared_expert(self) -> None:
        """Compute the block's shared expert, and its gate."""
        if self.names.shared is not None:
            self.shared = getattr(self.block, self.names.shared)(self.m)
            self.gate = (
                getattr(self.block, self.names.gate)(self.m)
                if self.names.gate
                else None
            )

    def gated_shared(self) -> Any:
        """Return the shared expert's output as the stream gets it."""
        return (
            self.shared if self.gate is None else torch.sigmoid(self.gate) * self.shared
        )

    def finish_combine(self) -> None:
        """Let the block finish what it makes of the experts' output, inside its layer."""
        call = self.call
        if self.again:
            routed = Known.apply(self.token, call.own_routed)
        else:
            routed = OverlappedEP.finish_combine(
                self.token, self.combine, self.dispatch
            )
            call.own_routed = routed.detach() if call.keeps else None
        self.output = behind_experts(
            self.names, self.block, routed, self.m, self.tape, self.shared, self.gate
        )

    def handle(self, multiplier: float) -> Handle:
        """Return what finishes the combine somewhere else; it keeps no graph of this layer."""
        names, block, shape = self.names, self.block, self.m.shape
        tape = [(name, detached(out)) for name, out in self.tape]

        def behind(routed: Tensor) -> Tensor:
            zero = routed.new_zeros(())
            out = behind_experts(
                names, block, routed, zero.expand(shape), tape, zero, zero
            )
            return out[0] if isinstance(out, tuple) else out

        return Handle(self.dispatch, self.combine, behind, multiplier)


def behind_experts(
    names: BlockNames,
    block: nn.Module,
    routed: Tensor,
    x: Tensor,
    tape: Any,
    shared: Any,
    gate: Any,
) -> Any:
    """Run the block's forward with given outputs of its router, its experts and its
    shared expert.

    A parameter of the block that is read here would be read when FSDP has freed it: a
    module that nobody gave an output for is refused.
    """

    def constant(value: Tensor) -> Callable[[Tensor], Tensor]:
        def give(like: Tensor) -> Tensor:
            out = (
                value.expand(like.shape)
                if not value.ndim
                else value.reshape(*like.shape[:-1], value.shape[-1])
            )
            return out.clone() if names.in_place or not value.ndim else out

        return give

    overrides = replay(tape) | {"experts": lambda *_, **__: routed}
    if names.shared and shared is not None:
        overrides[names.shared] = constant(shared)
    if names.gate and gate is not None:
        overrides[names.gate] = constant(gate)
    return names.forward(View(block, overrides), x)
