"""The order of a rewired layer's steps: the computation of each, the exchange it
starts, and the one it waits for.

Pure data: the runtime (`fcsd.parallel.overlap.layer`) runs it, and `beside` tells which
computation hides which exchange. In an MoE layer k, D is the dispatch of its tokens to
the experts' ranks, and C the combine that brings the experts' outputs back:

    attention a | wait C(k-1) | router | start D | attention b | wait D | experts | start C | shared expert

C(k-1) runs beside the shared expert of layer k-1 and part a of attention (norm,
queries, keys, values), D beside part b (the rest of it). The backward pass is the
mirror image: each start becomes a wait and each wait a start.

Not covered: durations; pipeline parallelism.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["core", "start", "end"]
"""Where attention is cut in two: between queries and core, or not at all, so that all
of it is part b (start) or part a (end).
"""


@dataclass(frozen=True)
class Step:
    """One step; the runtime calls it by its `name`.

    starts, waits: "dispatch" or "combine" of this layer; "before": the combine of the
    previous layer.
    """

    name: str
    starts: str | None = None
    waits: str | None = None


ATTENTION_A = Step("attention a")
ATTENTION_B = Step("attention b")
ARRIVE = Step("arrive", waits="before")
ROUTER = Step("router")
START_DISPATCH = Step("start dispatch", starts="dispatch")
FINISH_DISPATCH = Step("finish dispatch", waits="dispatch")
EXPERTS = Step("experts")
START_COMBINE = Step("start combine", starts="combine")
SHARED = Step("shared expert")
FINISH_COMBINE = Step("finish combine", waits="combine")
MLP = Step("mlp")

_DISPATCH = (ROUTER, START_DISPATCH)
_EXPERTS = (FINISH_DISPATCH, EXPERTS, START_COMBINE)
_ATTENTION = (ATTENTION_A, ATTENTION_B)


BLOCK = (*_DISPATCH, SHARED, *_EXPERTS, FINISH_COMBINE)
"""Steps of an MoE block that is run by itself, inside its layer."""


@dataclass(frozen=True)
class LayerFacts:
    """The facts about a layer that its schedule depends on.

    moe: it has routed experts. incoming: the combine of the previous layer is in flight
    when it begins. outgoing: the next layer waits for this one's. outdated: its MLP
    reads the stream without this layer's attention.
    """

    moe: bool = True
    incoming: bool = False
    outgoing: bool = False
    outdated: bool = True
    split: Split = "core"


def schedule(layer: LayerFacts) -> tuple[Step, ...]:
    """Return the steps of a layer in their order."""
    arrive = (ARRIVE,) if layer.incoming else ()
    finish = () if layer.outgoing else (FINISH_COMBINE,)
    # A dense layer exchanges nothing; the combine of the layer before it ends after its
    # attention.
    if not layer.moe:
        return (*_ATTENTION, *arrive, MLP)
    if not layer.outdated or (layer.incoming and layer.split == "end"):
        # No part of attention is left to hide the dispatch, so the shared expert does.
        return (*_ATTENTION, *arrive, *BLOCK[:-1], *finish)
    # The full overlap: part a of attention runs beside the combine that comes in, part
    # b beside the dispatch.
    if layer.incoming and layer.split == "core":
        return (
            ATTENTION_A,
            *arrive,
            *_DISPATCH,
            ATTENTION_B,
            *_EXPERTS,
            SHARED,
            *finish,
        )
    # Attention as a whole runs beside the dispatch, and the combine beside what comes
    # behind it.
    if layer.incoming or layer.outgoing or layer.split != "core":
        return (*arrive, *_DISPATCH, *_ATTENTION, *_EXPERTS, SHARED, *finish)
    # No combine is in flight between this layer and its neighbours, so both of its
    # exchanges run beside its own attention.
    return (*_DISPATCH, ATTENTION_A, *_EXPERTS, ATTENTION_B, SHARED, *finish)


Computed = list[tuple[int, str]]
"""The steps between the start of an exchange and its wait: layer and name of each, in
order.
"""


def layer_facts(
    rewired: Sequence[bool],
    moe: Sequence[bool],
    attention: str,
    mlp: str | Collection[int],
    splits: Iterable[Split] | None = None,
    *,
    inside: bool = False,
) -> list[LayerFacts | None]:
    """Return the facts of each layer; None for a layer that is not rewired, whose
    exchanges block.

    attention, mlp: as in `Connectivity`. splits: where each layer's attention can be
    cut; None: before the core in all of them. inside: the layers of the family wait for
    their own combine (docs/scale.md).
    """
    last = len(rewired) - 1
    # A combine stays in flight only into a rewired layer whose attention reads the
    # partial stream.
    may_carry = attention == "partial" and not inside
    carry = [
        may_carry and k < last and rewired[k] and moe[k] and rewired[k + 1]
        for k in range(len(rewired))
    ]
    outdated = _outdated(rewired, mlp)
    cuts: list[Split] = ["core"] * len(rewired) if splits is None else list(splits)
    return [
        LayerFacts(moe[k], k > 0 and carry[k - 1], carry[k], outdated[k], cuts[k])
        if is_rewired
        else None
        for k, is_rewired in enumerate(rewired)
    ]


def _outdated(rewired: Sequence[bool], mlp: str | Collection[int]) -> list[bool]:
    """Return whether the MLP side of each layer reads the outdated stream; mlp: as in the
    `farskip` field.
    """
    if isinstance(mlp, str):
        return [is_rewired and mlp == "outdated" for is_rewired in rewired]
    return [is_rewired and k in mlp for k, is_rewired in enumerate(rewired)]


def beside(facts: Sequence[LayerFacts | None]) -> list[dict[str, Computed]]:
    """Return, for each layer, the steps beside its "dispatch" and beside its "combine"
    in the forward pass.

    There are none where an exchange blocks, or the layer has none. The backward pass is
    the mirror image.
    """
    computed: list[dict[str, Computed]] = [
        {"dispatch": [], "combine": []} for _ in facts
    ]
    in_flight: set[tuple[int, str]] = set()
    for k, layer in enumerate(facts):
        for step in schedule(layer) if layer is not None else ():
            # A step waits before it computes, and what it starts travels from then on.
            in_flight.discard(
                (k - 1, "combine") if step.waits == "before" else (k, str(step.waits))
            )
            if step.starts is not None:
                in_flight.add((k, step.starts))
            for j, kind in in_flight:
                computed[j][kind].append((k, step.name))
    return computed


def served_beside(
    rewired: Sequence[bool],
    moe: Sequence[bool],
    attention: str,
    mlp: str | Collection[int],
    shared: Sequence[bool],
) -> list[tuple[Computed, ...]]:
    """Return, for each layer, the steps that a server computes beside its all-reduces
    (docs/serve.md).

    An MoE layer has two: A_k, of attention and the shared expert, runs beside the
    routed experts, and R_k, of the routed experts, beside attention k+1. With `mlp:
    full`, A_k is that of attention alone, and blocks; shared experts have a third one,
    beside the routed experts, where attention k+1 does not wait for R_k. A rewired
    dense layer has one (attention and MLP summed), with nothing beside it. An
    all-reduce that blocks has nothing beside it.

    shared: layers that have a shared expert.
    """
    outdated = _outdated(rewired, mlp)
    computed: list[tuple[Computed, ...]] = []
    for k, is_rewired in enumerate(rewired):
        # A regular layer has two all-reduces, which block; a rewired dense layer sums
        # both.
        if not is_rewired or not moe[k]:
            computed.append(([],) if is_rewired and outdated[k] else ([], []))
            continue
        follows = k + 1 < len(rewired) and rewired[k + 1] and attention == "partial"
        following: Computed = (
            [(k + 1, step.name) for step in _ATTENTION] if follows else []
        )
        experts: Computed = [(k, EXPERTS.name)]
        third = (experts,) if not outdated[k] and follows and shared[k] else ()
        computed.append((experts if outdated[k] else [], following, *third))
    return computed


def is_with_mixer(k: int, rewired: Sequence[bool], moe: Sequence[bool]) -> bool:
    """Tell whether a server computes layer k, of experts, with the mixer before it as one
    layer, where each layer is one branch: both are rewired.
    """
    if not 0 < k < len(rewired):
        return False
    return rewired[k - 1] and rewired[k] and moe[k] and not moe[k - 1]


def served_branches(
    rewired: Sequence[bool],
    moe: Sequence[bool],
    attention: str,
    mlp: str | Collection[int],
    shared: Sequence[bool],
) -> list[tuple[Computed, ...]]:
    """Return what `served_beside` does, of a model in which each layer is one branch.

    A rewired mixer is summed with the shared expert of a rewired MoE layer behind it:
    A_k is in that layer, beside its routed experts; with `mlp: full` it is of the mixer
    alone, and blocks. A mixer alone has one all-reduce, which blocks. R_k runs beside
    the next layer, if that does not wait for it; then shared experts that are not in A_k
    have an all-reduce of their own, beside the routed experts.
    """
    outdated = _outdated(rewired, mlp)
    computed: list[tuple[Computed, ...]] = []
    for k, is_rewired in enumerate(rewired):
        if not is_rewired or not moe[k]:
            computed.append(() if is_with_mixer(k + 1, rewired, moe) else ([],))
            continue
        follows = (
            k + 1 < len(rewired)
            and rewired[k + 1]
            and (outdated[k + 1] if moe[k + 1] else attention == "partial")
        )
        steps = (*_ATTENTION, MLP, SHARED, EXPERTS) if follows else ()
        following: Computed = [(k + 1, step.name) for step in steps]
        experts: Computed = [(k, EXPERTS.name)]
        alone = (experts,) if follows and shared[k] else ()
        if not is_with_mixer(k, rewired, moe):
            computed.append((*alone, following))
        elif outdated[k]:
            computed.append((experts, following))
        else:
            computed.append(([], *alone, following))
    return computed
