"""Compare the longest sequence that a model's config allows with the rows that it is
trained on.
"""

import sys
from collections.abc import Iterable
from typing import Any

from fcsd.base.errors import UserError

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
    name: str,
    config: Any,
    tensors: Iterable[tuple[str, tuple[int, ...]]],
    max_length: int,
    *,
    key: str = "max_length",
    tell: bool = True,
) -> None:
    """Warn on stderr, if `tell`, when rows of `max_length` tokens are longer than a
    model's positions.

    name: of the model, in messages. tensors: their names and shapes; none for a model
    that is not built yet. key: the user's name for max_length.

    Raises:
        UserError: rows are longer, and the positions are a table (learned embeddings)
            with no rows beyond them.
    """
    positions = num_positions(config)
    if positions is None or max_length <= positions:
        return
    text = (
        f"{key} {max_length}: rows are longer than the {positions} positions of {name}"
    )
    # Rotary positions are computed for any length; a table ends.
    table = next(
        (tensor for tensor, shape in tensors if _is_table(tensor, shape, positions)),
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
