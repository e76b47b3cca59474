"""device_map and offloading to disk, by the hooks of accelerate."""

import pytest
import torch

from fcsd.model.connectivity import (
    Connectivity,
    convert_model,
    farskip_layers,
    load_model,
    unconvert_model,
)
from tests.model.connectivity.test_ways_parallel import FEW
from tests.reference.tiny import X, logits, tiny_model
from tests.support import COMMON, few, user_error

FAR = Connectivity("all")


def generated(model):
    settings = {
        "max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    return model.generate(X, attention_mask=torch.ones_like(X), **settings)


@pytest.fixture
def places(tmp_path):
    """Return options that keep half of the weights in memory, and options that
    alternate layer by layer.
    """

    def options(model):
        memory = sum(p.numel() * p.element_size() for p in model.parameters()) // 2
        layers = {f"model.layers.{k}": ("cpu", "disk")[k % 2] for k in range(4)}
        others = dict.fromkeys(
            ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu"
        )
        folder = str(tmp_path / "offloaded")
        return (
            {"device_map": "auto", "max_memory": {"cpu": memory}, "offload_folder": folder},
            {"device_map": layers | others, "offload_folder": folder},
        )  # fmt: skip

    return options


@pytest.mark.parametrize("family", few(COMMON, kinds=FEW))
def test_a_model_loaded_with_half_of_its_weights_on_disk_is_rewired(
    family, places, tmp_path
):
    tiny_model(family).save_pretrained(tmp_path)
    whole = load_model(tmp_path, connectivity=FAR)
    for options in places(whole):
        model = load_model(tmp_path, connectivity=FAR, **options)
        assert farskip_layers(model) == [0, 1, 2, 3]
        assert any(p.device.type == "meta" for p in model.model.layers[3].parameters())
        assert "forward" in vars(model.model.layers[2])  # accelerate's hook
        assert torch.equal(logits(model), logits(whole))
        assert torch.equal(generated(model), generated(whole))
        for change in (lambda m: convert_model(m, Connectivity([0])), unconvert_model):
            with user_error(r"has its own `forward` \(from device_map.*load_model"):
                change(model)
        assert torch.equal(logits(model), logits(whole))


@pytest.mark.parametrize("family", few(COMMON, kinds=FEW))
def test_converting_a_model_that_has_hooks_is_refused_and_changes_nothing(
    family, places, tmp_path
):
    tiny_model(family).save_pretrained(tmp_path)
    original = load_model(tmp_path)
    for options in places(original):
        model = load_model(tmp_path, **options)
        with user_error(r"layer 0 has its own `forward` .* load it with .*load_model"):
            convert_model(model, FAR)
        assert torch.equal(logits(model), logits(original))


def test_a_device_map_without_hooks_allows_converting_afterwards(tmp_path):
    tiny_model("qwen2_moe").save_pretrained(tmp_path)
    model = load_model(tmp_path, device_map="cpu")
    convert_model(model, FAR)
    assert torch.equal(logits(model), logits(load_model(tmp_path, connectivity=FAR)))
