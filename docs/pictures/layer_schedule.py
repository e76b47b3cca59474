"""Place the operations of a decoder layer, regular and FarSkip, on a compute and a network queue.

The order is that of FarSkip-Collective, section 4.1. Operations are placed by what they read and on which queue they
run, so the picture shows no overlap that the connectivity does not allow. Standard library only.

Not covered: real durations (`DURATIONS` is chosen for legibility), and the backward pass.
"""

from collections.abc import Iterable
from dataclasses import dataclass

DURATIONS = {
    "q, k, v": 4.5,
    "core attention": 7.5,
    "router": 2.75,
    "dispatch": 5.0,
    "routed experts": 7.5,
    "combine": 5.5,
    "shared": 3.5,
}


@dataclass(frozen=True)
class Operation:
    """One operation of a layer; `reads` are those, as (name, layer), whose results it needs."""

    name: str
    layer: int
    reads: tuple[tuple[str, int], ...]


def queue(name: str) -> str:
    return "network" if name in ("dispatch", "combine") else "compute"


def stream(k: int) -> tuple[tuple[str, int], ...]:
    """Name what o_k is the sum of, beside o_{k-1}: what attention, shared and routed experts of layer k add."""
    return ("core attention", k), ("shared", k), ("combine", k)


def regular_layer(k: int) -> list[Operation]:
    """List a layer's operations in the order in which they are started: h = o + attn(o), then h + moe(h).

    The shared experts are computed before the combine is started, as a blocking collective wants it.
    """
    return [
        Operation("q, k, v", k, stream(k - 1)),
        Operation("core attention", k, (("q, k, v", k),)),
        Operation("router", k, (("core attention", k),)),
        Operation("dispatch", k, (("router", k),)),
        Operation("routed experts", k, (("dispatch", k),)),
        Operation("shared", k, (("core attention", k),)),
        Operation("combine", k, (("routed experts", k), ("shared", k))),
    ]


def farskip_layer(k: int) -> list[Operation]:
    """List a layer's operations in the order in which they are started (section 4.1, steps 1 to 8).

    Attention reads o_{k-1} - routed_{k-1}, the MoE block o_{k-1}.
    """
    return [
        Operation("q, k, v", k, stream(k - 1)[:2]),
        Operation("router", k, stream(k - 1)),
        Operation("dispatch", k, (("router", k),)),
        Operation("core attention", k, (("q, k, v", k),)),
        Operation("routed experts", k, (("dispatch", k),)),
        Operation("combine", k, (("routed experts", k),)),
        Operation("shared", k, stream(k - 1)),
    ]


def schedule(
    operations: Iterable[Operation],
) -> dict[tuple[str, int], tuple[float, float]]:
    """Place operations on two queues: each starts when its queue is free and all that it reads is there.

    Returns: (name, layer) -> (start, end). What no listed operation produces is there from the beginning.
    """
    free = {"compute": 0.0, "network": 0.0}
    placed: dict[tuple[str, int], tuple[float, float]] = {}
    for one in operations:
        ready = [placed[need][1] for need in one.reads if need in placed]
        start = max([free[queue(one.name)], *ready])
        end = start + DURATIONS[one.name]
        placed[one.name, one.layer] = (start, end)
        free[queue(one.name)] = end
    return placed
