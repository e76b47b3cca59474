"""Map a checkpoint's tensors to those of Megatron's local layers, and back. Imports
torch, but not Megatron.

Megatron's names are those of a model on one rank: experts are numbered over the whole
model (`own_name` returns a rank's names).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fcsd.model.families import base_model_type

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """One tensor of Megatron: the checkpoint's tensors from which it is made, and
    how.
    """

    sources: tuple[str, ...]
    join: Callable[[Tensors], torch.Tensor] = lambda tensors: tensors[0]
    split: Callable[[torch.Tensor], Tensors] = lambda tensor: [tensor]


def pieces_of(config: Any, mask: Sequence[bool]) -> dict[str, Piece]:
    """Return the name of each Megatron tensor of a model -> its piece; every tensor of
    the checkpoint is in exactly one piece.

    Args:
        config: config object of transformers of a family of
            `fcsd_megatron.settings.FAMILIES`.
        mask: one entry per layer, True for an MoE layer.
    """
    pieces = {
        "embedding.word_embeddings.weight": Piece(("model.embed_tokens.weight",)),
        "decoder.final_layernorm.weight": Piece(("model.norm.weight",)),
        "output_layer.weight": Piece(("lm_head.weight",)),
    }
    is_qwen3 = base_model_type(config.model_type) == "qwen3_moe"
    attention = _qwen3_attention if is_qwen3 else _latent_attention
    for k, is_moe in enumerate(mask):
        ours, theirs = f"decoder.layers.{k}.", f"model.layers.{k}."
        layer = {
            "input_layernorm.weight": Piece(("input_layernorm.weight",)),
            "pre_mlp_layernorm.weight": Piece(("post_attention_layernorm.weight",)),
            **attention(config),
            **(_experts(config) if is_moe else _mlp("mlp.", "mlp.")),
        }
        for name, piece in layer.items():
            pieces[ours + name] = Piece(
                tuple(theirs + source for source in piece.sources),
                piece.join,
                piece.split,
            )
    return pieces


_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+(?=\.)")


def own_name(name: str, first: int, count: int) -> str | None:
    """Return a tensor's name on the rank that has `count` experts from number `first`
    on; None if that rank lacks it.
    """
    if (match := _EXPERT.search(name)) is None:
        return name
    index = int(match[0]) - first
    if not 0 <= index < count:
        return None
    return f"{name[: match.start()]}{index}{name[match.end() :]}"


def is_expert(name: str) -> bool:
    """Tell whether a Megatron tensor belongs to a routed expert, so that it differs
    between ranks.
    """
    return _EXPERT.search(name) is not None


def _mlp(ours: str, theirs: str) -> dict[str, Piece]:
    return {
        f"{ours}linear_fc1.weight": Piece(
            (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight"),
            torch.cat,
            lambda tensor: [*tensor.chunk(2)],
        ),
        f"{ours}linear_fc2.weight": Piece((f"{theirs}down_proj.weight",)),
    }


def _experts(config: Any) -> dict[str, Piece]:
    pieces = {"mlp.router.weight": Piece(("mlp.gate.weight",))}
    if base_model_type(config.model_type) == "deepseek_v3":
        pieces["mlp.router.expert_bias"] = Piece(("mlp.gate.e_score_correction_bias",))
        if config.n_shared_experts:
            pieces |= _mlp("mlp.shared_experts.", "mlp.shared_experts.")
    for expert in range(config.num_local_experts):
        pieces |= _mlp(f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}.")
    return pieces


def _qwen3_attention(config: Any) -> dict[str, Piece]:
    """Map grouped attention: Megatron orders the rows of one tensor by group, each with
    queries, key and value.
    """
    groups, head = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads // groups * head

    def join(tensors: Tensors) -> torch.Tensor:
        rows = [tensor.reshape(groups, -1, tensor.shape[-1]) for tensor in tensors]
        return torch.cat(rows, dim=1).reshape(-1, tensors[0].shape[-1])

    def split(tensor: torch.Tensor) -> Tensors:
        rows = tensor.reshape(groups, -1, tensor.shape[-1]).split(
            [queries, head, head], dim=1
        )
        return [part.reshape(-1, tensor.shape[-1]) for part in rows]

    projections = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
    return {
        "self_attention.linear_qkv.weight": Piece(projections, join, split),
        "self_attention.q_layernorm.weight": Piece(("self_attn.q_norm.weight",)),
        "self_attention.k_layernorm.weight": Piece(("self_attn.k_norm.weight",)),
        "self_attention.linear_proj.weight": Piece(("self_attn.o_proj.weight",)),
    }


def _latent_attention(config: Any) -> dict[str, Piece]:
    names = {
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    if config.q_lora_rank is None:
        names["linear_q_proj"] = "q_proj"
    else:
        names |= {
            "linear_q_down_proj": "q_a_proj",
            "q_layernorm": "q_a_layernorm",
            "linear_q_up_proj": "q_b_proj",
        }
    return {
        f"self_attention.{ours}.weight": Piece((f"self_attn.{theirs}.weight",))
        for ours, theirs in names.items()
    }
