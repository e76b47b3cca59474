"""The MoE families that fcsd converts, as data: what their layers are called upstream, and nothing else.

`FAMILIES` maps a Hugging Face `model_type` to a `Family`. Every name is spelled as in the upstream modeling
file that the entry names, so an upstream rename shows as a refusal (`convert_model` compares class names),
never as a wrong model.

A family is listed only when the contract tests in `tests/connectivity` pass on it against an independent
reference. To add one: add its row here, a tiny configuration in `fcsd/testing/tiny.py`, and run those tests.

Not covered: layers with hyper-connections or learned residual gates, parallel attention and MLP on one norm,
post-norm layers, multimodal wrappers (convert their text model), encoder-decoders.
"""

from collections.abc import Mapping
from typing import Any

from fcsd.errors import UserError
from fcsd.families.family import MOE_LAYERS, Family, moe_mask

__all__ = ["FAMILIES", "Family", "base_model_type", "family_of", "moe_mask"]

_ROWS = (
    Family(
        model_type="qwen3_moe",
        upstream="models/qwen3_moe/modeling_qwen3_moe.py",
        config="Qwen3MoeConfig",
        causal_lm="Qwen3MoeForCausalLM",
        base_model="Qwen3MoeModel",
        decoder_layer="Qwen3MoeDecoderLayer",
        moe_block="Qwen3MoeSparseMoeBlock",
        moe_layers="decoder_sparse_step",
    ),
    Family(
        model_type="qwen2_moe",
        upstream="models/qwen2_moe/modeling_qwen2_moe.py",
        config="Qwen2MoeConfig",
        causal_lm="Qwen2MoeForCausalLM",
        base_model="Qwen2MoeModel",
        decoder_layer="Qwen2MoeDecoderLayer",
        moe_block="Qwen2MoeSparseMoeBlock",
        block_shared="shared_expert",
        block_gate="shared_expert_gate",
        moe_layers="decoder_sparse_step",
    ),
    Family(
        model_type="deepseek_v2",
        upstream="models/deepseek_v2/modeling_deepseek_v2.py",
        config="DeepseekV2Config",
        causal_lm="DeepseekV2ForCausalLM",
        base_model="DeepseekV2Model",
        decoder_layer="DeepseekV2DecoderLayer",
        moe_block="DeepseekV2Moe",
        block_shared="shared_experts",
        moe_layers="first_k_dense_replace",
    ),
    Family(
        model_type="deepseek_v3",
        upstream="models/deepseek_v3/modeling_deepseek_v3.py",
        config="DeepseekV3Config",
        causal_lm="DeepseekV3ForCausalLM",
        base_model="DeepseekV3Model",
        decoder_layer="DeepseekV3DecoderLayer",
        moe_block="DeepseekV3MoE",
        block_shared="shared_experts",
        moe_layers="first_k_dense_replace",
    ),
    Family(
        model_type="glm4_moe",
        upstream="models/glm4_moe/modeling_glm4_moe.py",
        config="Glm4MoeConfig",
        causal_lm="Glm4MoeForCausalLM",
        base_model="Glm4MoeModel",
        decoder_layer="Glm4MoeDecoderLayer",
        moe_block="Glm4MoeMoE",
        block_shared="shared_experts",
        moe_layers="first_k_dense_replace",
    ),
    Family(
        model_type="mixtral",
        upstream="models/mixtral/modeling_mixtral.py",
        config="MixtralConfig",
        causal_lm="MixtralForCausalLM",
        base_model="MixtralModel",
        decoder_layer="MixtralDecoderLayer",
        moe_block="MixtralSparseMoeBlock",
    ),
    Family(
        model_type="olmoe",
        upstream="models/olmoe/modeling_olmoe.py",
        config="OlmoeConfig",
        causal_lm="OlmoeForCausalLM",
        base_model="OlmoeModel",
        decoder_layer="OlmoeDecoderLayer",
        moe_block="OlmoeSparseMoeBlock",
    ),
    Family(
        model_type="llama4_text",
        upstream="models/llama4/modeling_llama4.py",
        config="Llama4TextConfig",
        causal_lm="Llama4ForCausalLM",
        base_model="Llama4TextModel",
        decoder_layer="Llama4TextDecoderLayer",
        moe_block="Llama4TextMoe",
        moe="feed_forward",
        block_shared="shared_expert",
        shared_in_place=True,
        moe_layers="moe_layers",
    ),
    Family(
        model_type="gpt_oss",
        upstream="models/gpt_oss/modeling_gpt_oss.py",
        config="GptOssConfig",
        causal_lm="GptOssForCausalLM",
        base_model="GptOssModel",
        decoder_layer="GptOssDecoderLayer",
        moe_block="GptOssMLP",
    ),
    Family(
        model_type="granitemoe",
        upstream="models/granitemoe/modeling_granitemoe.py",
        config="GraniteMoeConfig",
        causal_lm="GraniteMoeForCausalLM",
        base_model="GraniteMoeModel",
        decoder_layer="GraniteMoeDecoderLayer",
        moe_block="GraniteMoeMoE",
        moe="block_sparse_moe",
        residual_multiplier="residual_multiplier",
    ),
    Family(
        model_type="granitemoeshared",
        upstream="models/granitemoeshared/modeling_granitemoeshared.py",
        config="GraniteMoeSharedConfig",
        causal_lm="GraniteMoeSharedForCausalLM",
        base_model="GraniteMoeSharedModel",
        decoder_layer="GraniteMoeSharedDecoderLayer",
        moe_block="GraniteMoeSharedMoE",
        moe="block_sparse_moe",
        layer_shared="shared_mlp",
        residual_multiplier="residual_multiplier",
    ),
)

