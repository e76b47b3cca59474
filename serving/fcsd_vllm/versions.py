"""Which engines the plugin was verified with, and what it needs of one. Standard library only."""

import importlib
from typing import Any

VERIFIED = ("0.32.0",)
"""Versions of vLLM whose models were compared with fcsd's: ids, log-probabilities, order of collectives."""

# Model internals move with releases; the plugin API has not since 0.6.
NEEDED = (
    ("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"),
    ("vllm.model_executor.layers.linear", "RowParallelLinear"),
    ("vllm.model_executor.models.config", "MODELS_CONFIG_MAP"),
    ("vllm.model_executor.models.registry", "_TEXT_GENERATION_MODELS"),
    ("vllm.model_executor.models.registry", "_MULTIMODAL_MODELS"),
    ("vllm.model_executor.models.registry", "_TRANSFORMERS_BACKEND_MODELS"),
    ("vllm.forward_context", "get_forward_context"),
    ("vllm.distributed.parallel_state", "get_tp_group"),
    ("vllm.utils.torch_utils", "direct_register_custom_op"),
)
"""Module and name of each internal of vLLM that is used."""


class EngineError(RuntimeError):
    """This engine cannot serve FarSkip models; the message is one line."""


def release(version: str) -> str:
    """Return a version without its local part: `0.32.0` for `0.32.0+cpu`."""
    return version.partition("+")[0]


def unverified(version: str) -> str | None:
    """Return the sentence to warn with about an engine that is not on the list; None for one that is."""
    if release(version) in VERIFIED:
        return None
    return (
        f"fcsd-serving: vLLM {version} is not verified ({', '.join(VERIFIED)} is): compare the log-probabilities of a"
        " few prompts with load_model(...) before you rely on it"
    )


def missing(version: str, what: str) -> EngineError:
    """Return the error for an internal that this engine lacks."""
    return EngineError(
        f"fcsd-serving: vLLM {version} has no {what}, which FarSkip layers are made of;"
        f" install a verified version: vllm=={', '.join(VERIFIED)}"
    )


def check_internals(version: str) -> None:
    """Raise EngineError if the installed vLLM lacks a name in `NEEDED`."""
    for module, name in NEEDED:
        try:
            found: Any = getattr(importlib.import_module(module), name, None)
        except ImportError:
            found = None
        if found is None:
            raise missing(version, f"{module}.{name}")
