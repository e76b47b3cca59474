"""The families that the package serves in SGLang, with names as in `fcsd_vllm`.
Standard library only.
"""

from dataclasses import dataclass, replace

from fcsd_vllm.families import FAMILIES as IN_VLLM
from fcsd_vllm.families import Family

_HUNYUAN = Family(  # vLLM has no model file of it
    "hunyuan_v1_moe",
    "HunYuanMoEV1Config",
    "HunYuanMoEV1ForCausalLM",
    defaults=(
        ("moe_intermediate_size", None),
        ("num_shared_expert", 1),
        ("use_mixed_mlp_moe", True),
        ("use_qk_norm", True),
    ),
)
ALL: dict[str, Family] = {**IN_VLLM, _HUNYUAN.model_type: _HUNYUAN}
"""Every family that one of the two engines serves."""


@dataclass(frozen=True)
class Row:
    """How SGLang's model file of a family differs from others; what it has in common
    with vLLM's stands in `Family`.
    """

    module: str
    """Module below `sglang.srt.models` with the stock class of the architecture."""
    loop: str = "boundary"
    """What passes between layers: the engine's residual stream with boundaries that
    sum (`boundary`), hidden states and residual as in vLLM (`pair`), or the stream
    itself (`stream`)."""
    gives_more: bool = False
    """Whether layers return one more value, which the next one does not need."""
    attention: tuple[str, ...] = ("self_attn",)
    """Attributes of a layer that compute its attention, modules or methods, alone or
    as the first of a tuple; each layer of a hybrid model has one of them."""
    rows_of_heads: bool = False
    """Whether a layer gives its attention queries with a row for each head, where SGLang
    0.5.23 expects one for each token and fails."""
    routed: str = "forward_normal"
    """Method of a MoE block that gives the routed output once shared experts are taken
    out; of a tuple the last."""
    shared: str = "shared_experts"
    """Attribute of a MoE block that holds its shared experts; for those of the layer
    see `Family`."""
    ranks: str = ""
    """Attribute of a MoE block: over how many ranks it sums its output itself."""
    config: str = ""
    """Module below `sglang.srt.configs` with the class that SGLang reads instead of the
    one of transformers."""
    rope: str = ""
    """Type of layers whose RoPE the config has to give as that of all; SGLang reads
    that of the others elsewhere."""
    requires: tuple[tuple[str, object, str], ...] = ()
    """(config field, the one value that SGLang computes rightly, what it does with
    others)."""


_HYBRID = Row(
    "qwen3_5",
    attention=("self_attention", "linear_attn"),
    routed="_forward_router_experts",
    shared="shared_expert",
    config="qwen3_5",
)
"""Qwen's models with linear attention."""

ROWS: dict[str, Row] = {
    "qwen3_moe": Row("qwen3_moe"),
    "qwen2_moe": Row(
        "qwen2_moe", routed="_forward_router_experts", shared="shared_expert"
    ),
    "qwen3_next": replace(
        _HYBRID,
        module="qwen3_next",
        config="qwen3_next",
        requires=(
            ("mlp_only_layers", [], "SGLang makes every layer an MoE layer"),
            ("decoder_sparse_step", 1, "SGLang makes every layer an MoE layer"),
        ),
    ),
    "qwen3_5_moe_text": replace(_HYBRID, module="qwen3_5_text"),
    "qwen3_5_moe": _HYBRID,
    "mixtral": Row("mixtral", routed="forward"),
    "olmoe": Row("olmoe", loop="pair", routed="forward"),
    # The second value has the indices of sparse attention, although these have none.
    "deepseek_v2": Row("deepseek_v2", gives_more=True),
    "deepseek_v3": Row("deepseek_v2", gives_more=True),
    "glm4_moe": Row("glm4_moe"),
    "gpt_oss": Row("gpt_oss"),
    "ernie4_5_moe": Row(
        "ernie4",
        loop="pair",
        ranks="tp_size",
        requires=(("use_bias", False, "SGLang leaves out most of its biases"),),
    ),
    "minimax_m2": Row("minimax_m2"),
    "granitemoe": Row("granitemoe", loop="stream", routed="forward"),
    "granitemoeshared": Row("granitemoe", loop="stream", routed="forward"),
    "lfm2_moe": Row(
        "lfm2_moe",
        loop="stream",
        gives_more=True,
        attention=("self_attn", "conv"),
        routed="forward",
        config="lfm2_moe",
    ),
    "hunyuan_v1_moe": Row(
        "hunyuan",
        loop="pair",
        gives_more=True,
        rows_of_heads=True,
        routed="forward",
        shared="shared_mlp",
        ranks="tp_size",
        requires=(("use_cla", False, "its layers share keys and values"),),
    ),
    "mimo_v2_flash": Row("mimo_v2", rope="full_attention"),
}
"""Model type of the base -> row."""

FAMILIES: dict[str, Family] = {name: ALL[name] for name in ROWS}
"""Model type of the base -> names that it shares with vLLM."""

ONLY_OURS = tuple(name for name, family in ALL.items() if family.like)
"""Families that SGLang and transformers do not know, so that their regular checkpoints
come to the plugin, too."""

_WITHOUT_OVERLAP = (
    "; not tried without overlap (SGLANG_PLUGINS=none, --trust-remote-code,"
    " --model-impl transformers)"
)
REFUSED: dict[str, str] = {
    "instella_moe": (
        "SGLang does not support its attention gate; serve it with vLLM and this"
        " plugin, or with AMD's fork (github.com/AMD-AGI/FarSkip-Collective), which"
        " loads what `fcsd convert --format amd` writes"
    ),
    "llama4_text": (
        "SGLang's loader of Llama4ForCausalLM skips the packed experts"
        " (`experts.gate_up_proj`) of such a checkpoint, and only logs it; serve it with"
        " vLLM"
    ),
    "llama4": (
        "not tested: outside CUDA, SGLang rounds its queries and keys to bfloat16, so"
        " that tests on CPUs could not compare its tokens; serve it with vLLM"
    ),
    "granitemoehybrid": (
        "its Mamba layers are run by SGLang's attention backend, in Triton kernels for"
        " GPUs, and are no modules whose sums could be delayed; serve it with vLLM"
    ),
    "gemma4_text": (
        "a norm follows each of its sums, which SGLang's layer ends itself inside the"
        " feed-forward stage; serve it with vLLM"
    ),
    "gemma4": (
        "a norm follows each of its sums, which SGLang's layer ends itself inside the"
        " feed-forward stage; serve it with vLLM"
    ),
    "deepseek_v32": (
        "SGLang runs sparse attention on GPUs only, and passes its indices from layer to"
        " layer beside the stream" + _WITHOUT_OVERLAP
    ),
    "glm_moe_dsa": (
        "SGLang runs sparse attention on GPUs only, and passes its indices from layer to"
        " layer beside the stream" + _WITHOUT_OVERLAP
    ),
    "deepseek_v4": (
        "SGLang mixes its residual streams in kernels for GPUs that also end the sums"
        + _WITHOUT_OVERLAP
    ),
    "nemotron_h": (
        "not tested: SGLang runs its Mamba layers in Triton kernels for GPUs only, so"
        " that tests on CPUs could not compare its tokens; serve it with vLLM"
    ),
}
"""Family that is not served with overlap -> why, and what serves it."""
