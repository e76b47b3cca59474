"""AMD's Instella keys mean what AMD's modeling file computes, written here as equations
on the regular model.

The attention gate is in `tests/model/connectivity/test_instella_published.py`.
"""

import json

import pytest
import torch

from fcsd.base.errors import UserError
from fcsd.cli.main import main
from fcsd.model.connectivity import (
    Connectivity,
    convert_checkpoint,
    farskip_layers,
    load_model,
    unconvert_checkpoint,
)
from fcsd.model.connectivity.aliases import INSTELLA_KEYS, from_instella
from fcsd.model.connectivity.export import export_checkpoint
from tests.float64 import BOUND, in_float64
from tests.reference.parts import layer_arguments
from tests.reference.reference import reference_forward
from tests.reference.tiny import tiny_model
from tests.support import change_json, user_error

X = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(5))
LAYERS = 5

pytestmark = pytest.mark.usefixtures("float64")


def amd_forward(model, keys):
    """Return the logits as `modeling_instella_moe.py` computes them, from a regular
    deepseek_v3.

    Two streams: `full`, and `no_routed`, which every MoE layer leaves, regular or
    FarSkip, and no dense layer. A layer with start <= k <= end is a FarSkip layer: its
    attention reads `no_routed` if there is one, and its MLP reads `full` before
    attention is added.
    """
    start, end = keys.get("farskip_start_idx", 0), keys.get("farskip_end_idx", 1e4)
    full, arguments = layer_arguments(model, X)
    no_routed = None
    for k, layer in enumerate(model.model.layers):
        farskip = keys.get("farskip", False) and start <= k <= min(
            end, model.config.num_hidden_layers - 1
        )
        attention_reads, mlp_reads = full, None
        if farskip:
            attention_reads = full if no_routed is None else no_routed
            mlp_reads = full
            if keys.get("attn_only_farskip"):
                mlp_reads = None
            if keys.get("mlp_only_farskip"):
                attention_reads = full
        attended = (
            full
            + layer.self_attn(layer.input_layernorm(attention_reads), **arguments[k])[0]
        )
        normed = layer.post_attention_layernorm(
            attended if mlp_reads is None else mlp_reads
        )
        if hasattr(layer.mlp, "experts"):
            shared = layer.mlp.shared_experts(normed)
            routed = layer.mlp(normed) - shared
            full, no_routed = attended + routed + shared, attended + shared
        else:
            full, no_routed = attended + layer.mlp(normed), None
    return model.lm_head(model.model.norm(full))


@pytest.fixture(scope="module")
def base():
    with in_float64():
        return tiny_model("deepseek_v3", num_hidden_layers=LAYERS)


@pytest.fixture
def checkpoint(base, tmp_path):
    """Write the base model with further keys in its config, as AMD's checkpoints have them."""

    def write(**keys):
        folder = tmp_path / "amd"
        base.save_pretrained(folder)
        change_json(folder / "config.json", keys)
        return folder

    return write


