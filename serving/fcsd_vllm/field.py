"""Read the `farskip` field of a config, with fcsd's checks and messages. Standard
library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
"""Version of the field that is read."""


class FieldError(ValueError):
    """The field cannot be served; the message is one line."""


@dataclass(frozen=True)
class Field:
    """Which layers are rewired, and how; the equations are in fcsd's `Connectivity`."""

    layers: tuple[int, ...]
    """Indices, sorted."""
    partial: bool
    """Attention reads the stream without the routed output of a selected MoE layer before it."""
    outdated: frozenset[int]
    """Layers whose MLP or MoE block reads the stream before that layer's attention."""


def read_field(
    value: Any, num_layers: int | None = None, where: str = "config.json"
) -> Field:
    """Return a checked field.

    Args:
        value: the config's value of `farskip`.
        num_layers: decoder layers of the model; None leaves the check of the largest
            index to a later call.
        where: prefix of messages about the whole field.

    Raises:
        FieldError: another version, a malformed field, an unknown side, an index that
            the model does not have.
    """
    version = value.get("version") if isinstance(value, Mapping) else None
    if version != VERSION:
        raise FieldError(
            f"{where}: farskip.version: this fcsd reads version {VERSION}, got"
            f" {version!r}"
        )
    if set(value) != {"version", "layers", "attention", "mlp"} or not isinstance(
        value["layers"], list
    ):
        raise FieldError(
            f"{where}: farskip: needs exactly the keys version, layers (a list),"
            f" attention, mlp; got {dict(value)!r}"
        )
    layers = _indices(value["layers"], num_layers, "layers")
    attention, mlp = value["attention"], value["mlp"]
    if attention not in ("partial", "full"):
        raise FieldError(f"attention: must be 'partial' or 'full', got {attention!r}")
    if mlp not in ("outdated", "full") and not isinstance(mlp, list):
        raise FieldError(
            f"mlp: must be 'outdated', 'full' or a list of layers, got {mlp!r}"
        )
    outdated = layers if mlp == "outdated" else ()
    if isinstance(mlp, list):
        outdated = _indices(mlp, num_layers, "mlp")
    if regular := sorted(set(outdated) - set(layers)):
        raise FieldError(
            f"mlp: layer {regular[0]} is not rewired; select it with `layers`, too"
        )
    if attention == mlp == "full" and layers:
        raise FieldError(
            "connectivity: attention: full with mlp: full is the regular connectivity,"
            " nothing would be rewired; set one of them (attention: partial, mlp:"
            " outdated), or use layers: none"
        )
    return Field(layers, attention == "partial", frozenset(outdated))


PUBLISHED = (
    "farskip",
    "farskip_start_idx",
    "farskip_end_idx",
    "attn_only_farskip",
    "mlp_only_farskip",
)
"""AMD's keys for the same connectivity; fcsd's `connectivity/aliases.py` defines
them."""


def field_of(config: Any, num_layers: int) -> Field:
    """Return the field of a config object with fcsd's key or AMD's; without either, the
    model is regular.

    Raises:
        FieldError: as in `read_field`; an unknown key of AMD's kind; one of AMD's
            ranges that rewires both sides from a layer after a regular MoE layer, which
            hands on another stream in AMD's file.
    """
    if isinstance(getattr(config, "farskip", None), Mapping):
        return read_field(config.farskip, num_layers)
    keys = {name: value for name, value in vars(config).items() if "farskip" in name}
    if unknown := sorted(keys.keys() - set(PUBLISHED)):
        raise FieldError(
            f"config.json: {unknown[0]}: unknown key; allowed: {', '.join(PUBLISHED)}"
        )
    attention_only = keys.get("attn_only_farskip")
    mlp_only = keys.get("mlp_only_farskip")
    start = max(int(keys.get("farskip_start_idx") or 0), 0)
    last = keys.get("farskip_end_idx")
    end = min(num_layers - 1 if last is None else int(last), num_layers - 1)
    if not keys.get("farskip") or start > end or (attention_only and mlp_only):
        return Field((), True, frozenset())
    first_moe = config.first_k_dense_replace
    if start > first_moe and attention_only:
        start -= 1  # in AMD's file, regular MoE layers also leave their routed output in flight
    elif start > first_moe and not mlp_only:
        raise FieldError(
            f"config.json: farskip_start_idx: layer {start} follows a regular MoE"
            " layer, whose routed output AMD's file also leaves in flight; use 0 to"
            f" {first_moe}, or set mlp_only_farskip or attn_only_farskip"
        )
    layers = tuple(range(start, end + 1))
    return Field(layers, not mlp_only, frozenset(() if attention_only else layers))


def _indices(values: list[Any], num_layers: int | None, name: str) -> tuple[int, ...]:
    if not all(
        isinstance(index, int) and not isinstance(index, bool) for index in values
    ):
        raise FieldError(f"{name}: indices must be whole numbers, got {values!r}")
    if negative := [index for index in values if index < 0]:
        raise FieldError(
            f"{name}: index {negative[0]} is negative; for the last layers use last:N"
        )
    if repeated := [index for index in values if values.count(index) > 1]:
        raise FieldError(f"{name}: index {repeated[0]} is given twice in {values!r}")
    indices = sorted(values)
    if num_layers is not None and (
        beyond := [index for index in indices if index >= num_layers]
    ):
        raise FieldError(
            f"{name}: index {beyond[0]} is out of range: the model has {num_layers}"
            f" decoder layers, 0 to {num_layers - 1}"
        )
    return tuple(indices)