FAMILIES: dict[str, Family] = {row.model_type: row for row in _ROWS}

PREFIX = "farskip_"
"""A converted checkpoint has `model_type` PREFIX + the model type of its base."""

_EXPERT_COUNTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
    "n_experts",
    "ffn_config",
    "text_config",
)


def base_model_type(model_type: str) -> str:
    """`qwen3_moe` for both `qwen3_moe` and `farskip_qwen3_moe`."""
    return model_type.removeprefix(PREFIX)


def family_of(config: Any) -> Family:
    """The family of a checkpoint.

    Args:
        config: a transformers config object, or the mapping read from a `config.json`. A FarSkip config
            gives the family of its base.

    Raises:
        UserError: there is no `model_type`; the family is not supported; the model is dense, so that there
            is no expert communication to move out of the way.
    """
    get = (
        config.get
        if isinstance(config, Mapping)
        else lambda name, default=None: getattr(config, name, default)
    )
    model_type = get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UserError(
            "config.json: model_type is missing; a Hugging Face checkpoint names its family there"
        )
    family = FAMILIES.get(base_model_type(model_type))
    if family is None:
        if not any(get(name) for name in _EXPERT_COUNTS):
            raise UserError(
                f"model type '{model_type}' is a dense model: it has no MoE layer, so FarSkip has no expert"
                " communication to overlap; choose an MoE model of one of the families"
                f" {', '.join(sorted(FAMILIES))}"
            )
        hint = (
            "; convert its text model, which has model type 'llama4_text'" if model_type == "llama4" else ""
        )
        raise UserError(
            f"model type '{model_type}' is not supported{hint}; supported families:"
            f" {', '.join(sorted(FAMILIES))}"
        )
    if not isinstance(config, Mapping) and not any(moe_mask(config, family)):
        fields = MOE_LAYERS[family.moe_layers][0]
        raise UserError(
            f"model type '{model_type}': this model is dense, none of its {config.num_hidden_layers} layers"
            f" is an MoE layer (config fields: {', '.join(fields)}); FarSkip needs at least one"
        )
    return family
