"""Describe the families whose layer is not the plain pre-norm layer; `rewire` gets all it
needs to know about them as data.

The equations of the layouts and residual rules are in `Family`. Particulars of the
families here:

- glm_moe_dsa, mistral_large4: attention passes the positions that it attends to on to
  the next layer; zaya: a router passes on its hidden state, which the next router adds
  to its own. It is computed at once from what the router reads.
- afmoe, kolibri1, axk1, beam, muse_spark, gemma4: a norm follows shared + routed;
  inkling: a convolution over time follows it. The stream gets N(shared + routed), from
  which no part can be separated, so all of it counts as routed.
- beam: sums are scaled by depth; muse_spark: a learned gate per channel weighs stream
  and branch; gemma4: the layer's output is multiplied by a scalar. Attention reads the
  stream after attention, scaled in this way. zaya: stream and branch have learned
  factors and biases per channel; the biases of a sum are not in flight. Its stream is
  float32.
- gemma4: the router, the experts and a dense MLP each read the stream after attention;
  the dense MLP is the part that is always active, under the same norm as the routed
  experts.
- minimax: the stream itself is normed before attention and before the MLP; flex_olmo:
  it is read unnormed, and the outputs are normed.
- cohere2_moe: attention and MLP read one norm of the same stream, so that only
  attention's input changes.
- dbrx: both norms are inside a module that also holds attention.
- inkling2: the stream that is in flight is the sum of one block of layers; what later
  layers read of a block that ended is whole. A convolution over time follows routed.
- jetmoe: attention has experts as well, which stay part of attention; only the output
  of the MLP's experts, with their bias, is in flight.
"""

from dataclasses import replace

from fcsd.model.families.family import INDEXER, Family, Folding, wrapper

_NORMED = Folding(closed=("self_attn", "mlp"))

_HY4 = Family(
    model_type="hy_v4",
    folding=Folding(reads=INDEXER),
    config="HYV4Config",
    moe_block="HYV4MoE",
    layout="streams",
    connections=("attn_hc", "ffn_hc"),
    connection_returns=("write", "read"),
    block_shared="shared_experts",
    side_output="prev_topk_indices",
    moe_layers="mlp_layer_types",
)

_QWEN4 = Family(
    model_type="qwen4_exp_text",
    folding=Folding(
        reads=(
            *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            "index_qk_proj",
        ),
        unread=("ple",),
    ),
    fuses_rows="ngram_embedding.weight",
    config="Qwen4ExpTextConfig",
    decoder_layer="Qwen4ExpTextDecoderLayer",
    layout="streams",
    in_norm=None,
    mlp_norm=None,
    connections=("attn_hyper_connection", "mlp_hyper_connection"),
    connection_returns=("read", "streams", "write"),
    stream_branch="ple",
    block_shared="shared_expert",
    block_gate="shared_expert_gate",
    # The state of its linear attention runs through the row.
    packing="leaks",
)

_INKLING = Family(
    model_type="inkling_text",
    folding=Folding(
        reads=("r_proj",),
        unread=("attn_sconv", "mlp_sconv"),
        closed=("self_attn", "mlp"),
    ),
    config="InklingTextConfig",
    decoder_layer="InklingDecoderLayer",
    moe_block="InklingMoE",
    overlap_refused=(
        "its router weighs its shared experts, which therefore cannot run by themselves"
    ),
    block_shared="shared_experts",
    additive=False,
    moe_layers="mlp_layer_types",
    # Its short convolutions reach over the ends of examples.
    packing="leaks",
)

_INKLING2 = Family(
    model_type="inkling2_text",
    folding=Folding(
        reads=("r_proj", "sink_proj"),
        # Keys and values read mixes of their own.
        apart=(("Inkling2FullDecoderLayer", ("self_attn.k_proj", "self_attn.v_proj")),),
        unread=("post_attention_convolution", "post_mlp_convolution"),
        closed=("self_attn", "mlp"),
    ),
    config="Inkling2TextConfig",
    decoder_layer=("Inkling2SlidingDecoderLayer", "Inkling2FullDecoderLayer"),
    moe_block="Inkling2SparseMoeBlock",
    layout="sources",
    connections=("attention_input", "mlp_input"),
    block_begins="is_block_boundary",
    in_norm=None,
    additive=False,
    # Its short convolutions reach over the ends of examples.
    packing="leaks",
)

