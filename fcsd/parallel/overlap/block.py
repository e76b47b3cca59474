"""The MoE block of a layer in steps: router, dispatch, experts, combine, shared expert.

The block's forward is called with a substitute `self` (`View`) and stopped at its
experts, whose arguments are the router's choice, whatever the router; it is called
again to process the experts' output. No routing code is copied.

Not covered: the order of the steps (`fcsd.parallel.overlap.schedule`); exchanges in
flight between layers (`fcsd.parallel.overlap.layer`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcsd.model.connectivity.layer import View
from fcsd.model.families.capacity import capped
from fcsd.model.families.family import Family
from fcsd.parallel.overlap.exchange import Exchange, Known
from fcsd.parallel.overlap.experts import Dispatch, OverlappedEP, Sizes
from fcsd.parallel.overlap.schedule import Step


@dataclass(frozen=True)
class Handle:
    """Brings a layer's routed output back to its ranks. block: the rest of its MoE
    block, from the routed output (N, D) to (B, T, D).
    """

    dispatch: Dispatch
    exchange: Exchange
    block: Callable[[Tensor], Tensor]
    multiplier: float

    def arrive(self, ticket: Tensor) -> Tensor:
        """Wait for the combine; return the experts' output, (N, D)."""
        return OverlappedEP.finish_combine(ticket, self.exchange, self.dispatch)

    def add(self, partial: Tensor, routed: Tensor) -> Tensor:
        """Return the stream with the routed output added."""
        added = self.block(routed).view(partial.shape)
        return partial + (added if self.multiplier == 1 else added * self.multiplier)


@dataclass
class Call:
    """One call of a layer, outside its checkpoint; it holds the values that the first
    pass leaves for the recomputation.

    before: the previous layer's combine, if in flight. passes: forward passes so far.
    reads: a hook reads the layer's output, so the layer finishes its own combine;
    plain: a hook reads its block's, so nothing of the layer overlaps. keeps: the layer
    is checkpointed. routed: the output that arrived from the previous layer;
    own_routed: the output of this layer's experts, if the recomputation needs it;
    sizes: the dispatch's sizes.
    """

    before: Handle | None
    reads: bool
    keeps: bool
    plain: bool = False
    passes: int = 0
    routed: Tensor | None = None
    own_routed: Tensor | None = None
    sizes: Sizes | None = None

    def arrive(self, ticket: Tensor) -> Tensor:
        """Return the previous layer's routed output; a recomputation has it already."""
        assert self.before is not None
        # The exchange ran in the first pass; the recomputation takes its detached
        # result.
        if self.passes > 1:
            return Known.apply(ticket, self.routed)  # type: ignore[no-any-return]
        routed = self.before.arrive(ticket)
        self.routed = routed.detach() if self.keeps else None
        return routed


class LeaveForward(Exception):
    """Raised to leave a family's forward once it has got as far as is needed."""

    def __init__(self, *values: Any):
        super().__init__()
        self.values = values


def stop(*values: Any, **_: Any) -> Any:
    raise LeaveForward(*values)


class Recorder(View):
    """A substitute that records the output of each module that it calls: (name,
    output), in order. around: a function that calls the first of them.
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
            # An empty tape means that this is the first module, attention.
            if self._around is not None and not self._tape:
                out = self._around(child, *args, **kwargs)
            else:
                out = child(*args, **kwargs)
            self._tape.append((name, out))
            return out

        return run


def replay(tape: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return, for each module on a tape, a function that returns its recorded output."""
    # Outputs are used up in order: a module that is called twice has two entries.
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
        return tuple(detached(item) for item in out)
    return out.detach() if isinstance(out, Tensor) else out


def own_forward(block: nn.Module) -> Any:
    """Return the forward of the block's original class, which the rewiring and FSDP
    have replaced by generated subclasses.
    """
    base = next(
        (cls for cls in type(block).__mro__ if "farskip_base" in vars(cls)), None
    )
    return (base.farskip_base if base else type(block)).forward  # type: ignore[attr-defined]


