"""Rewire the layers of an SGLang model before its weights are loaded: loaders, kernels
and caches see the stock model.

In most model files, a stock layer passes its unsummed output to a boundary, which sums
it before the next layer. The first rewired layer of a run starts at the boundary of its
attention, which completes the previous layer's sums. Within the run, layers keep their
sums in flight. The last layer returns a pair (stream, complete update), as at a pipeline
boundary. In other files, layers sum themselves and pass the pair (update, stream), or
the stream; see `Row.loop`.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.layer_boundary import PLAIN_ADD
from sglang.srt.layers.layer_boundary.adapters.attention import get_attn_tp_context
from sglang.srt.layers.layer_boundary.residual.batch import stream_of
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils import cpu_has_amx_support, is_cpu
from torch import nn

from fcsd_sglang.families import Row
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
    stack: Any, family: Family, row: Row, field: Field, communication: Communication
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
    mixers = [
        next((name for name in row.attention if hasattr(layer, name)), None)
        for layer in layers
    ]
    here = [mixer is not None for mixer in mixers]
    is_moe = [hasattr(getattr(layer, family.moe, None), "experts") for layer in layers]
    rewired = [k for k in field.layers if here[k]]
    for k in rewired:
        layer = layers[k]
        schedule = Schedule(
            **place(field, k, here, is_moe),
            layer=layer,
            attention=getattr(layer, str(mixers[k])),
            norms=tuple(getattr(layer, name) for name in family.norms),
            factor=getattr(layer, family.factor) if family.factor else 1.0,
            block=getattr(layer, family.moe),
            shared=None,
            communication=communication,
        )
        _take_apart(schedule, str(mixers[k]), family, row)
        layer.farskip_schedule = schedule
        layer.forward = _make_forward(schedule, str(mixers[k]), row)
    if row.rows_of_heads:
        _give_rows_of_tokens(stack)
    return rewired


def _give_rows_of_tokens(stack: nn.Module) -> None:
    """Make the queries that attention gets have a row for each token, not for each head.

    SGLang takes more rows than tokens for padding, and cuts them off
    (`padded_extend_real_tokens`).
    """

    def reshape(attention: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        queries, *rest = given
        width = attention.tp_q_head_num * attention.qk_head_dim
        return queries.reshape(-1, width), *rest

    for module in stack.modules():
        if isinstance(module, RadixAttention):
            module.register_forward_pre_hook(reshape)


def _take_apart(schedule: Schedule, mixer: str, family: Family, row: Row) -> None:
    """Make attention, block and shared experts of a layer return this rank's part of
    their sums.
    """
    layer, where = schedule.layer, f"layer {schedule.index}"
    block: Any = schedule.block
    attention: Any = getattr(layer, mixer)
    if getattr(attention, "use_dsa", False):
        raise Refused(
            f"{where}: sparse attention passes indices from layer to layer; serve with"
            " vLLM"
        )
    # A layer whose attention is a method holds its projections.
    is_module = isinstance(attention, nn.Module)
    _make_partial(
        attention.modules() if is_module else layer.children(), f"{where}: attention"
    )
    if schedule.dense:
        _make_partial(block.modules(), f"{where}: its MLP")
        return
    if getattr(block, "num_fused_shared_experts", 0):
        raise Refused(
            f"{where}: shared experts are fused with the routed ones; use"
            " --disable-shared-experts-fusion"
        )
    if getattr(block, "_fuse_shared_experts_inside_sbo", False):
        raise Refused(
            f"{where}: shared experts run inside single-batch overlap; leave it off"
        )
    block.experts.reduce_results = False
    if row.ranks:
        setattr(block, row.ranks, 1)
    in_layer = bool(family.shared)
    shared: Any = getattr(
        layer if in_layer else block, family.shared or row.shared, None
    )
    if shared is not None:
        if hasattr(block, "forward_cpu") and is_cpu() and cpu_has_amx_support():
            raise Refused(
                f"{where}: SGLang's AMX kernels add shared to routed experts; serve"
                " with vLLM"
            )
        _make_partial(shared.modules(), f"{where}: its shared experts")
        schedule.shared = shared if in_layer else _take_shared(block, shared)
    schedule.block = _routed(block, row, clones=shared is not None)


def _take_shared(block: Any, shared: Any) -> Any:
    """Return the function of a block's shared experts, which the block then leaves out."""
    if hasattr(block, "_forward_shared_experts"):  # with their gate
        compute = block._forward_shared_experts
        block._forward_shared_experts = _nothing
    else:
        compute = shared.forward
        shared.forward = _nothing
    return compute