ROWS: tuple[Family, ...] = (
    Family(
        model_type="glm_moe_dsa",
        folding=Folding(reads=INDEXER),
        config="GlmMoeDsaConfig",
        moe_block="GlmMoeDsaMoE",
        block_shared="shared_experts",
        side_output="prev_topk_indices",
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="afmoe",
        folding=_NORMED,
        since="5.5",
        config="AfmoeConfig",
        mlp_norm="pre_mlp_layernorm",
        block_shared="shared_experts",
        additive=False,
        moe_layers="num_dense_layers",
        packing="given_masks",
    ),
    Family(
        model_type="kolibri1",
        folding=_NORMED,
        config="Kolibri1Config",
        block_shared="shared_experts",
        additive=False,
    ),
    Family(
        model_type="axk1",
        config="AXK1Config",
        moe_block="AXK1MoE",
        block_shared="shared_experts",
        additive=False,
        moe_layers="mlp_layer_types",
    ),
    _INKLING,
    Family(
        model_type="flex_olmo",
        folding=_NORMED,
        since="5.5",
        config="FlexOlmoConfig",
        layout="post_norm",
        in_norm=None,
        mlp_norm=None,
        additive=False,
    ),
    Family(
        model_type="cohere2_moe",
        config="Cohere2MoeConfig",
        layout="parallel",
        mlp_norm=None,
        block_shared="shared_experts",
        shared_average="shared_expert_combination_strategy",
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="beam",
        folding=_NORMED,
        config="BeamConfig",
        moe_block="BeamMoE",
        mlp_norm="pre_feedforward_layernorm",
        additive=False,
        residual="depth",
        residual_names=("attn_residual_add_idx", "mlp_residual_add_idx"),
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="dbrx",
        folding=Folding(
            reads=("Wqkv", "router.layer", "w1", "v1"),
            writes=("w2",),
            transposed=("w2",),
        ),
        spread_refused=(
            "transformers has no plan for its experts, whose weights form one matrix"
        ),
        config="DbrxConfig",
        decoder_layer="DbrxBlock",
        moe_block="DbrxFFN",
        in_norm="norm_1",
        mlp_norm="norm_2",
        norms="norm_attn_norm",
        moe="ffn",
    ),
    Family(
        model_type="jetmoe",
        folding=Folding(
            reads=("router.layer", "input_linear", "kv_proj"),
            # the last two have a bias
            writes=("output_linear", "mlp", "self_attention.experts"),
        ),
        spread_refused=(
            "transformers has no plan for its experts, which are also in its attention"
        ),
        since="5.5",
        config="JetMoeConfig",
        moe_block="JetMoeMoE",
    ),
    Family(
        model_type="minimax",
        folding=Folding(
            reads=("qkv_proj", "output_gate"),
            closed=("self_attn",),
            mlp_factor="mlp_beta_factor",
        ),
        since="5.5",
        config="MiniMaxConfig",
        layout="post_norm",
        residual="factor",
        residual_names=("attn_alpha_factor", "mlp_alpha_factor"),
        # The state of its lightning attention runs through the row.
        packing="leaks",
    ),
    Family(
        model_type="gemma4_text",
        folding=Folding(unread=("router",), closed=("self_attn", "mlp")),
        spread_refused=(
            "transformers fails to load it over several ranks (overlapping meshes)"
        ),
        config="Gemma4TextConfig",
        moe_block="Gemma4TextExperts",
        mlp_norm=("pre_feedforward_layernorm", "router", "pre_feedforward_layernorm_2"),
        moe="experts",
        additive=False,
        residual="factor",
        residual_names=(None, "layer_scalar"),
        moe_layers="enable_moe_block",
        requires=(
            (
                "hidden_size_per_layer_input",
                0,
                (
                    "a per-layer input branch reads the output of the experts inside"
                    " the layer"
                ),
            ),
            (
                "num_kv_shared_layers",
                0,
                "layers that reuse keys and values cut the stream between layers",
            ),
        ),
    ),
    Family(
        model_type="mistral_large4",
        folding=Folding(
            reads=INDEXER,
            # The indexer norms its input before the queries.
            other_uses=(("self_attn.indexer", "aten.native_layer_norm"),),
        ),
        config="MistralLarge4Config",
        causal_lm="MistralLarge4ForConditionalGeneration",
        decoder_layer="MistralLarge4TextDecoderLayer",
        moe_block="MistralLarge4TextMoE",
        block_shared="shared_experts",
        side_output="prev_topk_indices",
        moe_layers="mlp_layer_types",
    ),
    Family(
        model_type="muse_spark",
        folding=Folding(
            reads=("pre_expert_proj",),
            left_out=("mlp.experts",),
            closed=("self_attn", "mlp"),
        ),
        config="MuseSparkConfig",
        causal_lm="MuseSparkForConditionalGeneration",
        decoder_layer="MuseSparkTextDecoderLayer",
        moe_block="MuseSparkMoE",
        mlp_norm="pre_feedforward_layernorm",
        additive=False,
        residual="gate",
        residual_names=(
            "post_attention_residual_gate",
            "post_feedforward_residual_gate",
        ),
        moe_layers="mlp_layer_types",
    ),
    wrapper(_INKLING, "inkling_mm_model", "Inkling"),
    _INKLING2,
    wrapper(_INKLING2, "inkling2", "Inkling2"),
    Family(
        model_type="deepseek_v4",
        folding=Folding(reads=("kv_proj", "weights_proj")),
        config="DeepseekV4Config",
        layout="streams",
        connections=("attn_hc", "ffn_hc"),
        connection_returns=("write", "mix", "read"),
        block_argument="input_ids",
        block_shared="shared_experts",
        # Its compressed keys are made of groups of tokens from the beginning of the row.
        packing="leaks",
        padding="counts",
    ),
    _HY4,
    replace(
        wrapper(_HY4, "hy_v4_vl", "HYV4VL", base_model="HYV4VLModel"),
        decoder_layer="HYV4VLDecoderLayer",
        moe_block="HYV4VLMoE",
        upstream="models/hy_v4_vl/modeling_hy_v4_vl.py",
        # Its masks are made without the positions of a row's examples.
        packing="leaks",
        since="5.24",
    ),
    Family(
        model_type="nemotron_h",
        config="NemotronHConfig",
        decoder_layer="NemotronHBlock",
        moe_block="NemotronHMoE",
        folding=Folding(
            reads=("fc1_latent_proj",),
            writes=("fc2_latent_proj",),
            latent="mixer.fc1_latent_proj",
        ),
        layout="blocks",
        in_norm="norm",
        mlp_norm=None,
        attention="mixer",
        moe="mixer",
        mlp_block="NemotronHMLP",
        block_shared="shared_experts",
        moe_layers="layers_block_type",
        overlap_refused=(
            "each of its layers is one branch, and the runtime runs the exchanges of a"
            " layer beside the attention of the same layer"
        ),
        # The state of its Mamba layers runs through the row.
        packing="leaks",
    ),
    Family(
        model_type="zaya",
        folding=Folding(
            reads=("v_proj_current", "v_proj_delayed", "mlp.gate.down_proj"),
            closed=("self_attn", "mlp"),
        ),
        config="ZayaConfig",
        residual="scale",
        residual_names=("post_attention_residual_scale", "post_mlp_residual_scale"),
        side_output="prev_router_hidden_states",
        overlap_refused=(
            "its MoE blocks also take and return the states of their routers, which the"
            " runtime does not pass on"
        ),
        # The convolutions of its attention run through the row.
        packing="leaks",
        # With -1, in the place of the choice of no expert.
        overwritten=".balancing_biases",
    ),
    _QWEN4,
    wrapper(_QWEN4, "qwen4_exp", "Qwen4Exp"),
    Family(
        model_type="glm5_next",
        folding=Folding(
            reads=(
                *(*INDEXER, "index_kpool_compress_gate"),
                *("f_a_proj", "b_proj", "g_a_proj"),
            )
        ),
        fuses_rows="conv1d.weight",
        config="Glm5NextConfig",
        causal_lm="Glm5NextForConditionalGeneration",
        decoder_layer="Glm5NextTextDecoderLayer",
        moe_block="Glm5NextTextMoE",
        layout="streams",
        connections=("attn_hc", "ffn_hc"),
        connection_returns=("write", "mix", "read"),
        block_shared="shared_experts",
        side_output="prev_topk_indices",
        moe_layers="mlp_layer_types",
        # The state of its linear attention runs through the row.
        packing="leaks",
    ),
)
