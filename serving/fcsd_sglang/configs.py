"""transformers configs `farskip_<base>`, whose instances look like the base's:
`model_type` and `architectures` too.

SGLang decides by architecture: MLA, attention backends, page sizes, quantisation,
memory. So a FarSkip model has the architecture of its base, and the classes of `models`
replace the stock ones. Each process that reads a config checks that they do: otherwise
the stock class would load the same weights and serve a different model.
"""

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import transformers

from fcsd_sglang.families import FAMILIES, ONLY_OURS, REFUSED, ROWS, Row
from fcsd_sglang.versions import EngineError, check_version, installed
from fcsd_vllm.configs import make_config_class
from fcsd_vllm.families import Family

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


def _base(family: Family) -> Any:
    """Return SGLang's own config class of a family; None if it has none."""
    module = ROWS[family.model_type].config
    if not module:
        return None
    return getattr(
        importlib.import_module(f"sglang.srt.configs.{module}"), family.config
    )


def _with_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config, and of its text config, with what transformers
    writes in `rope_parameters` also where older classes look.
    """
    rope = fields.get("rope_parameters") or {}
    text = fields.get("text_config")
    return {
        **{
            name: rope[name]
            for name in ("rope_theta", "partial_rotary_factor")
            if name in rope
        },
        **fields,
        **({"text_config": _with_rope(text)} if isinstance(text, dict) else {}),
    }


def _with_one_rope(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with the RoPE of one type of layers as that of all;
    without `rope_parameters`, it is in fields of its own.
    """
    rope = (fields.get("rope_parameters") or {}).get(kind) or {
        "rope_type": "default",
        **{
            name: fields[name]
            for name in ("rope_theta", "partial_rotary_factor")
            if name in fields
        },
    }
    return {**fields, "rope_parameters": rope}


def _complete(row: Row) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that adds to a family's fields what SGLang reads."""
    if row.rope:
        return functools.partial(_with_one_rope, row.rope)
    return _with_rope if row.config else dict


CLASSES: dict[str, Any] = {
    family.farskip_type: make_config_class(
        family,
        base=_base(family),
        complete=_complete(ROWS[family.model_type]),
        module=__name__,
        base_architecture=True,
        check=check_server,
    )
    for family in FAMILIES.values()
}


def _reading_both(family: Family) -> Any:
    """Return a class of SGLang's own that also reads a converted checkpoint.

    SGLang reads a file a second time, with the class that it has for the `model_type`
    of the config that it got.
    """
    stock: Any = _base(family)
    ours = CLASSES[family.farskip_type]

    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        is_ours = config_dict.get("model_type") == family.farskip_type
        return (ours if is_ours else stock).from_dict(config_dict, **kwargs)

    space = {"from_dict": classmethod(from_dict), "__module__": __name__}
    return type(stock.__name__, (stock,), space)


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
    for _type in (f"farskip_{_name}", *([_name] if _name in ONLY_OURS else ())):
        CLASSES[_type] = _refusing(_type, f"fcsd-serving: {_name}: {_sentence}")
for _family in FAMILIES.values():
    _made = CLASSES[_family.farskip_type]
    globals()[_made.__name__] = _made  # pickle looks for it here


def register_all() -> None:
    """Register every config class."""
    for model_type, made in CLASSES.items():
        transformers.AutoConfig.register(model_type, made, exist_ok=True)
    own = [name for name in FAMILIES if ROWS[name].config]
    from sglang.srt.utils.hf_transformers import common

    for name in own:
        common._CONFIG_REGISTRY[name] = _reading_both(FAMILIES[name])
