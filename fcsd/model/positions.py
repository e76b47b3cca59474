"""Compare the longest sequence that a model's config allows with the rows that it is
trained on.
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

# Names of learned position embeddings in transformers' text models; image encoders use
# the same ones.
_TABLES = ("wpe", "embed_positions", "position_embeddings")
_NOT_TEXT = ("vision", "visual", "image", "audio")


def num_positions(config: Any) -> int | None:
    """Return the longest sequence that a model's config allows; None if it does not
    say.
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
    """Warn on stderr, if `tell`, when rows of `max_length` tokens are longer than the
    model's positions.

    model: or the config of a model that is not built yet. key: the user's name for
    max_length.

    Raises:
        UserError: rows are longer, and the positions are a table (learned embeddings)
            with no rows beyond them.
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
    # Rotary positions are computed for any length; a table ends.
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
            f"{text}: the model was not trained on later positions; {positions} would"
            " fit",
            file=sys.stderr,
        )


def _of_folder(model: ModelFolder) -> tuple[Any, Iterable[tuple[str, tuple[int, ...]]]]:
    """Return the config, or None if transformers cannot read it, and the names and
    shapes of the tensors.
    """
    checkpoint = read_checkpoint(model.folder, any_family=True)
    try:
        return model.load_config(any_family=True), checkpoint.shapes.items()
    except (OSError, ValueError):  # loading the model reports why
        return None, ()


def _is_table(tensor: str, shape: tuple[int, ...], positions: int) -> bool:
    parts = tensor.split(".")
    is_text = not any(word in part for part in parts for word in _NOT_TEXT)
    # OPT's table begins with two extra rows.
    return (
        is_text
        and any(part in _TABLES for part in parts)
        and len(shape) == 2
        and 0 <= shape[0] - positions <= 2
    )
