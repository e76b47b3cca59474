"""FarSkip connectivity: its specification, the rewiring, and checkpoints with it.

    from fcsd.model.connectivity import Connectivity, convert_model, load_model
    model = load_model("path/to/Qwen3-30B-A3B", connectivity=Connectivity(layers="all"))

`selection` reads which layers, `spec` says how, `rewire` rewires, `modeling` creates the
`FarSkip<Family>ForCausalLM` classes, `convert` works on models in memory, `load` and
`export` on folders. Names that need torch are imported at first use.

Not covered: transformers' pipelines with a stage boundary between two rewired layers (a
stage hands on one tensor, a rewired layer two; `pipeline_cuts` names the other
boundaries).
"""

import importlib
from typing import TYPE_CHECKING, Any

from fcsd.model.connectivity.selection import Selection, parse_selection, resolve_layers
from fcsd.model.connectivity.spec import Connectivity

if TYPE_CHECKING:
    from fcsd.model.connectivity.convert import (
        convert_model,
        farskip_layers,
        pipeline_cuts,
        unconvert_model,
    )
    from fcsd.model.connectivity.export import convert_checkpoint, unconvert_checkpoint
    from fcsd.model.connectivity.load import load_model
    from fcsd.model.connectivity.modeling import register

__all__ = [
    "Connectivity",
    "Selection",
    "convert_checkpoint",
    "convert_model",
    "farskip_layers",
    "load_model",
    "parse_selection",
    "pipeline_cuts",
    "register",
    "resolve_layers",
    "unconvert_checkpoint",
    "unconvert_model",
]

_LAZY = {
    "convert": ("convert_model", "farskip_layers", "pipeline_cuts", "unconvert_model"),
    "export": ("convert_checkpoint", "unconvert_checkpoint"),
    "load": ("load_model",),
    "modeling": ("register",),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
