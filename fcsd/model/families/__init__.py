"""Describe the MoE families that fcsd converts as data: the upstream names of their
layers, and nothing else. `check_sizes` refuses a config with which no layer of theirs
can be built or run.

`FAMILIES` maps a Hugging Face `model_type` to a `Family`. Every name is spelled as in
the upstream modeling file of the entry, so that an upstream rename leads to a refusal
(`convert_model` compares class names), never to a wrong model. The rows are in
`standard`, `adapted` and `multimodal`.

A family is listed only when the contract tests in `tests/model/connectivity` pass on it
against an independent reference. To add one: `docs/families.md`.

Not covered: the families in `REFUSED`, for which the equations have no meaning.
"""

import difflib
import importlib.metadata
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from fcsd.base.errors import UserError, one_line
from fcsd.model.families import adapted, multimodal, standard
from fcsd.model.families.family import MOE_LAYERS, Family, moe_mask, text_config
from fcsd.model.families.refused import BROKEN, REFUSED

__all__ = [
    "ALIASES",
    "ALL_FAMILIES",
    "FAMILIES",
    "REFUSED",
    "SERVED",
    "SERVED_BY_SGLANG",
    "UNAVAILABLE",
    "Family",
    "base_model_type",
    "check_not_refused",
    "expert_counts",
    "family_of",
    "moe_mask",
    "serve_command",
    "served_by",
    "text_config",
]

ALL_FAMILIES: dict[str, Family] = {
    row.model_type: row for row in (*standard.ROWS, *adapted.ROWS, *multimodal.ROWS)
}
"""Families of every supported transformers, with those that the installed one lacks or
breaks: what the documentation lists.
"""


def _installed_transformers() -> str | None:
    """Return the version of transformers without importing it; None if it is not
    installed, as where the documentation is built.
    """
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


_INSTALLED = _installed_transformers()


def _unavailable(row: Family) -> str | None:
    """Say which transformers a family needs, if the installed one does not fit."""
    if _INSTALLED is None:
        return None
    if _release(row.since) > _release(_INSTALLED):
        return (
            f"needs transformers {row.since} or newer; installed is {_INSTALLED}:"
            " pip install -U transformers"
        )
    if (fault := BROKEN.get(row.model_type, {}).get(_INSTALLED)) is not None:
        return (
            f"needs another transformers than {_INSTALLED}, in which {fault}:"
            f" pip install 'transformers!={_INSTALLED},>={row.since}'"
        )
    return None


UNAVAILABLE: dict[str, str] = {
    name: reason
    for name, row in ALL_FAMILIES.items()
    if (reason := _unavailable(row)) is not None
}
"""Families that the installed transformers does not have or breaks -> what they need."""

FAMILIES: dict[str, Family] = {
    name: row for name, row in ALL_FAMILIES.items() if name not in UNAVAILABLE
}

_SEE = f"`fcsd families` lists the {len(FAMILIES)} that can be converted"

PREFIX = "farskip_"
"""The `model_type` of a converted checkpoint is PREFIX + that of the original."""

SERVED = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "gemma4", "gemma4_text", "glm4_moe", "gpt_oss", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "instella_moe", "lfm2_moe", "llama4", "llama4_text", "mimo_v2_flash",
    "minimax_m2", "mixtral", "nemotron_h", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip
"""Families whose converted checkpoints vLLM runs with the plugin in `serving/` (the
distribution fcsd-serving).
"""

SERVED_BY_SGLANG = (
    "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared",
    "hunyuan_v1_moe", "lfm2_moe", "mimo_v2_flash", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
)  # fmt: skip
"""Families whose converted checkpoints SGLang runs with that distribution."""

# Config fields that count experts ("section.field" for one in a section), of all
# families here and of some others.
EXPERTS = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "ffn_config.moe_num_experts",
    "num_routed_experts", "n_experts",
)  # fmt: skip
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "ffn_config.moe_top_k", "top_k_experts",
    "moe_top_k", "experts_per_token",
)  # fmt: skip
_ROW_WIDTH = ("moe_hidden_size", "moe_latent_size", "hidden_size")
_SECTIONS = ("ffn_config", "text_config")


ALIASES = {
    "AXK1": "axk1",  # A.X-K1, before transformers had the family
    "joyai_llm_flash": "deepseek_v3",  # JoyAI-LLM-Flash
    # Kimi-K2; according to its page, the name lets engines tell it from DeepSeek
    "kimi_k2": "deepseek_v3",
}
"""Model types of published checkpoints that are another name for a family -> that
family; classes and tensor names are the same.
"""


def base_model_type(model_type: str) -> str:
    """Return `qwen3_moe` for both `qwen3_moe` and `farskip_qwen3_moe`; resolve aliases."""
    name = model_type.removeprefix(PREFIX)
    return ALIASES.get(name, name)


