"""Tiny models of every family with every parameter randomised: a fresh norm is all
ones, and hides a wrong one.
"""

from typing import Any

import torch
import transformers
from transformers import AutoConfig

from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.connectivity.modeling import register
from fcsd.model.families import FAMILIES, UNAVAILABLE
from fcsd.pipeline.tiny.models import randomise
from tests.reference.tiny import adapted, multimodal, standard
from tests.support import skip_unavailable

TINY: dict[str, dict[str, Any]] = {
    name: fields
    for name, fields in {**standard.TINY, **adapted.TINY, **multimodal.TINY}.items()
    if name not in UNAVAILABLE
}
"""Model type -> config fields that the tiny configuration of each family adds to the
common sizes.
"""

VOCABULARY = 99
X = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
"""Two rows of tokens."""
# the ids of images, videos and sounds come after those of text
_WRAPPER_VOCABULARY = 106


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """Build a configuration of 4 layers of width 32; `overrides` are config fields, for
    a wrapper those of its text config.
    """
    skip_unavailable(model_type)
    if FAMILIES[model_type].like:
        register(model_type)
    fields = dict(TINY[model_type])
    if "text_config" not in fields:
        return AutoConfig.for_model(model_type, **{**_COMMON, **fields, **overrides})
    fields["text_config"] = {
        **_COMMON, "vocab_size": _WRAPPER_VOCABULARY, **fields["text_config"], **overrides,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **fields)


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """Build a regular CausalLM or multimodal wrapper in eval mode, float32, all
    parameters and router bias buffers random from `seed`.

    `attn_implementation`, `experts_implementation` and `dtype` among the overrides go
    to the model, the rest to `tiny_config`.
    """
    options = {
        name: overrides.pop(name)
        for name in ("attn_implementation", "experts_implementation", "dtype")
        if name in overrides
    }
    config = tiny_config(model_type, **overrides)
    model = getattr(transformers, FAMILIES[model_type].auto_model).from_config(
        config, **options
    )
    randomise(model, seed)
    return model.eval()


def converted(model_type: str, **overrides: Any) -> Any:
    """Build a tiny model with all of its layers rewired."""
    model = tiny_model(model_type, **overrides)
    convert_model(model, Connectivity("all"))
    return model


@torch.no_grad()
def logits(model: Any, input_ids: torch.Tensor = X, **inputs: Any) -> torch.Tensor:
    """Return the logits of a pass without gradients and without a cache."""
    return model(input_ids, use_cache=False, **inputs).logits


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every gradient by the name of its parameter."""
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
