"""The order of a rewired layer's steps: what each computes, which exchange it starts and which it waits for.

Pure data: the runtime (`fcsd.overlap.layer`) runs it. Of an MoE layer k, with D the dispatch of its tokens to the
experts' ranks and C the combine that brings the experts' outputs back:

    attention a | wait C(k-1) | router | start D | attention b | wait D | experts | start C | shared expert

C(k-1) runs beside the shared expert of layer k-1 and part a of attention (norm, queries, keys, values), D beside part b
(the rest of it). The backward pass is the mirror image: each start becomes a wait and each wait a start.

Not covered: how long anything takes; pipeline parallelism.
"""

from dataclasses import dataclass
from typing import Literal

Split = Literal["core", "start", "end"]
"""Where attention is cut in two: between queries and core, or not at all: all of it is part b (start) or a (end)."""


@dataclass(frozen=True)
class Step:
    """One step; `name` is what the runtime calls it by.

    starts, waits: "dispatch" or "combine" of this layer; "before": the combine of the layer before.
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
"""Of an MoE block that is taken by itself, inside its layer."""


@dataclass(frozen=True)
class LayerFacts:
    """What the schedule of a layer depends on.

    moe: it has routed experts. incoming: the combine of the layer before is in flight when it begins. outgoing: the
    next layer waits for this one's. outdated: its MLP reads the stream without this layer's attention.
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
    if not layer.moe:
        return (*_ATTENTION, *arrive, MLP)
    if not layer.outdated or (layer.incoming and layer.split == "end"):
        # Nothing is left of attention to run beside the dispatch: the shared expert does.
        return (*_ATTENTION, *arrive, *BLOCK[:-1], *finish)
    if layer.incoming and layer.split == "core":
        return (ATTENTION_A, *arrive, *_DISPATCH, ATTENTION_B, *_EXPERTS, SHARED, *finish)
    if layer.incoming or layer.outgoing or layer.split != "core":
        return (*arrive, *_DISPATCH, *_ATTENTION, *_EXPERTS, SHARED, *finish)
    # No layer waits for its combine and none is waited for: both exchanges run beside its own attention.
    return (*_DISPATCH, ATTENTION_A, *_EXPERTS, ATTENTION_B, SHARED, *finish)
