"""The table of families against the upstream classes that it names."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig

from fcsd.model.connectivity import register
from fcsd.model.connectivity.modeling import modeling_module, modeling_source
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    FAMILIES,
    base_model_type,
    expert_counts,
    family_of,
    moe_mask,
    multimodal,
    read_field,
    text_config,
)
from fcsd.model.families.refused import BROKEN
from fcsd.model.families.structure import LOGIT_SCALES
from tests.reference.tiny import TINY, tiny_config, tiny_model
from tests.support import user_error


def upstream(family):
    """Return transformers' modeling file, or the classes of the family that
    transformers does not have.
    """
    if FAMILIES[family].like:
        return modeling_module(FAMILIES[family])
    path = FAMILIES[family].upstream.removesuffix(".py").replace("/", ".")
    return importlib.import_module(f"transformers.{path}")


def several(names):
    return names if isinstance(names, tuple) else (names,) if names else ()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_name_exists_upstream_and_on_the_layers(name):
    family, module, model = FAMILIES[name], upstream(name), tiny_model(name)
    layer_classes = several(family.decoder_layer)
    inner = () if family.like else (family.moe_block, *layer_classes)
    classes = (family.causal_lm, family.base_model, *inner)
    assert all(hasattr(module, one) for one in classes)
    assert type(model).__name__ == family.causal_lm
    assert any(type(part).__name__ == family.base_model for part in model.modules())
    assert type(model.config).__name__ == family.config
    mask = moe_mask(model.config, family)
    stack = decoder_layers(model, family)
    assert {type(layer).__name__ for layer in stack} == set(layer_classes)
    for layer, is_moe in zip(stack, mask, strict=True):
        norms = getattr(layer, family.norms) if family.norms else layer
        for norm in (*several(family.in_norm), *several(family.mlp_norm)):
            assert isinstance(getattr(norms, norm), torch.nn.Module)
        block = getattr(layer, family.moe)
        assert (type(block).__name__ == family.moe_block) == is_moe
        if not is_moe:
            continue
        shared = [child for child, _ in block.named_children() if "shared" in child]
        assert sorted(shared) == sorted(
            filter(None, (family.block_shared, family.block_gate))
        )
        assert [child for child, _ in layer.named_children() if "shared" in child] == (
            [family.layer_shared] if family.layer_shared else []
        )
        assert hasattr(layer, "residual_multiplier") == (
            family.residual_multiplier is not None
        )


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("qwen3_moe", {}, [1, 1, 1, 1]),
        ("qwen3_moe", {"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ("qwen2_moe", {"mlp_only_layers": [0, 2]}, [0, 1, 0, 1]),
        ("qwen2_moe", {"mlp_only_layers": [3], "decoder_sparse_step": 2}, [0, 1, 0, 0]),
        ("deepseek_v2", {"first_k_dense_replace": 3}, [0, 0, 0, 1]),
        ("deepseek_v3", {"first_k_dense_replace": 0}, [1, 1, 1, 1]),
        ("glm4_moe", {"first_k_dense_replace": 2}, [0, 0, 1, 1]),
        ("llama4_text", {"interleave_moe_layer_step": 2}, [0, 1, 0, 1]),
        ("llama4_text", {"moe_layers": [0]}, [1, 0, 0, 0]),
        ("mixtral", {}, [1, 1, 1, 1]),
        ("gpt_oss", {}, [1, 1, 1, 1]),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]}, [1, 0, 1, 0]),
        ("exaone_moe", {"first_k_dense_replace": 2}, [0, 0, 1, 1]),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, [0, 1, 0, 1]),
        ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 2}, [1, 1, 1, 0]),
        ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 0}, [1, 0, 0, 1]),
        ("jamba", {"num_experts": 1}, [0, 0, 0, 0]),
        ("lfm2_moe", {"num_dense_layers": 2}, [0, 0, 1, 1]),
        ("granitemoehybrid", {}, [1, 1, 1, 1]),
        ("granitemoehybrid", {"num_local_experts": 0}, [0, 0, 0, 0]),
    ],
)  # fmt: skip
def test_the_moe_layers_are_those_of_the_built_model(name, overrides, expected):
    family, model = FAMILIES[name], tiny_model(name, **overrides)
    assert moe_mask(model.config, family) == [bool(value) for value in expected]
    built = [
        type(getattr(layer, family.moe)).__name__ == family.moe_block
        for layer in model.model.layers
    ]
    assert built == moe_mask(model.config, family)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_is_recognised_from_a_config_object_raw_json_and_a_farskip_config(
    name,
):
    config = tiny_config(name)
    assert family_of(config) is FAMILIES[name]
    assert family_of(json.loads(config.to_json_string())) is FAMILIES[name]
    register(name)
    fields = {"num_hidden_layers": 4, **TINY[name]}
    if FAMILIES[name].multimodal:
        fields = {"text_config": config.get_text_config().to_dict()}
    farskip = AutoConfig.for_model(f"farskip_{name}", **fields)
    assert family_of(farskip) is FAMILIES[name]
    assert base_model_type(farskip.model_type) == name


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_config_counts_its_experts_by_one_number_and_scales_its_logits_by_one_field(
    name,
):
    family = FAMILIES[name]
    config = text_config(tiny_config(name), family)
    for fields in (EXPERTS, EXPERTS_PER_TOKEN):
        counts = {
            value
            for field in fields
            if isinstance(value := read_field(config, field), int)
        }
        assert len(counts) == 1, "names that a config has besides its own mean the same"
    assert len([field for field in LOGIT_SCALES if hasattr(config, field)]) <= 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (name, counts)
        for name, counts in {
            "dbrx": (8, 2), "gemma4": (8, 2), "deepseek_v3": (8, 2), "llama4": (4, 1),
        }.items()
        if name in FAMILIES
    ],
)  # fmt: skip
def test_experts_are_counted_from_the_fields_of_the_config(name, expected):
    config = text_config(tiny_config(name), FAMILIES[name])
    assert expert_counts(config) == expected


def test_an_unknown_family_a_dense_model_and_a_dense_member_of_a_family_have_errors_of_their_own():
    with user_error(
        r"'jamba9' is not supported; the nearest that are: jamba; `fcsd families`"
    ):
        family_of({"model_type": "jamba9", "num_experts": 16})
    with user_error("'llama' is a dense model: it has no MoE layer"):
        family_of(AutoConfig.for_model("llama"))
    with user_error("'qwen3' is a dense model"):
        family_of({"model_type": "qwen3"})
    with user_error("'foo_moe' is unknown to transformers [0-9.]+, and not one that"):
        family_of({"model_type": "foo_moe"})
    with user_error(
        r"this model is dense, none of its 4 layers .*first_k_dense_replace"
    ):
        family_of(tiny_config("deepseek_v3", first_k_dense_replace=4))
    with user_error("model_type is missing"):
        family_of({})


def test_registering_an_unsupported_family_is_refused():
    with user_error("'farskip_jamba9' is not supported"):
        register("farskip_jamba9")


OTHER = """
import importlib.metadata, json, pathlib, sys
importlib.metadata.version = lambda _: sys.argv[2]
from fcsd.base.errors import UserError
from fcsd.model.connectivity.checkpoint import read_config
from fcsd.model.families import FAMILIES, UNAVAILABLE, family_of
assert not UNAVAILABLE.keys() & FAMILIES.keys()
folder = pathlib.Path(sys.argv[1])
family = sys.argv[3]
for name, keys in ((family, {}), (f"farskip_{family}", {"farskip": {}})):
    (folder / "config.json").write_text(json.dumps({"model_type": name, "num_experts": 8, "auto_map": {}} | keys))
    for ask in (lambda: family_of({"model_type": name}), lambda: read_config(folder, any_family=True)):
        try:
            ask()
        except UserError as error:
            print(str(error).removeprefix(f"{folder}: "))
