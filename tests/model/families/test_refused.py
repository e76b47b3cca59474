"""Families that are refused by name, each with its reason."""

import importlib

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from fcsd.base.errors import UserError
from fcsd.model.connectivity import Connectivity, convert_checkpoint, register
from fcsd.model.families import FAMILIES, REFUSED, family_of
from tests.reference.tiny import tiny_config
from tests.support import user_error

NEWER = {"inkling2_loop", "inkling2_loop_text"}
"""Families that came with transformers 5.24."""


def skip_where_it_is_missing(name):
    if name in NEWER and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_family_is_named_with_its_reason(name):
    with pytest.raises(UserError) as error:
        family_of({"model_type": name})
    assert str(error.value).startswith(
        f"model type '{name}' cannot be converted: {REFUSED[name]}"
    )


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_family_exists_upstream_and_is_not_supported(name):
    skip_where_it_is_missing(name)
    assert name in CONFIG_MAPPING
    assert name not in FAMILIES


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("inkling2_loop", ["loop_num_passes", "message_input"]),
        ("longcat_flash", ["shortcut_mlp_output", "self.input_layernorm[1]"]),
        ("doge", ["down_embed = nn.Embedding"]),
        ("bamba", ["num_experts = 1"]),
        ("diffusion_gemma", ["ForBlockDiffusion"]),
        ("openai_privacy_filter", ["bidirectional"]),
    ],
)
def test_the_reason_can_be_seen_in_the_upstream_source(module, words):
    """An upstream rewrite that makes a family fit fails this test."""
    skip_where_it_is_missing(module)
    path = importlib.import_module(
        f"transformers.models.{module}.modeling_{module}"
    ).__file__
    with open(path, encoding="utf-8") as file:
        source = file.read()
    assert [word for word in words if word not in source] == []


def test_converting_and_registering_a_refused_family_say_why(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "doge", "num_experts": 8}')
    with user_error(
        r"'doge' cannot be converted: its experts are rows of an embedding"
    ):
        convert_checkpoint(tmp_path, tmp_path / "out", Connectivity("all"))
    assert not (tmp_path / "out").exists()
    with user_error("'farskip_bamba' cannot be converted: its MLP is dense"):
        register("farskip_bamba")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("hidden_size_per_layer_input", 8, "a per-layer input branch"),
        ("num_kv_shared_layers", 2, "layers that reuse keys and values"),
    ],
)
def test_a_member_of_a_family_that_the_equations_do_not_fit_is_refused(
    field, value, reason
):
    config = tiny_config("gemma4_text", **{field: value})
    with user_error(rf"gemma4_text.*{field}: {value} is not supported.*0.*{reason}"):
        family_of(config)
