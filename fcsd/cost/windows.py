"""How long each exchange of an expert-parallel layer may take before somebody waits for it: pure arithmetic.

Of an MoE layer k there are two windows, not one sum: its dispatch has what is computed between its start and its wait
(the core of attention and the output projection), its combine the shared expert and the next layer's queries, keys and
values. What an exchange takes beyond its own window is exposed, however much the other has left.

    windows(facts, seconds)  -> [(W_d, W_c) of each layer], from `fcsd.overlap.schedule`
    exposed(seconds, window) -> max(0, seconds - window)

Equation 9 of the FarSkip paper (T_d + T_c <= T_layer - T_experts - T_gate) is necessary for no exposed time, not
sufficient. In the backward pass every window is that of the forward pass doubled, as its computation is.
"""

from collections.abc import Mapping, Sequence

from fcsd.overlap.schedule import LayerFacts, Split, Step, schedule

Seconds = Mapping[str, float]
"""Seconds of a layer's steps by the names of `fcsd.overlap.schedule`; of a step that is not named 0."""

BACKWARD = 2.0
"""Backward computation over forward computation: gradients of inputs and of weights."""


def layer_facts(
    rewired: Sequence[bool],
    moe: Sequence[bool],
    attention: str,
    mlp: str,
    splits: Sequence[Split],
    *,
    inside: bool = False,
) -> list[LayerFacts | None]:
    """Return what the schedule of each layer depends on; None for a layer that is not rewired, whose exchanges block.

    attention, mlp: as in `Connectivity`. splits: where each layer's attention can be cut. inside: of a family whose
    layers keep their own combine (docs/overlap.md).
    """
    last = len(rewired) - 1
    carry = [
        rewired[k] and moe[k] and k < last and rewired[k + 1] and attention == "partial" and not inside
        for k in range(len(rewired))
    ]
    return [
        LayerFacts(moe[k], k > 0 and carry[k - 1], carry[k], mlp == "outdated", splits[k])
        if rewired[k]
        else None
        for k in range(len(rewired))
    ]


def windows(facts: Sequence[LayerFacts | None], seconds: Sequence[Seconds]) -> list[tuple[float, float]]:
    """Return for each layer the seconds computed beside its dispatch and beside its combine, in the forward pass.

    (0, 0) for a layer that is not rewired, or has no exchange.
    """
    found = [{"dispatch": 0.0, "combine": 0.0} for _ in facts]
    in_flight: set[tuple[int, str]] = set()
    for k, layer in enumerate(facts):
        for step in schedule(layer) if layer is not None else ():
            in_flight.discard(_waited(step, k))
            if step.starts is not None:
                in_flight.add((k, step.starts))
            for j, kind in in_flight:
                found[j][kind] += seconds[k].get(step.name, 0.0)
    return [(each["dispatch"], each["combine"]) for each in found]


def _waited(step: Step, k: int) -> tuple[int, str]:
    return (k - 1, "combine") if step.waits == "before" else (k, str(step.waits))


def exposed(seconds: float, window: float) -> float:
    """Return the seconds of an exchange that nothing is computed beside."""
    return max(0.0, seconds - window)


def equation_9(exchanges: float, seconds: Seconds) -> float:
    """Return (T_d + T_c) / (T_layer - T_experts - T_gate) of one layer: at most 1 where all could be hidden.

    exchanges: T_d + T_c. Necessary, not sufficient.
    """
    overlappable = sum(
        value for name, value in seconds.items() if name not in ("router", "experts", "arrive")
    )
    return exchanges / overlappable if overlappable else float("inf")


def serving_windows(
    rewired: Sequence[bool],
    moe: Sequence[bool],
    attention: str,
    mlp: str,
    seconds: Sequence[Seconds],
) -> list[tuple[float, ...]]:
    """Return for each layer the windows of its all-reduces (docs/serving.md).

    Two of an MoE layer: A_k of attention and shared expert beside the routed experts, R_k of the routed experts beside
    attention k+1. With `mlp: full` A_k is attention's and blocks; shared experts take a third, beside the routed ones,
    where attention k+1 does not wait for R_k. One of a rewired dense layer (attention and MLP summed), nothing beside
    it. Zeros where it blocks.
    """
    found: list[tuple[float, ...]] = []
    for k, each in enumerate(seconds):
        if not rewired[k]:
            found.append((0.0, 0.0))
        elif not moe[k]:
            found.append((0.0,) if mlp == "outdated" else (0.0, 0.0))
        else:
            follows = k + 1 < len(rewired) and rewired[k + 1] and attention == "partial"
            beside = ("attention a", "attention b")
            following = sum(seconds[k + 1].get(name, 0.0) for name in beside) if follows else 0.0
            experts = each.get("experts", 0.0)
            third = (experts,) if mlp == "full" and follows and each.get("shared expert") else ()
            found.append((experts if mlp == "outdated" else 0.0, following, *third))
    return found


def gain(exposed_share: float, overlap: float) -> float:
    """Return regular / overlapped time - 1, f v / (1 - f v): a share f of the time is exposed, v of it gets hidden."""
    hidden = exposed_share * overlap
    return hidden / (1 - hidden)
