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
from fcsd_vllm.refusals import MONOLITHIC, Refused
from fcsd_vllm.schedule import Schedule, layer_name, pair, place
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
        parts: dict[str, Any] = {
            **place(field, k, here, is_moe),
            "layer": layers[k],
            "block": getattr(layers[k], family.moe),
            "shared": None,
            "communication": communication,
        }
        schedule: Schedule
        if isinstance(communication, Transport):
            before = table.get(layer_name(k - 1))
            schedule = _exchanging(
                parts, getattr(before, "exchange", None), family, version
            )
        else:
            schedule = Schedule(**parts)
            _give_partial_sums(schedule, family, version)
        table[schedule.name] = schedule
        attention = _attention(layers[k], family)
        takes = set(inspect.signature(attention.forward).parameters) & set(
            family.arguments
        )
        run = functools.partial(
            _forward, schedule, attention, family.arguments, tuple(sorted(takes))
        )
        layers[k].forward = run
    return rewired


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
        for part in (layer, _attention(layer, family), getattr(layer, family.moe))
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
    _check_layer(schedule)
    _row(
        _attention(schedule.layer, family), f"attention of {where}", version
    ).reduce_results = False
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
    _take_shared(schedule, runner)


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
    schedule = ExchangeSchedule(**parts, before=before)
    _check_layer(schedule)
    if not schedule.dense:
        runner: Any = _runner(schedule.block)
        for name in _RUNNER_NAMES:
            if not hasattr(runner, name):
                raise missing(version, f"MoERunner.{name}")
        _check_runner(schedule, runner, version)
        if runner._quant_method.is_monolithic:
            raise Refused(
                f"layer {schedule.index}: {type(runner._quant_method).__name__}"
                f" {MONOLITHIC}"
            )
        _take_shared(schedule, runner)
        schedule.exchange = Exchange(
            schedule.block, runner, schedule.index, parts["communication"]
        )
    call_before_kernel(_attention(schedule.layer, family), schedule.between)
    return schedule


def _take_shared(schedule: Schedule, runner: Any) -> None:
    """Make the schedule run the shared experts, and the block return only the routed
    output.
    """
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


def _check_layer(schedule: Schedule) -> None:
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
    if getattr(runner, "routed_output_transform", None) is not None:
        raise Refused(
            f"{where}: its routed output is transformed after the sum over ranks, so"
            " that sum cannot be delayed; serve the original model"
        )


def _forward(
    schedule: Schedule,
    attention: Any,
    names: tuple[str, ...],
    takes: tuple[str, ...],
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Compute a rewired layer, called as vLLM's loop calls the stock one."""
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    hidden, residual = arguments["hidden_states"], arguments["residual"]
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
        read = schedule.layer.input_layernorm(base)
    elif schedule.receives:
        stream, flight = residual
        routed = hidden
        base, read = torch.ops.fcsd.attention_input(
            stream, flight, routed, schedule.name
        )
    elif residual is None:
        base, read = hidden, schedule.layer.input_layernorm(hidden)
    else:
        read, base = schedule.layer.input_layernorm(hidden, residual)
    arguments["hidden_states"] = read
    out = attention(**{name: arguments[name] for name in takes})
    op = torch.ops.fcsd.after_attention
    if schedule.in_flight:
        op = torch.ops.fcsd.after_attention_in_flight
    outputs = op(out, base, routed, schedule.name)
    if schedule.carries and schedule.ends_stage:
        outputs = torch.ops.fcsd.finish(
            outputs[0],
            outputs[1],
            outputs[2] if schedule.in_flight else None,
            schedule.name,
        )
    return pair(schedule, outputs)
