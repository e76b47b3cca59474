"""torchao's int8 weights, on a CPU: quantised while loading, saved, loaded again,
converted before and after.
"""

import importlib.util

import pytest
import torch

from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    convert_model,
    farskip_layers,
    load_model,
)
from tests.float64 import ROUNDINGS, logits_in_float64
from tests.reference.tiny import tiny_model
from tests.support import COMMON

X = torch.randint(3, 99, (8, 32), generator=torch.Generator().manual_seed(3))
FAR = Connectivity("all")

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None,
    reason="needs torchao: pip install 'fcsd[torchao]'",
)


@torch.no_grad()
def logits(model):
    return model(X, use_cache=False).logits


def int8():
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(quant_type=Int8WeightOnlyConfig())


def quantised_modules(model):
    return {
        name
        for name, module in model.named_modules()
        if type(getattr(module, "weight", None)).__name__ == "Int8Tensor"
    }


@pytest.mark.parametrize("family", COMMON)
def test_a_model_quantised_while_loading_is_rewired_and_as_exact_as_the_original(
    family, tmp_path
):
    tiny_model(family).save_pretrained(tmp_path)
    model = load_model(tmp_path, connectivity=FAR, quantization_config=int8())
    assert farskip_layers(model) == [0, 1, 2, 3]
    original = load_model(tmp_path, quantization_config=int8())
    names = quantised_modules(original)
    assert quantised_modules(model) == names
    assert len([name for name in names if name.endswith("o_proj")]) == 4
    errors = [
        float(
            (
                logits(quantised)
                - logits(load_model(tmp_path, connectivity=connectivity))
            )
            .abs()
            .mean()
        )
        for quantised, connectivity in ((original, None), (model, FAR))
    ]
    assert 0 < errors[1] < 1.5 * errors[0]
    # The same int8 weights, written out in float32.
    plain = load_model(tmp_path, connectivity=FAR)
    with torch.no_grad():
        for name in names:
            plain.get_submodule(name).weight.copy_(
                model.get_submodule(name).weight.dequantize()
            )
    written = logits(plain)
    rounding = (written - logits_in_float64(plain, {"input_ids": X})).abs().max()
    assert (logits(model) - written).abs().max() < ROUNDINGS * rounding
    convert_model(original, FAR)
    assert torch.equal(logits(original), logits(model))


@pytest.mark.parametrize("family", COMMON)
def test_a_quantised_checkpoint_is_converted_saved_and_loaded(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "float")
    load_model(tmp_path / "float", quantization_config=int8()).save_pretrained(
        tmp_path / "int8"
    )
    convert_checkpoint(tmp_path / "int8", tmp_path / "far", FAR)
    expected = load_model(
        tmp_path / "float", connectivity=FAR, quantization_config=int8()
    )
    expected.save_pretrained(tmp_path / "saved")
    for folder in ("far", "saved"):
        model = load_model(tmp_path / folder)
        assert farskip_layers(model) == [0, 1, 2, 3]
        assert quantised_modules(model) == quantised_modules(expected)
        assert torch.equal(logits(model), logits(expected))
