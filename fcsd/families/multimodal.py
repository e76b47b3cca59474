"""Multimodal families: the text stack inside a wrapper is rewired, the rest is left alone."""

from dataclasses import replace

from fcsd.families.adapted import ROWS as ADAPTED
from fcsd.families.family import Family
from fcsd.families.standard import ROWS as STANDARD

_WRAPPED = {row.model_type: row for row in (*STANDARD, *ADAPTED)}


def _wrapper(text: Family, *, model_type: str, config: str, model: str, base_model: str) -> Family:
    """The wrapper around a text stack with these names."""
    return replace(
        text,
        model_type=model_type,
        config=config,
        causal_lm=model,
        base_model=base_model,
        reference="written",
        auto_model="AutoModelForImageTextToText",
    )


TEXT_ROWS: tuple[Family, ...] = (
    Family(
        model_type="aria_text",
        upstream="models/aria/modeling_aria.py",
        config="AriaTextConfig",
        causal_lm="AriaTextForCausalLM",
        base_model="AriaTextModel",
        decoder_layer="AriaTextDecoderLayer",
        moe_block="AriaTextMoELayer",
        block_shared="shared_experts",
    ),
    Family(
        model_type="qwen3_5_moe_text",
        upstream="models/qwen3_5_moe/modeling_qwen3_5_moe.py",
        config="Qwen3_5MoeTextConfig",
        causal_lm="Qwen3_5MoeForCausalLM",
        base_model="Qwen3_5MoeTextModel",
        decoder_layer="Qwen3_5MoeDecoderLayer",
        moe_block="Qwen3_5MoeSparseMoeBlock",
        block_shared="shared_expert",
        block_gate="shared_expert_gate",
    ),
    Family(
        model_type="minimax_m3_vl_text",
        upstream="models/minimax_m3_vl/modeling_minimax_m3_vl.py",
        config="MiniMaxM3VLTextConfig",
        causal_lm="MiniMaxM3VLForCausalLM",
        base_model="MiniMaxM3VLTextModel",
        decoder_layer="MiniMaxM3VLDecoderLayer",
        moe_block="MiniMaxM3VLSparseMoeBlock",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="dots3_note_text",
        upstream="models/dots3_note/modeling_dots3_note.py",
        config="Dots3NoteTextConfig",
        causal_lm="Dots3NoteForCausalLM",
        base_model="Dots3NoteTextModel",
        decoder_layer="Dots3NoteTextDecoderLayer",
        moe_block="Dots3NoteTextMoE",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
    ),
)
"""Text models that transformers has a CausalLM for, besides their wrapper."""

_WRAPPED |= {row.model_type: row for row in TEXT_ROWS}