def serve_command(model_type: str, where: str, *, weights: bool = True) -> str | None:
    """Return the command that serves a converted checkpoint; None if the plugin does
    not support its family.

    weights: the checkpoint has weights; one without is served with dummies.
    """
    served = model_type.startswith(PREFIX) and base_model_type(model_type) in SERVED
    dummies = "" if weights else " --load-format dummy"
    return f"vllm serve {where}{dummies}" if served else None


def served_by(model_type: str) -> list[str]:
    """Return the engines that run a family's converted checkpoints with overlap."""
    engines = {"vLLM": SERVED, "SGLang": SERVED_BY_SGLANG}
    return [engine for engine, names in engines.items() if model_type in names]


def read_field(config: Any, name: str) -> Any:
    """Read a config field, or "section.field"; None if the config has no such field."""
    for part in name.split("."):
        config = getattr(config, part, None)
    return config


def expert_counts(config: Any) -> tuple[int | None, int | None]:
    """Return the numbers of routed experts in a layer and of those that one token uses;
    None if the config does not say.

    config: the config object of the decoder layers.
    """

    def first(names: tuple[str, ...]) -> int | None:
        values = (read_field(config, name) for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    return first(EXPERTS), first(EXPERTS_PER_TOKEN)


def expert_groups(config: Any) -> tuple[int, int]:
    """Return the number of groups of a layer's experts, and the number of groups that
    one token's experts come from; (1, 1) without such a limit.

    A group is a run of consecutive experts (DeepSeek's node-limited routing). config:
    the config object of the decoder layers.
    """
    groups, chosen = (getattr(config, name, None) for name in ("n_group", "topk_group"))
    if not groups or not chosen or getattr(config, "topk_method", None) == "greedy":
        return 1, 1
    return groups, chosen


def row_width(config: Any) -> int:
    """Return the number of elements in a row that is sent to an expert: the width of
    the experts' latent space if they have one, else the hidden size.
    """
    return int(
        next(value for name in _ROW_WIDTH if (value := getattr(config, name, None)))
    )


def check_not_refused(model_type: str) -> None:
    """Raise UserError for a model type in `REFUSED`, with the reason, or in
    `UNAVAILABLE`, with the transformers that it needs.
    """
    if (needs := UNAVAILABLE.get(base_model_type(model_type))) is not None:
        raise UserError(f"model type '{model_type}' {needs}")
    if (reason := REFUSED.get(base_model_type(model_type))) is not None:
        raise UserError(
            f"model type '{model_type}' cannot be converted: {reason}; {_SEE}"
        )


def _get(config: Any, name: str, default: Any = None) -> Any:
    """Read a field of a config object, or of its mapping."""
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def family_of(config: Any) -> Family:
    """Find the family of a checkpoint.

    Args:
        config: a transformers config object, or the mapping read from a `config.json`.
            A FarSkip config gives the family of its original.

    Raises:
        UserError: there is no `model_type`; the family is refused or not supported; the
            model is dense, so that it has no expert communication to overlap; or it has
            a part that the equations of its family do not cover.
    """

    model_type = _get(config, "model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(
            "config.json: model_type is missing; a Hugging Face checkpoint names its"
            " family there"
        )
    family = FAMILIES.get(base_model_type(model_type))
    check_not_refused(model_type)
    if family is None:
        near = difflib.get_close_matches(model_type, FAMILIES, n=3, cutoff=0.6)
        hint = f"; the nearest that are: {', '.join(near)}" if near else ""
        if not any(_get(config, name) for name in (*EXPERTS, *_SECTIONS)):
            from transformers import CONFIG_MAPPING

            # Only of types that transformers knows is it sure that they have no experts.
            if model_type not in CONFIG_MAPPING:
                raise UserError(
                    f"model type '{model_type}' is unknown to transformers {_INSTALLED},"
                    f" and not one that can be converted{hint}; {_SEE}"
                )
            raise UserError(
                f"model type '{model_type}' is a dense model: it has no MoE layer, so"
                " FarSkip has no expert communication to overlap; choose an MoE model;"
                f" {_SEE}"
            )
        raise UserError(f"model type '{model_type}' is not supported{hint}; {_SEE}")
    # The rules for dense layers read fields that upstream fills in; a raw `config.json`
    # may lack them.
    if not isinstance(config, Mapping) and not any(moe_mask(config, family)):
        fields = MOE_LAYERS[family.moe_layers][0]
        num_layers = text_config(config, family).num_hidden_layers
        raise UserError(
            f"model type '{model_type}': this model is dense, none of its {num_layers}"
            f" layers is an MoE layer (config fields: {', '.join(fields)}); FarSkip"
            " needs at least one"
        )
    text = (_get(config, "text_config") or config) if family.multimodal else config
    for field, value, reason in family.requires:
        if (actual := _get(text, field, value)) != value:
            raise UserError(
                f"model type '{model_type}': {field}: {actual} is not supported, only"
                f" {value}, because {reason}"
            )
    return family


# ---- sizes with which layers cannot be built or run: transformers checks the types of
# most fields, but no ranges

_SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "v_head_dim", "vocab_size", "max_position_embeddings", "qk_rope_head_dim",
    "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank", "n_shared_experts",
)  # fmt: skip
_AT_LEAST_ZERO = {
    "intermediate_size", "moe_intermediate_size", "qk_rope_head_dim", "qk_nope_head_dim", "q_lora_rank",
    "kv_lora_rank", "n_shared_experts",
}  # fmt: skip
"""Sizes of parts that a model may lack."""
_ADVICE = "; correct it, or fetch the config again"


