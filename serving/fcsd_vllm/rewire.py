"""Rewire the layers of a vLLM model before weights are loaded: loaders, kernels, caches
and LoRA see the stock model.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import RowParallelLinear

from fcsd_vllm import ops  # noqa: F401  defines torch.ops.fcsd
from fcsd_vllm.communication import Communication
from fcsd_vllm.exchange import Exchange
from fcsd_vllm.exchange_schedule import ExchangeSchedule, call_before_kernel
from fcsd_vllm.families import Family
from fcsd_vllm.field import Field
from fcsd_vllm.normed_schedule import NormedSchedule
from fcsd_vllm.refusals import MONOLITHIC, Refused
from fcsd_vllm.schedule import Schedule, branches, layer_name, pair, place
from fcsd_vllm.transports import Transport
from fcsd_vllm.versions import missing


def rewire(
    stack: nn.Module,
    family: Family,
    field: Field,
    communication: Communication | Transport,
    table: dict[str, Any],
    version: str,
) -> list[int]:
    """Rewire the selected layers that this rank holds, in place.

    Args:
        stack: the module with `layers`; layers of other pipeline stages are
            placeholders without attention.
        table: the dict in which the custom ops look up layers by name.
        version: vLLM's version, for messages about a missing internal.

    Returns:
        The indices of the rewired layers.

    Raises:
        Refused: the schedule cannot express a layer.
        EngineError: an internal of vLLM is missing.
    """
    layers: list[Any] = list(stack.layers)  # type: ignore[arg-type]
    here = [_attention(layer, family) is not None for layer in layers]
    is_moe = [
        here[k] and _runner(getattr(layer, family.moe)) is not None
        for k, layer in enumerate(layers)
    ]
    rewired = [k for k in field.layers if here[k]]
    for k in rewired:
        _check_forward(layers[k], k)
    places = (
        branches(field, here, is_moe)
        if family.one_branch
        else (place(field, k, here, is_moe) for k in rewired)
    )
    for placed in places:
        schedule = _schedule(placed, layers, family, communication, table, version)
        table[schedule.name] = schedule
        first, last = schedule.first, schedule.index
        layers[first].forward = functools.partial(
            _forward, schedule, family, _taken(schedule.attention, family)
        )
        for k in range(first + 1, last + 1):
            layers[k].forward = _hand_on
    return rewired


def _schedule(
    placed: dict[str, Any],
    layers: list[Any],
    family: Family,
    communication: Communication | Transport,
    table: dict[str, Any],
    version: str,
) -> Schedule:
    """Return the schedule of one rewired layer, or of a mixer and the experts behind it;
    its parts give this rank's part of their sums.
    """
    first, last = layers[placed["first"]], layers[placed["index"]]
    attention, block = _attention(first, family), getattr(last, family.moe)
    if family.one_branch and first is last:
        attention, block = (attention, None) if placed["dense"] else (None, block)
    parts: dict[str, Any] = {
        **placed,
        "layer": first,
        "attention": attention,
        "norms": (getattr(first, family.norms[0]), getattr(last, family.norms[1])),
        "factor": getattr(first, family.factor) if family.factor else 1.0,
        "block": block,
        "shared": None,
        "communication": communication,
    }
    before = table.get(layer_name(placed["first"] - 1))
    if isinstance(communication, Transport):
        return _exchanging(parts, getattr(before, "exchange", None), family, version)
    schedule = (
        NormedSchedule(**parts, before=before)
        if family.normed_sums
        else Schedule(**parts)
    )
    _give_partial_sums(schedule, family, version)
    return schedule


def _taken(attention: Any, family: Family) -> tuple[str, ...]:
    """Return the arguments of a layer that its attention takes by name; none if that is
    an MLP, or missing.
    """
    if attention is None:
        return ()
    names = set(inspect.signature(attention.forward).parameters)
    return tuple(sorted(names & {*family.arguments, _OUTPUT}))


_OUTPUT = "output"
"""Argument of an attention module that writes its output into memory it is given."""


def used_functions(
    stack: nn.Module, family: Family, rewired: list[int]
) -> list[Callable[..., Any]]:
    """Return the forwards that rewired layers replace or call, and the forward that
    loops over the layers.
    """
    layers: list[Any] = [stack.layers[k] for k in rewired]  # type: ignore[index]
    parts = [
        part
        for layer in layers
        for part in (
            layer,
            _attention(layer, family),
            getattr(layer, family.moe),
            getattr(layer, family.shared) if family.shared else None,
        )
        if part is not None
    ]
    return [type(part).forward for part in (stack, *parts)]


def _check_forward(layer: nn.Module, k: int) -> None:
    """Refuse a layer with a wrapped forward: FarSkip would skip the wrapper's work,
    such as fetching weights.
    """
    if (wrapper := vars(layer).get("forward")) is not None:
        raise Refused(
            f"layer {k}: {getattr(wrapper, '__module__', 'something')} has replaced"
            " the layer's forward, which FarSkip layers would skip; switch it off (for"
            " offloaded weights: --cpu-offload-gb, --offload-group-size)"
        )


def _attention(layer: nn.Module, family: Family) -> Any:
    """Return a layer's attention module; None for a layer of another pipeline stage."""
    return next(
        (
            module
            for name in family.attention
            if (module := getattr(layer, name, None)) is not None
        ),
        None,
    )


