"""Refuse sizes in a model's config with which its layers cannot be built or run.

transformers checks the types of most fields, but no ranges: a head of width 0 ends in a
division by zero, and more chosen experts than there are in an error of torch.

Not covered: sizes that contradict the weights, which loading compares.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from fcsd.base.errors import UserError, one_line
from fcsd.model.families import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    Family,
    expert_counts,
    expert_groups,
    read_field,
    text_config,
)

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
_HEADS = ("num_attention_heads", "num_key_value_heads")
_ROPE = ("rope_parameters", "rope_scaling")


def check_sizes(config: Any, family: Family, where: str) -> None:
    """Raise UserError for a size below 1, a base of the rotary embedding that is no
    positive number, query heads that do not share keys evenly, or more experts per token than
    experts.

    config: transformers' config object of the model. where: the file, for the message.
    """
    text = text_config(config, family)
    for problem in _problems(text):
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
    heads, shared = (_value(text, name) for name in _HEADS)
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
    sections = [getattr(text, name, None) for name in _ROPE]
    for section in [section for section in sections if isinstance(section, dict)]:
        kinds = [kind for kind in section.values() if isinstance(kind, dict)]
        for values in (section, *kinds):
            if "rope_theta" in values:
                yield "rope_theta", values["rope_theta"]


def _field(text: Any, names: tuple[str, ...]) -> str:
    """Return the name under which a config has the first of these fields."""
    name = next(name for name in names if isinstance(read_field(text, name), int))
    return str(text.attribute_map.get(name, name))
