"""AMD's Instella-MoE: DeepSeek-V3 whose attention has a gate on every channel of every
head.

    a = W_o (y * sigmoid(W_g x))      x: what `input_layernorm` gives, y: the heads side by side

The gate is computed in the dtype of the activations, as AMD's own code does.
"""

import torch
from torch import nn
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
    DeepseekV3PreTrainedModel,
)

from fcsd.model.connectivity.layer import View


class InstellaMoEConfig(DeepseekV3Config):
    model_type = "instella_moe"
    gated_attention: bool = True
    num_mtp_layers: int = 0


class InstellaMoEAttention(DeepseekV3Attention):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        width = config.num_attention_heads * config.v_head_dim
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)

    def forward(self, hidden_states, *args, **kwargs):
        def gated(heads):
            return self.o_proj(heads * torch.sigmoid(self.gate_proj(hidden_states)))

        return DeepseekV3Attention.forward(
            View(self, {"o_proj": gated}), hidden_states, *args, **kwargs
        )


class _Settable:
    """transformers reads the source of a class's module to decide these two."""

    @classmethod
    def _can_set_attn_implementation(cls):
        return DeepseekV3ForCausalLM._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls):
        return DeepseekV3ForCausalLM._can_set_experts_implementation()


class InstellaMoEModel(_Settable, DeepseekV3Model):
    config_class = InstellaMoEConfig
    config: InstellaMoEConfig

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = InstellaMoEAttention(config, index)
        self.post_init()


class InstellaMoEForCausalLM(_Settable, DeepseekV3ForCausalLM):
    config_class = InstellaMoEConfig
    config: InstellaMoEConfig

    def __init__(self, config):
        # whose subclass would build a model without gates
        DeepseekV3PreTrainedModel.__init__(self, config)
        self.model = InstellaMoEModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