CASES = {  # keys -> our layers and sides; layer 0 is dense
    "as AMD ships it": ({}, [0, 1, 2, 3, 4], "partial", "outdated"),
    "AMD's defaults written out": (
        {
            "farskip_start_idx": 0,
            "farskip_end_idx": 1e4,
            "attn_only_farskip": False,
            "mlp_only_farskip": False,
        },
        [0, 1, 2, 3, 4],
        "partial",
        "outdated",
    ),
    "the end is inclusive": ({"farskip_end_idx": 3}, [0, 1, 2, 3], "partial", "outdated"),
    "starts after the dense layer": ({"farskip_start_idx": 1}, [1, 2, 3, 4], "partial", "outdated"),
    "attention only": ({"attn_only_farskip": True}, [0, 1, 2, 3, 4], "partial", "full"),
    "attention only, in the middle": (
        {"attn_only_farskip": True, "farskip_start_idx": 3, "farskip_end_idx": 3},
        [2, 3],
        "partial",
        "full",
    ),
    "mlp only": ({"mlp_only_farskip": True}, [0, 1, 2, 3, 4], "full", "outdated"),
    "mlp only, in the middle": (
        {"mlp_only_farskip": True, "farskip_start_idx": 2, "farskip_end_idx": 3},
        [2, 3],
        "full",
        "outdated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_with_instellas_keys_computes_amds_equations(
    base, checkpoint, case
):
    more, layers, attention, mlp = CASES[case]
    keys = {"farskip": True, **more}
    model = load_model(checkpoint(**keys))
    assert type(model).__name__ == "FarSkipDeepseekV3ForCausalLM"
    assert model.config.farskip == {
        "version": 1, "layers": layers, "attention": attention, "mlp": mlp,
    }  # fmt: skip
    assert not hasattr(model.config, "farskip_start_idx")
    with torch.no_grad():
        actual, expected, regular = (
            model(X).logits,
            amd_forward(base, keys),
            base(X).logits,
        )
        by_our_equations, _ = reference_forward(base, X, layers, attention, mlp)
    assert (actual - expected).abs().max() < BOUND
    assert (actual - by_our_equations).abs().max() < BOUND
    assert (actual - regular).abs().max() > 0.05
    one_less = keys | {"farskip_end_idx": min(keys.get("farskip_end_idx", 4), 4) - 1}
    assert (actual - amd_forward(base, one_less)).abs().max() > 0.02


@pytest.mark.parametrize("case", [*CASES, "nothing"])
def test_an_export_has_amds_keys_for_what_the_model_computes(
    base, tmp_path, case, capsys
):
    """Checked by AMD's equations, and by fcsd."""
    _, layers, attention, mlp = CASES.get(case, ({}, [], "partial", "outdated"))
    base.save_pretrained(tmp_path / "base")
    source = tmp_path / "base"
    if layers:
        convert_checkpoint(
            source, tmp_path / "ours", Connectivity(layers, attention, mlp)
        )
        source = tmp_path / "ours"
    assert main(["convert", str(source), str(tmp_path / "amd"), "--format", "amd"]) == 0
    capsys.readouterr()
    config = json.loads((tmp_path / "amd" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (
        "deepseek_v3",
        ["InstellaMoEForCausalLM"],
    )
    assert config["farskip"] is bool(layers) and config["gated_attention"] is False
    assert config["torch_dtype"] == "float64"
    assert config["rope_theta"] == 10000.0
    assert not config["rope_scaling"]
    assert "rope_parameters" not in config
    assert not (tmp_path / "amd" / "modeling_farskip.py").exists()
    keys = {name: config[name] for name in INSTELLA_KEYS if name in config}
    model, source_model = load_model(tmp_path / "amd"), load_model(source)
    with torch.no_grad():
        assert (source_model(X).logits - amd_forward(base, keys)).abs().max() < BOUND
        assert (model(X).logits - amd_forward(base, keys)).abs().max() < BOUND
    assert farskip_layers(model) == layers


@pytest.mark.parametrize(
    ("family", "connectivity", "message"),
    [
        ("deepseek_v3", Connectivity([1, 3]), "they cannot express layers [1, 3], attention partial, mlp outdated"),
        ("deepseek_v3", Connectivity([3, 4]), "they cannot express layers [3, 4]"),
        ("deepseek_v2", Connectivity([1, 2]), "SGLang, which has DeepSeek-V2's, rewires both sides of all layers"),
        ("qwen3_moe", Connectivity("all"), "DeepSeek-V2, DeepSeek-V3 and Instella-MoE only, not for 'qwen3_moe'"),
    ],
)  # fmt: skip
def test_what_amds_keys_cannot_say_is_refused_with_the_reason(
    family, connectivity, message, tmp_path
):
    tiny_model(family, num_hidden_layers=LAYERS).save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "ours", connectivity)
    with pytest.raises(UserError) as caught:
        export_checkpoint(tmp_path / "ours", tmp_path / "amd")
    assert message in str(caught.value)
    assert not (tmp_path / "amd").exists()


def test_a_deepseek_v2_with_all_layers_is_exported_for_amds_sglang(tmp_path):
    model = tiny_model("deepseek_v2")
    model.save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "ours", Connectivity("all"))
    export_checkpoint(tmp_path / "ours", tmp_path / "amd")
    config = json.loads((tmp_path / "amd" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV2ForCausalLM"]
    assert "auto_map" not in config
    assert (config["model_type"], config["farskip"]) == ("deepseek_v2", True)
    with torch.no_grad():
        expected = reference_forward(model, X, [0, 1, 2, 3])[0]
        assert (load_model(tmp_path / "amd")(X).logits - expected).abs().max() < BOUND


@pytest.mark.parametrize(
    "keys",
    [
        {"farskip": False},
        {"farskip": False, "farskip_start_idx": 1},
        {"farskip_start_idx": 0},
        {"farskip": True, "farskip_start_idx": 5},
        {"farskip": True, "farskip_end_idx": -1},
        {"farskip": True, "attn_only_farskip": True, "mlp_only_farskip": True},
    ],
)
def test_keys_that_rewire_nothing_are_the_regular_model(base, checkpoint, keys):
    folder = checkpoint(**keys)
    model = load_model(folder)
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    with torch.no_grad():
        assert (model(X).logits - amd_forward(base, keys)).abs().max() < BOUND
        assert torch.equal(model(X).logits, base(X).logits)


def test_both_sides_after_a_regular_moe_layer_are_refused_because_no_selection_computes_them(
    base, checkpoint
):
    keys = {"farskip": True, "farskip_start_idx": 3}
    with torch.no_grad():
        amd = amd_forward(base, keys)
        for layers in ([3, 4], [2, 3, 4]):
            assert (amd - reference_forward(base, X, layers)[0]).abs().max() > 0.02
    with pytest.raises(UserError) as caught:
        load_model(checkpoint(**keys))
    for part in (
        "config.json: farskip_start_idx: 3 follows the regular MoE layer 2",
        "allowed: 0 to 1, or mlp_only_farskip or attn_only_farskip with it",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("num_dense", [0, 1, 2])
def test_the_range_may_begin_at_the_first_moe_layer_and_not_later(num_dense):
    mask = [k >= num_dense for k in range(LAYERS)]
    for start in range(LAYERS):
        keys = {"farskip": True, "farskip_start_idx": start}
        if start <= num_dense:
            assert from_instella(keys, mask) == Connectivity(list(range(start, LAYERS)))
        else:
            with user_error(f"allowed: 0 to {num_dense}"):
                from_instella(keys, mask)


def test_a_conversion_writes_our_format_with_what_the_keys_say(
    base, checkpoint, tmp_path, capsys
):
    keys = {"farskip": True, "mlp_only_farskip": True, "farskip_end_idx": 2}
    folder = checkpoint(**keys)
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["model_type"] == "farskip_deepseek_v3"
    assert config["farskip"] == {
        "version": 1, "layers": [0, 1, 2], "attention": "full", "mlp": "outdated",
    }  # fmt: skip
    assert not {"farskip_end_idx", "mlp_only_farskip"} & config.keys()
    with torch.no_grad():
        expected = amd_forward(base, keys)
        assert (load_model(tmp_path / "ours")(X).logits - expected).abs().max() < BOUND

    assert convert_checkpoint(folder, tmp_path / "other", Connectivity([1, 2])) == [
        1,
        2,
    ]
    assert farskip_layers(load_model(tmp_path / "other")) == [1, 2]
    unconvert_checkpoint(folder, tmp_path / "regular")
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "regular")(X).logits, base(X).logits)
        assert torch.equal(load_model(folder, original=True)(X).logits, base(X).logits)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"farskip": True, "gated_attention": True}, "5 tensors are missing, the first is 'model.layers.0.self_attn"),
        ({"farskip": True, "gated_attention": "yes"}, "gated_attention: must be true or false, got 'yes'"),
        ({"farskip": True, "gated_attention": True, "model_type": "deepseek_v2"}, "on model type deepseek_v3, not"),
        ({"farskip": True, "farskip_stride": 2}, "farskip_stride: unknown key; did you mean 'farskip_"),
        ({"gated_attention": True, "gate_rank": 2}, "gate_rank: unknown key"),
        ({"gated_attention": True, "qk_layernorm": False}, "qk_layernorm: False is not supported, only True, because"),
        ({"farskip": True, "attn_only_farskip": 1}, "attn_only_farskip: must be true or false, got 1"),
        ({"farskip": True, "farskip_start_idx": 0.5}, "farskip_start_idx: must be the index of a layer, got 0.5"),
        ({"farskip": True, "farskip_end_idx": True}, "farskip_end_idx: must be the index of a layer, got True"),
        ({"farskip": True, "farskip_end_idx": None}, "farskip_end_idx: must be the index of a layer, got None"),
        ({"farskip": "yes", "farskip_end_idx": 3}, "farskip: must be true or false, got 'yes'"),
        ({"farskip": True, "model_type": "bert"}, "not on model type 'bert'; `fcsd families` lists"),
        ({"farskip": True, "first_k_dense_replace": None}, "the fields num_hidden_layers, first_k_dense_replace"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_read_are_refused_before_weights_are(
    checkpoint, keys, message
):
    with pytest.raises(UserError) as caught:
        load_model(checkpoint(**keys))
    assert message in str(caught.value)
    assert (
        "config.json: " in str(caught.value)
        or "tensors" in message
        or "qk_layernorm" in message
    )


def test_amds_code_is_not_run_where_remote_code_is_allowed_because_transformers_5_cannot(
    base, checkpoint
):
    folder = checkpoint(farskip=True, auto_map={"AutoConfig": "configuration_x.X"})
    model = load_model(folder, trust_remote_code=True)
    assert type(model).__name__ == "FarSkipDeepseekV3ForCausalLM"
    with torch.no_grad():
        assert (
            model(X).logits - amd_forward(base, {"farskip": True})
        ).abs().max() < BOUND
