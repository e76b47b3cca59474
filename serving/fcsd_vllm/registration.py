"""Register configs with transformers, and architectures and config hooks with vLLM, in
each process of vLLM.
"""

from typing import Any

import fcsd_vllm
from fcsd_vllm import configs
from fcsd_vllm.families import FAMILIES, REFUSED, Family
from fcsd_vllm.refusals import Refused, check_engine
from fcsd_vllm.settings import read_settings, with_version
from fcsd_vllm.versions import check_internals, unverified
from fcsd_vllm.weights import check_gates, check_weights


def register_all() -> None:
    """Register every family that this transformers has."""
    import transformers
    import vllm
    from transformers import AutoConfig
    from vllm import ModelRegistry
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    check_internals(vllm.__version__)
    if (sentence := unverified(vllm.__version__)) is not None:
        init_logger("vllm.fcsd").warning_once(sentence)
    for family in FAMILIES.values():
        if not hasattr(transformers, family.config):
            continue
        AutoConfig.register(
            family.farskip_type, getattr(configs, family.farskip_config), exist_ok=True
        )
        if family.like:
            regular = getattr(configs, family.farskip_config.removeprefix("FarSkip"))
            AutoConfig.register(family.model_type, regular, exist_ok=True)
        architectures = [family.architecture]
        if family.like:
            architectures.append(family.causal_lm)
        for architecture in architectures:
            ModelRegistry.register_model(
                architecture, f"fcsd_vllm.models:{family.architecture}"
            )
            _add_hook(family, architecture)
    _add_warning()
    _find_drafts()
    if current_platform.is_cpu():
        from fcsd_vllm.cpu_exchange import give_collectives
        from fcsd_vllm.cpu_experts import choose_by_bias, respect_expert_map

        respect_expert_map()
        choose_by_bias()
        give_collectives()


def _add_hook(family: Family, architecture: str) -> None:
    """Make vLLM call the plugin when an engine is configured, after its hook for the
    base's architecture.
    """
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.model_executor.models.config import (
        MODELS_CONFIG_MAP,
        VerifyAndUpdateConfig,
    )
    from vllm.platforms import current_platform

    base: Any = MODELS_CONFIG_MAP.get(family.stock, VerifyAndUpdateConfig)

    def verify_and_update_config(vllm_config: Any) -> None:
        configs.check_class(vllm_config.model_config.hf_config, family, architecture)
        base.verify_and_update_config(vllm_config)
        check_engine(vllm_config, family)
        check_latent(vllm_config, family)
        check_weights(vllm_config.model_config.model)
        if getattr(vllm_config.model_config.hf_config, "gated_attention", False):
            check_gates(
                vllm_config.model_config.model,
                vllm_config.model_config.hf_config.num_hidden_layers,
            )
        settings = read_settings(vllm_config.additional_config)
        if (
            settings.comm != "blocking"
            and current_platform.is_cuda_alike()
            and not is_breakable_cudagraph_enabled()
        ):
            keep_whole_graphs(vllm_config.compilation_config)
        vllm_config.additional_config = with_version(
            vllm_config.additional_config, fcsd_vllm.__version__
        )

    MODELS_CONFIG_MAP[architecture] = type(
        f"{architecture}Config",
        (base,),
        {"verify_and_update_config": staticmethod(verify_and_update_config)},
    )


def check_latent(vllm_config: Any, family: Family) -> None:
    """Raise Refused if the attention backend has no kernel for the size of the latent
    cache.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not vllm_config.model_config.use_mla:
        return
    config = vllm_config.model_config.hf_text_config
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    chosen = vllm_config.attention_config.backend
    if current_platform.is_cpu():
        chosen = AttentionBackendEnum.CPU_MLA
    if chosen is None or chosen.get_class().supports_head_size(latent):
        return  # vLLM takes the first backend that supports the size
    others = "" if current_platform.is_cpu() else "--attention-backend TRITON_MLA, or "
    raise Refused(
        f"fcsd-serving: {family.causal_lm}: {chosen.name} has no kernel for its latent"
        f" cache of {latent} channels; use {others}VLLM_MLA_DISABLE=1 in the"
        " environment (caches whole heads)"
    )


def _add_warning() -> None:
    """Make vLLM's Transformers backend, which runs a checkpoint's
    `modeling_farskip.py`, warn that it overlaps nothing, and refuse a family that it
    would compute wrongly.
    """
    from vllm.logger import init_logger
    from vllm.model_executor.models.config import (
        MODELS_CONFIG_MAP,
        VerifyAndUpdateConfig,
    )
    from vllm.model_executor.models.registry import _TRANSFORMERS_BACKEND_MODELS

    def verify_and_update_config(vllm_config: Any) -> None:
        config = vllm_config.model_config.hf_config
        if getattr(config, "farskip", None) is not None:
            base = config.model_type.removeprefix("farskip_")
            if base in REFUSED:
                raise Refused(f"fcsd-serving: {base}: {REFUSED[base]}")
            init_logger("vllm.fcsd").warning_once(
                "FarSkip: %s runs in vLLM's Transformers backend, which overlaps no"
                " all-reduce. The plugin overlaps them for: %s",
                config.model_type,
                ", ".join(FAMILIES),
            )

    hook = staticmethod(verify_and_update_config)
    for name in _TRANSFORMERS_BACKEND_MODELS:
        if name not in MODELS_CONFIG_MAP:
            made = type(
                f"{name}FarSkipConfig",
                (VerifyAndUpdateConfig,),
                {"verify_and_update_config": hook},
            )
            MODELS_CONFIG_MAP[name] = made


def _find_drafts() -> None:
    """Let vLLM draft with the layers for multi-token prediction of a converted
    checkpoint, which it finds by the base's architecture.
    """
    from vllm.config import SpeculativeConfig

    if SpeculativeConfig.hf_config_override is not draft_config:
        _STOCK["hf_config_override"] = SpeculativeConfig.hf_config_override
        SpeculativeConfig.hf_config_override = staticmethod(draft_config)


_STOCK: dict[str, Any] = {}


def draft_config(config: Any) -> Any:
    """Return the config of the draft of a model with this config. Layers that draft are
    regular: they read the final state, in which nothing is missing.
    """
    architecture = config.architectures[0]
    family = next(
        (row for row in FAMILIES.values() if row.architecture == architecture), None
    )
    if family is not None:
        config.architectures = [family.causal_lm]
    config = _STOCK["hf_config_override"](config)
    if family is not None and config.architectures == [family.causal_lm]:
        # A draft without such layers is a whole model.
        config.architectures = [architecture]
    return config


def keep_whole_graphs(compilation_config: Any) -> None:
    """Capture whole decode steps, and run prefill without graphs.

    A compiled piecewise graph ends at attention, where the sums that FarSkip hides behind
    attention are in flight; but a stream that leaves a capture must return before the
    capture ends. Breakable graphs can have the sums between their pieces
    (`BetweenGraphs`).
    """
    from vllm.config import CUDAGraphMode
    from vllm.logger import init_logger

    mode = compilation_config.cudagraph_mode
    kept = CUDAGraphMode.FULL_DECODE_ONLY if mode is None else mode.without_piecewise()
    if kept != mode:
        init_logger("vllm.fcsd").info_once(
            "FarSkip: cudagraph_mode is set to %s, without piecewise graphs", kept.name
        )
    compilation_config.cudagraph_mode = kept