def _runner(block: nn.Module) -> MoERunner | None:
    """Return the module that runs an MoE block's experts; None for a dense MLP."""
    return next(
        (module for module in block.modules() if isinstance(module, MoERunner)), None
    )


def _give_partial_sums(schedule: Schedule, family: Family, version: str) -> None:
    """Make attention, block and shared experts of a layer return this rank's part of
    their sums.
    """
    where = f"layer {schedule.index}"
    _check_layer(schedule, family)
    if schedule.attention is not None:
        _row(
            schedule.attention, f"attention of {where}", version
        ).reduce_results = False
    if schedule.block is None:
        return
    if schedule.dense:
        _row(schedule.block, f"MLP of {where}", version).reduce_results = False
        return
    runner: Any = _runner(schedule.block)
    _check_runner(schedule, runner, version)
    if not hasattr(runner.moe_config, "skip_final_all_reduce"):
        raise missing(version, "FusedMoEConfig.skip_final_all_reduce")
    kernel = getattr(runner._quant_method, "moe_kernel", None)
    if kernel is not None and kernel.output_is_reduced():
        raise Refused(
            f"{where}: {type(kernel).__name__} sums over ranks itself; choose another"
            " MoE backend"
        )
    runner.moe_config.skip_final_all_reduce = True
    _take_shared(schedule, runner, family)
    if family.shared and schedule.shared is not None:
        _row(
            schedule.shared, f"shared experts of {where}", version
        ).reduce_results = False


_RUNNER_NAMES = (
    "router",
    "routed_scaling_factor",
    "routed_experts",
    "_sequence_parallel_context",
)


def _exchanging(
    parts: dict[str, Any], before: Exchange | None, family: Family, version: str
) -> ExchangeSchedule:
    """Return the schedule of a layer with experts sharded over data-parallel ranks."""
    if family.normed_sums:
        raise Refused(
            f"layer {parts['index']}: norms follow {family.causal_lm}'s sums, which"
            " FarSkip's exchange of data-parallel ranks does not split; use"
            " --data-parallel-size 1"
        )
    schedule = ExchangeSchedule(**parts, before=before)
    _check_layer(schedule, family)
    if not schedule.dense:
        block = parts["block"]
        runner: Any = _runner(block)
        for name in _RUNNER_NAMES:
            if not hasattr(runner, name):
                raise missing(version, f"MoERunner.{name}")
        _check_runner(schedule, runner, version)
        if runner._quant_method.is_monolithic:
            raise Refused(
                f"layer {schedule.index}: {type(runner._quant_method).__name__}"
                f" {MONOLITHIC}"
            )
        _take_shared(schedule, runner, family)
        schedule.exchange = Exchange(
            block,
            runner,
            schedule.index,
            parts["communication"],
            schedule.factor,
        )
    if schedule.attention is not None:
        call_before_kernel(schedule.attention, schedule.between)
    return schedule


def _take_shared(schedule: Schedule, runner: Any, family: Family) -> None:
    """Make the schedule run the shared experts, and the block return only the routed
    output.
    """
    if family.shared:
        schedule.shared = getattr(schedule.layer, family.shared)
    if runner._shared_experts is not None:
        schedule.shared = runner._shared_experts._layer
        runner._shared_experts = None
        # the overlap that asked whether there are shared experts
        runner._forward_entry = runner._select_forward()


def _row(module: nn.Module, what: str, version: str) -> Any:
    """Return the only matmul of a module whose output is summed over ranks."""
    rows = [part for part in module.modules() if isinstance(part, RowParallelLinear)]
    if len(rows) != 1 or not hasattr(rows[0], "reduce_results"):
        raise missing(
            version,
            f"single RowParallelLinear.reduce_results in {what} ({len(rows)} found)",
        )
    return rows[0]


