"""Find how a server stores a model's weights: bytes per element, and the precision of
the matmuls, from the checkpoint's quantisation.

The experts may be stored in another way than all other weights, which are taken to be
stored as those of attention. A model whose method is not known here is planned in
bfloat16, and the plan says so.
"""

import re
from collections.abc import Mapping
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
        experts = _stored(quantisation, f"{layer}.mlp.experts.0.up_proj", has_fp8)
        others = _stored(quantisation, f"{layer}.self_attn.o_proj", has_fp8)
        # DeepSeek-V4 keeps it beside the quantisation of the other weights.
        if quantisation and config.get("expert_dtype") == "fp4":
            experts = replace(experts, name="MXFP4", experts=_FP4)
    except (AttributeError, TypeError, ValueError, re.error):  # of another type
        raise UserError(
            f"config.json: {FIELD}: {quantisation!r:.200}: cannot be read; correct it, or"
            " plan with --dtype bfloat16"
        ) from None
    if experts.name == others.name:
        return experts
    # Attention in bfloat16 is understood.
    names = [f"{experts.name} experts", others.name]
    name = ", ".join(names if others != BFLOAT16 else names[:1])
    return replace(experts, name=name, others=others.others)


def _stored(quantisation: Mapping[str, Any], module: str, has_fp8: bool) -> Stored:
    """Return how the weights of a module are stored."""
    method = str(quantisation.get("quant_method", ""))
    if not method or _is_left_out(quantisation, module):
        return BFLOAT16
    if method in ("fp8", "fbgemm_fp8"):
        in_blocks = quantisation.get("weight_block_size") == [_BLOCK, _BLOCK]
        stored = replace(FP8, sent=1 + 4 / _BLOCK) if in_blocks else FP8
    elif method == "mxfp4":
        if ".experts." not in module:
            return BFLOAT16
        stored = Stored("MXFP4", _FP4, _FP4)
    elif (bits := _bits(quantisation, module)) is not None:
        is_float, number, group = bits
        if is_float and number == 8:
            stored = FP8
        else:
            # A 16-bit scale for each group, or an 8-bit scale for 16 floats of 4 bits.
            scale = 8 / 16 if is_float else 16 / group if group > 0 else 0.0
            width = (number + scale) / 8
            kind = "NVFP" if is_float else "INT"
            stored = Stored(f"{kind}{number}", width, width)
    elif quantisation.get("config_groups"):
        return BFLOAT16  # in no group
    else:
        return Stored(f"bfloat16 (the method {method} is not planned)")
    if stored.precision == "fp8" and not has_fp8:
        return Stored(f"{stored.name}, computed in bfloat16", 1.0, 1.0)
    return stored


def _is_left_out(quantisation: Mapping[str, Any], module: str) -> bool:
    """Return whether a quantisation leaves a module as it is."""
    # compressed-tensors and ModelOpt; ModelOpt; all that are transformers' own
    keys = ("ignore", "exclude_modules", "modules_to_not_convert")
    patterns = [pattern for key in keys for pattern in quantisation.get(key) or ()]
    # GPTQ: a regular expression, of which "-:" excludes what it matches
    dynamic = [key for key in quantisation.get("dynamic") or () if key.startswith("-:")]
    patterns += [key.replace("-:", "re:", 1) for key in dynamic]
    return any(_matches(pattern, module) for pattern in patterns)


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern of a quantisation means a module or what holds it."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    # The model may be a part of another one, with other names before `layers`.
    name = pattern[max(pattern.find("layers."), 0) :]
    return fnmatchcase(f".{module}.", f"*.{name}.*")


def _bits(quantisation: Mapping[str, Any], module: str) -> tuple[bool, int, int] | None:
    """Return whether the weights of a module are floats, their bits, and the size of a
    group with one scale (0: none); None where the method does not say.
    """
    algorithm = str(quantisation.get("quant_algo", "")).upper()
    if algorithm.startswith(("FP8", "NVFP4")):
        return True, 8 if algorithm.startswith("FP8") else 4, 16
    for group in dict(quantisation.get("config_groups") or {}).values():
        weights, targets = (
            group.get("weights") or {},
            group.get("targets") or ["Linear"],
        )
        is_meant = "Linear" in targets or any(_matches(t, module) for t in targets)
        if is_meant and "num_bits" in weights:
            is_float = weights.get("type") == "float"
            return (
                is_float,
                int(weights["num_bits"]),
                int(weights.get("group_size") or 0),
            )
    # GPTQ, AWQ and auto-round
    bits = quantisation.get("bits", quantisation.get("w_bit"))
    if bits is None:
        return None
    return False, int(bits), int(quantisation.get("group_size", 128))