def check_sizes(config: Any, where: str) -> None:
    """Raise UserError for a size below 1, a base of the rotary embedding that is no
    positive number, query heads that do not share keys evenly, or more experts per token than
    experts.

    config: transformers' config object of the model. where: the file, for the message.
    """
    for problem in _problems(config.get_text_config()):
        raise UserError(f"{where}: {problem}{_ADVICE}")


def refused_config(raw: Mapping[str, Any], error: Exception, where: str) -> UserError:
    """Return the error for a `config.json` that transformers refuses: a wrong size where
    there is one, else what transformers says.
    """
    section = raw.get("text_config") or raw
    text = SimpleNamespace(**{**section, "attribute_map": {}})
    with suppress(Exception):  # other fields of a wrong kind
        for problem in _problems(text):
            return UserError(f"{where}: {problem}{_ADVICE}")
    return UserError(f"{where}: transformers refuses it: {one_line(error)}")


def null_sizes(config: Any) -> str:
    """Name the sizes that a config leaves empty, for the message of a failed build; ""
    if there are none.

    config: as in `check_sizes`; the sections of a wrapper count, too.
    """
    text = config.get_text_config()
    needed = [name for name in _SIZES if name not in _AT_LEAST_ZERO]
    names = [name for name in needed if name in vars(text) and vars(text)[name] is None]
    names += [name for name, value in _rope_bases(text) if value is None][:1]
    return f" (without a value: {', '.join(names)})" if names else ""


def _problems(text: Any) -> Iterator[str]:
    # Latent attention has a rotary and a plain part of each head, and may lack one.
    latent = {"head_dim"} if hasattr(text, "qk_rope_head_dim") else set()
    for name in _SIZES:
        value = _value(text, name)
        least = 0 if name in _AT_LEAST_ZERO | latent else 1
        if isinstance(value, int | float) and value < least:
            yield f"{name} must be at least {least}, got {value}"
    heads, shared = (
        _value(text, "num_attention_heads"),
        _value(text, "num_key_value_heads"),
    )
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        yield (
            f"num_attention_heads must be a multiple of num_key_value_heads, {shared}, got"
            f" {heads}"
        )
    for name, value in _rope_bases(text):
        # Families without rotary embeddings may leave it empty.
        is_number = isinstance(value, int | float)
        if value is not None and not (is_number and value > 0):
            yield f"{name} must be a number above 0, got {value!r:.80}"
    experts, per_token = expert_counts(text)
    if experts and per_token is not None and not 1 <= per_token <= experts:
        yield (
            f"{_field(text, EXPERTS_PER_TOKEN)} must be from 1 to {experts}, the number of"
            f" experts in a layer, got {per_token}"
        )
    if experts is not None and experts < 0:
        yield f"{_field(text, EXPERTS)} must be at least 0, got {experts}"
    groups, chosen = expert_groups(text)
    if not 1 <= chosen <= groups:
        yield f"topk_group must be from 1 to {groups} (n_group), got {chosen}"


def _value(text: Any, name: str) -> Any:
    # Not by `getattr`: where layers differ in a size, transformers refuses to read it
    # from the whole config.
    return vars(text).get(text.attribute_map.get(name, name))


def _rope_bases(text: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each base of a rotary embedding; layers of several kinds
    have one each.
    """
    names = ("rope_parameters", "rope_scaling")
    sections = [getattr(text, name, None) for name in names]
    for section in [section for section in sections if isinstance(section, dict)]:
        kinds = [kind for kind in section.values() if isinstance(kind, dict)]
        for values in (section, *kinds):
            if "rope_theta" in values:
                yield "rope_theta", values["rope_theta"]


def _field(text: Any, names: tuple[str, ...]) -> str:
    """Return the name under which a config has the first of these fields."""
    name = next(name for name in names if isinstance(read_field(text, name), int))
    return str(text.attribute_map.get(name, name))
