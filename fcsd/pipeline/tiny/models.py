"""Small models with every parameter randomised, and a tokenizer for them, made in memory."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from fcsd.base.errors import UserError, one_line
from fcsd.model.connectivity.modeling import classes_of
from fcsd.model.families import FAMILIES
from fcsd.pipeline.tiny.cut import cut_sizes


def small_model(config: PreTrainedConfig, seed: int = 0, **changes: Any) -> Any:
    """Build a regular model from a configuration with its sizes cut, in eval mode, with
    all parameters and router bias buffers random from `seed`; UserError if transformers
    cannot build it.

    changes: those of `cut_sizes`; `attn_implementation`, `experts_implementation` and
    `dtype` (float32) go to the model.
    """
    # These are arguments of the model, not fields of its configuration.
    names = ("attn_implementation", "experts_implementation", "dtype")
    options = {name: changes.pop(name) for name in names if name in changes}
    model_class = classes_of(FAMILIES[config.model_type]).model
    try:
        model = model_class._from_config(cut_sizes(config, **changes), **options)
    # transformers raises errors of many types for sizes that do not fit together.
    except Exception as error:
        raise UserError(
            f"{config.model_type}: the sizes of its config cannot be cut:"
            f" {one_line(error)}"
        ) from error
    randomise(model, seed)
    return model.eval()


def tiny_model(model_type: str, seed: int = 0, **changes: Any) -> Any:
    """Build a small model of a family (UserError if there is none), from transformers'
    default configuration; otherwise as `small_model`.
    """
    if model_type not in FAMILIES:
        raise UserError(
            f"no family has the model type '{model_type}'; `fcsd families` lists them"
        )
    return small_model(classes_of(FAMILIES[model_type]).config(), seed, **changes)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill parameters, router bias buffers and tables of experts with random values: matrices with a
    standard deviation of 1.5/sqrt(last dim), image kernels with 1.5/sqrt(inputs), norms
    and scales around 1, biases around 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=generator)

    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            inputs = (
                parameter[0].numel() if parameter.ndim >= 4 else parameter.shape[-1]
            )
            parameter.copy_(normal(parameter) * 1.5 / inputs**0.5)
        elif "norm" in name or name.endswith("scale"):
            parameter.copy_(1 + 0.2 * normal(parameter))
        else:
            parameter.copy_(0.1 * normal(parameter))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or name.endswith("expert_bias"):
            buffer.copy_(0.3 * normal(buffer))
        elif name.endswith("balancing_biases"):
            # beside probabilities of which only the largest counts
            buffer.copy_(0.1 * normal(buffer))
        elif name.endswith("layer_scalar"):
            buffer.copy_(1 + 0.2 * normal(buffer))
        elif name.endswith("tid2eid"):
            # the experts of each token id, all different
            router: Any = model.get_submodule(name.rpartition(".")[0])
            scores = torch.rand(len(buffer), router.num_experts, generator=generator)
            buffer.copy_(scores.topk(buffer.shape[1]).indices)


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<bos>' if loop.first else '' }}<{{"
    " message['role'] }}> {% if message['role'] == 'assistant' %}{% generation %}{{"
    " message['content'] }}<eos>{% endgeneration %}{% else %}{{ message['content'] }}{%"
    " endif %}{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tiny_tokenizer(
    vocab_size: int = 512, chat_template: bool = True
) -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer in memory, with a chat template (roles system, user,
    assistant).

    Ids: 0 `<pad>`, 1 `<bos>`, 2 `<eos>`, 3 to 5 the roles, then the 256 bytes, so that
    any text survives encoding and decoding. A vocabulary below 262 holds single ASCII
    characters instead, lower case first, and drops all others. The remainder of the
    vocabulary is filled with unused tokens.

    Raises:
        UserError: `vocab_size` is below 70.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<system>", "<user>", "<assistant>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(special) + 64
    if vocab_size < smallest:
        raise UserError(
            f"tiny_tokenizer: vocab_size must be at least {smallest}, got {vocab_size}"
        )
    if vocab_size < len(special) + len(alphabet):
        # Space and newline (as the byte-level alphabet writes them), lower case, digits
        # and signs, capitals last.
        printable = [chr(code) for code in range(33, 127)]
        alphabet = [
            "Ġ",
            "Ċ",
            *sorted(printable, key=lambda c: (c.isupper(), not c.islower(), c)),
        ]
    symbols = (special + alphabet)[:vocab_size]
    # Padding the vocabulary to its exact size keeps model and tokenizer equal.
    symbols += [f"<unused{k}>" for k in range(vocab_size - len(symbols))]
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: k for k, symbol in enumerate(symbols)}, merges=[])
    )
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
