"""Instella-MoE against its equations, written out by hand on the tensors of a checkpoint."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from fcsd.model.connectivity import Connectivity, convert_model, unconvert_model
from fcsd.model.connectivity.modeling import classes_of
from fcsd.model.families import FAMILIES
from tests.float64 import BOUND, error, in_float64
from tests.reference.instella import CONFIGS, WRONG, instella_logits, sigma
from tests.reference.tiny import tiny_config, tiny_model

X = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(5))
LAYERS = 5
# The rotations cover more of the trained length than the published ones, so that all
# three parts of the ramp occur.
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
    "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def regular(tmp_path_factory):
    """Return (regular model, tensors and config of its checkpoint) in float64: a dense
    first layer, no q_lora, keys wider than values, two shared experts, YaRN with
    mscale_all_dim, a router with biases that matter.
    """
    with in_float64():
        model = tiny_model(
            "instella_moe", num_hidden_layers=LAYERS, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=8,
            rope_parameters=YARN,
        )  # fmt: skip
    folder = tmp_path_factory.mktemp("instella")
    model.save_pretrained(folder)
    return (
        model,
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )


@torch.no_grad()
def logits(model):
    return model(X, use_cache=False).logits


@pytest.fixture(scope="module")
def rewired(regular):
    """Return the logits with all layers rewired."""
    model, *_ = regular
    with in_float64():
        convert_model(model, Connectivity("all"))
        return logits(model)


@pytest.mark.usefixtures("float64")
def test_the_family_computes_its_equations_with_and_without_farskip(regular, rewired):
    model, tensors, config = regular
    assert error(rewired, instella_logits(tensors, config, X)) < BOUND
    convert_model(model, Connectivity("moe"))
    assert (
        error(logits(model), instella_logits(tensors, config, X, range(1, LAYERS)))
        < BOUND
    )
    unconvert_model(model)
    plain = logits(model)
    assert error(plain, instella_logits(tensors, config, X, False)) < BOUND
    assert error(plain, rewired) > 0.1


@pytest.mark.parametrize("wrong", WRONG)
def test_a_misreading_of_the_equations_differs(regular, rewired, wrong):
    _, tensors, config = regular
    assert error(rewired, instella_logits(tensors, config, X, wrong=wrong)) > 0.02


def test_the_scale_of_the_published_models_has_yarns_factor_squared():
    raw = json.loads((CONFIGS / "Instella-MoE-16B-A3B-Think.json").read_text())
    rope = raw["rope_scaling"] | {"rope_theta": raw["rope_theta"]}
    assert sigma(raw | {"rope_parameters": rope}) == pytest.approx(0.16562688, abs=1e-8)
    config = tiny_config(
        "instella_moe",
        qk_nope_head_dim=96,
        qk_rope_head_dim=32,
        rope_parameters=YARN | {"rope_theta": 8e6},
    )
    model = classes_of(FAMILIES["instella_moe"]).model(config)
    assert model.model.layers[0].self_attn.scaling == pytest.approx(
        0.16562688, abs=1e-8
    )
    assert math.isclose(model.model.rotary_emb.attention_scaling, 1.0)


def test_the_gate_is_trained_and_starts_like_other_weights():
    model = classes_of(FAMILIES["instella_moe"]).model(
        tiny_config("instella_moe", initializer_range=0.5)
    )
    gates = [layer.self_attn.gate_proj.weight for layer in model.model.layers]
    assert all(0.4 < float(gate.detach().std()) < 0.6 for gate in gates)
    model(X, labels=X).loss.backward()
    assert all(gate.grad is not None and gate.grad.abs().max() > 0 for gate in gates)
