"""Other projects' configuration keys for the same connectivity, read as ours. Standard
library only.

AMD's Instella-MoE checkpoints are FarSkip models from scratch. Their `config.json` has
five keys for it, defined by `modeling_instella_moe.py` (AMD, 2026, written for
transformers 4.57.1; the checkpoints contain it):

    farskip             bool; false or absent: the regular model
    farskip_start_idx   first FarSkip layer, default 0
    farskip_end_idx     last FarSkip layer, *inclusive*, default 10000; min(farskip_end_idx, L - 1) counts
    attn_only_farskip   attention reads the stream without routed output, the MLP reads h: `mlp: full`
    mlp_only_farskip    the MLP reads o_{k-1}, attention reads the full stream: `attention: full`

Both switches on: both sides are full, which is the regular model. A dense layer in the
range follows the same two rules and leaves nothing in flight, as ours; the first layer
of the model and the layer after a dense one read one stream for both, as ours.

There is one difference. In AMD's file *every* MoE layer hands the stream without its
routed output on, a regular one too, so the first FarSkip layer after a regular MoE
layer reads o - routed of that regular layer. Here the routed output of a regular layer
is never in flight. `attn_only_farskip` equals our connectivity with a selection that
begins one layer earlier (in that layer attention and MLP read the same as in a regular
layer). With both sides it has no counterpart and is refused. No published checkpoint
sets the start.

`gated_attention` on a deepseek_v3 is the attention gate of the family instella_moe,
with or without the keys above. Every key of such a config must be described
(`_DESCRIBED`); in other configs, every key with `farskip` in its name must be: the
effect of an unknown key is unknown. `to_instella` is the other direction.

Not covered: AMD's own code, which calls `DeepseekV3MoE.moe`; transformers 5 no longer
has it.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from fcsd.base.errors import UserError
from fcsd.base.strict import did_you_mean
from fcsd.model.connectivity.spec import CALIBRATED, TRAINED, Connectivity
from fcsd.model.families import ALIASES, FAMILIES, PREFIX, base_model_type, moe_mask
from fcsd.model.families.family import MOE_LAYERS

INSTELLA_KEYS = (
    "farskip",
    "farskip_start_idx",
    "farskip_end_idx",
    "attn_only_farskip",
    "mlp_only_farskip",
)


GATE = "gated_attention"
_BASE, _INSTELLA = "deepseek_v3", "instella_moe"
"""Model type in a `config.json` with the gate, and the family that it is."""

_DESCRIBED = {
    CALIBRATED, TRAINED,
    "_name_or_path", "architectures", "attention_bias", "attention_dropout", "auto_map", "aux_loss_alpha",
    "bos_token_id", "dtype", "eos_token_id", "ep_size", "first_k_dense_replace", "gated_attention", "head_dim",
    "hidden_act", "hidden_size", "initializer_range", "intermediate_size", "kv_lora_rank", "max_position_embeddings",
    "model_type", "moe_intermediate_size", "moe_layer_freq", "n_group", "n_routed_experts", "n_shared_experts",
    "norm_topk_prob", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_nextn_predict_layers", "output_router_logits", "pad_token_id", "pretraining_tp", "q_lora_rank",
    "qk_head_dim", "qk_layernorm", "qk_nope_head_dim", "qk_rope_head_dim", "quantization_config", "rms_norm_eps",
    "rope_interleave", "rope_parameters", "rope_scaling", "rope_theta", "routed_scaling_factor", "scoring_func",
    "seq_aux", "tie_word_embeddings", "topk_group", "topk_method", "torch_dtype", "transformers_version", "use_cache",
    "v_head_dim", "vocab_size",
}  # fmt: skip
"""Keys of DeepSeek-V3, of every config, and of Instella beside `INSTELLA_KEYS`."""


def has_instella_keys(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` says connectivity or gate in Instella's keys. In
    ours, `farskip` is a mapping.
    """
    if config.get("model_type") == _BASE and config.get(GATE):
        return True
    return isinstance(config.get("farskip"), bool) or any(
        key in config for key in INSTELLA_KEYS[1:]
    )