def _check_layer(schedule: Schedule, family: Family) -> None:
    if family.whole_stream and (
        (schedule.carries and schedule.ends_stage)
        or (schedule.receives and schedule.begins_stage)
    ):
        raise Refused(
            f"layer {schedule.index}: between pipeline stages, vLLM's"
            f" {family.causal_lm} passes one tensor, in which the routed output cannot"
            " be kept apart from the stream; use --pipeline-parallel-size 1"
        )
    if getattr(schedule.layer, "layer_scale", False):
        raise Refused(
            f"layer {schedule.index}: FarSkip layers do not support layer_scale, which"
            " multiplies this layer's sums; serve the original model"
        )


def _check_runner(schedule: Schedule, runner: Any, version: str) -> None:
    for name in ("moe_config", "_shared_experts", "_select_forward", "_forward_entry"):
        if not hasattr(runner, name):
            raise missing(version, f"MoERunner.{name}")
    block: Any = schedule.block
    where = f"layer {schedule.index}"
    if runner.moe_config.is_sequence_parallel:
        raise Refused(
            f"{where}: sequence-parallel MoE scatters the stream; use"
            " --tensor-parallel-size 1 or --data-parallel-size 1"
        )
    if getattr(block, "is_fused_shared_expert_enabled", False):
        raise Refused(
            f"{where}: shared experts are fused with the routed ones; set"
            " VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0"
        )
    if getattr(block, "replicate_shared_expert", False):
        raise Refused(
            f"{where}: its shared expert is replicated on every rank; use a"
            " tensor-parallel size that divides its width"
        )
    transform = getattr(runner, "routed_output_transform", None)
    if transform is not None and not getattr(transform, "reduce_commutative", False):
        raise Refused(
            f"{where}: its routed output is transformed after the sum over ranks"
            " (with a bias, or quantised), so that sum cannot be delayed; serve the"
            " original model"
        )


def _parted(hidden: Any) -> tuple[Any, Any]:
    """Return the pair that a rewired layer passes on instead of the whole stream, or
    the stream and None."""
    return hidden if isinstance(hidden, tuple) else (hidden, None)


def _hand_on(hidden_states: Any, residual: Any, **_: Any) -> Any:
    """Do nothing in a layer that was computed with the mixer before it."""
    return hidden_states, residual


def _forward(
    schedule: Schedule,
    family: Family,
    takes: tuple[str, ...],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a rewired layer, called as vLLM's loop calls the stock one."""
    arguments = {**dict(zip(family.arguments, args, strict=False)), **kwargs}
    hidden: Any = arguments["hidden_states"]
    residual: Any = arguments.get("residual")
    if family.whole_stream:
        hidden, residual = _parted(hidden)
    routed = None
    if isinstance(schedule, ExchangeSchedule):
        if residual is None:
            stream = hidden
        else:
            routed = hidden
            stream = residual[0] if isinstance(residual, tuple) else residual
        base, read = torch.ops.fcsd.layer_input(stream, routed, schedule.name)
    elif schedule.receives and schedule.begins_stage:
        base, routed = residual, hidden
        read = schedule.norms[0](base)
    elif schedule.receives:
        stream, flight = residual
        routed = hidden
        base, read = torch.ops.fcsd.attention_input(
            stream, flight, routed, schedule.name
        )
    elif residual is None:
        base, read = hidden, schedule.norms[0](hidden)
    else:
        read, base = schedule.norms[0](hidden, residual)
    arguments["hidden_states"] = read
    if _OUTPUT in takes:
        arguments[_OUTPUT] = torch.empty_like(read)
    if schedule.attention is None:
        out = read
    elif not takes:  # a mixer that is an MLP
        out = schedule.attention(read)
    else:
        out = schedule.attention(**{name: arguments[name] for name in takes})
    out = schedule.scaled(arguments[_OUTPUT] if _OUTPUT in takes else out)
    op = getattr(torch.ops.fcsd, schedule.operator)
    outputs = op(out, base, routed, schedule.name)
    if schedule.carries and schedule.ends_stage:
        outputs = torch.ops.fcsd.finish(
            outputs[0],
            outputs[1],
            outputs[2] if schedule.in_flight else None,
            schedule.name,
        )
    hidden, residual = pair(schedule, outputs)
    if not family.whole_stream:
        return hidden, residual
    whole = (hidden, residual) if isinstance(residual, tuple) else residual + hidden
    return (whole, None) if "residual" in family.arguments else whole
