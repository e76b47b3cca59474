"""Other projects' configuration keys for the same connectivity, read as ours. Standard library only.

AMD's Instella-MoE checkpoints are FarSkip models from scratch. Their `config.json` says so in five keys, whose
meaning is that of `modeling_instella_moe.py` (AMD, 2026, written for transformers 4.57.1; it is shipped in
the checkpoints):

    farskip             bool; false or absent: the regular model
    farskip_start_idx   first FarSkip layer, default 0
    farskip_end_idx     last FarSkip layer, *inclusive*, default 10000; min(farskip_end_idx, L - 1) counts
    attn_only_farskip   attention reads the stream without routed output, the MLP reads h: `mlp: full`
    mlp_only_farskip    the MLP reads o_{k-1}, attention reads the full stream: `attention: full`

Both switches on: both sides are full, which is the regular model. A dense layer in the range follows the same
two rules and leaves nothing in flight, as ours; the first layer of the model and the layer after a dense one
read one stream for both, as ours.

There is one difference. In AMD's file *every* MoE layer hands the stream without its routed output on, a
regular one too, so the first FarSkip layer after a regular MoE layer reads o - routed of that regular layer.
Here the routed output of a regular layer is never in flight. With `attn_only_farskip` the wiring is still
ours, with the selection begun one layer earlier (whose attention and MLP then both read what a regular
layer reads). With both sides it has no counterpart and is refused. No published checkpoint sets the start.

Not covered: Instella's attention gate (`gated_attention`), which transformers' deepseek_v3 does not have, so
that AMD's own weights cannot be loaded; `fcsd inspect` shows them. AMD's code calls `DeepseekV3MoE.moe`, which
transformers 5 no longer has.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fcsd.base.errors import UserError
from fcsd.model.connectivity.spec import Connectivity
from fcsd.model.families import FAMILIES, PREFIX, Family, moe_mask
from fcsd.model.families.family import MOE_LAYERS

INSTELLA_KEYS = (
    "farskip",
    "farskip_start_idx",
    "farskip_end_idx",
    "attn_only_farskip",
    "mlp_only_farskip",
)


def has_instella_keys(config: Mapping[str, Any]) -> bool:
    """Return whether the connectivity of a `config.json` is written in Instella's keys. In ours, `farskip` is a
    mapping."""
    return isinstance(config.get("farskip"), bool) or any(key in config for key in INSTELLA_KEYS[1:])


def from_instella(
    config: Mapping[str, Any], moe_mask: Sequence[bool], where: str = "config.json"
) -> Connectivity:
    """Return the connectivity that Instella's keys describe.

    Args:
        config: the mapping read from a `config.json`.
        moe_mask: one entry a decoder layer, True for an MoE layer.
        where: what an error names.

    Returns:
        `layers: none` for a regular model.

    Raises:
        UserError: a key has a value of the wrong kind, or the range begins with both sides after a regular
            MoE layer (see the module's docstring).
    """
    farskip, attention_only, mlp_only = (
        _flag(config, key, where) for key in ("farskip", "attn_only_farskip", "mlp_only_farskip")
    )
    start = max(_index(config, "farskip_start_idx", 0, where), 0)
    end = min(_index(config, "farskip_end_idx", 10_000, where), len(moe_mask) - 1)
    if not farskip or start > end or (attention_only and mlp_only):
        return Connectivity("none")
    after_regular_moe = start > 0 and moe_mask[start - 1]
    if after_regular_moe and attention_only:
        start -= 1
    elif after_regular_moe and not mlp_only:
        first_moe = list(moe_mask).index(True)
        raise UserError(
            f"{where}: farskip_start_idx: {start} follows the regular MoE layer {start - 1}; in AMD's file"
            f" attention of layer {start} reads the stream without that layer's routed output, which has no"
            f" counterpart here; allowed: 0 to {first_moe}, or mlp_only_farskip or attn_only_farskip with it"
        )
    return Connectivity(
        list(range(start, end + 1)),
        attention="full" if mlp_only else "partial",
        mlp="full" if attention_only else "outdated",
    )


def no_gate(family: Family) -> str:
    """Explain why AMD's own weights, which have the attention gate, cannot be used."""
    return (
        f"gated_attention: transformers' {family.causal_lm} has no attention gate, so these weights"
        " (self_attn.gate_proj) cannot be loaded as it; the checkpoint already is FarSkip, and runs with AMD's own code"
        " under transformers 4.57"
    )


def translate_instella(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Return a `config.json` with Instella's keys, rewritten in fcsd's own format: `farskip_<base>` with a `farskip`
    field, or the base family's where nothing is rewired.

    Raises:
        UserError: as `from_instella`; a family that is not supported, or the attention gate.
    """
    model_type = str(config.get("model_type") or "")
    family = FAMILIES.get(model_type)
    if family is None or family.multimodal:
        raise UserError(
            f"{where}: farskip: Instella's keys are read on text models of a supported family, not on model"
            f" type '{model_type}'; `fcsd families` lists the supported ones"
        )
    if config.get("gated_attention"):
        raise UserError(f"{where}: {no_gate(family)}")
    try:
        mask = moe_mask(SimpleNamespace(**config), family)
    except (AttributeError, TypeError):
        fields = ", ".join(("num_hidden_layers", *MOE_LAYERS[family.moe_layers][0]))
        raise UserError(
            f"{where}: farskip: which layers are MoE cannot be told; the fields {fields} are needed beside it"
        ) from None
    field = from_instella(config, mask, where).field(mask)
    left = {key: value for key, value in config.items() if key not in (*INSTELLA_KEYS, "auto_map")}
    if not field["layers"]:
        return left | {"architectures": [family.causal_lm]}
    names = {"model_type": PREFIX + model_type, "architectures": [f"FarSkip{family.causal_lm}"]}
    return left | names | {"farskip": field}


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key}: must be true or false, got {value!r}")
    return value


def _index(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = config.get(key, default)  # AMD's default of the end is the float 1e4
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise UserError(f"{where}: {key}: must be the index of a layer, got {value!r}")
    return int(value)
