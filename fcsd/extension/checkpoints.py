"""Checkpoints by what their JSON says: files, family, connectivity; what loads no torch."""

from fcsd.base.weights import is_config_only
from fcsd.model.connectivity.checkpoint import (
    CONFIG,
    INDEX,
    Checkpoint,
    find_folder,
    has_tokenizer,
    read_checkpoint,
    read_checkpoint_json,
)
from fcsd.model.connectivity.marks import TRAINED
from fcsd.model.connectivity.spec import Connectivity, resolve_layers
from fcsd.model.families import PREFIX, base_model_type
from fcsd.model.inspect.checkpoint import find_source

__all__ = [
    "CONFIG",
    "INDEX",
    "PREFIX",
    "TRAINED",
    "Checkpoint",
    "Connectivity",
    "base_model_type",
    "find_folder",
    "find_source",
    "has_tokenizer",
    "is_config_only",
    "read_checkpoint",
    "read_checkpoint_json",
    "resolve_layers",
]
