"""The tensors of a quantised checkpoint, told by their names and dtypes: whether they are
quantised, and whether any of them is missing.

Not covered: the numbers; a method names and packs its tensors as it likes.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

from fcsd.base.weights import CONFIG
from fcsd.model.quantised.methods import FIELD, MODELOPT, PACKING, Quantisation

_INTEGERS = ("U8", "I8")
_OWN_NAMES = re.compile(
    r".*(\.weight_(scale|scale_inv|scale_2|packed|global_scale|shape|zero_point)|_scale_inv|_weight_scale\w*"
    r"|[._]input_(scale|global_scale)|\.(qweight|qzeros|scales|[kv]_scale|weight\.absmax)|_proj_(blocks|scales))"
)
"""Names that quantisation gives its tensors."""
_EXPERT = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<part>down|gate_up|gate|up)_proj\..+"
)
_SCALE = re.compile(r"(.+?)_(scale\w*|scales)")
SCALES_OF_MODULES = (".scale", ".qscale_weight")
"""Suffixes that some FP8 checkpoints (DeepSeek-V4, Mistral Large 4) use in place of
`.weight_scale_inv`.
"""
_SCALES = re.compile(
    r"(weight_)?(scale|scales|scale_inv|scale_2|global_scale|shape|zero_point|zeros|qzeros|g_idx|perm)|input_\w*scale|qscale_weight"
)
"""Suffixes after a module's name of tensors that hold none of its weights."""

Shapes = Mapping[str, tuple[int, ...]]


def quantised_tensors(dtypes: Mapping[str, str]) -> list[str]:
    """Return the names of tensors that are quantised, or exist because others are."""
    return [
        name
        for name, dtype in dtypes.items()
        if dtype.startswith(("F8", "F4", "F6"))
        or dtype in _INTEGERS
        or _OWN_NAMES.fullmatch(name)
    ]


def is_left_over(quantisation: Quantisation, dtypes: Mapping[str, str]) -> bool:
    """Return whether tensors are plain that would be quantised according to the
    fields.
    """
    return quantisation.method in PACKING and not quantised_tensors(dtypes)


def missing_tensors(
    expected: Shapes, dtypes: Mapping[str, str], tied: Collection[str]
) -> list[str]:
    """Return a plain model's tensors that no tensor of a quantised checkpoint could
    hold.

    A method may rename a tensor and add others, but their names begin with that of the
    module (`x.weight` -> `x.weight_packed`, `x.qweight`) or of the parameter
    (`down_proj` -> `down_proj_blocks`). It may give each expert a module where the
    family has one tensor for all. FP8 needs its scales, too.
    """
    held: set[str] = set()
    experts: dict[str, set[str]] = defaultdict(set)
    for name in dtypes:
        module, _, last = name.rpartition(".")
        held.add(name)
        # A scale belongs to a weight; alone it holds nothing.
        if _SCALES.fullmatch(last) or _SCALE.fullmatch(name):
            continue
        held.add(re.sub(r"_(blocks|packed)$", "", name))
        # Whatever else a module has (`qweight`, `weight_packed`) may be its weight; a
        # bias may not.
        if last != "bias":
            held.add(f"{module}.weight")
            if match := _EXPERT.fullmatch(name):
                experts[f"{match['experts']}.{match['part']}_proj"].add(match["index"])
    # A family's one tensor for all experts may be a module for each in the files. It is
    # there when they are as many as its first dimension.
    for name, shape in expected.items():
        parts = [name]
        if "gate_up" in name:
            parts += [name.replace("gate_up", part) for part in ("gate", "up")]
        counts = [len(experts[part]) for part in parts]
        if shape and shape[0] in (counts[0], min(counts[1:], default=0)):
            held.add(name)
    # Without its scales an FP8 tensor is not the weight.
    scaled = {match[1] for name in dtypes if (match := _SCALE.fullmatch(name))}
    scaled |= {
        f"{name.removesuffix(end)}.weight"
        for name in dtypes
        for end in SCALES_OF_MODULES
        if name.endswith(end)
    }
    lacking = [
        f"{name}_scale_inv"
        for name, dtype in dtypes.items()
        if dtype.startswith("F8") and name not in scaled and not _SCALE.fullmatch(name)
    ]
    return [
        name for name in expected if name not in held and name not in tied
    ] + lacking


def quantised_without_word(folder: Path, name: str, dtype: str) -> str:
    """Return the message about quantised weights that no file says how to read."""
    return (
        f"{folder}: tensor '{name}' ({dtype}) is of quantised weights, but neither"
        f" {FIELD} in {CONFIG} nor {MODELOPT} says how; fetch the config again"
    )
