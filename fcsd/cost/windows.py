"""How long each exchange of an expert-parallel layer may take before somebody waits for it: pure arithmetic.

Of an MoE layer k there are two windows, not one sum: its dispatch has what is computed between its start and its wait
(the core of attention and the output projection), its combine the shared expert and the next layer's queries, keys and
values: `fcsd.overlap.schedule.beside` says what. What an exchange takes beyond its own window is exposed, however much
the other has left.

Equation 9 of the FarSkip paper (T_d + T_c <= T_layer - T_experts - T_gate) is necessary for no exposed time, not
sufficient. In the backward pass every window is that of the forward pass doubled, as its computation is.
"""

from collections.abc import Mapping, Sequence

from fcsd.overlap.schedule import Computed

Seconds = Mapping[str, float]
"""Seconds of a layer's steps by the names of `fcsd.overlap.schedule`; of a step that is not named 0."""

BACKWARD = 2.0
"""Backward computation over forward computation: gradients of inputs and of weights."""


def window(computed: Computed, seconds: Sequence[Seconds]) -> float:
    """Return the seconds of what is computed beside an exchange. seconds: of each layer."""
    return sum((seconds[k].get(step, 0.0) for k, step in computed), 0.0)


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


def gain(exposed_share: float, overlap: float) -> float:
    """Return regular / overlapped time - 1, f v / (1 - f v): a share f of the time is exposed, v of it gets hidden."""
    hidden = exposed_share * overlap
    return hidden / (1 - hidden)
