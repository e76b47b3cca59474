"""Multimodal families: the text stack inside a wrapper is rewired, the rest is left alone."""

from dataclasses import replace

from fcsd.families.family import Family
from fcsd.families.standard import ROWS as STANDARD

_TEXT = {row.model_type: row for row in STANDARD}


def _wrapper(text: Family, model_type: str, config: str, model: str, base_model: str) -> Family:
    """The wrapper around a text stack with these names."""
    return replace(
        text,
        model_type=model_type,
        config=config,
        causal_lm=model,
        base_model=base_model,
        auto_model="AutoModelForImageTextToText",
    )


ROWS: tuple[Family, ...] = (
    _wrapper(
        _TEXT["llama4_text"],
        model_type="llama4",
        config="Llama4Config",
        model="Llama4ForConditionalGeneration",
        base_model="Llama4ForConditionalGeneration",
    ),
)
