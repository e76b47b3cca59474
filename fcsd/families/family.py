"""What one MoE family is called upstream. Standard library only: recipes and `--help` read this without
torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """Names of one family, in the spelling of its upstream modeling file.

    Every family here has the pre-norm layer `h = o + c·attn(in_norm(o)); o' = h + c·moe(mlp_norm(h))`, where
    c is 1 or the layer's `residual_multiplier`.
    """

    model_type: str
    """Key in Hugging Face's Auto mappings."""
    upstream: str
    """File inside the transformers package that the other names come from."""
    config: str
    """Class of the configuration."""
    causal_lm: str
    """Class of the model with its LM head."""
    base_model: str
    """Class of the model without head."""
    decoder_layer: str | tuple[str, ...]
    """Class of a decoder layer, MoE or dense; several where the kinds of a hybrid have a class each."""
    moe_block: str
    """Class of the MoE block; a layer whose `moe` attribute has another class is dense."""
    in_norm: str = "input_layernorm"
    """Attribute of the layer: norm before attention."""
    mlp_norm: str = "post_attention_layernorm"
    """Attribute of the layer: norm before the MoE block (its input is the stream after attention)."""
    moe: str = "mlp"
    """Attribute of the layer: MoE block, or the dense MLP of a dense layer."""
    block_shared: str | None = None
    """Attribute of the MoE block: its shared expert, where it has one."""
    block_gate: str | None = None
    """Attribute of the MoE block: linear whose sigmoid multiplies the shared expert's output."""
    shared_in_place: bool = False
    """The MoE block adds the routed output into the shared expert's output in place."""
    layer_shared: str | None = None
    """Attribute of the layer: shared expert beside the MoE block; may be None in a given model."""
    residual_multiplier: str | None = None
    """Attribute of the layer: factor on both residual branches."""
    moe_layers: str = "all"
    """Which layers are MoE: a key of `MOE_LAYERS`."""
    reference: Literal["written", "generic"] = "generic"
    """What the contract tests compare with: forward passes written by hand down to the routing, or the layer
    equations on the family's own modules."""
    auto_model: str = "AutoModelForCausalLM"
    """Auto class of `causal_lm`. AutoModelForImageTextToText for a wrapper of a text stack and towers, and for
    Mistral 4's text model, which transformers lists there."""

    @property
    def multimodal(self) -> bool:
        """A wrapper: the stack in it is rewired, and the fields of the stack are in its text config."""
        return not self.causal_lm.endswith("ForCausalLM")


def _all(config: Any) -> list[bool]:
    return [True] * config.num_hidden_layers


def _first_k_dense(config: Any) -> list[bool]:
    return [k >= config.first_k_dense_replace for k in range(config.num_hidden_layers)]


def _sparse_step(config: Any) -> list[bool]:
    dense = set(config.mlp_only_layers or ())
    step = config.decoder_sparse_step
    has_experts = config.num_experts > 0
    return [has_experts and k not in dense and (k + 1) % step == 0 for k in range(config.num_hidden_layers)]


def _listed(config: Any) -> list[bool]:
    return [k in set(config.moe_layers) for k in range(config.num_hidden_layers)]


def _mlp_layer_types(config: Any) -> list[bool]:
    return [kind == "sparse" for kind in config.mlp_layer_types[: config.num_hidden_layers]]


def _moe_layer_interval(config: Any) -> list[bool]:
    first, last = config.moe_layer_start_index, config.moe_layer_end_index
    interval = config.moe_layer_interval
    return [first <= k <= last and (k + 1) % interval == 0 for k in range(config.num_hidden_layers)]


def _layers_num_experts(config: Any) -> list[bool]:
    return [count > 1 for count in config.layers_num_experts]


def _num_dense_layers(config: Any) -> list[bool]:
    return [k >= config.num_dense_layers for k in range(config.num_hidden_layers)]


def _num_local_experts(config: Any) -> list[bool]:
    return [config.num_local_experts > 0] * config.num_hidden_layers


MOE_LAYERS: dict[str, tuple[tuple[str, ...], Callable[[Any], list[bool]]]] = {
    "all": (("num_hidden_layers",), _all),
    "first_k_dense_replace": (("first_k_dense_replace",), _first_k_dense),
    "decoder_sparse_step": (("num_experts", "decoder_sparse_step", "mlp_only_layers"), _sparse_step),
    "moe_layers": (("moe_layers", "interleave_moe_layer_step"), _listed),
    "mlp_layer_types": (("mlp_layer_types",), _mlp_layer_types),
    "moe_layer_interval": (
        ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
        _moe_layer_interval,
    ),
    "expert_layer_period": (("expert_layer_period", "expert_layer_offset"), _layers_num_experts),
    "num_dense_layers": (("num_dense_layers",), _num_dense_layers),
    "num_local_experts": (("num_local_experts",), _num_local_experts),
}
"""Rule name -> (config fields that decide, function of the config). The rules are upstream's own
conditions."""


def moe_mask(config: Any, family: Family) -> list[bool]:
    """One entry a decoder layer: True where it is an MoE layer. `config` is a config object (defaults filled
    in)."""
    return MOE_LAYERS[family.moe_layers][1](text_config(config, family))


def text_config(config: Any, family: Family) -> Any:
    """The config object that describes the decoder layers: `config` itself, or the part of a wrapper's."""
    return config.get_text_config() if family.multimodal else config
