"""Positions: the longest sequence that a model's config says it takes, set against the
rows that it is trained on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from fcsd.base.errors import UserError
from fcsd.model.connectivity.checkpoint import read_checkpoint
from fcsd.model.load import ModelFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What transformers' text models call a learned embedding of each position; those of
# images are called so, too.
_TABLES = ("wpe", "embed_positions", "position_embeddings")
_NOT_TEXT = ("vision", "visual", "image", "audio")


def num_positions(config: Any) -> int | None:
    """Return the longest sequence that a model's config says it takes; None where it
    says nothing.
    """
    positions: int | None = getattr(
        config.get_text_config(), "max_position_embeddings", None
    )
    return positions


def check_positions(
    model: ModelFolder | PreTrainedModel | PreTrainedConfig,
    max_length: int,
    *,
    key: str = "max_length",
    tell: bool = True,
) -> None:
    """Say on stderr, if `tell`, that rows of `max_length` tokens are longer than the
    model's positions.

    model: a config stands for a model that is still to be made. key: what the user
    calls max_length.

    Raises:
        UserError: they are, and the positions are a table (learned embeddings), which
            ends there.
    """
    shapes: Iterable[tuple[str, tuple[int, ...]]] = ()
    if isinstance(model, ModelFolder):
        name = model.config.path
        config, shapes = _of_folder(model)
    elif isinstance(model, PreTrainedConfig):
        name, config = f"a {model.model_type}", model
    else:
        name, config = type(model).__name__, model.config
        shapes = ((tensor, tuple(p.shape)) for tensor, p in model.named_parameters())
    positions = num_positions(config) if config is not None else None
    if positions is None or max_length <= positions:
        return
    text = (
        f"{key} {max_length}: rows are longer than the {positions} positions of {name}"
    )
    table = next(
        (tensor for tensor, shape in shapes if _is_table(tensor, shape, positions)),
        None,
    )
    if table is not None:
        raise UserError(
            f"{text}, which are a table of that length ({table}); set {key} to"
            f" {positions} or less"
        )
    if tell:
        print(
            f"{text}: what an example has behind them is where the model was never"
            f" trained; {positions} would fit",
            file=sys.stderr,
        )


def _of_folder(model: ModelFolder) -> tuple[Any, Iterable[tuple[str, tuple[int, ...]]]]:
    """Return the config, None where transformers cannot read it, and names and shapes
    of the tensors.
    """
    checkpoint = read_checkpoint(model.folder, any_family=True)
    try:
        return model.load_config(any_family=True), checkpoint.shapes.items()
    except (OSError, ValueError):  # the loading says why
        return None, ()


def _is_table(tensor: str, shape: tuple[int, ...], positions: int) -> bool:
    parts = tensor.split(".")
    is_text = not any(word in part for part in parts for word in _NOT_TEXT)
    # OPT's begins with two rows of its own.
    return (
        is_text
        and any(part in _TABLES for part in parts)
        and len(shape) == 2
        and 0 <= shape[0] - positions <= 2
    )