WRAPPERS: tuple[Family, ...] = (
    _wrapper(
        _WRAPPED["llama4_text"],
        model_type="llama4",
        config="Llama4Config",
        model="Llama4ForConditionalGeneration",
        base_model="Llama4ForConditionalGeneration",
    ),
    _wrapper(
        _WRAPPED["aria_text"],
        model_type="aria",
        config="AriaConfig",
        model="AriaForConditionalGeneration",
        base_model="AriaModel",
    ),
    _wrapper(
        _WRAPPED["qwen3_5_moe_text"],
        model_type="qwen3_5_moe",
        config="Qwen3_5MoeConfig",
        model="Qwen3_5MoeForConditionalGeneration",
        base_model="Qwen3_5MoeModel",
    ),
    _wrapper(
        _WRAPPED["minimax_m3_vl_text"],
        model_type="minimax_m3_vl",
        config="MiniMaxM3VLConfig",
        model="MiniMaxM3SparseForConditionalGeneration",
        base_model="MiniMaxM3VLModel",
    ),
    _wrapper(
        _WRAPPED["dots3_note_text"],
        model_type="dots3_note",
        config="Dots3NoteConfig",
        model="Dots3NoteForConditionalGeneration",
        base_model="Dots3NoteModel",
    ),
    _wrapper(
        _WRAPPED["gemma4_text"],
        model_type="gemma4",
        config="Gemma4Config",
        model="Gemma4ForConditionalGeneration",
        base_model="Gemma4Model",
    ),
    Family(
        model_type="glm4v_moe",
        upstream="models/glm4v_moe/modeling_glm4v_moe.py",
        config="Glm4vMoeConfig",
        causal_lm="Glm4vMoeForConditionalGeneration",
        base_model="Glm4vMoeModel",
        decoder_layer="Glm4vMoeTextDecoderLayer",
        moe_block="Glm4vMoeTextMoE",
        block_shared="shared_experts",
        moe_layers="first_k_dense_replace",
        reference="written",
        auto_model="AutoModelForImageTextToText",
    ),
    Family(
        model_type="step3p7",
        upstream="models/step3p7/modeling_step3p7.py",
        config="Step3p7Config",
        causal_lm="Step3p7ForConditionalGeneration",
        base_model="Step3p7Model",
        decoder_layer="Step3p7DecoderLayer",
        moe_block="Step3p7SparseMoeBlock",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
        reference="written",
        auto_model="AutoModelForImageTextToText",
    ),
    Family(
        model_type="deepseek_ocr2",
        upstream="models/deepseek_ocr2/modeling_deepseek_ocr2.py",
        config="DeepseekOcr2Config",
        causal_lm="DeepseekOcr2ForConditionalGeneration",
        base_model="DeepseekOcr2Model",
        decoder_layer="DeepseekOcr2TextDecoderLayer",
        moe_block="DeepseekOcr2TextMoe",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
        reference="written",
        auto_model="AutoModelForImageTextToText",
    ),
    Family(
        model_type="unlimited_ocr",
        upstream="models/unlimited_ocr/modeling_unlimited_ocr.py",
        config="UnlimitedOcrConfig",
        causal_lm="UnlimitedOcrForConditionalGeneration",
        base_model="UnlimitedOcrModel",
        decoder_layer="UnlimitedOcrTextDecoderLayer",
        moe_block="UnlimitedOcrTextMoe",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
        reference="written",
        auto_model="AutoModelForImageTextToText",
    ),
    Family(
        model_type="ernie4_5_vl_moe",
        upstream="models/ernie4_5_vl_moe/modeling_ernie4_5_vl_moe.py",
        config="Ernie4_5_VLMoeConfig",
        causal_lm="Ernie4_5_VLMoeForConditionalGeneration",
        base_model="Ernie4_5_VLMoeModel",
        decoder_layer="Ernie4_5_VLMoeDecoderLayer",
        moe_block="Ernie4_5_VLMoeMoeBlock",
        moe_argument="moe_mm_token_type_ids",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
        reference="written",
        auto_model="AutoModelForImageTextToText",
    ),
    Family(
        model_type="qwen3_vl_moe",
        upstream="models/qwen3_vl_moe/modeling_qwen3_vl_moe.py",
        config="Qwen3VLMoeConfig",
        causal_lm="Qwen3VLMoeForConditionalGeneration",
        base_model="Qwen3VLMoeModel",
        decoder_layer="Qwen3VLMoeTextDecoderLayer",
        moe_block="Qwen3VLMoeTextSparseMoeBlock",
        stream_edit="_deepstack_process",
        moe_layers="decoder_sparse_step",
        reference="written",
        auto_model="AutoModelForImageTextToText",
    ),
    Family(
        model_type="qwen3_omni_moe_thinker",
        upstream="models/qwen3_omni_moe/modeling_qwen3_omni_moe.py",
        config="Qwen3OmniMoeThinkerConfig",
        causal_lm="Qwen3OmniMoeThinkerForConditionalGeneration",
        base_model="Qwen3OmniMoeThinkerModel",
        decoder_layer="Qwen3OmniMoeThinkerTextDecoderLayer",
        moe_block="Qwen3OmniMoeThinkerTextSparseMoeBlock",
        stream_edit="_deepstack_process",
        moe_layers="decoder_sparse_step",
        reference="written",
        auto_model="AutoModelForImageTextToText",
    ),
)

ROWS = (*TEXT_ROWS, *WRAPPERS)
