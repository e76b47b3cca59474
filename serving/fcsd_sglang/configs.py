"""transformers configs `farskip_<base>`, whose instances look like the base's: `model_type` and `architectures` too.

SGLang decides by architecture: MLA, attention back ends, page sizes, quantisation, memory. So a FarSkip model has the
architecture of its base, and the classes of `models` take the places of the stock ones. That they do is checked here,
in each process that reads a config: otherwise the stock class would load the same weights and serve another model.
"""

import os
from typing import Any

import transformers

from fcsd_sglang.families import DEFAULTS, FAMILIES
from fcsd_sglang.versions import EngineError, check_version, installed
from fcsd_vllm.configs import check_config
from fcsd_vllm.families import Family

VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
PACKAGE = __name__.partition(".")[0]


def check_package(value: str | None) -> None:
    """Raise EngineError unless SGLang takes its model classes from this package."""
    if value != PACKAGE:
        raise EngineError(
            f"fcsd-serving: a FarSkip model needs {VARIABLE}={PACKAGE} in the environment of the server, got"
            f" {value or 'nothing'!r}; without it SGLang would run the stock model"
        )


def make_config_class(family: Family) -> Any:
    """Return the config class of a family, as `AutoConfig` is to know it."""
    base: Any = getattr(transformers, family.config)

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        check_version(installed())
        check_package(os.environ.get(VARIABLE))
        check_config(config_dict, family)
        unset = {k: v for k, v in DEFAULTS.get(family.model_type, {}).items() if config_dict.get(k) is None}
        made = super(new, cls).from_dict({**config_dict, **unset}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        config.farskip = config_dict["farskip"]
        config.architectures = [family.causal_lm]
        config.__dict__["model_type"] = family.model_type
        return made

    new: Any = type(
        f"FarSkip{family.config}",
        (base,),
        {"model_type": family.farskip_type, "from_dict": classmethod(from_dict), "__module__": __name__},
    )
    return new


CLASSES = {family.farskip_type: make_config_class(family) for family in FAMILIES.values()}
globals().update({made.__name__: made for made in CLASSES.values()})  # where pickle looks for them


def register_all() -> None:
    """Register every config class."""
    for model_type, made in CLASSES.items():
        transformers.AutoConfig.register(model_type, made, exist_ok=True)
