"""Read and check the checkpoint from which a Megatron model is built. Does not import
Megatron.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.base.errors import UserError
from fcsd.model.connectivity.checkpoint import Checkpoint, find_folder, read_checkpoint
from fcsd.model.connectivity.load import check_tensors, config_and_class
from fcsd.model.families import moe_mask
from fcsd_megatron.names import Piece, pieces_of
from fcsd_megatron.plans import LayerPlan, layer_plans
from fcsd_megatron.settings import settings_of


@dataclass(frozen=True)
class Source:
    """A checkpoint's config, and its translation to Megatron."""

    checkpoint: Checkpoint
    config: Any
    """Config object of transformers."""
    settings: dict[str, Any]
    """Fields of a TransformerConfig."""
    plans: list[LayerPlan | None]
    pieces: dict[str, Piece]


def read_source(path: str | Path) -> Source:
    """Read a regular or FarSkip checkpoint of qwen3_moe or deepseek_v3, without its
    weights.

    Args:
        path: local folder, or `owner/name` of a Hub repository.

    Raises:
        UserError: as in `fcsd.load_model` and `settings_of`; a tensor without a
            counterpart in Megatron.
    """
    checkpoint = read_checkpoint(find_folder(path))
    config, cls = config_and_class(checkpoint)
    assert checkpoint.family is not None
    mask = moe_mask(config, checkpoint.family)
    settings = settings_of(config, mask, str(path))
    check_tensors(checkpoint, config, cls)
    pieces = pieces_of(config, mask)
    known = {name for piece in pieces.values() for name in piece.sources}
    if unknown := sorted(checkpoint.shapes.keys() - known):
        raise UserError(
            f"{path}: {len(unknown)} tensors have no place in Megatron, the first is"
            f" '{unknown[0]}'; give a checkpoint of a language model with one tensor"
            " per expert, as save_pretrained writes it"
        )
    return Source(
        checkpoint, config, settings, layer_plans(checkpoint.connectivity, mask), pieces
    )
