"""Conversion of a model in memory: what it leaves alone, what it refuses, and what
survives copying.
"""

import pickle
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    convert_model,
    farskip_layers,
    load_model,
    unconvert_model,
)
from fcsd.model.families import FAMILIES
from tests.float64 import BOUND, error
from tests.reference.tiny import X, logits, tiny_config, tiny_model
from tests.support import TEXT_FAMILIES, user_error


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_conversion_keeps_parameters_names_and_class_names(family):
    model = tiny_model(family)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = {
        name: type(module).__name__ for name, module in model.named_modules() if name
    }
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    convert_model(model, Connectivity("all"))
    assert type(model).__name__ == f"FarSkip{FAMILIES[family].causal_lm}"
    assert {
        name: type(module).__name__ for name, module in model.named_modules() if name
    } == modules
    assert {
        name: id(parameter) for name, parameter in model.named_parameters()
    } == parameters
    assert state.keys() == model.state_dict().keys()
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()
    )


def test_converting_again_replaces_the_first_conversion():
    model, twice = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    assert (
        convert_model(model, Connectivity("last:2")) == [2, 3] == farskip_layers(model)
    )
    convert_model(twice, Connectivity("all", mlp="full"))
    for _ in range(2):
        assert (
            convert_model(twice, Connectivity("last:2"))
            == [2, 3]
            == farskip_layers(twice)
        )
        assert torch.equal(logits(model), logits(twice))
    assert twice.config.farskip == {
        "version": 1, "layers": [2, 3], "attention": "partial", "mlp": "outdated",
    }  # fmt: skip


def test_unconverting_gives_class_and_config_back():
    model = tiny_model("qwen2_moe")
    before = model.config.to_dict()
    convert_model(model, Connectivity("all"))
    assert model.config.model_type == "farskip_qwen2_moe"
    unconvert_model(model)
    after = model.config.to_dict()
    assert type(model) is type(tiny_model("qwen2_moe"))
    before.pop("architectures"), after.pop("architectures")
    assert after == before
    assert farskip_layers(model) == []
    unconvert_model(model)  # once more changes nothing
    assert type(model) is type(tiny_model("qwen2_moe"))


def test_a_teacher_that_shares_the_config_object_stays_regular():
    config = tiny_config("qwen3_moe")
    teacher, student = (type(tiny_model("qwen3_moe"))(config).eval() for _ in range(2))
    student.load_state_dict(teacher.state_dict())
    before = logits(teacher)
    convert_model(student, Connectivity("all"))
    assert config.model_type == teacher.config.model_type == "qwen3_moe"
    assert not hasattr(config, "farskip")
    assert torch.equal(logits(teacher), before)
    assert (logits(student) - before).abs().max() > 1e-3


@pytest.mark.usefixtures("float64")
def test_the_attention_implementation_can_be_changed_after_conversion():
    model = tiny_model("qwen3_moe", attn_implementation="sdpa")
    convert_model(model, Connectivity("all"))
    before = logits(model)
    model.set_attn_implementation("eager")
    assert model.model.layers[2].self_attn.config._attn_implementation == "eager"
    assert error(logits(model), before) < BOUND
    model.set_experts_implementation("eager")
    assert error(logits(model), before) < BOUND


def test_a_pickled_model_opens_in_a_fresh_process(tmp_path):
    model = tiny_model("llama4_text")
    convert_model(model, Connectivity("all"))
    (tmp_path / "model.pickle").write_bytes(pickle.dumps((model, X, logits(model))))
    code = (
        "import pickle, sys, torch\n"
        "model, x, expected = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert torch.equal(model(x, use_cache=False).logits, expected)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.pickle")], check=True
    )


def test_layers_with_their_own_forward_are_refused():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny_model("qwen3_moe")
    add_hook_to_module(model.model.layers[1], AlignDevicesHook())
    with user_error(r"layer 1 has its own `forward` .* convert the model before them"):
        convert_model(model, Connectivity("all"))
    assert farskip_layers(model) == []
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert convert_model(model, Connectivity([2])) == [2]


def test_headless_and_foreign_models_are_refused():
    with user_error("only Qwen3MoeForCausalLM"):
        convert_model(tiny_model("qwen3_moe").model, Connectivity("all"))
    with user_error("not a transformers model"):
        convert_model(torch.nn.Linear(2, 2), Connectivity("all"))
    dense = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama",
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=1,
            vocab_size=9,
        )
    )
    with user_error("model type 'llama' is a dense model"):
        convert_model(dense, Connectivity("all"))


@pytest.mark.parametrize(
    ("family", "connectivity"),
    [
        # nothing is in flight before a regular layer
        ("qwen3_moe", Connectivity([0, 2], mlp="full")),
        ("deepseek_v3", Connectivity([0, 1], mlp="full")),  # layer 0 is dense
        ("cohere2_moe", Connectivity([3])),  # its MLP reads the outdated stream anyhow
    ],
)
def test_a_connectivity_that_changes_nothing_is_refused_on_every_way(
    family, connectivity, tmp_path
):
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "base")
    before = logits(model)
    ways = (
        lambda: convert_model(model, connectivity),
        lambda: convert_checkpoint(tmp_path / "base", tmp_path / "far", connectivity),
        lambda: load_model(tmp_path / "base", connectivity=connectivity),
    )
    for way in ways:
        with user_error(
            r"connectivity: layers \[.*\], .* change nothing: .* select such"
        ):
            way()
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    convert_model(model, connectivity, regular_ok=True)
    assert torch.equal(logits(model), before)  # it is just the regular model


def test_a_selection_that_the_model_does_not_have_changes_nothing():
    model = tiny_model("mixtral")
    convert_model(model, Connectivity([1]))
    before = logits(model)
    with user_error("index 4 is out of range: the model has 4 decoder layers"):
        convert_model(model, Connectivity([4]))
    assert farskip_layers(model) == [1]
    assert torch.equal(logits(model), before)
