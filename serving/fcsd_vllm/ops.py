"""The parts of a rewired layer as opaque custom ops, with start and wait inside.

Inductor sees data dependencies only, and moves traced starts and waits: it fuses a wait
with norms and so hoists it to its start, and on CPUs it read buffers before an in-place
sum had written them (log-probabilities off by 2.9). It can neither move nor fuse an op
that returns newly allocated memory and takes everything that must precede it as
arguments.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import direct_register_custom_op

from fcsd_vllm.refusals import Refused

_LIBRARY = Library("fcsd", "FRAGMENT")


def _schedule(name: str) -> Any:
    """Return the layer with this name in this engine; each engine in a process has a
    table.

    Raises:
        Refused: vLLM captures a piecewise graph, which would end with sums in flight.
            It chooses the kind of graph again once it knows its attention kernels,
            after `keep_whole_graphs`.
    """
    context = get_forward_context()
    schedule = context.no_compile_layers[name]
    at_once = getattr(schedule.communication, "at_once", False)
    if (
        context.cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE
        and not at_once
        and not is_breakable_cudagraph_enabled()
    ):
        raise Refused(
            "fcsd-serving: vLLM captures piecewise graphs, which end where FarSkip has"
            " sums in flight (its attention kernels or speculation do not support full"
            " graphs); set VLLM_USE_BREAKABLE_CUDAGRAPH=1, with which sums start and end"
            ' between them, or --compilation-config \'{"cudagraph_mode": "NONE"}\''
        )
    return schedule


def attention_input(
    stream: torch.Tensor, flight: torch.Tensor | None, routed: torch.Tensor, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Schedule.attention_input`; `routed` is in flight, and only marks that its
    start comes first.
    """
    return _schedule(layer).attention_input(stream, flight)


def layer_input(
    stream: torch.Tensor, routed: torch.Tensor | None, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ExchangeSchedule.layer_input`."""
    return _schedule(layer).layer_input(stream, routed)


def after_attention(
    attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Schedule.after_attention`, with only a routed output in flight at its
    end.
    """
    return _schedule(layer).after_attention(attention, base, routed)


def after_attention_in_flight(
    attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None, layer: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Schedule.after_attention`, with two collectives in flight at its end."""
    return _schedule(layer).after_attention(attention, base, routed)


def after_attention_normed(
    attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `NormedSchedule.after_attention`, with two sums in one collective in flight
    at its end."""
    return _schedule(layer).after_attention(attention, base, routed)


def finish(
    stream: torch.Tensor, routed: torch.Tensor, flight: torch.Tensor | None, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Schedule.finished`."""
    schedule = _schedule(layer)
    if flight is None:
        return schedule.finished(stream, routed)
    return schedule.finished(stream, routed, flight)


def _like(place: int, number: int) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return an operator's fake implementation for compilers: `count` outputs like one
    of its arguments.
    """
    return lambda *tensors: tuple(
        torch.empty_like(tensors[place]) for _ in range(number)
    )


def _two_sums(
    attention: torch.Tensor, base: torch.Tensor, routed: torch.Tensor | None, layer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of `after_attention_normed` for compilers."""
    return torch.empty_like(base), base.new_empty(base.shape[0], 2 * base.shape[1])


_FAKES = {
    attention_input: _like(0, 2),
    layer_input: _like(0, 2),
    after_attention: _like(1, 2),
    after_attention_in_flight: _like(1, 3),
    after_attention_normed: _two_sums,
    finish: _like(0, 2),
}
for _op, _fake in _FAKES.items():
    direct_register_custom_op(
        op_name=_op.__name__,
        op_func=_op,
        mutates_args=[],
        fake_impl=_fake,
        target_lib=_LIBRARY,
    )
