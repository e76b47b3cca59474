"""A checkpoint's quantisation fields, and whether weights with them can be loaded and
trained.

The fields are in `quantization_config` of the config or of its `text_config`; NVIDIA's
ModelOpt writes them to `hf_quant_config.json` beside it. The fields may be left over:
weights that somebody has dequantised, or a conversion.

Not covered: the tensors (`fcsd.model.quantised.tensors`).
"""

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fcsd.base.errors import one_line
from fcsd.base.files import read_json

FIELD = "quantization_config"
DEQUANTISED = ("fp8", "mxfp8", "mxfp4", "compressed-tensors", "modelopt")
"""Methods that `fcsd dequantize` can decode."""
MODELOPT = "hf_quant_config.json"
_NOT_LOADED = {
    "nvfp4": (
        "transformers creates it from plain weights, and cannot load NVFP4 weights"
    )
}


PACKING = frozenset({
    "auto-round", "awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8", "nvfp4",
})  # fmt: skip
"""Methods whose checkpoints hold tensors that `quantised_tensors` knows. Others quantise
plain ones when they load.
"""


class Quantisation(NamedTuple):
    """A checkpoint's description of how its weights are quantised."""

    method: str
    """`quant_method` as it is written; "None" where it is not."""
    place: str
    """Where it is said: a file, or the key in the config."""
    algorithm: str | None = None
    """What ModelOpt did: NVFP4, FP8."""
    settings: Mapping[str, Any] = MappingProxyType({})
    """All that is said."""

    @property
    def words(self) -> str:
        method = "unknown method" if self.method == "None" else self.method
        return method + (f" ({self.algorithm})" if self.algorithm else "")


def said_quantisation(
    config: Mapping[str, Any], folder: Path | None = None
) -> Quantisation | None:
    """Return the quantisation fields of a config, or of ModelOpt's file in its folder;
    None: nothing.
    """
    if (field := quantisation_field(config)) is not None:
        return _quantisation(*field)
    if folder is None or not (folder / MODELOPT).is_file():
        return None
    return modelopt_quantisation(
        read_json(folder / MODELOPT, "fetch the file again", keys=())
    )


def _quantisation(place: str, settings: Any) -> Quantisation:
    values = settings if isinstance(settings, Mapping) else {}
    # A config object has an enumeration. Cut short, because messages quote it and a
    # file may hold anything.
    method = values.get("quant_method")
    method = str(getattr(method, "value", method))[:80]
    algorithm = values.get("quant_algo") or values.get("format")
    if not isinstance(algorithm, str):
        algorithm = None
    return Quantisation(method, place, algorithm, values)


def model_quantisation(model: Any) -> Quantisation | None:
    """Return how the files are quantised that a model in memory was loaded from.

    A config says nothing of weights that transformers has dequantised while it loaded
    them; the conversions with which it would save them do.
    """
    if (quantisation := said_quantisation(model.config.to_dict())) is not None:
        return quantisation
    for conversion in getattr(model, "_weight_conversions", None) or ():
        for operation in getattr(conversion, "operations", ()):
            if (quantizer := getattr(operation, "hf_quantizer", None)) is not None:
                method = quantizer.quantization_config.quant_method
                return Quantisation(str(getattr(method, "value", method)), "its files")
    return None


def modelopt_quantisation(written: Mapping[str, Any]) -> Quantisation:
    """Return the fields of `hf_quant_config.json`."""
    settings = written.get("quantization")
    if not isinstance(settings, Mapping):
        settings = {}
    return _quantisation(MODELOPT, {**settings, "quant_method": "modelopt"})


def quantisation_field(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the key and the value of the field that transformers reads: of the config,
    or else of its text config; None: there is none.
    """
    inner = config.get("text_config")
    if config.get(FIELD):
        return FIELD, config[FIELD]
    if isinstance(inner, Mapping) and inner.get(FIELD):
        return f"text_config.{FIELD}", inner[FIELD]
    return None


def without_quantisation(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without its quantisation fields."""
    inner = config.get("text_config")
    plain = {key: value for key, value in config.items() if key != FIELD}
    if isinstance(inner, Mapping):
        plain["text_config"] = {
            key: value for key, value in inner.items() if key != FIELD
        }
    return plain


def without_quantisation_fields(config: Any) -> Any:
    """Remove the quantisation fields from a config object, and return them."""
    for part in (config, config.get_text_config()):
        if hasattr(part, FIELD):
            delattr(part, FIELD)
    return config


def why_not_loaded(quantisation: Quantisation) -> str | None:
    """Return why no transformers of this version loads such weights, where it is known
    before they are read.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    # transformers' table has bitsandbytes_4bit and bitsandbytes_8bit, configs only the
    # first word.
    loadable = {*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes"} - _NOT_LOADED.keys()
    if quantisation.method in loadable:
        return None
    if quantisation.place != MODELOPT:
        where = f"{quantisation.place}.quant_method"
    else:
        where = f"{MODELOPT}:"
    reason = _NOT_LOADED.get(quantisation.method)
    name = repr(quantisation.method) + (
        f" ({quantisation.algorithm})" if quantisation.algorithm else ""
    )
    advice = dequantise_advice(
        quantisation, "fetch the checkpoint in another form, for example bfloat16"
    )
    return (
        f"{where} {name} is not one that the installed transformers can"
        f" load{f' ({reason})' if reason else ''}; it loads {', '.join(sorted(loadable))};"
        f" {advice}"
    )


def why_not_trained(quantisation: Quantisation | None) -> str | None:
    """Return why a model is not trained; None: it is.

    Weights of some methods load in bfloat16, but none are saved as they were loaded.
    """
    if quantisation is None:
        return None
    advice = dequantise_advice(quantisation, "train its unquantised original")
    return (
        f"its weights are quantised by {quantisation.words} ({quantisation.place}), but"
        f" training needs unquantised ones; {advice}"
    )


def dequantise_advice(quantisation: Quantisation, otherwise: str = "") -> str:
    """Return what to do with weights of a method that `fcsd dequantize` knows, or
    `otherwise`.
    """
    if quantisation.method not in DEQUANTISED:
        return otherwise
    return "`fcsd dequantize` writes them in bfloat16"


def why_not_here(config: Mapping[str, Any]) -> str | None:
    """Return why weights that transformers can load are not loaded on this machine: a
    package, or a GPU, is missing.
    """
    try:
        _quantizer_here(config)
    except Exception as error:  # each method has its own kinds
        return one_line(error)
    return None


def is_dequantised_here(config: Mapping[str, Any], requested: Any = None) -> bool:
    """Return whether transformers dequantises weights while it loads them on this
    machine.

    requested: the `quantization_config` that it is called with.
    """
    if getattr(requested, "dequantize", False):
        return True
    try:
        quantizer = _quantizer_here(config)
    except Exception:  # loading gives the error
        return False
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def _quantizer_here(config: Mapping[str, Any]) -> Any:
    """Return transformers' quantizer of a config after it has looked at this machine."""
    from transformers.quantizers.auto import AutoHfQuantizer

    field = quantisation_field(config)
    settings: Any = None if field is None else field[1]
    quantizer = AutoHfQuantizer.from_config(copy.deepcopy(settings), pre_quantized=True)
    quantizer.validate_environment(device_map=None, weights_only=True)
    return quantizer
