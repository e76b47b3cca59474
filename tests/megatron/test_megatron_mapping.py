"""The parts of `fcsd_megatron` that need no Megatron: names, settings, plans, refusals.
`make test-megatron` has the rest.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fcsd.base.errors import UserError
from fcsd.model.connectivity import Connectivity, convert_model, resolve_layers
from fcsd.model.families import FAMILIES, moe_mask
from tests.reference.tiny import tiny_config, tiny_model
from tests.support import load_modules, user_error

PURE = ("names", "plans", "refusals", "settings", "source", "versions")


@pytest.fixture(scope="module")
def package() -> Any:
    """The modules that need no Megatron."""
    return load_modules("megatron", "fcsd_megatron", PURE)


@pytest.mark.parametrize(
    "connectivity",
    [
        Connectivity("all"),
        Connectivity([0, 1, 3]),
        *(Connectivity("all", **{s: "full"}) for s in ("attention", "mlp")),
    ],
    ids=str,
)
def test_the_plans_are_those_of_the_rewired_model(
    package: Any, connectivity: Connectivity
) -> None:
    model = tiny_model("deepseek_v3")
    mask = moe_mask(model.config, FAMILIES["deepseek_v3"])
    convert_model(model, connectivity)
    rewired = [getattr(layer, "farskip_plan", None) for layer in model.model.layers]
    plans = package.plans.layer_plans(connectivity, mask)
    assert [plan and (plan.outdated, plan.carry) for plan in plans] == [
        plan and (plan.outdated, plan.carry) for plan in rewired
    ]
    assert [k for k, plan in enumerate(plans) if plan] == resolve_layers(
        connectivity.layers, mask
    )


def test_a_regular_checkpoint_has_no_plans(package: Any) -> None:
    assert package.plans.layer_plans(None, [False, True]) == [None, None]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_every_tensor_of_the_files_is_in_one_piece_and_comes_back(
    package: Any, family: str, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    source = package.source.read_source(tmp_path)
    sources = [name for piece in source.pieces.values() for name in piece.sources]
    assert sorted(sources) == sorted(source.checkpoint.shapes)
    for piece in source.pieces.values():
        tensors = [
            torch.randn(source.checkpoint.shapes[name]) for name in piece.sources
        ]
        assert all(map(torch.equal, piece.split(piece.join(tensors)), tensors))


def test_grouped_attention_has_queries_key_and_value_of_a_group_together(
    package: Any,
) -> None:
    config = tiny_config("qwen3_moe", head_dim=1)  # 4 heads, 2 groups
    piece = package.names.pieces_of(config, [True])[
        "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    rows = piece.join(
        [torch.tensor(each)[:, None] for each in ([1, 2, 3, 4], [10, 20], [100, 200])]
    )
    assert rows.flatten().tolist() == [1, 2, 10, 100, 3, 4, 20, 200]


def test_a_rank_has_its_own_experts_by_its_own_numbers(package: Any) -> None:
    names, prefix = package.names, "decoder.layers.1.mlp.experts.local_experts."
    assert (
        names.own_name(f"{prefix}5.linear_fc1.weight", 4, 4)
        == f"{prefix}1.linear_fc1.weight"
    )
    assert names.own_name(f"{prefix}3.linear_fc1.weight", 4, 4) is None
    assert (
        names.own_name("decoder.layers.1.mlp.router.weight", 4, 4)
        == "decoder.layers.1.mlp.router.weight"
    )


@pytest.mark.parametrize(
    "family, field, value, message",
    [
        ("olmoe", "hidden_act", "silu", "model type 'olmoe' is not supported in Megatron-Core; supported:"),
        ("qwen3_moe", "hidden_act", "gelu", "hidden_act: 'gelu'"),
        ("qwen3_moe", "tie_word_embeddings", True, "tie_word_embeddings: True"),
        ("qwen3_moe", "attention_bias", True, "attention_bias: True"),
        ("qwen3_moe", "use_sliding_window", True, "use_sliding_window: True"),
        ("qwen3_moe", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "rope_type default"),
        ("deepseek_v3", "norm_topk_prob", False, "norm_topk_prob: False"),
        ("deepseek_v3", "rope_interleave", False, "rope_interleave: False"),
        ("deepseek_v3", "num_experts_per_tok", 4, "would not score groups by two experts"),
        ("deepseek_v3", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4}, "default, and yarn"),
    ],
)  # fmt: skip
def test_what_megatron_computes_in_another_way_is_refused(
    package: Any, family: str, field: str, value: Any, message: str
) -> None:
    config = tiny_config(family)
    setattr(config, field, value)
    with user_error("x: ") as refused:
        package.settings.settings_of(config, [True] * 4, "x")
    assert message in str(refused.value)


def test_every_rule_refuses_what_is_set_and_leaves_what_is_off(package: Any) -> None:
    rules = package.refusals.RULES
    package.refusals.check_options(SimpleNamespace())
    for name, (_, reason) in rules.items():
        value = "local" if name == "cuda_graph_impl" else 2
        with pytest.raises(UserError) as refused:
            package.refusals.check_options(SimpleNamespace(**{name: value}))
        assert f"{name}={value!r} {reason}" in str(refused.value)


def test_another_release_is_refused_in_a_line_that_names_those_that_were_compared(
    package: Any,
) -> None:
    for release in ("0.16.1", "0.19.2", "0.16.1+cpu"):
        package.versions.check_version(release)
    for release in ("0.16.0", "0.20.0"):
        with user_error(
            f"megatron-core {release} is not supported, .*install megatron-core==0.19.2"
        ):
            package.versions.check_version(release)
