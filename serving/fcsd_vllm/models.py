"""The model classes that vLLM loads: stock classes whose layers are rewired before
weights are loaded.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any

from fcsd_vllm.communication import make_communication
from fcsd_vllm.families import FAMILIES, Family
from fcsd_vllm.field import field_of, read_field
from fcsd_vllm.rewire import rewire, used_functions
from fcsd_vllm.settings import Settings, read_settings, shown
from fcsd_vllm.transports import make_transport
from fcsd_vllm.versions import check_sources, needed_functions


def _stock_class(name: str) -> Any:
    """Return vLLM's stock class of an architecture."""
    from vllm.model_executor.models.registry import (
        _MULTIMODAL_MODELS,
        _TEXT_GENERATION_MODELS,
    )

    module, class_name = {**_TEXT_GENERATION_MODELS, **_MULTIMODAL_MODELS}[name]
    module = module if "." in module else f"vllm.model_executor.models.{module}"
    return getattr(importlib.import_module(module), class_name)


def forwards() -> Iterator[Callable[..., Any]]:
    """Yield the forwards of the parts of all models that the families name; a wrapper's
    layers are those of its text model. Files for images cannot be imported without
    torchvision; those of Qwen3.5 are left out, whose layers are Qwen3-Next's.
    """
    rooms = ("vllm.model_executor.models.", "vllm.model_executor.layers.mamba.")
    for family in FAMILIES.values():
        if family.text_config or family.model_type == "qwen3_5_moe_text":
            continue
        file = importlib.import_module(_stock_class(family.stock).__module__)
        for each in vars(file).values():
            if _is_part(each) and all(
                name.startswith(rooms)
                for name in (each.__module__, each.forward.__module__)
            ):
                yield each.forward


def _is_part(each: Any) -> bool:
    """Return whether this is a class whose forward `used_functions` may return: no whole
    model with a head, no linear layer, no placeholder of another stage, no protocol. A
    part that is taken for none is refused when a model is served.
    """
    from torch import nn
    from vllm.model_executor.layers.linear import LinearBase

    return (
        inspect.isclass(each)
        and issubclass(each, nn.Module)
        and not issubclass(each, (LinearBase, nn.Identity))
        and not hasattr(each, "compute_logits")
    )


def make_model_class(family: Family) -> Any:
    """Return the FarSkip class of a family."""
    stock = _stock_class(family.stock)

    def __init__(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        if family.like:
            _add_gates(self, vllm_config)
        _rewire(self, family, vllm_config)

    def load_weights(self: Any, weights: Any) -> Any:
        from fcsd_vllm.gate import renamed

        return stock.load_weights(self, renamed(weights, self))

    namespace: dict[str, Any] = {"__init__": __init__, "__module__": __name__}
    if family.like:
        namespace["load_weights"] = load_weights
    return type(family.architecture, (stock,), namespace)


def _add_gates(model: Any, vllm_config: Any) -> None:
    import vllm

    from fcsd_vllm.gate import add_gates

    model.farskip_mla = vllm_config.model_config.use_mla
    if getattr(model.config, "gated_attention", False):
        add_gates(model.model, model.config, vllm_config.quant_config, vllm.__version__)


def _rewire(model: Any, family: Family, vllm_config: Any) -> None:
    import vllm
    from vllm.compilation.breakable_cudagraph import (
        eager_break_during_capture,
        is_breakable_cudagraph_enabled,
    )
    from vllm.distributed.parallel_state import get_dp_group, get_tp_group
    from vllm.logger import init_logger

    config = vllm_config.model_config.hf_config
    num_layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    exchanging = vllm_config.parallel_config.data_parallel_size > 1
    settings = _chosen(vllm_config, exchanging)
    if exchanging:
        model.farskip_communication = make_transport(settings, get_dp_group())
    else:
        model.farskip_communication = make_communication(
            settings,
            get_tp_group(),
            eager_break_during_capture if is_breakable_cudagraph_enabled() else None,
        )
    stack = reduce(getattr, family.stack.split("."), model)
    if family.like:
        field = field_of(config, num_layers)
    else:
        field = read_field(config.farskip, num_layers)
    rewired = rewire(
        stack,
        family,
        field,
        model.farskip_communication,
        vllm_config.compilation_config.static_forward_context,
        vllm.__version__,
    )
    used = []
    if rewired:
        used = [*used_functions(stack, family, rewired), *needed_functions()]
    check_sources(used, vllm.__version__, settings.looked_at)
    init_logger("vllm.fcsd").info(
        "FarSkip: rewired %d of %d layers of %s, %s %s, vLLM %s",
        len(rewired),
        num_layers,
        family.causal_lm,
        "exchanges" if exchanging else "all-reduces",
        shown(settings),
        vllm.__version__,
    )


def _chosen(vllm_config: Any, exchanging: bool) -> Settings:
    """Return the settings with the backend chosen."""
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    settings = read_settings(vllm_config.additional_config)
    if not settings.comm:
        settings = replace(
            settings, comm="c10d" if current_platform.is_cpu() else "stream"
        )
    if exchanging and settings.comm != "blocking" and is_breakable_cudagraph_enabled():
        init_logger("vllm.fcsd").warning_once(
            "FarSkip: exchanges of data-parallel ranks end with each piece of a breakable"
            " graph, so they are blocking; VLLM_USE_BREAKABLE_CUDAGRAPH=0 overlaps them"
        )
        settings = replace(
            settings, comm="blocking", latency_ms=0.0, bandwidth_gb_per_s=0.0
        )
    return settings


def __getattr__(name: str) -> Any:
    """Create a model class when it is first needed, so that no other family's file is
    imported.
    """
    family = next((row for row in FAMILIES.values() if row.architecture == name), None)
    if family is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = make_model_class(family)
    return made
