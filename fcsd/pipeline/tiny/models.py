"""Tiny models of every family with every parameter randomised: a fresh norm is all ones, and hides a wrong
one."""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, PreTrainedTokenizerFast

from fcsd.base.errors import UserError
from fcsd.model.connectivity.modeling import register
from fcsd.model.families import FAMILIES
from fcsd.pipeline.tiny.configs import TINY

VOCABULARY = 99
_WRAPPER_VOCABULARY = 106  # the ids of images, videos and sounds are behind those of text


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """Build a configuration of 4 layers of width 32; `overrides` are config fields, in a wrapper those of its text
    config."""
    if model_type not in TINY:
        raise UserError(
            f"no tiny model of type '{model_type}'; fcsd.pipeline.tiny.configs.TINY has those that there are"
        )
    if FAMILIES[model_type].like:
        register(model_type)
    fields = dict(TINY[model_type])
    if "text_config" not in fields:
        return AutoConfig.for_model(model_type, **{**_COMMON, **fields, **overrides})
    fields["text_config"] = {
        **_COMMON,
        "vocab_size": _WRAPPER_VOCABULARY,
        **fields["text_config"],
        **overrides,
    }
    return AutoConfig.for_model(model_type, **fields)


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """Build a regular CausalLM or multimodal wrapper in eval mode, float32, all parameters and router bias buffers
    random from `seed`.

    `attn_implementation`, `experts_implementation` and `dtype` among the overrides go to the model, the rest
    to `tiny_config`.
    """
    options = {
        name: overrides.pop(name)
        for name in ("attn_implementation", "experts_implementation", "dtype")
        if name in overrides
    }
    config = tiny_config(model_type, **overrides)
    model = getattr(transformers, FAMILIES[model_type].auto_model).from_config(config, **options)
    randomise(model, seed)
    return model.eval()


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill parameters and router bias buffers: matrices with std 1.5/sqrt(last dim), kernels of images with
    1.5/sqrt(inputs), norms and scales around 1, biases around 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator)

    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            inputs = parameter[0].numel() if parameter.ndim >= 4 else parameter.shape[-1]
            parameter.copy_(normal(parameter) * 1.5 / inputs**0.5)
        elif "norm" in name or name.endswith("scale"):
            parameter.copy_(1 + 0.2 * normal(parameter))
        else:
            parameter.copy_(0.1 * normal(parameter))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or name.endswith("expert_bias"):
            buffer.copy_(0.3 * normal(buffer))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * normal(buffer))


_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<bos>' if loop.first else '' }}<{{ message['role'] }}> "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<eos>{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_tokenizer(vocab_size: int = 512, chat_template: bool = True) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer made in memory, with a chat template (roles system, user, assistant).

    Ids: 0 `<pad>`, 1 `<bos>`, 2 `<eos>`, 3 to 5 the roles, then the 256 bytes, so that any text survives
    encoding and decoding. A vocabulary below 262 holds single ASCII characters instead, lower case first,
    and drops what it does not know. The rest of the vocabulary is filled with unused tokens.

    Raises:
        UserError: `vocab_size` is below 70.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(special) + 64
    if vocab_size < smallest:
        raise UserError(f"tiny_tokenizer: vocab_size must be at least {smallest}, got {vocab_size}")
    if vocab_size < len(special) + len(alphabet):
        # Space and newline (as the byte-level alphabet writes them), lower case, digits and signs, capitals
        # last.
        printable = [chr(code) for code in range(33, 127)]
        alphabet = ["Ġ", "Ċ", *sorted(printable, key=lambda c: (c.isupper(), not c.islower(), c))]
    symbols = (special + alphabet)[:vocab_size]
    symbols += [f"<unused{k}>" for k in range(vocab_size - len(symbols))]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: k for k, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<system>", "<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
    )
    if chat_template:
        fast.chat_template = _CHAT_TEMPLATE
    return fast
