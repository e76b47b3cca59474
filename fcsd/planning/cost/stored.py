"""Find how a server stores a model's weights: bytes per element, and the precision of
the matmuls, from the checkpoint's quantisation.

Not covered: modules that a method leaves out, except that MXFP4 applies to experts
only. A model whose method is not known here is planned in bfloat16, and the plan says
so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    quantisation = (
        config.get(FIELD) or (config.get("text_config") or {}).get(FIELD) or {}
    )
    try:
        stored = _stored(quantisation, has_fp8)
        # DeepSeek-V4 keeps it beside the quantisation of the other weights.
        if quantisation and config.get("expert_dtype") == "fp4":
            name = f"MXFP4 experts, {stored.name}"
            return replace(stored, name=name, experts=_FP4)
        return stored
    except (AttributeError, TypeError, ValueError):  # a field of another type
        raise UserError(
            f"config.json: {FIELD}: {quantisation!r:.200}: cannot be read; correct it, or"
            " plan with --dtype bfloat16"
        ) from None


def _stored(quantisation: Mapping[str, Any], has_fp8: bool) -> Stored:
    method = str(quantisation.get("quant_method", ""))
    if not method:
        return BFLOAT16
    if method in ("fp8", "fbgemm_fp8"):
        in_blocks = quantisation.get("weight_block_size") == [_BLOCK, _BLOCK]
        stored = replace(FP8, sent=1 + 4 / _BLOCK) if in_blocks else FP8
    elif method == "mxfp4":
        stored = Stored("MXFP4 experts", _FP4)  # attention stays in bfloat16
    elif (bits := _bits(quantisation)) is not None:
        is_float, number, group = bits
        if is_float and number == 8:
            stored = FP8
        else:
            # A 16-bit scale for each group, or an 8-bit scale for 16 floats of 4 bits.
            scale = 8 / 16 if is_float else 16 / group if group > 0 else 0.0
            width = (number + scale) / 8
            kind = "NVFP" if is_float else "INT"
            stored = Stored(f"{kind}{number}", width, width)
    else:
        return Stored(f"bfloat16 (the method {method} is not planned)")
    if stored.precision == "fp8" and not has_fp8:
        return Stored(f"{stored.name}, computed in bfloat16", 1.0, 1.0)
    return stored


def _bits(quantisation: Mapping[str, Any]) -> tuple[bool, int, int] | None:
    """Return whether weights are floats, their bits, and the size of a group with one
    scale (0: none); None where the method does not say.
    """
    algorithm = str(quantisation.get("quant_algo", "")).upper()
    if algorithm.startswith(("FP8", "NVFP4")):
        return True, 8 if algorithm.startswith("FP8") else 4, 16
    for group in dict(quantisation.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        if "num_bits" in weights:
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
