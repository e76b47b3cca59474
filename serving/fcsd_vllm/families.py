"""The families that the plugin serves, one per row, as vLLM and transformers spell
them. Standard library only.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """The names by which one family's model file in vLLM differs from others; the rest
    is read from the layer.
    """

    model_type: str
    """Key in transformers' Auto mappings; a converted checkpoint has `farskip_` before it."""
    config: str
    """Class of the configuration in transformers."""
    causal_lm: str
    """Architecture, in transformers and in vLLM; a converted checkpoint has `FarSkip` before it."""
    attention: tuple[str, ...] = ("self_attn",)
    """Attributes of a layer that hold its attention; each layer of a hybrid model has
    one of them."""
    moe: str = "mlp"
    """Attribute of a layer that holds its MoE block, or the MLP of a dense layer."""
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """Attributes of a layer: the norm before attention, the norm before the MoE block
    or the MLP."""
    shared: str = ""
    """Attribute of a layer that holds shared experts outside the MoE block; may be None
    in a given model."""
    factor: str = ""
    """Attribute of a layer: number by which the outputs of attention, MoE block and
    shared experts are multiplied."""
    arguments: tuple[str, ...] = ("positions", "hidden_states", "residual")
    """Arguments that vLLM's model loop passes to a layer by position."""
    whole_stream: bool = False
    """Whether the model's loop passes the stream as hidden_states alone, instead of as
    the sum of vLLM's pair (hidden_states, residual)."""
    one_branch: bool = False
    """Whether each layer is one branch, of any kind under the same names; a rewired mixer
    and the experts behind it are computed as one layer, as `branches` says."""
    normed_sums: bool = False
    """Whether norms follow the sums over ranks, as in `NormedSchedule`."""
    stack: str = "model"
    """Path from the model with its head to the module that holds the layers."""
    text_config: bool = False
    """Whether it is a multimodal wrapper, with the decoder's fields in its text
    config."""
    defaults: tuple[tuple[str, Any], ...] = ()
    """Config fields that engines need to choose a method, and that transformers does
    not write because it has only one.
    """
    like: str = ""
    """Family whose class in vLLM this family uses, with a gate on attention.
    transformers and vLLM do not know this family, so the plugin also loads its regular
    checkpoints and AMD's."""
    requires: tuple[tuple[str, Any, str], ...] = ()
    """(config field, the one value that vLLM computes rightly, what it does with
    others)."""
    fp16_rescales: bool = False
    """In float16, vLLM divides the residual stream by a factor, so FarSkip's sums would
    have different scales.
    """

    @property
    def farskip_type(self) -> str:
        """Return the `model_type` of a converted checkpoint."""
        return f"farskip_{self.model_type}"

    @property
    def architecture(self) -> str:
        """Return the architecture of a converted checkpoint."""
        return f"FarSkip{self.causal_lm}"

    @property
    def farskip_config(self) -> str:
        """Return the name of the configuration class of a converted checkpoint."""
        return f"{self.architecture}Config" if self.like else f"FarSkip{self.config}"

    @property
    def stock_type(self) -> str:
        """Return the base's `model_type`, by which vLLM chooses its behaviour."""
        return self.like or self.model_type

    @property
    def stock(self) -> str:
        """Return vLLM's architecture whose layers are rewired."""
        return FAMILIES[self.like].causal_lm if self.like else self.causal_lm


