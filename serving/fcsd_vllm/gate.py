"""Instella-MoE's gate, which vLLM's DeepSeek lacks: o_proj(y * sigmoid(gate_proj(x))),
where x is the input of attention.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.model_executor.layers.linear import ColumnParallelLinear

from fcsd_vllm.refusals import Refused
from fcsd_vllm.versions import missing
from fcsd_vllm.weights import GATE


def add_gates(stack: Any, config: Any, quant_config: Any, version: str) -> None:
    """Add its gate to every attention module of this rank, before weights are loaded.

    Raises:
        EngineError: attention has no place for a gate.
    """
    width = config.num_attention_heads * config.v_head_dim
    for index, layer in enumerate(stack.layers):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            continue
        name = f"model.layers.{index}{GATE}".strip(".")
        gate = ColumnParallelLinear(
            config.hidden_size,
            width,
            bias=False,
            quant_config=quant_config,
            prefix=name,
        )
        if hasattr(attention, "mla_attn"):
            if not hasattr(attention.mla_attn, "g_proj"):
                raise missing(version, "MultiHeadLatentAttentionWrapper.g_proj")
            attention.mla_attn.g_proj = gate
        else:
            attention.g_proj = gate
            attention.forward = functools.partial(_forward, attention)


class _Gated:
    """Stands in for an attention module in its own forward, and applies the gate before
    the output projection.
    """

    def __init__(self, attention: Any, gate: torch.Tensor) -> None:
        self.attention = attention
        self.gate = gate

    def o_proj(self, heads: torch.Tensor) -> Any:
        return self.attention.o_proj(heads * self.gate)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.attention, name)


def _forward(
    attention: Any,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    llama_4_scaling: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention where vLLM runs it without a latent cache (VLLM_MLA_DISABLE=1)."""
    gate = attention.g_proj(hidden_states)[0].sigmoid()
    out: torch.Tensor = type(attention).forward(
        _Gated(attention, gate), positions, hidden_states, llama_4_scaling
    )
    return out


def renamed(
    weights: Iterable[tuple[str, torch.Tensor]], model: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename a checkpoint's gates to the names in vLLM's model, whose loader would
    otherwise read them as parts of an MLP's `gate_up_proj`.

    Raises:
        Refused: a gate for a model or layer without one; vLLM itself skips unknown
            names.
    """
    config = model.config
    ours = ".self_attn.mla_attn.g_proj." if model.farskip_mla else ".self_attn.g_proj."
    gates = config.num_hidden_layers if getattr(config, "gated_attention", False) else 0
    for name, tensor in weights:
        place, gate, kind = name.partition(GATE)
        if gate and int(place.rpartition(".")[2]) >= gates:
            raise Refused(
                f"fcsd-serving: {name} matches no parameter: config.json has"
                f" gated_attention for {gates} layers"
            )
        yield (place + ours + kind if gate else name), tensor