class BlockRun:
    """One pass through an MoE block: its steps, and the values they hand to each other.

    m: (B, T, D), the block's input. given: its arguments beside that. note: called for
    each step. multiplier: factor on its output in the stream.
    """

    def __init__(
        self,
        ep: Any,
        family: Family,
        block: Any,
        call: Call,
        steps: tuple[Step, ...],
        note: Callable[[str], None],
    ):
        self.ep: OverlappedEP = ep
        self.family: Any = family
        # A model of the family may have no shared expert.
        self.has_shared = getattr(block, family.block_shared or "", None) is not None
        self.block, self.call, self.steps, self.note = block, call, list(steps), note
        self.again = call.passes > 1
        self.m: Any = None
        self.shared: Any = None
        self.gate: Any = None
        self.tape: list[tuple[str, Any]] = []
        self.chosen: Any = ()
        self.given: dict[str, Any] = {}
        self.multiplier = 1.0

    def one_piece(self) -> bool:
        """Tell whether no step of the block is between the two parts of attention."""
        names = [step.name for step in self.steps]
        return names.index("attention b") == names.index("attention a") + 1

    def until(self, name: str | None) -> None:
        """Run the steps before the one of this name; None: all that are left."""
        while self.steps and self.steps[0].name != name:
            step = self.steps.pop(0)
            self.note(step.name)
            getattr(self, step.name.replace(" ", "_"))()

    def pass_by(self, name: str) -> None:
        """Run the steps before this one, and skip it: the caller does its work."""
        self.until(name)
        self.note(self.steps.pop(0).name)

    # ---- the steps

    def router(self) -> None:
        """Enter the block up to its experts; `chosen` are the arguments of their call."""
        overrides: dict[str, Any] = {"experts": stop}
        # The shared expert and its gate run later, during the combine; here they do
        # nothing.
        if self.has_shared:
            # computed in `shared_expert`
            overrides[self.family.block_shared] = lambda x: x
        if self.family.block_gate:
            overrides[self.family.block_gate] = lambda x: x[..., :1]
        if self.ep.scaled:
            overrides["router"] = self._choose
        try:
            stand_in = Recorder(self.block, overrides, self.tape)
            own_forward(self.block)(stand_in, self.m, **self.given)
        # A capacity limit, if there is one, changes the routing weights here.
        except LeaveForward as reached:
            self.chosen = capped(self.block.experts, reached.values)

    def _choose(self, x: Tensor) -> Any:
        """Find each token's experts in a router's dense scores (N, all experts)."""
        scores, logits = self.block.router(x)
        chosen = scores.topk(self.block.top_k, dim=1)
        # The block sums over all experts afterwards; the arriving rows already are that
        # sum, so one score of 1 represents all.
        self.tape.append(("router", (scores.new_ones(scores.shape[0], 1), logits)))
        # The block would call its experts next, with these arguments.
        raise LeaveForward(x, chosen.indices, chosen.values)

    def start_dispatch(self) -> None:
        """Send the tokens to their experts; a recomputation knows the sizes already."""
        rows, experts, weights = self.chosen
        self.dispatch = self.ep.start_dispatch(rows, experts, weights, self.call.sizes)
        self.chosen = ()
        # The recomputation must dispatch the same numbers of rows as the first pass.
        if self.call.keeps:
            self.call.sizes = self.dispatch.sizes

    def finish_dispatch(self) -> None:
        """Wait for the rows of this rank's experts."""
        self.rows, self.pairs = self.ep.finish_dispatch(self.dispatch)

    def experts(self) -> None:
        """Compute this rank's experts."""
        self.rows = self.ep.run_experts(self.block.experts, self.rows, self.pairs)

    def start_combine(self) -> None:
        """Send the outputs back. A recomputation sends nothing: the received rows are
        known or not needed.
        """
        self.ticket, self.combine = self.ep.start_combine(
            self.rows, self.pairs, self.dispatch.sizes, absent=self.again
        )
        del self.rows, self.pairs

    def shared_expert(self) -> None:
        """Compute the block's shared expert, and its gate."""
        if self.has_shared:
            self.shared = getattr(self.block, self.family.block_shared)(self.m)
            if self.family.block_gate:
                self.gate = getattr(self.block, self.family.block_gate)(self.m)

    def gated_shared(self) -> Any:
        """Return the shared expert's output as it is added to the stream."""
        if self.gate is None:
            return self.shared
        return torch.sigmoid(self.gate) * self.shared

    def finish_combine(self) -> None:
        """Wait for the routed output, and run the rest of the block inside its layer."""
        call = self.call
        if self.again:
            routed = Known.apply(self.ticket, call.own_routed)
        else:
            routed = OverlappedEP.finish_combine(
                self.ticket, self.combine, self.dispatch
            )
            call.own_routed = routed.detach() if call.keeps else None
        self.output = behind_experts(
            self.family, self.block, routed, self.m, self.tape, self.shared, self.gate
        )

    def handle(self) -> Handle:
        """Return a handle that finishes the combine elsewhere, without this layer's
        graph.
        """
        family, block, shape = self.family, self.block, self.m.shape
        has_shared, has_gate = self.has_shared, self.gate is not None
        # Detached, so that this layer's graph is not kept alive by the next one.
        tape = [(name, detached(out)) for name, out in self.tape]

        # The partial stream already includes the shared expert: zeros replace it here.
        def behind(routed: Tensor) -> Tensor:
            zero = routed.new_zeros(())
            shared, gate = zero if has_shared else None, zero if has_gate else None
            x = zero.expand(shape)
            out = behind_experts(family, block, routed, x, tape, shared, gate)
            return out[0] if isinstance(out, tuple) else out

        return Handle(self.dispatch, self.combine, behind, self.multiplier)


def behind_experts(
    family: Family,
    block: nn.Module,
    routed: Tensor,
    x: Tensor,
    tape: Any,
    shared: Any,
    gate: Any,
) -> Any:
    """Run the block's forward with recorded outputs of its router, its experts and its
    shared expert.

    FSDP may have freed the block's parameters by then, so every module that reads one
    needs a recorded output.
    """

    def constant(value: Tensor) -> Callable[[Tensor], Tensor]:
        def give(like: Tensor) -> Tensor:
            if not value.ndim:
                out = value.expand(like.shape)
            else:
                out = value.reshape(*like.shape[:-1], value.shape[-1])
            # A block that adds in place must not change a shared tensor.
            return out.clone() if family.shared_in_place or not value.ndim else out

        return give

    # The router's recorded outputs come first; then the experts return the routed sum.
    overrides = replay(tape) | {"experts": lambda *_, **__: routed}
    if shared is not None:
        overrides[str(family.block_shared)] = constant(shared)
    if gate is not None:
        overrides[str(family.block_gate)] = constant(gate)
    return own_forward(block)(View(block, overrides), x)