_ROWS = (
    Family("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    Family("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    Family(
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        attention=("self_attn", "linear_attn"),
        arguments=("hidden_states", "residual", "positions"),
    ),
    Family("mixtral", "MixtralConfig", "MixtralForCausalLM", moe="block_sparse_moe"),
    Family("olmoe", "OlmoeConfig", "OlmoeForCausalLM"),
    Family(
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        arguments=("positions", "hidden_states", "residual", "llama_4_scaling"),
        defaults=(
            ("moe_layer_freq", 1),
            ("n_group", 1),
            ("topk_group", 1),
            ("scoring_func", "softmax"),
            ("topk_method", "greedy"),
        ),
        fp16_rescales=True,
    ),
    Family(
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        arguments=("positions", "hidden_states", "residual", "llama_4_scaling"),
        defaults=(
            ("moe_layer_freq", 1),
            ("scoring_func", "sigmoid"),
            ("topk_method", "noaux_tc"),
        ),
        fp16_rescales=True,
    ),
    Family(
        "instella_moe",
        "DeepseekV3Config",
        "InstellaMoEForCausalLM",
        arguments=("positions", "hidden_states", "residual", "llama_4_scaling"),
        like="deepseek_v3",
        defaults=(
            ("moe_layer_freq", 1),
            ("scoring_func", "sigmoid"),
            ("topk_method", "noaux_tc"),
        ),
        fp16_rescales=True,
    ),
    Family("llama4_text", "Llama4TextConfig", "Llama4ForCausalLM", moe="feed_forward"),
    Family(
        "llama4",
        "Llama4Config",
        "Llama4ForConditionalGeneration",
        moe="feed_forward",
        stack="language_model.model",
        text_config=True,
    ),
    Family("glm4_moe", "Glm4MoeConfig", "Glm4MoeForCausalLM"),
    Family(
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        attention=("attn",),
        arguments=("hidden_states", "positions", "residual"),
    ),
    Family(
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeForCausalLM",
        requires=(("use_bias", False, "vLLM leaves out most of its biases"),),
    ),
    Family(
        "minimax_m2",
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        moe="block_sparse_moe",
        defaults=(
            ("scoring_func", "sigmoid"),
            ("use_routing_bias", True),
            ("use_qk_norm", True),  # without it, SGLang leaves out these norms
        ),
    ),
    # its layers read the names of the published config, beside those of transformers
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashConfig",
        "MiMoV2FlashForCausalLM",
        defaults=(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
    ),
    Family(
        "granitemoe",
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        moe="block_sparse_moe",
        factor="residual_multiplier",
        arguments=("positions", "hidden_states"),
        whole_stream=True,
    ),
    Family(
        "granitemoeshared",
        "GraniteMoeSharedConfig",
        "GraniteMoeSharedForCausalLM",
        moe="block_sparse_moe",
        shared="shared_mlp",
        factor="residual_multiplier",
        arguments=("positions", "hidden_states"),
        whole_stream=True,
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        attention=("self_attn", "mamba"),
        moe="block_sparse_moe",
        shared="shared_mlp",
        factor="residual_multiplier",
        whole_stream=True,
    ),
    Family(
        "gemma4_text",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        moe="experts",
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        shared="mlp",
        whole_stream=True,
        normed_sums=True,
    ),
    Family(
        "gemma4",
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        moe="experts",
        norms=("input_layernorm", "pre_feedforward_layernorm"),
        shared="mlp",
        whole_stream=True,
        normed_sums=True,
        stack="language_model.model",
        text_config=True,
    ),
    Family(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        attention=("mixer",),
        moe="mixer",
        norms=("norm", "norm"),
        one_branch=True,
    ),
    Family(
        "lfm2_moe",
        "Lfm2MoeConfig",
        "Lfm2MoeForCausalLM",
        attention=("self_attn", "short_conv"),
        moe="feed_forward",
        norms=("operator_norm", "ffn_norm"),
        requires=(
            ("tie_word_embeddings", True, "vLLM takes the embedding for the head"),
        ),
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        attention=("self_attn", "linear_attn"),
        arguments=("hidden_states", "residual", "positions"),
    ),
    Family(
        "qwen3_5_moe",
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        attention=("self_attn", "linear_attn"),
        arguments=("hidden_states", "residual", "positions"),
        stack="language_model.model",
        text_config=True,
    ),
)

FAMILIES: dict[str, Family] = {row.model_type: row for row in _ROWS}
"""Model type of the base -> row."""

_SPARSE = (
    "vLLM runs sparse attention on GPUs only, in layers whose norms sum over ranks; its"
    " Transformers backend would attend to all tokens"
)
REFUSED: dict[str, str] = {
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE,
    "deepseek_v4": (
        "not tested: its layers mix several streams, and vLLM stores its keys in FP8 on"
        " every platform, so that tests on CPUs could not compare its tokens; the"
        " Transformers backend has no such attention"
    ),
}
"""Family that is refused by name -> why."""