def _routed(block: Any, row: Row, clones: bool) -> Any:
    """Return the function of a block's routed experts.

    The block's `forward` may add shared experts on another stream. SGLang's kernels
    write into their input, which the shared experts of `mlp: full` read later.
    """
    method = getattr(block, row.routed)

    def routed(hidden_states: torch.Tensor) -> Any:
        out = method(hidden_states.clone() if clones else hidden_states)
        return out[-1] if isinstance(out, tuple) else out

    return routed


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Replace the shared experts of a block, which are computed apart from it."""


def _make_partial(modules: Iterable[nn.Module], what: str) -> None:
    """Make modules return this rank's part of their sum; raise Refused unless every rank
    of the group contributes one.
    """
    rows = [module for module in modules if isinstance(module, RowParallelLinear)]
    ranks = get_parallel().tp_size
    if (
        len(rows) != 1
        or rows[0].use_decode_attn_tp
        or rows[0].input_size != rows[0].input_size_per_partition * ranks
    ):
        raise Refused(
            f"{what} cannot be summed once over all {ranks} ranks; leave off options"
            " that replicate or regroup projections"
        )
    rows[0].reduce_results = False


def _make_forward(schedule: Schedule, mixer: str, row: Row) -> Callable[..., Any]:
    """Return the forward of a rewired layer, called as SGLang's loop calls the stock one."""
    layer: Any = schedule.layer
    names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
    attention: Any = getattr(layer, mixer)
    if isinstance(attention, nn.Module):
        attention = attention.forward
    takes = set(inspect.signature(attention).parameters) - {"hidden_states"}
    enter, leave = _LOOPS[row.loop]

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
        base, routed, read = enter(schedule, arguments)
        attended = getattr(layer, mixer)(
            hidden_states=read,
            **{name: arguments[name] for name in takes if name in arguments},
        )
        if isinstance(attended, tuple):
            attended = attended[0]
        get_attn_tp_context().clear_attn_inputs()
        outputs = schedule.after_attention(schedule.scaled(attended), base, routed)
        values: tuple[Any, ...]
        if schedule.carries and not schedule.ends_stage:
            values = (InFlight(*outputs),)
            if row.loop == "pair":
                values += (None,)
        else:
            if schedule.carries:
                outputs = schedule.finished(*outputs)
            values = leave(*outputs, arguments["forward_batch"])
        if row.gives_more:
            values += (None,)
        return values if len(values) > 1 else values[0]

    return forward


_Entered = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""The stream that attention reads, the part that it does not read, and the stream after
the norm."""


def _enter_boundary(schedule: Schedule, arguments: dict[str, Any]) -> _Entered:
    hidden_states, batch = arguments["hidden_states"], arguments["forward_batch"]
    boundary: Any = schedule.layer.attn_boundary
    if not schedule.receives:
        read = boundary.prepare(hidden_states, batch)
        return stream_of(batch).residual, None, read
    if schedule.begins_stage:
        routed, base = stream_of(batch).export(hidden_states)
        read = schedule.norms[0](base)
    else:
        base, routed, read = _received(schedule, hidden_states)
    entry = boundary.entry(batch)
    if entry.attn_input_adapter is not None:  # MLA reads its input from there
        read = entry.attn_input_adapter(read, batch, boundary.plan.qkv_latent_func)
    return base, routed, read


def _leave_boundary(
    stream: torch.Tensor, update: torch.Tensor, batch: Any
) -> tuple[Any, ...]:
    boundary = stream_of(batch)
    boundary.write(stream)
    return (boundary.record(update, PLAIN_ADD),)


def _enter_pair(schedule: Schedule, arguments: dict[str, Any]) -> _Entered:
    hidden_states, residual = arguments["hidden_states"], arguments["residual"]
    if schedule.receives:
        return _received(schedule, hidden_states)
    if residual is None:
        return _enter_stream(schedule, arguments)
    read, base = schedule.norms[0](hidden_states, residual)
    return base, None, read


def _leave_pair(
    stream: torch.Tensor, update: torch.Tensor, batch: Any
) -> tuple[Any, ...]:
    return update, stream


def _enter_stream(schedule: Schedule, arguments: dict[str, Any]) -> _Entered:
    hidden_states = arguments["hidden_states"]
    if schedule.receives:
        return _received(schedule, hidden_states)
    return hidden_states, None, schedule.norms[0](hidden_states)


def _leave_stream(
    stream: torch.Tensor, update: torch.Tensor, batch: Any
) -> tuple[Any, ...]:
    return (stream + update,)


def _received(schedule: Schedule, before: InFlight) -> _Entered:
    """Return what the rewired layer before has passed on."""
    base, read = schedule.attention_input(before.stream, before.flight)
    return base, before.routed, read


_LOOPS: dict[str, tuple[Callable[..., _Entered], Callable[..., tuple[Any, ...]]]] = {
    "boundary": (_enter_boundary, _leave_boundary),
    "pair": (_enter_pair, _leave_pair),
    "stream": (_enter_stream, _leave_stream),
}
"""`Row.loop` -> how a layer reads what it is called with, and what it returns at the end
of a run."""
