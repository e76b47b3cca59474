"""The engines that the plugin was verified with, and the internals that it needs.
Standard library only.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Iterable
from typing import Any

from fcsd_vllm.sources import SOURCES, changed, digests, seal

READ = ("0.33.0",)
"""Versions of vLLM whose changed functions were read and the plugin adapted to, but
which have not run FarSkip models because they have no CPU build.
"""
VERIFIED = tuple(version for version in SOURCES if version not in READ)
"""Versions of vLLM whose models were compared with fcsd's: ids, log-probabilities,
order of collectives.
"""

# Model internals move with releases; the plugin API has not since 0.6.
_MOE = "vllm.model_executor.layers.fused_moe"
_RUNNER = f"{_MOE}.runner.moe_runner"
_ATTENTION = "vllm.model_executor.layers.attention"
# Functions for experts over data-parallel ranks, whose steps `exchange.py` splits or
# replaces.
EXCHANGE = (
    (_RUNNER, "MoERunner._sequence_parallel_context"),
    (_RUNNER, "MoERunner._apply_quant_method"),
    (f"{_MOE}.modular_kernel", "FusedMoEKernelModularImpl.apply"),
    (f"{_MOE}.modular_kernel", "FusedMoEKernelModularImpl._prepare"),
    (f"{_MOE}.modular_kernel", "FusedMoEKernelModularImpl._fused_experts"),
    (f"{_MOE}.modular_kernel", "FusedMoEKernelModularImpl._finalize"),
    (f"{_MOE}.modular_kernel", "FusedMoEKernelModularImpl._allocate_buffers"),
    (
        f"{_MOE}.prepare_finalize.naive_dp_ep",
        "MoEPrepareAndFinalizeNaiveDPEPModular.prepare",
    ),
    (
        f"{_MOE}.prepare_finalize.naive_dp_ep",
        "MoEPrepareAndFinalizeNaiveDPEPModular.finalize",
    ),
    (f"{_MOE}.prepare_finalize.naive_dp_ep", "_quantize_and_setup_dispatch"),
    (f"{_MOE}.prepare_finalize.naive_dp_ep", "_unwrap_scale_and_prepare_for_moe"),
    (f"{_MOE}.topk_weight_and_reduce", "TopKWeightAndReduceContiguous.apply"),
    ("vllm.distributed.device_communicators.all2all", "AgRsAll2AllManager.dispatch"),
    (
        "vllm.distributed.device_communicators.all2all",
        "AgRsAll2AllManager.combine_into_output",
    ),
    ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.all_gatherv"),
    (
        "vllm.distributed.device_communicators.pynccl",
        "PyNcclCommunicator.reduce_scatterv",
    ),
    (f"{_ATTENTION}.attention", "unified_attention_with_output"),
    (f"{_ATTENTION}.mla_attention", "unified_mla_attention_with_output"),
)
PUBLIC = (
    ("vllm.compilation.breakable_cudagraph", "eager_break_during_capture"),
    ("vllm.compilation.breakable_cudagraph", "is_breakable_cudagraph_enabled"),
    ("vllm.config", "CUDAGraphMode.without_piecewise"),
    ("vllm.config", "SpeculativeConfig.hf_config_override"),
    ("vllm.distributed.parallel_state", "GroupCoordinator.all_reduce"),
    ("vllm.distributed.parallel_state", "get_dp_group"),
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.forward_context", "get_forward_context"),
    ("vllm.utils.torch_utils", "direct_register_custom_op"),
)
"""Functions that the plugin calls as vLLM's own models do, whatever their code: only
their names are checked. What a result lacks is an error where it is used.
"""
NEEDED = (
    *EXCHANGE,
    *PUBLIC,
    (_RUNNER, "MoERunner.forward"),
    (_RUNNER, "MoERunner._select_forward"),
    (_RUNNER, "MoERunner._forward_impl"),
    (_RUNNER, "MoERunner._maybe_apply_routed_scale_to_output"),
    (_RUNNER, "MoERunner._maybe_reduce_routed_output_before_transform"),
    (_RUNNER, "MoERunner.apply_routed_output_transform"),
    (_RUNNER, "MoERunner._maybe_reduce_final_output"),
    ("vllm.config", "VllmConfig.try_verify_and_update_config"),
    ("vllm.distributed.device_communicators.pynccl", "PyNcclCommunicator.all_reduce"),
    ("vllm.model_executor.layers.linear", "RowParallelLinear.forward"),
    ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    ("vllm.model_executor.models.registry", "_TEXT_GENERATION_MODELS"),
    ("vllm.model_executor.models.registry", "_MULTIMODAL_MODELS"),
    ("vllm.model_executor.models.registry", "_TRANSFORMERS_BACKEND_MODELS"),
)
"""Module and name of each internal of vLLM that the plugin uses; functions that are not
in `PUBLIC` are also identified by their source.
"""

_WRAPPED = (
    (
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        "CPUUnquantizedExperts.apply",
    ),
)
"""What is wrapped where an engine has it."""


class EngineError(RuntimeError):
    """This engine cannot serve FarSkip models; the message is one line."""


def release(version: str) -> str:
    """Return a version without its local part: `0.32.0` for `0.32.0+cpu`."""
    return version.partition("+")[0]


def unverified(version: str) -> str | None:
    """Return the warning about an engine that is not verified; None for a verified
    engine.
    """
    if release(version) in VERIFIED:
        return None
    read = ", its source was only read" if release(version) in READ else ""
    return (
        f"fcsd-serving: vLLM {version} is not verified{read} ({', '.join(VERIFIED)} is):"
        " compare the log-probabilities of a few prompts with load_model(...) before"
        " you rely on it"
    )


def missing(version: str, what: str) -> EngineError:
    """Return the error for an internal that this engine lacks."""
    return EngineError(
        f"fcsd-serving: vLLM {version} has no {what}, which FarSkip layers need;"
        f" install a verified version: vllm=={', '.join(VERIFIED)}"
    )


def check_internals(version: str) -> None:
    """Raise EngineError if the installed vLLM lacks a name in `NEEDED`."""
    for module, name in NEEDED:
        if _internal(module, name) is None:
            raise missing(version, f"{module}.{name}")


def needed_functions() -> list[Callable[..., Any]]:
    """Return the functions in `NEEDED` whose code matters, and those that the plugin
    wraps."""
    return [
        each
        for module, name in (*NEEDED, *_WRAPPED)
        if (module, name) not in PUBLIC
        and inspect.isfunction(each := _internal(module, name))
    ]


def _internal(module: str, name: str) -> Any:
    try:
        holder: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        holder = getattr(holder, part, None)
    return holder


def check_sources(
    functions: Iterable[Callable[..., Any]], version: str, looked_at: str = ""
) -> None:
    """Raise EngineError if a function differs from every verified version.

    Args:
        functions: the functions that a model's layers replace and call.
        looked_at: the digest with which a user confirms that the changes were reviewed.
    """
    new = changed(digests(functions))
    if not new or looked_at == seal(new):
        return
    names = ", ".join(".".join(name.split(".")[-2:]) for name in new)
    setting = json.dumps({"fcsd": {"looked_at": seal(new)}})
    raise EngineError(
        f"fcsd-serving: vLLM {version}: FarSkip layers replace or call functions that"
        f" changed and were not reviewed: {names}; install vllm=={', '.join(VERIFIED)},"
        " or review the changes, compare the log-probabilities of a few prompts with"
        f" load_model(...), and pass --additional-config '{setting}'"
    )
