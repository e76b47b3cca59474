"""Tiny checkpoints, and what fcsd's `load_model` and a Megatron model compute on them,
in float64.
"""

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from transformers.core_model_loading import revert_weight_conversion

from fcsd.model.connectivity import Connectivity, convert_checkpoint, load_model
from fcsd_megatron import build_model, load_weights, read_source
from tests.float64 import in_float64
from tests.reference.tiny import tiny_model

VOCABULARY, ROWS, TOKENS = 99, 2, 12

_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
    "mscale_all_dim": 0.9, "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}), "deepseek_v3": ("deepseek_v3", {}),
    "qwen3_moe-dense": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        {
            "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "v_head_dim": 12, "rms_norm_eps": 1e-3,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v3-full_queries": (
        "deepseek_v3",
        {"q_lora_rank": None, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
    ),
}  # fmt: skip
CONNECTIVITIES: dict[str, Connectivity | None] = {
    "regular": None, "all": Connectivity("all"), "half": Connectivity([2, 3]), "gap": Connectivity([0, 1, 3]),
    "attention_full": Connectivity("all", attention="full"),
    "mlp_full": Connectivity("all", mlp="full"),
    "mlp_mixed": Connectivity("all", mlp=[1, 2]),
}  # fmt: skip
"""Four layers; the first of deepseek_v3 is dense."""

OPTIONS: dict[str, Any] = {
    "params_dtype": torch.float64, "moe_router_dtype": "fp64", "use_cpu_initialization": True,
    "bias_dropout_fusion": False, "bias_activation_fusion": False, "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
}  # fmt: skip
"""Fields of TransformerConfig without which Megatron wants a GPU, or its compiler."""


def make_checkpoint(
    folder: Path, model: str, connectivity: str, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a checkpoint whose every parameter is random."""
    family, sizes = MODELS[model]
    place, original = folder / f"{model}-{connectivity}", folder / f"{model}-original"
    if not original.exists():
        tiny_model(family, **sizes).to(dtype).save_pretrained(original)
    if CONNECTIVITIES[connectivity] is None:
        return original
    convert_checkpoint(original, place, CONNECTIVITIES[connectivity])
    return place


def tokens_of(rank: int) -> torch.Tensor:
    """Return the batch of a rank."""
    return torch.randint(
        VOCABULARY, (ROWS, TOKENS), generator=torch.Generator().manual_seed(7 + rank)
    )


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """Return a sum of the logits with weights of size 1 that differ."""
    return (
        logits
        * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    ).sum()


def start(num_ranks: int) -> None:
    """Initialise Megatron's groups: the experts are spread over all ranks."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)


def megatron_model(folder: Path, **options: Any) -> Any:
    """Build and fill the model of a checkpoint, in float64 with norms, too."""
    with in_float64():
        model = build_model(folder, **{**OPTIONS, **options}).double().eval()
    load_weights(model, folder)
    return model


def call(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return a Megatron model's logits."""
    rows, length = tokens.shape
    later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    with in_float64():
        logits: torch.Tensor = model(
            tokens, torch.arange(length).expand(rows, -1), later
        )
    return logits


def megatron_outputs(
    model: Any, tokens: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Return logits and gradients by Megatron's names on this rank."""
    logits = call(model, tokens)
    with in_float64():
        loss_of(logits).backward()
    return logits.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def fcsd_outputs(
    folder: Path, tokens: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits and gradients, by the names of the whole Megatron model, of `load_model`."""
    model = load_model(folder, dtype=torch.float64).double()
    with in_float64():
        # frequencies were float32
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        logits = model(tokens, use_cache=False).logits
        loss_of(logits).backward()
    memory = {name: parameter.grad for name, parameter in model.named_parameters()}
    files = revert_weight_conversion(model, memory)
    return logits.detach(), {
        name: piece.join([files[each] for each in piece.sources])
        for name, piece in read_source(folder).pieces.items()
        if set(piece.sources) <= files.keys()  # a bias of the router is no parameter
    }
