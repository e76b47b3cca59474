"""Describe the MoE families that fcsd converts as data: the upstream names of their
layers, and nothing else.

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
from collections.abc import Mapping
from typing import Any

from fcsd.base.errors import UserError
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
    "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next",
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
        return next(
            (
                value
                for name in names
                if isinstance(value := read_field(config, name), int)
            ),
            None,
        )

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

    def get(name: str) -> Any:
        if isinstance(config, Mapping):
            return config.get(name)
        return getattr(config, name, None)

    model_type = get("model_type")
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
        if not any(get(name) for name in (*EXPERTS, *_SECTIONS)):
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
    text = (get("text_config") or config) if family.multimodal else config
    for field, value, reason in family.requires:
        if isinstance(text, Mapping):
            actual = text.get(field, value)
        else:
            actual = getattr(text, field, value)
        if actual != value:
            raise UserError(
                f"model type '{model_type}': {field}: {actual} is not supported, only"
                f" {value}, because {reason}"
            )
    return family
