"""Published models at their real sizes: parameters counted on the meta device,
conversion, a traced forward.

The configurations and the published numbers are in `fcsd/model/inspect/configs`, with
their sources.
"""

import tempfile
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from fcsd.model.connectivity import (
    Connectivity,
    convert_model,
    farskip_layers,
    resolve_layers,
)
from fcsd.model.connectivity.modeling import classes_of
from fcsd.model.families import moe_mask, text_config
from tests.real_configs import real_config
from tests.support import cache_of

EXACT = {  # the Hub's number, and what it includes that is not a parameter of the model's modules
    "DeepSeek-V2-Lite": (15_706_484_224, lambda model: 0),
    "DeepSeek-V3": (671_026_419_200, lambda model: 58 * 256),
    "Qwen3-30B-A3B": (30_532_122_624, lambda model: 0),
    "Qwen3-235B-A22B": (235_093_634_560, lambda model: 0),
    "Llama-4-Scout-17B-16E": (108_641_793_536, lambda model: 0),
    "Mixtral-8x7B-v0.1": (46_702_792_704, lambda model: 0),
    "OLMoE-1B-7B-0924": (6_919_161_856, lambda model: 0),
    "gpt-oss-20b": (20_914_757_184, lambda model: 0),
    "GLM-4.5-Air": (110_468_824_832, lambda model: _glm_mtp(model) + 46 * 128),
    "Moonlight-16B-A3B": (15_960_111_936, lambda model: 26 * 64 + 27 * 64),
}

MOE_LAYERS = {
    "DeepSeek-V2-Lite": range(1, 27), "DeepSeek-V3": range(3, 61), "Qwen3-30B-A3B": range(48),
    "Qwen3-235B-A22B": range(94), "Llama-4-Scout-17B-16E": range(48), "Mixtral-8x7B-v0.1": range(32),
    "OLMoE-1B-7B-0924": range(16), "gpt-oss-20b": range(24), "GLM-4.5-Air": range(1, 46),
    "Moonlight-16B-A3B": range(1, 27),
}  # fmt: skip
LAST_75_PERCENT = {
    "DeepSeek-V2-Lite": range(7, 27), "DeepSeek-V3": range(15, 61), "Qwen3-30B-A3B": range(12, 48),
    "Qwen3-235B-A22B": range(23, 94), "Llama-4-Scout-17B-16E": range(12, 48), "Mixtral-8x7B-v0.1": range(8, 32),
    "OLMoE-1B-7B-0924": range(4, 16), "gpt-oss-20b": range(6, 24), "GLM-4.5-Air": range(11, 46),
    "Moonlight-16B-A3B": range(7, 27),
}  # fmt: skip


def _glm_mtp(model):
    """Return an MTP layer of GLM-4.5: a decoder layer, its projection, three norms, its
    own embeddings and head.
    """
    width, vocabulary = model.config.hidden_size, model.config.vocab_size
    layer = sum(parameter.numel() for parameter in model.model.layers[-1].parameters())
    return layer + 2 * width**2 + 3 * width + 2 * width * vocabulary


@cache
def real_model(name):
    """Return the model without storage, in bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        family, config = real_config(name, Path(folder))
    with torch.device("meta"):
        return family, classes_of(family).model._from_config(
            config, dtype=torch.bfloat16
        ).eval()


@pytest.mark.parametrize("name", EXACT)
def test_a_real_model_has_the_published_number_of_parameters(name):
    _, model = real_model(name)
    published, beside = EXACT[name]
    assert (
        sum(parameter.numel() for parameter in model.parameters()) + beside(model)
        == published
    )


def _cases():
    for number, name in enumerate(EXACT):
        yield pytest.param(
            name, "all", marks=[pytest.mark.breadth] if number > 1 else []
        )
        if MOE_LAYERS[name][0] > 0:  # else moe is all
            yield pytest.param(name, "moe", marks=pytest.mark.breadth)
        yield pytest.param(name, "last:75%", marks=pytest.mark.breadth)


@pytest.mark.parametrize(("name", "selection"), list(_cases()))
def test_a_real_model_converts_in_a_moment_and_runs_with_cache_and_hidden_states(
    name, selection
):
    family, model = real_model(name)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    mask = moe_mask(model.config, family)
    assert [index for index, is_moe in enumerate(mask) if is_moe] == list(
        MOE_LAYERS[name]
    )

    began = time.process_time()
    layers = convert_model(model, Connectivity(selection))
    assert time.process_time() - began < 1.0  # measured: 3 to 20 ms
    expected = {
        "all": range(len(mask)),
        "moe": MOE_LAYERS[name],
        "last:75%": LAST_75_PERCENT[name],
    }
    assert (
        layers
        == farskip_layers(model)
        == list(expected[selection])
        == resolve_layers(selection, mask)
    )
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == shapes

    first, second = traced_forward(model, num_tokens=3)
    width, vocabulary = (
        getattr(text_config(model.config, family), key)
        for key in ("hidden_size", "vocab_size")
    )
    for output, tokens in ((first, 3), (second, 1)):
        assert output.logits.shape == (1, tokens, vocabulary)
        assert [state.shape for state in output.hidden_states] == [
            (1, tokens, width)
        ] * (len(mask) + 1)
        assert all(state.is_meta for state in output.hidden_states)
    (read,) = cache_of(second).values()
    assert read.get_seq_length(len(mask) - 1) == 4


def traced_forward(model, num_tokens):
    """Return the outputs for a prompt and for one token after it, on tensors that have
    shapes but no storage.
    """
    tokens = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    options = {"use_cache": True, "output_hidden_states": True}
    with torch.no_grad():
        first = model(tokens, **options)
        return first, model(tokens[:, :1], **cache_of(first), **options)
