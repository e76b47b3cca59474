"""FarSkip models in Megatron-Core: rewired layers, models of converted checkpoints, and
loading and saving of their weights.

    model = build_model(CHECKPOINT, params_dtype=torch.bfloat16, bf16=True)   # after initialize_model_parallel
    load_weights(model, CHECKPOINT)
    …                                                                         # Megatron's own training
    save_weights(model, OUT, like=CHECKPOINT)

`source`, `settings`, `plans`, `names`, `refusals` and `versions` do not import
Megatron; `layer` computes the equations, `spec` puts layers into Megatron's specs,
`model` builds models, `weights` loads and saves.

Not covered: overlapped exchanges (layers are blocking), tensor, pipeline and context
parallelism, Transformer Engine's layers, activation recomputation, CUDA graphs,
Megatron's inference; models other than qwen3_moe and deepseek_v3. Nothing was run on a
GPU.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcsd_megatron.model import build_model, transformer_config
    from fcsd_megatron.source import read_source
    from fcsd_megatron.spec import local_block, with_farskip
    from fcsd_megatron.weights import load_weights, save_weights

__all__ = [
    "build_model",
    "load_weights",
    "local_block",
    "read_source",
    "save_weights",
    "transformer_config",
    "with_farskip",
]

_LAZY = {
    "model": ("build_model", "transformer_config"),
    "source": ("read_source",),
    "spec": ("local_block", "with_farskip"),
    "weights": ("load_weights", "save_weights"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
