"""fcsd: FarSkip-Collective self-distillation for Hugging Face MoE checkpoints.

    import fcsd

    model, tokenizer = fcsd.load("Qwen/Qwen3-30B-A3B", layers="last:90%")
    trainer = fcsd.FCSDTrainer(
        model=model,
        args=fcsd.FCSDConfig(...),
        train_dataset=...,
        processing_class=tokenizer,
    )
    trainer.train()

Importing this package loads neither torch nor transformers and never touches the
network: each name is imported on first use. See docs/python.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fcsd.api.evaluation import Comparison, Evaluation, compare, evaluate_model
    from fcsd.api.models import calibrate, convert, convert_checkpoint, load, unconvert
    from fcsd.api.recipes import load_recipe, run_stage
    from fcsd.api.trainer import FCSDTrainer
    from fcsd.base.errors import UserError
    from fcsd.model.connectivity.spec import Connectivity
    from fcsd.training.fcsd_config import FCSDConfig

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "Connectivity",
    "Evaluation",
    "FCSDConfig",
    "FCSDTrainer",
    "UserError",
    "calibrate",
    "compare",
    "convert",
    "convert_checkpoint",
    "evaluate_model",
    "load",
    "load_recipe",
    "run_stage",
    "unconvert",
]

_MODULES = {
    "fcsd.api.evaluation": ("Comparison", "Evaluation", "compare", "evaluate_model"),
    "fcsd.api.models": (
        "calibrate",
        "convert",
        "convert_checkpoint",
        "load",
        "unconvert",
    ),
    "fcsd.api.recipes": ("load_recipe", "run_stage"),
    "fcsd.model.connectivity.spec": ("Connectivity",),
    "fcsd.training.fcsd_config": ("FCSDConfig",),
    "fcsd.api.trainer": ("FCSDTrainer",),
    "fcsd.base.errors": ("UserError",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *globals()])
