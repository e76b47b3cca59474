"""Only the sizes in a configuration are cut, for any family."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from fcsd.model.connectivity import Connectivity, convert_model
from fcsd.model.connectivity.modeling import classes_of
from fcsd.model.connectivity.stack import decoder_layers
from fcsd.model.families import FAMILIES, Family, family_of, moe_mask
from fcsd.model.families.family import text_config
from fcsd.model.inspect.checkpoint import config_object
from fcsd.model.inspect.shipped import CONFIGS
from fcsd.pipeline.tiny.cut import cut_sizes
from fcsd.pipeline.tiny.models import small_model, tiny_model
from tests.support import few, user_error

# Fields of published checkpoints that transformers' defaults lack, or with which the
# defaults leave out the family's own kind of layer.
_GEMMA4 = {
    "enable_moe_block": True, "hidden_size_per_layer_input": 0, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704,
}  # fmt: skip
_QWEN4 = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": [
            *(["linear_attention", "moe"] * 2 + ["full_attention", "moe"]) * 2,
            *("linear_attention", "moe"),
        ]
    },
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "deepseek_v2": {"n_routed_experts": 64, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 64, "moe_topk": [8] * 32},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "gemma4_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4},
    "phimoe": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 64,
            "long_factor": [1.5] * 64,
            "short_mscale": 1.24,
            "long_mscale": 1.24,
        }
    },
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 12,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "mlp_layer_types": ["dense"] + ["sparse"] * 11,
        }
    },
    "step3p7": {
        "text_config": {
            "sliding_window": 512,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11
            + ["full_attention"],
        }
    },
    "glm4v_moe": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            },
        }
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 500000.0,
                "mrope_section": [22, 22, 20],
            }
        }
    },
}  # fmt: skip


def kinds_of_layers(model: Any, family: Family) -> list[frozenset[str]]:
    """Return for each decoder layer its name in the config, and the classes and names
    of its modules.
    """
    names = getattr(text_config(model.config, family), "layer_types", None)
    return [
        frozenset(
            [str(names and names[k])]
            + [
                f"{name.rpartition('.')[2]}: {type(module).__name__}"
                for name, module in layer.named_modules()
            ]
        )
        for k, layer in enumerate(decoder_layers(model, family))
    ]


@pytest.mark.parametrize("model_type", few(FAMILIES))
def test_the_cut_model_of_every_family_has_all_kinds_of_layers_converts_and_runs(
    model_type: str,
) -> None:
    family = FAMILIES[model_type]
    real = classes_of(family).config(**PUBLISHED.get(model_type, {}))
    model = small_model(real, vocab_size=120, max_position_embeddings=64)
    assert sum(parameter.numel() for parameter in model.parameters()) < 3_000_000
    assert sum(moe_mask(model.config, family)) >= 2
    with torch.device("meta"):
        whole = classes_of(family).model._from_config(real)
    layers = kinds_of_layers(model, family)
    assert len(layers) == 4 and set(layers) == set(kinds_of_layers(whole, family))
    assert convert_model(model, Connectivity("all")) == [0, 1, 2, 3]
    with torch.no_grad():
        logits = model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits
    assert logits.shape[1:] == (12, 120) and logits.isfinite().all()


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem
)
def test_the_configs_of_published_checkpoints_are_cut(path: Path) -> None:
    family = family_of(raw := json.loads(path.read_text()))
    raw.pop("quantization_config", None)
    config = config_object(classes_of(family).config, raw, family.model_type, path.name)
    model = small_model(config, vocab_size=512, max_position_embeddings=4096)
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    mask, whole = moe_mask(model.config, family), moe_mask(config, family)
    assert len(mask) == 4 and (mask[0], set(mask)) == (whole[0], set(whole))
    with torch.no_grad():
        assert (
            model(input_ids=torch.arange(3, 15)[None], use_cache=False)
            .logits.isfinite()
            .all()
        )


def test_what_is_no_size_stays_as_the_configuration_has_it() -> None:
    own = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=4096,
        num_hidden_layers=94,
        num_experts=4,
        norm_topk_prob=True,
        rope_theta=5e6,
        mlp_only_layers=[0, 7],
        attention_bias=True,
        pad_token_id=151643,
    )
    cut = cut_sizes(own, num_hidden_layers=6, vocab_size=300)
    assert (cut.hidden_size, cut.num_hidden_layers, cut.vocab_size) == (64, 6, 300)
    assert cut.num_experts == 4  # small already
    # the small tokenizer's
    assert (cut.bos_token_id, cut.eos_token_id, cut.pad_token_id) == (1, 2, 0)
    assert cut.norm_topk_prob and cut.attention_bias
    assert cut.rope_parameters["rope_theta"] == 5e6


def test_layers_are_chosen_once_for_all_lists_of_a_configuration() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    own = AutoConfig.for_model(
        "flint",
        num_hidden_layers=12,
        layer_types=kinds,
        mlp_only_layers=[0, 1, 2],
        sliding_window=4096,
    )
    cut = cut_sizes(own)
    # Dense with a window, dense without; with experts and a window; the last.
    assert cut.layer_types == [
        "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    ]  # fmt: skip
    assert cut.mlp_only_layers == [0, 1] and cut.sliding_window == 8
    heads = cut_sizes(AutoConfig.for_model("deepseek_v3"))
    assert (heads.num_key_value_heads, heads.num_attention_heads) == (4, 4)
    assert heads.qk_head_dim == heads.qk_nope_head_dim + heads.qk_rope_head_dim == 48


def test_a_model_that_cannot_be_cut_is_refused_in_one_line() -> None:
    with user_error("no family has the model type 'llama'; `fcsd families` lists them"):
        tiny_model("llama")
    with user_error(r"dots1: the sizes of its config cannot be cut: empty\(\)"):
        tiny_model("dots1")
