"""Specs for Megatron-Core: with rewired layers instead of its own, and with the local
layers that a checkpoint needs.
"""

import copy
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from fcsd.base.errors import UserError
from fcsd_megatron.layer import FarSkipTransformerLayer
from fcsd_megatron.plans import LayerPlan


def with_farskip(
    block: TransformerBlockSubmodules, plans: Sequence[LayerPlan | None]
) -> TransformerBlockSubmodules:
    """Return a block's spec with `FarSkipTransformerLayer` in the layers that have a
    plan.

    It accepts any spec of `TransformerLayer`s. Only specs of local layers were compared
    with fcsd, not those of Transformer Engine.

    Raises:
        UserError: different numbers of layers and plans, or layers of another class.
    """
    specs = list(block.layer_specs)
    if len(specs) != len(plans):
        raise UserError(
            f"fcsd-megatron: {len(plans)} plans for a spec of {len(specs)} layers;"
            " give one plan per layer"
        )
    for k, plan in enumerate(plans):
        if plan is None:
            continue
        if specs[k].module is not TransformerLayer:
            raise UserError(
                f"fcsd-megatron: layer {k} is a {specs[k].module.__name__}; FarSkip"
                " layers can only replace TransformerLayer"
            )
        specs[k] = ModuleSpec(
            FarSkipTransformerLayer,
            params={"plan": plan},
            submodules=specs[k].submodules,
        )
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=block.layer_norm)


def local_block(config: Any) -> TransformerBlockSubmodules:
    """Return Megatron's spec of local layers, with latent attention as in transformers.

    Raises:
        UserError: queries without a latent, in a release that has no local layer for
            them.
    """
    if (
        config.multi_latent_attention
        and config.q_lora_rank is None
        and version("megatron-core") == "0.19.2"
    ):
        raise UserError(
            "fcsd-megatron: q_lora_rank null: megatron-core 0.19.2 normalises such"
            " queries only with Transformer Engine; install megatron-core==0.16.1"
        )
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )
    if config.multi_latent_attention:
        for spec in (specs := [copy.deepcopy(spec) for spec in block.layer_specs]):
            attention = spec.submodules.self_attention.submodules
            attention.core_attention = LatentAttention
            attention.q_layernorm = (
                IdentityOp if config.q_lora_rank is None else LatentNorm
            )
            attention.kv_layernorm = LatentNorm
        block = TransformerBlockSubmodules(
            layer_specs=specs, layer_norm=block.layer_norm
        )
    return block


class LatentAttention(DotProductAttention):
    """Megatron's local attention for latent attention, whose values and keys differ in
    size.

    `DotProductAttention` of 0.16.1 and 0.19.2 refuses different sizes, although only
    its output's shape depends on them.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        if v_channels is not None:
            self.hidden_size_per_partition = (
                v_channels * self.num_attention_heads_per_partition
            )


class LatentNorm:
    """A norm of latents: transformers and DeepSeek's code use an epsilon of 1e-6,
    whatever the config says.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-6) -> Any:
        return WrappedTorchNorm(config, hidden_size, eps=1e-6)
