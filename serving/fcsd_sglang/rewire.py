"""Rewire the layers of an SGLang model before its weights are loaded: loaders, kernels
and caches see the stock model.

A stock layer passes its unsummed output to a boundary, which sums it before the next
layer. The first rewired layer of a run starts at the boundary of its attention, which
completes the previous layer's sums. Within the run, layers keep their sums in flight.
The last layer returns a pair (stream, complete update), as at a pipeline boundary.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.layer_boundary import PLAIN_ADD
from sglang.srt.layers.layer_boundary.adapters.attention import get_attn_tp_context
from sglang.srt.layers.layer_boundary.residual.batch import stream_of
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import cpu_has_amx_support, is_cpu
from torch import nn

from fcsd_sglang.families import GIVES_PAIR
from fcsd_vllm.communication import Communication
from fcsd_vllm.families import Family
from fcsd_vllm.field import Field
from fcsd_vllm.refusals import Refused
from fcsd_vllm.schedule import Schedule, place


class InFlight(NamedTuple):
    """What a rewired layer passes to the next instead of hidden states; see
    `Schedule.after_attention`.
    """

    stream: torch.Tensor
    routed: torch.Tensor
    flight: torch.Tensor | None = None


def rewire(
    stack: Any, family: Family, field: Field, communication: Communication
) -> list[int]:
    """Rewire the selected layers that this rank holds, in place.

    Args:
        stack: the module with `layers`; layers of other pipeline stages are
            placeholders without attention.

    Returns:
        The indices of the rewired layers.

    Raises:
        Refused: the schedule cannot express a layer.
    """
    layers: list[Any] = list(stack.layers)
    here = [hasattr(layer, "self_attn") for layer in layers]
    is_moe = [bool(getattr(layer, "is_layer_sparse", False)) for layer in layers]
    rewired = [k for k in field.layers if here[k]]
    for k in rewired:
        layer = layers[k]
        schedule = Schedule(
            **place(field, k, here, is_moe),
            layer=layer,
            norms=(layer.input_layernorm, layer.post_attention_layernorm),
            factor=1.0,
            block=layer.mlp,
            shared=None,
            communication=communication,
        )
        _take_apart(schedule)
        layer.farskip_schedule = schedule
        layer.forward = _make_forward(
            schedule, gives_pair=family.model_type in GIVES_PAIR
        )
    return rewired


def _take_apart(schedule: Schedule) -> None:
    """Make attention, block and shared experts of a layer return this rank's part of
    their sums.
    """
    layer, where = schedule.layer, f"layer {schedule.index}"
    block: Any = schedule.block
    parts: list[Any] = [layer.self_attn]
    if getattr(layer.self_attn, "use_dsa", False):
        raise Refused(
            f"{where}: sparse attention passes indices from layer to layer; serve with"
            " vLLM"
        )
    if schedule.dense:
        parts.append(block)
    else:
        if getattr(block, "num_fused_shared_experts", 0):
            raise Refused(
                f"{where}: shared experts are fused with the routed ones; use"
                " --disable-shared-experts-fusion"
            )
        if getattr(block, "_fuse_shared_experts_inside_sbo", False):
            raise Refused(
                f"{where}: shared experts run inside single-batch overlap; leave it off"
            )
        schedule.block = _routed(block)
        if getattr(block, "shared_experts", None) is not None:
            if hasattr(block, "forward_cpu") and is_cpu() and cpu_has_amx_support():
                raise Refused(
                    f"{where}: SGLang's AMX kernels add shared to routed experts;"
                    " serve with vLLM"
                )
            parts.append(block.shared_experts)
            schedule.shared = block._forward_shared_experts
            block._forward_shared_experts = _nothing
    for part in parts:
        _check_partial(part, where)


def _routed(block: Any) -> Any:
    """Return the function of a block's routed experts.

    The block's `forward` may add shared experts on another stream. SGLang's kernels
    write into their input, which the shared experts of `mlp: full` read later.
    """
    if getattr(block, "shared_experts", None) is None:
        return block.forward_normal
    return lambda hidden_states: block.forward_normal(hidden_states.clone())


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replace the shared experts of a block, which are computed apart from it."""


def _check_partial(part: nn.Module, where: str) -> None:
    """Raise Refused unless every rank of the group contributes a part of the sum."""
    rows = [
        module for module in part.modules() if isinstance(module, RowParallelLinear)
    ]
    ranks = get_parallel().tp_size
    if (
        len(rows) != 1
        or rows[0].reduce_results
        or rows[0].input_size != rows[0].input_size_per_partition * ranks
    ):
        raise Refused(
            f"{where}: {type(part).__name__} is not summed over all {ranks} ranks;"
            " leave off options that replicate or regroup projections"
        )


def _make_forward(schedule: Schedule, gives_pair: bool) -> Callable[..., Any]:
    """Return the forward of a rewired layer, called as SGLang's loop calls the stock one."""
    layer: Any = schedule.layer
    names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
    takes = set(inspect.signature(type(layer.self_attn).forward).parameters) & set(
        names
    ) - {"hidden_states"}

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if (
            arguments.get("captured_last_layer_outputs") is not None
            or arguments.get("capture_output") is not None
        ):
            raise Refused(
                f"layer {schedule.index}: SGLang reads the stream after this layer,"
                " where FarSkip has sums in flight"
            )
        batch = arguments["forward_batch"]
        base, routed, read = _enter(schedule, arguments["hidden_states"], batch)
        attention = layer.self_attn(
            hidden_states=read,
            **{name: arguments[name] for name in takes if name in arguments},
        )
        get_attn_tp_context().clear_attn_inputs()
        outputs = schedule.after_attention(attention, base, routed)
        if schedule.carries and not schedule.ends_stage:
            out: Any = InFlight(*outputs)
        else:
            stream, update = (
                schedule.finished(*outputs) if schedule.carries else outputs
            )
            boundary = stream_of(batch)
            boundary.write(stream)
            out = boundary.record(update, PLAIN_ADD)
        return (out, None) if gives_pair else out

    return forward


def _enter(
    schedule: Schedule, hidden_states: Any, batch: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the stream that attention reads, the part that it does not read, and the
    stream after the norm.
    """
    boundary: Any = schedule.layer.attn_boundary
    if not schedule.receives:
        read = boundary.prepare(hidden_states, batch)
        return stream_of(batch).residual, None, read
    if schedule.begins_stage:
        routed, base = stream_of(batch).export(hidden_states)
        read = schedule.norms[0](base)
    else:
        routed = hidden_states.routed
        base, read = schedule.attention_input(
            hidden_states.stream, hidden_states.flight
        )
    entry = boundary.entry(batch)
    if entry.attn_input_adapter is not None:  # MLA reads its input from there
        read = entry.attn_input_adapter(read, batch, boundary.plan.qkv_latent_func)
    return base, routed, read