"""


@pytest.mark.parametrize(
    ("family", "installed", "needs"),
    [
        (
            "lara_mini",
            "5.23.1",
            "needs transformers 5.24 or newer; installed is 5.23.1: pip install -U"
            " transformers",
        ),
        (
            "llama4",
            "5.24.0",
            "needs another transformers than 5.24.0, in which the model fails in its"
            " forward pass: it reads a field, image_outputs, that its text model's"
            " output does not have: pip install 'transformers!=5.24.0,>=5.23'",
        ),
    ],
)
def test_a_family_that_the_installed_transformers_lacks_or_breaks_is_refused_by_name(
    tmp_path, family, installed, needs
):
    done = subprocess.run(
        [sys.executable, "-c", OTHER, tmp_path, installed, family],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        f"model type '{name}' {needs}"
        for name in (family, f"farskip_{family}")
        for _ in range(2)
    ]


def test_a_checkpoint_of_a_family_names_the_releases_that_break_it():
    text = modeling_source(
        next(row for row in multimodal.ROWS if row.model_type == "llama4")
    )
    assert "or transformers.__version__ in ('5.24.0',)" in text
    assert "transformers>=5.23,!=5.24.0,<6" in text
    assert "__version__ in" not in modeling_source(FAMILIES["llama4_text"])


@pytest.mark.skipif(
    transformers.__version__ not in BROKEN["llama4"],
    reason="the installed transformers runs Llama 4",
)
def test_llama4_really_fails_in_the_release_that_is_said_to_break_it():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    text = {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size_mlp": 32,
        "num_local_experts": 2, "vocab_size": 64, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 32,
        "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    config = transformers.Llama4Config(
        text_config=sizes | text, vision_config=sizes | vision
    )
    model = transformers.Llama4ForConditionalGeneration(config)
    with pytest.raises(AttributeError, match="image_outputs"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
