"""Find how a server stores a model's weights: bytes per element, and the precision of
the matmuls, from the checkpoint's quantisation.

The experts may be stored in another way than all other weights, which are taken to be
stored as those of attention. A model whose method is not known here is planned in
bfloat16, and the plan says so.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from fcsd.base.errors import UserError
from fcsd.model.quantised.methods import FIELD

Precision = Literal["float32", "bfloat16", "fp8"]


@dataclass(frozen=True)
class Stored:
    """Weights as they are stored in memory. experts, others: bytes per element,
    including its share of the scales. precision: dtype of the matmuls; with fp8,
    attention's core and activations are bfloat16. sent: bytes per element of a
    dispatched row; a returned row is as wide as an activation.
    """

    name: str
    experts: float = 2.0
    others: float = 2.0
    precision: Precision = "bfloat16"
    sent: float = 2.0

    def precision_of(self, width: float) -> Precision:
        """Return the dtype of matmuls with weights of so many bytes an element."""
        left_out = self.precision == "fp8" and width == BFLOAT16.others
        return "bfloat16" if left_out else self.precision


FLOAT32 = Stored("float32", 4.0, 4.0, "float32", 4.0)
BFLOAT16 = Stored("bfloat16")
FP8 = Stored("FP8", 1.0, 1.0, "fp8")
_FP4 = 4.25 / 8
"""Bytes of a float of 4 bits with its share of the 8-bit scale of 32 of them."""
_EXPERTS = tuple(
    f"{block}.experts.0.up_proj"
    for block in ("mlp", "block_sparse_moe", "feed_forward", "moe", "mixer")
)
_OTHERS = ("self_attn.o_proj", "mixer.o_proj")
"""What families call a weight of the experts, and one of attention, in a layer."""
_BLOCK = 128
"""Elements of a row that share one 32-bit scale when vLLM's backends dispatch in FP8
(`use_fp8_dispatch` of DeepEP's kernels; the gather also quantises first).
"""


def stored_weights(config: Mapping[str, Any], *, has_fp8: bool) -> Stored:
    """Return how a server stores the weights of a checkpoint.

    config: its `config.json`. has_fp8: the GPU has FP8 matmuls; without them FP8
    weights are read in FP8 and multiplied in bfloat16.
    """
    text = config.get("text_config") or config
    quantisation = config.get(FIELD) or text.get(FIELD) or {}
    try:
        # A layer in the middle is like most others.
        layer = f"model.layers.{int(text.get('num_hidden_layers') or 0) // 2}"
        experts = _stored(
            quantisation, [f"{layer}.{name}" for name in _EXPERTS], has_fp8
        )
        others = _stored(quantisation, [f"{layer}.{name}" for name in _OTHERS], has_fp8)
        # DeepSeek-V4 keeps it beside the quantisation of the other weights.
        if quantisation and config.get("expert_dtype") == "fp4":
            experts = replace(experts, name="MXFP4", experts=_FP4)
    except (AttributeError, KeyError, TypeError, ValueError, re.error):
        raise UserError(
            f"config.json: {FIELD}: {quantisation!r:.200}: cannot be read; correct it, or"
            " plan with --dtype bfloat16"
        ) from None
    if experts.experts == others.others:
        return experts
    # Attention in bfloat16 is understood.
    names = [f"{experts.name} experts", others.name]
    name = ", ".join(names if others != BFLOAT16 else names[:1])
    return replace(experts, name=name, others=others.others)


def _stored(
    quantisation: Mapping[str, Any], names: Sequence[str], has_fp8: bool
) -> Stored:
    """Return how the weights of a module are stored.

    names: what families call it.
    """
    method = str(quantisation.get("quant_method", ""))
    if not method or _is_left_out(quantisation, names):
        return BFLOAT16
    if method in ("fp8", "fbgemm_fp8", "mxfp8"):
        in_blocks = quantisation.get("weight_block_size") == [_BLOCK, _BLOCK]
        stored = replace(FP8, sent=1 + 4 / _BLOCK) if in_blocks else FP8
    elif method == "mxfp4":
        is_experts = ".experts." in names[0]
        stored = Stored("MXFP4", _FP4, _FP4) if is_experts else BFLOAT16
    elif (bits := _bits(quantisation, names)) is not None:
        is_float, number, group = bits
        if is_float and number == 8:
            stored = FP8
        else:
            # An 8-bit scale for each group of floats, or a 16-bit one of integers.
            scale = (8 if is_float else 16) / group if group > 0 else 0.0
            width = (number + scale) / 8
            kind = ("MXFP" if group == 32 else "NVFP") if is_float else "INT"
            stored = Stored(f"{kind}{number}", width, width)
    elif any(key in quantisation for key in ("config_groups", "layer_quant_config")):
        return BFLOAT16  # in none of them
    else:
        return Stored(f"bfloat16 (the method {method} is not planned)")
    if stored.precision == "fp8" and not has_fp8:
        return Stored(f"{stored.name}, computed in bfloat16", 1.0, 1.0)
    return stored


def _is_left_out(quantisation: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether a quantisation leaves a module as it is."""
    # compressed-tensors and ModelOpt; ModelOpt; transformers' own methods; vLLM's FP8;
    # Quark
    keys = (
        "ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "exclude",
    )  # fmt: skip
    patterns = [pattern for key in keys for pattern in quantisation.get(key) or ()]
    # GPTQ: a regular expression, of which "-:" excludes what it matches
    dynamic = [key for key in quantisation.get("dynamic") or () if key.startswith("-:")]
    patterns += [key.replace("-:", "re:", 1) for key in dynamic]
    return any(_matches(pattern, names) for pattern in patterns)


def _matches(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a pattern of a quantisation means a module or what holds it."""
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    # The model may be a part of another one, with other names before `layers`.
    pattern = f"*.{pattern[max(pattern.find('layers.'), 0) :]}.*"
    return any(fnmatchcase(f".{name}.", pattern) for name in names)


def _bits(
    quantisation: Mapping[str, Any], names: Sequence[str]
) -> tuple[bool, int, int] | None:
    """Return whether the weights of a module are floats, their bits, and the size of a
    group with one scale (0: none); None where the method does not say.
    """
    algorithm = str(quantisation.get("quant_algo") or "").upper()
    method = quantisation["quant_method"]
    if method == "nvfp4" or "NVFP4" in algorithm:
        return True, 4, 16
    if algorithm.startswith("FP8"):
        return True, 8, 0
    if algorithm.startswith(("W4A", "INT4")):
        return False, 4, int(quantisation.get("group_size", 128))
    for settings in dict(quantisation.get("config_groups") or {}).values():
        weights = settings.get("weights") or {}
        targets = settings.get("targets") or ["Linear"]
        is_meant = "Linear" in targets or any(_matches(t, names) for t in targets)
        if is_meant and "num_bits" in weights:
            is_float, size = weights.get("type") == "float", weights.get("group_size")
            return is_float, int(weights["num_bits"]), int(size or 0)
    if method == "quark":
        return _quark_bits(quantisation, names)
    # GPTQ, AWQ and auto-round
    bits = quantisation.get("bits", quantisation.get("w_bit"))
    if bits is None:
        return None
    return False, int(bits), int(quantisation.get("group_size", 128))


def _quark_bits(
    quantisation: Mapping[str, Any], names: Sequence[str]
) -> tuple[bool, int, int] | None:
    """Return the same for AMD's Quark, which has settings for all modules and others
    for some.
    """
    layers = dict(quantisation.get("layer_quant_config") or {})
    settings = [each for pattern, each in layers.items() if _matches(pattern, names)]
    weight = [*settings, quantisation.get("global_quant_config") or {}][0].get("weight")
    # Of several steps of rounding the last one is stored.
    weight = weight[-1] if isinstance(weight, list) else weight
    if not weight:
        return None
    dtype, size = str(weight["dtype"]), weight.get("group_size")
    digits = re.search(r"\d+", dtype)
    return (
        None
        if digits is None
        else (dtype.startswith("fp"), int(digits[0]), int(size or 0))
    )
