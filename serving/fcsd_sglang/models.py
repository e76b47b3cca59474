"""The classes that replace SGLang's own; it finds them through
`SGLANG_EXTERNAL_MODEL_PACKAGE`.

With a stock checkpoint, each behaves as the stock class. With a FarSkip config, it
rewires layers before weights are loaded. If a module of such a package fails to import,
SGLang only logs it and continues with the stock classes. So this module imports nothing
that can fail, and creates its classes when `EntryClass` is read, where an error ends
the process.
"""

import functools
import importlib
from typing import Any

from fcsd_sglang.families import ALL, FAMILIES, ONLY_OURS, REFUSED, ROWS
from fcsd_sglang.versions import EngineError, check_version, installed
from fcsd_vllm.families import Family
from fcsd_vllm.field import read_field


def make_model_class(family: Family) -> Any:
    """Return the class of a family that serves regular and FarSkip checkpoints."""
    stock: Any = getattr(
        importlib.import_module(f"sglang.srt.models.{ROWS[family.model_type].module}"),
        family.causal_lm,
    )

    @functools.wraps(stock.__init__)
    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        stock.__init__(self, config, *args, **kwargs)
        if getattr(config, "farskip", None) is not None:
            _rewire(self, config, family)

    def shared_experts_fusion_disable_reason(
        cls: Any, hf_config: Any, quant_config: Any
    ) -> str | None:
        if getattr(hf_config, "farskip", None) is not None:
            return "FarSkip layers sum shared experts with attention, apart from routed experts."
        return super(made, cls).shared_experts_fusion_disable_reason(
            hf_config, quant_config
        )  # type: ignore[misc]

    namespace: dict[str, Any] = {"__init__": __init__, "__module__": __name__}
    if hasattr(stock, "shared_experts_fusion_disable_reason"):
        namespace["shared_experts_fusion_disable_reason"] = classmethod(
            shared_experts_fusion_disable_reason
        )
    made: Any = type(family.causal_lm, (stock,), namespace)
    return made


def _rewire(model: Any, config: Any, family: Family) -> None:
    import logging

    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_parallel, get_server_args

    from fcsd_sglang.communication import make
    from fcsd_sglang.refusals import check_arguments, check_fields
    from fcsd_sglang.rewire import rewire
    from fcsd_sglang.settings import settings
    from fcsd_vllm.settings import shown
    from fcsd_vllm.weights import check_weights

    row = ROWS[family.model_type]
    text = config.text_config if family.text_config else config
    check_arguments(resolving_view(get_server_args()), family.architecture)
    check_fields(text, row, family.architecture)
    check_weights(get_server_args().model_path)
    chosen = settings()
    communication = make(chosen, get_parallel().tp_group)
    rewired = rewire(
        model.model,
        family,
        row,
        read_field(config.farskip, text.num_hidden_layers),
        communication,
    )
    logging.getLogger("sglang.fcsd").info(
        "FarSkip: rewired %d of %d layers of %s, all-reduces %s, SGLang %s",
        len(rewired),
        text.num_hidden_layers,
        family.causal_lm,
        shown(chosen),
        installed(),
    )


@functools.cache
def classes() -> list[Any]:
    """Return the class of each family, for SGLang's registry."""
    check_version(installed())
    from fcsd_sglang.cpu_experts import skip_absent_experts

    skip_absent_experts()
    refusing = [
        _refusing(ALL[name].causal_lm, f"fcsd-serving: {name}: {sentence}")
        for name, sentence in REFUSED.items()
        if name in ONLY_OURS
    ]
    return [_class_of(family) for family in FAMILIES.values()] + refusing


def _class_of(family: Family) -> Any:
    """Return `make_model_class`'s, or a class that raises with the reason why SGLang's own
    cannot be imported here.
    """
    try:
        return make_model_class(family)
    except Exception as error:  # of any kind: it belongs to one family's file
        return _refusing(
            family.causal_lm,
            f"fcsd-serving: {family.model_type}: SGLang's own model cannot be imported"
            f" here: {type(error).__name__}: {error}",
        )


def _refusing(architecture: str, sentence: str) -> Any:
    """Return the class of an architecture that AMD publishes; it raises with the reason
    why it is not served.
    """

    def __init__(self: Any, *_: Any, **__: Any) -> None:
        raise EngineError(sentence)

    return type(architecture, (), {"__init__": __init__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """Create the classes when SGLang asks for them."""
    if name != "EntryClass":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return classes()
    except AttributeError as error:
        # SGLang would take the module for one without classes, and run stock models.
        raise EngineError(
            f"fcsd-serving: no model class can be made: {error}"
        ) from error
