"""Describe multimodal families: the text stack inside a wrapper is rewired, and the rest
stays as it is.
"""

from dataclasses import replace

from fcsd.model.families.adapted import ROWS as ADAPTED
from fcsd.model.families.family import Family, Folding, wrapper
from fcsd.model.families.standard import ROWS as STANDARD

TEXT_ROWS: tuple[Family, ...] = (
    Family(
        model_type="aria_text",
        folding=Folding(transposed=("gate_up_proj", "down_proj")),
        since="5.5",
        config="AriaTextConfig",
        causal_lm="AriaTextForCausalLM",
        moe_block="AriaTextMoELayer",
        block_shared="shared_experts",
        reference="generic",
    ),
    Family(
        model_type="qwen3_5_moe_text",
        folding=Folding(reads=("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
        config="Qwen3_5MoeTextConfig",
        decoder_layer="Qwen3_5MoeDecoderLayer",
        moe_block="Qwen3_5MoeSparseMoeBlock",
        block_shared="shared_expert",
        block_gate="shared_expert_gate",
        # The state of its gated delta net runs through the row.
        packing="leaks",
        reference="generic",
    ),
    Family(
        model_type="minimax_m3_vl_text",
        folding=Folding(routed_factor="routed_scaling_factor"),
        config="MiniMaxM3VLTextConfig",
        decoder_layer="MiniMaxM3VLDecoderLayer",
        moe_block="MiniMaxM3VLSparseMoeBlock",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
        packing="leaks",
        # Its blocks of keys begin at the row's first slot (a TODO upstream).
        padding="counts",
        reference="generic",
    ),
    Family(
        model_type="dots3_note_text",
        config="Dots3NoteTextConfig",
        moe_block="Dots3NoteTextMoE",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
        reference="generic",
    ),
)
"""Text models for which transformers has a CausalLM class besides their wrapper."""

_STACKS = {row.model_type: row for row in (*STANDARD, *ADAPTED, *TEXT_ROWS)}

WRAPPERS: tuple[Family, ...] = (
    replace(
        wrapper(
            _STACKS["llama4_text"],
            "llama4",
            "Llama4",
            base_model="Llama4ForConditionalGeneration",
        ),
        scaled_experts="language_model.model.layers.*.feed_forward.experts",
    ),
    wrapper(_STACKS["aria_text"], "aria", "Aria"),
    wrapper(_STACKS["qwen3_5_moe_text"], "qwen3_5_moe", "Qwen3_5Moe"),
    replace(
        wrapper(
            _STACKS["minimax_m3_vl_text"],
            "minimax_m3_vl",
            "MiniMaxM3VL",
            causal_lm="MiniMaxM3SparseForConditionalGeneration",
        ),
        fuses_rows="gate_up_proj.weight",
    ),
    wrapper(_STACKS["dots3_note_text"], "dots3_note", "Dots3Note"),
    wrapper(_STACKS["gemma4_text"], "gemma4", "Gemma4"),
    Family(
        model_type="glm4v_moe",
        config="Glm4vMoeConfig",
        causal_lm="Glm4vMoeForConditionalGeneration",
        decoder_layer="Glm4vMoeTextDecoderLayer",
        moe_block="Glm4vMoeTextMoE",
        block_shared="shared_experts",
        moe_layers="first_k_dense_replace",
        packing="leaks",
    ),
    Family(
        model_type="step3p7",
        folding=Folding(routed_factor="routed_scaling_factor"),
        config="Step3p7Config",
        causal_lm="Step3p7ForConditionalGeneration",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="deepseek_ocr2",
        config="DeepseekOcr2Config",
        causal_lm="DeepseekOcr2ForConditionalGeneration",
        decoder_layer="DeepseekOcr2TextDecoderLayer",
        moe_block="DeepseekOcr2TextMoe",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="unlimited_ocr",
        config="UnlimitedOcrConfig",
        causal_lm="UnlimitedOcrForConditionalGeneration",
        decoder_layer="UnlimitedOcrTextDecoderLayer",
        moe_block="UnlimitedOcrTextMoe",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="ernie4_5_vl_moe",
        folding=Folding(left_out=("mlp.vision_moe",)),
        overlap_refused=(
            "its MoE blocks have two sets of experts, for text and for images"
        ),
        config="Ernie4_5_VLMoeConfig",
        causal_lm="Ernie4_5_VLMoeForConditionalGeneration",
        moe_block="Ernie4_5_VLMoeMoeBlock",
        moe_argument="moe_mm_token_type_ids",
        block_shared="shared_experts",
        moe_layers="mlp_layer_types",
        packing="leaks",
    ),
    Family(
        model_type="qwen3_vl_moe",
        spread_refused=(
            "transformers fails to load it over several ranks (its experts are"
            " transposed)"
        ),
        config="Qwen3VLMoeConfig",
        causal_lm="Qwen3VLMoeForConditionalGeneration",
        decoder_layer="Qwen3VLMoeTextDecoderLayer",
        moe_block="Qwen3VLMoeTextSparseMoeBlock",
        stream_edit="_deepstack_process",
        moe_layers="decoder_sparse_step",
    ),
    Family(
        model_type="qwen3_omni_moe_thinker",
        upstream="models/qwen3_omni_moe/modeling_qwen3_omni_moe.py",
        config="Qwen3OmniMoeThinkerConfig",
        causal_lm="Qwen3OmniMoeThinkerForConditionalGeneration",
        decoder_layer="Qwen3OmniMoeThinkerTextDecoderLayer",
        moe_block="Qwen3OmniMoeThinkerTextSparseMoeBlock",
        stream_edit="_deepstack_process",
        moe_layers="decoder_sparse_step",
    ),
)

ROWS = (*TEXT_ROWS, *WRAPPERS)
