"""transformers configs `farskip_<base>`, whose instances look like the base's:
`model_type` and `architectures` too.

SGLang decides by architecture: MLA, attention backends, page sizes, quantisation,
memory. So a FarSkip model has the architecture of its base, and the classes of `models`
replace the stock ones. Each process that reads a config checks that they do: otherwise
the stock class would load the same weights and serve a different model.
"""

import os
from typing import Any

import transformers

from fcsd_sglang.families import ALL, FAMILIES, REFUSED
from fcsd_sglang.versions import EngineError, check_version, installed
from fcsd_vllm.configs import make_config_class

VARIABLE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
PACKAGE = __name__.partition(".")[0]


def check_package(value: str | None) -> None:
    """Raise EngineError unless SGLang takes its model classes from this package."""
    if value != PACKAGE:
        raise EngineError(
            f"fcsd-serving: a FarSkip model needs {VARIABLE}={PACKAGE} in the"
            f" environment of the server, got {value or 'nothing'!r}; without it SGLang"
            " would run the stock model"
        )


def check_server() -> None:
    """Raise EngineError unless this SGLang is the supported version and takes its
    classes from this package.
    """
    check_version(installed())
    check_package(os.environ.get(VARIABLE))


CLASSES: dict[str, Any] = {
    family.farskip_type: make_config_class(
        family, module=__name__, base_architecture=True, check=check_server
    )
    for family in FAMILIES.values()
}


def _refusing(model_type: str, sentence: str) -> Any:
    """Return a config class that raises with the reason why its models are not
    served.
    """

    def from_dict(cls: Any, *_: Any, **__: Any) -> Any:
        raise EngineError(sentence)

    space = {
        "model_type": model_type,
        "from_dict": classmethod(from_dict),
        "__module__": __name__,
    }
    return type("Refused", (transformers.PretrainedConfig,), space)


for _name, _sentence in REFUSED.items():
    for _type in (_name, ALL[_name].farskip_type):
        CLASSES[_type] = _refusing(_type, _sentence)
for _family in FAMILIES.values():
    _made = CLASSES[_family.farskip_type]
    globals()[_made.__name__] = _made  # pickle looks for it here


def register_all() -> None:
    """Register every config class."""
    for model_type, made in CLASSES.items():
        transformers.AutoConfig.register(model_type, made, exist_ok=True)
