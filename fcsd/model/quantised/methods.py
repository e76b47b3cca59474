"""A checkpoint's quantisation fields, and whether weights with them can be loaded and
trained.

The fields are in `quantization_config` of the config or of its `text_config`; NVIDIA's
ModelOpt writes them to `hf_quant_config.json` beside it. The fields may be left over:
weights that somebody has dequantised, or a conversion.

Not covered: the tensors (`fcsd.model.quantised.tensors`).
"""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.base.errors import one_line
from fcsd.base.files import read_json

FIELD = "quantization_config"
DEQUANTISED = ("fp8", "mxfp4", "compressed-tensors", "modelopt")
"""Methods of which `fcsd dequantize` knows the tensors."""
_TRAINED = ("mxfp4",)
"""Methods whose weights transformers loads in bfloat16, and saves so."""
MODELOPT = "hf_quant_config.json"
_NOT_LOADED = {
    "nvfp4": (
        "transformers creates it from plain weights, and cannot load NVFP4 weights"
    )
}


PACKING = frozenset({
    "auto-round", "awq", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8", "nvfp4",
})  # fmt: skip
"""Methods whose checkpoints hold tensors that `quantised_tensor` knows. Others quantise
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
    for section, settings in quantisation_fields(config):
        named = isinstance(settings, Mapping)
        # Cut short, because messages quote it and a file may hold anything.
        method = str(settings.get("quant_method") if named else None)[:80]
        algorithm = None
        if named:
            algorithm = settings.get("quant_algo") or settings.get("format")
        return Quantisation(
            method, section, algorithm if isinstance(algorithm, str) else None
        )
    if folder is None or not (folder / MODELOPT).is_file():
        return None
    return modelopt_quantisation(
        read_json(folder / MODELOPT, "fetch the file again", keys=())
    )


def modelopt_quantisation(written: Mapping[str, Any]) -> Quantisation:
    """Return the fields of `hf_quant_config.json`."""
    settings = written.get("quantization")
    algorithm = settings.get("quant_algo") if isinstance(settings, Mapping) else None
    return Quantisation(
        "modelopt", MODELOPT, algorithm if isinstance(algorithm, str) else None
    )


def quantisation_fields(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the configs whose field transformers reads: the config, or else its text
    config.
    """
    inner = config.get("text_config")
    if config.get(FIELD):
        yield FIELD, config[FIELD]
    elif isinstance(inner, Mapping) and inner.get(FIELD):
        yield f"text_config.{FIELD}", inner[FIELD]


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
    advice = "`fcsd dequantize` writes it in bfloat16"
    if quantisation.method not in DEQUANTISED:
        advice = "fetch the checkpoint in another form, for example bfloat16"
    return (
        f"{where} {name} is not one that the installed transformers can"
        f" load{f' ({reason})' if reason else ''}; it loads {', '.join(sorted(loadable))};"
        f" {advice}"
    )


def why_not_trained(quantisation: Quantisation | None) -> str | None:
    """Return why a model is not trained: weights of its method may load, and cannot be
    saved; None: it is.
    """
    if (
        quantisation is None
        or quantisation.method not in PACKING
        or quantisation.method in _TRAINED
    ):
        return None
    advice = "`fcsd dequantize` writes them in bfloat16, to train from"
    if quantisation.method not in DEQUANTISED:
        advice = "train its unquantised original"
    return (
        f"its weights are quantised by {quantisation.words} ({quantisation.place}), but"
        f" training needs unquantised ones; {advice}"
    )


def why_not_here(config: Mapping[str, Any]) -> str | None:
    """Return why weights that transformers can load are not loaded on this machine: a
    package, or a GPU, is missing.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    settings: Any = next(
        (settings for _, settings in quantisation_fields(config)), None
    )
    try:
        quantizer = AutoHfQuantizer.from_config(
            copy.deepcopy(settings), pre_quantized=True
        )
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # each method has its own kinds
        return one_line(error)
    return None