def in_our_names(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a `config.json` with connectivity and family in fcsd's keys and names; as
    it is where it has them.

    Raises:
        UserError: as `translate_instella`.
    """
    if (family := ALIASES.get(str(config.get("model_type")))) is not None:
        config = config | {"model_type": family}
    return translate_instella(config, where) if has_instella_keys(config) else config


def instella_type(config: Mapping[str, Any]) -> str:
    """Return the model type that a `config.json` means: a deepseek_v3 with Instella's
    gate is an instella_moe.
    """
    model_type = str(config.get("model_type") or "")
    return _INSTELLA if model_type == _BASE and config.get(GATE) else model_type


def check_described(config: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an undescribed key in a config with Instella's keys."""
    gated = config.get("model_type") == _BASE and bool(config.get(GATE))
    described_keys = _DESCRIBED.union(INSTELLA_KEYS)
    for key in config:
        if key not in described_keys and (gated or "farskip" in key):
            raise UserError(
                f"{where}: {key}: unknown"
                f" key{did_you_mean(key, sorted(described_keys))}; its effect on an"
                " Instella model is unknown, so fcsd does not ignore it; remove it if"
                " it changes nothing"
            )


def from_instella(
    config: Mapping[str, Any], moe_mask: Sequence[bool], where: str = "config.json"
) -> Connectivity:
    """Return the connectivity that Instella's keys in a `config.json` describe;
    `layers: none` for a regular model.

    moe_mask: one entry per decoder layer, True for an MoE layer. where: the config's
    name in errors.

    Raises:
        UserError: a key has a value of the wrong kind, or the range begins with both
            sides after a regular MoE layer (see the module's docstring).
    """
    farskip, attention_only, mlp_only = (
        _flag(config, key, where)
        for key in ("farskip", "attn_only_farskip", "mlp_only_farskip")
    )
    start = max(_index(config, "farskip_start_idx", 0, where), 0)
    end = min(_index(config, "farskip_end_idx", 10_000, where), len(moe_mask) - 1)
    if not farskip or start > end or (attention_only and mlp_only):
        return Connectivity("none")
    # In AMD's file a regular MoE layer hands the stream on without its routed output,
    # too. With attention alone the same arises here from a selection that begins one
    # layer earlier: a first layer with `mlp: full` computes what a regular one does,
    # and leaves its output in flight. With the MLP alone attention reads the full
    # stream, so nothing has to be moved.
    after_regular_moe = start > 0 and moe_mask[start - 1]
    if after_regular_moe and attention_only:
        start -= 1
    elif after_regular_moe and not mlp_only:
        first_moe = list(moe_mask).index(True)
        raise UserError(
            f"{where}: farskip_start_idx: {start} follows the regular MoE layer"
            f" {start - 1}; in AMD's file attention of layer {start} reads the stream"
            " without that layer's routed output, which has no counterpart here;"
            f" allowed: 0 to {first_moe}, or mlp_only_farskip or attn_only_farskip"
            " with it"
        )
    return Connectivity(
        list(range(start, end + 1)),
        attention="full" if mlp_only else "partial",
        mlp="full" if attention_only else "outdated",
    )


def translate_instella(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a `config.json` with Instella's keys, rewritten in fcsd's own format:
    `farskip_<base>` with a `farskip` field, or the base family's where nothing is
    rewired.

    Raises:
        UserError: as `from_instella`; a family that is not supported, the gate on
            another than deepseek_v3, or a key that is not described.
    """
    model_type = instella_type(config)
    family = FAMILIES.get(model_type)
    if family is None or family.multimodal:
        raise UserError(
            f"{where}: farskip: Instella's keys are read on text models of a supported"
            f" family, not on model type '{model_type}'; `fcsd families` lists the"
            " supported ones"
        )
    check_described(config, where)
    if _flag(config, GATE, where) and model_type != _INSTELLA:
        raise UserError(
            f"{where}: {GATE}: the gate is supported on model type {_BASE}, not on"
            f" '{model_type}'"
        )
    try:
        # The raw fields replace transformers' config object, which this module must not
        # import. A field that upstream would fill in is missing here, so the rule for
        # MoE layers may fail.
        mask = moe_mask(SimpleNamespace(**config), family)
    except (AttributeError, UserError):
        fields = ", ".join(("num_hidden_layers", *MOE_LAYERS[family.moe_layers][0]))
        raise UserError(
            f"{where}: farskip: fcsd cannot tell which layers are MoE; add the fields"
            f" {fields}"
        ) from None
    field = from_instella(config, mask, where).field(mask)
    other_keys = {
        key: value
        for key, value in config.items()
        if key not in (*INSTELLA_KEYS, "auto_map")
    }
    if family.like:
        # 1 in some, whose files hold no such layer
        other_keys["num_nextn_predict_layers"] = 0
    if not field["layers"]:
        return other_keys | {
            "model_type": model_type,
            "architectures": [family.causal_lm],
        }
    names = {
        "model_type": PREFIX + model_type,
        "architectures": [f"FarSkip{family.causal_lm}"],
    }
    return other_keys | names | {"farskip": field}


AMDS_CODE = "amd/Instella-MoE-16B-A3B-Think"
"""Repository whose code an exported config names: it is not copied."""
_AUTO = {
    "AutoConfig": "configuration_instella_moe.InstellaMoEConfig",
    "AutoModel": "modeling_instella_moe.InstellaMoEModel",
    "AutoModelForCausalLM": "modeling_instella_moe.InstellaMoEForCausalLM",
}
_REWRITTEN = ("farskip", "auto_map", "dtype", "rope_parameters")


def to_instella(
    config: Mapping[str, Any],
    field: Mapping[str, Any],
    mask: Sequence[bool],
    where: str,
) -> dict[str, Any]:
    """Return a `config.json` in Instella's keys, which `translate_instella` reads as
    the same model.

    AMD's code for transformers 4.57 has DeepSeek-V3's router and reads the keys. AMD's
    SGLang supports all layers with both sides, or none, chosen by environment
    variables; it also has DeepSeek-V2's router.

    config: of a checkpoint of fcsd, or in Instella's keys but translated. field: its
    `farskip` field; `layers: []` for a regular model. mask: one entry per decoder
    layer, True for an MoE layer. where: the config's name in errors.

    Raises:
        UserError: the family or the connectivity cannot be said in these keys; a key is
            none that is described.
    """
    family = base_model_type(str(config["model_type"]))
    if family not in (_INSTELLA, "deepseek_v2", _BASE):
        raise UserError(
            f"{where}: AMD's keys are read by AMD's code for DeepSeek-V2, DeepSeek-V3"
            f" and Instella-MoE only, not for '{family}'"
        )
    keys = _keys_of(field, mask, where)
    if family == "deepseek_v2" and field["layers"] != [] and set(keys) != {"farskip"}:
        raise UserError(
            f"{where}: AMD's code for transformers has DeepSeek-V3's router, and AMD's"
            " SGLang, which has DeepSeek-V2's, rewires both sides of all layers;"
            " convert the original with `--layers all`"
        )
    result_keys = {key: value for key, value in config.items() if key not in _REWRITTEN}
    result_keys |= _rope_before_5(config) | {
        "torch_dtype": config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    }
    names: dict[str, Any] = {"architectures": ["DeepseekV2ForCausalLM"]}
    if family != "deepseek_v2":
        names = {
            "architectures": ["InstellaMoEForCausalLM"],
            "auto_map": {
                auto: f"{AMDS_CODE}--{class_path}" for auto, class_path in _AUTO.items()
            },
            GATE: family == _INSTELLA,
            # The value without MTP tensors: an engine that finds a number but no
            # tensors drafts with random ones. `export_checkpoint` puts the number back
            # where the tensors are.
            "num_nextn_predict_layers": 0,
        }
    model_type = _BASE if family == _INSTELLA else family
    result = result_keys | names | {"model_type": model_type} | keys
    # Code that reads this config passes over a key that it does not know.
    check_described(result, where)
    return result


def _keys_of(
    field: Mapping[str, Any], mask: Sequence[bool], where: str
) -> dict[str, Any]:
    """Return the keys that `from_instella` reads as this field."""
    layers = field["layers"]
    if not layers:
        return {"farskip": False}
    flags = {
        "attn_only_farskip": field["mlp"] == "full",
        "mlp_only_farskip": field["attention"] == "full",
    }
    last = {"farskip_end_idx": layers[-1]} if layers[-1] < len(mask) - 1 else {}
    # With attention alone, AMD's range begins one layer later; our first layer computes
    # the same as a regular layer.
    for first in (layers[0], layers[0] + 1):
        keys = {
            "farskip": True,
            **({"farskip_start_idx": first} if first else {}),
            **last,
        }
        keys |= {name: True for name, value in flags.items() if value}
        try:
            if from_instella(keys, mask).field(mask) == dict(field):
                return keys
        except UserError:
            continue
    raise UserError(
        f"{where}: farskip: AMD's keys have one range of layers, which begins at a"
        " dense layer, or at the first MoE layer if both sides are rewired; they cannot"
        f" express layers {layers}, attention {field['attention']}, mlp {field['mlp']}"
    )


def _rope_before_5(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` of transformers 5 as the two fields that 4.57 and 5 read."""
    rope = dict(config.get("rope_parameters") or {})
    if not rope:
        return {}
    theta, kind = rope.pop("rope_theta", 10_000.0), rope.pop("rope_type", "default")
    return {
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"type": kind, **rope},
    }


def _flag(config: Mapping[str, Any], key: str, where: str) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{where}: {key}: must be true or false, got {value!r}")
    return value


def _index(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = config.get(key, default)  # AMD's default of the end is the float 1e4
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != int(value)
    ):
        raise UserError(f"{where}: {key}: must be the index of a layer, got {value!r}")
    return int(value)
