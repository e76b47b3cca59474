"""Specify how the selected layers are rewired: as a value, as the section `connectivity`
of a recipe, and as the `farskip` field of a config; tell what a config says of its weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import Field, model_validator

from fcsd.base.errors import UserError
from fcsd.base.strict import Rule, Strict, refuse
from fcsd.model.connectivity.selection import (
    MlpInput,
    Selection,
    parse_mlp,
    parse_selection,
    resolve_layers,
)


@dataclass(frozen=True)
class Connectivity:
    """Which decoder layers are rewired, and how.

    o_k is the residual stream after layer k, routed_k the output of its routed experts
    (with the family's residual multiplier), attn_k and shared_k those of its attention
    and its shared experts (0 where it has none). A layer outside the selection keeps
    the regular equations on the full o_{k-1}. A selected layer k computes

        o_k = o_{k-1} + attn_k(a) + shared_k(m) + routed_k(m)        dense layer: mlp_k(m) for the last two

        attention: partial   a = o_{k-1} - routed_{k-1} if layer k-1 is a selected MoE layer (its routed
                             output is in flight), else a = o_{k-1}
        attention: full      a = o_{k-1}
        mlp: outdated        m = o_{k-1}
        mlp: full            m = h_k = o_{k-1} + attn_k(a), the regular MLP input
        mlp: SELECTION outdated in these selected layers, full in the others

    The output in flight does not depend on the MLP side: `mlp: full` is attention-only
    FarSkip, in which attention still reads the stream without the routed output of the
    layer before it, and the MoE block waits for it. `attention: full` is MLP-only
    FarSkip: attention and MoE block of one layer run in parallel on the same full
    o_{k-1}, and nothing is carried to the next layer. A selected dense layer follows
    the same two rules and leaves nothing in flight, so the layer after it reads the
    full stream. With `mlp: full`, the first layer of a run of selected layers computes
    the same as a regular layer. Both sides full is the regular model and is refused,
    except with no layers.

    Raises:
        UserError: a side or the selection is not one of the values above.
    """

    layers: Selection = "all"
    attention: Literal["partial", "full"] = "partial"
    mlp: MlpInput = "outdated"

    def __post_init__(self) -> None:
        # The class is frozen. In their normal form equal selections are equal
        # connectivities.
        object.__setattr__(self, "layers", parse_selection(self.layers))
        object.__setattr__(self, "mlp", parse_mlp(self.mlp))
        if self.attention not in ("partial", "full"):
            raise UserError(
                f"attention: must be 'partial' or 'full', got {self.attention!r}"
            )
        if self.attention == "full" and self.mlp not in ("outdated", "full"):
            raise UserError(
                "connectivity: with attention: full a layer whose MLP side is regular is"
                " a regular layer; select with `layers` alone, and mlp: outdated"
            )
        if self.attention == self.mlp == "full" and self.layers not in ("none", []):
            raise UserError(
                "connectivity: attention: full with mlp: full is the regular"
                " connectivity, nothing would be rewired; set one of them (attention:"
                " partial, mlp: outdated), or use layers: none"
            )

    def field(self, moe_mask: Sequence[bool]) -> dict[str, Any]:
        """Return the `farskip` field of a config: version, resolved layer indices, both
        sides. `mlp` is a list of indices where only some layers are outdated.

        Raises:
            UserError: as `resolve_layers`; `mlp` lists a layer that is not rewired.
        """
        layers = resolve_layers(self.layers, moe_mask)
        mlp: str | list[int] = self.mlp  # type: ignore[assignment]
        by_name = isinstance(self.mlp, list)
        if by_name or (layers and self.mlp not in ("outdated", "full")):
            chosen = resolve_layers(self.mlp, moe_mask, "mlp")
            outdated = [layer for layer in chosen if layer in layers]
            # A list names its layers one by one; a rule such as last:50% may also name
            # others, but not only others.
            if (by_name or not outdated) and outdated != chosen:
                regular = sorted(set(chosen) - set(layers))
                raise UserError(
                    f"mlp: layer {regular[0]} is not rewired; select it with `layers`,"
                    " too"
                )
            # The two words wherever they say it: a field is compared as a whole.
            if not outdated:
                mlp = "full"
            elif outdated == layers:
                mlp = "outdated"
            else:
                mlp = outdated
        return {
            "version": VERSION,
            "layers": layers,
            "attention": self.attention,
            "mlp": mlp if layers or isinstance(mlp, str) else "outdated",
        }

    def outdated_layers(self, moe_mask: Sequence[bool]) -> list[int]:
        """Return the indices of the layers whose MLP side reads the outdated stream."""
        return outdated_layers(self.field(moe_mask))

    def attention_layers(self, moe_mask: Sequence[bool]) -> list[int]:
        """Return the indices of the layers whose attention reads the stream without the
        output of the MoE block before it.
        """
        layers = self.field(moe_mask)["layers"] if self.attention == "partial" else []
        return [k for k in layers if k - 1 in layers and moe_mask[k - 1]]

    def new_field(
        self, moe_mask: Sequence[bool], layout: str = "pre_norm"
    ) -> dict[str, Any]:
        """Return the `farskip` field of a model to convert.

        layout: of the family; in a parallel one the MLP reads o_{k-1} in regular layers
        too, and in one of blocks two neighbours must be selected.

        Raises:
            UserError: as `field`; all layers would compute the same as regular ones.
        """
        field = self.field(moe_mask)
        layers = field["layers"]
        # With the regular MLP input only these layers differ from regular ones.
        blocks = layout == "blocks"
        # A published model's code refuses it, too (`rewire.check_field`), and has no fcsd.
        if layout == "parallel" and self.attention == "full" and layers:
            raise UserError(
                "attention: full changes nothing here, because attention and MLP of a"
                " layer read the same stream already; use attention: partial"
            )
        behind = self.attention == "partial" and any(
            moe_mask[k] and k + 1 in layers and not (blocks and moe_mask[k + 1])
            for k in layers
        )
        regular_mlp = field["mlp"] == "full" or layout == "parallel"
        if blocks and not any(
            moe_mask[k] and k - 1 in layers for k in outdated_layers(field)
        ):
            regular_mlp = True
        if layers and not behind and regular_mlp:
            more = layout != "parallel" and not blocks
            alternative = " or mlp: outdated," if more else ""
            raise UserError(
                f"connectivity: layers {layers}, attention: {self.attention}, mlp:"
                f" {self.mlp} change nothing: attention reads another stream only in a"
                " selected layer that follows a selected MoE layer; select such"
                f" neighbours (layers: all),{alternative} or use layers: none for the regular"
                " model"
            )
        return field

    @staticmethod
    def from_field(
        field: Mapping[str, Any], where: str = "config.json"
    ) -> "Connectivity":
        """Read a `farskip` field back; raises UserError for another version or a
        malformed field.
        """
        refuse(*_FIELD, of=(field, where))
        # A selection refuses an empty list, as a slip; in a field it is the regular
        # model.
        layers: Selection = field["layers"] or "none"
        return Connectivity(layers, field["attention"], field["mlp"])


class ConnectivityConfig(Strict):
    """The layers to rewire, and the inputs of their two branches (see
    `fcsd.model.connectivity.Connectivity`).
    """

    layers: str | list[int] | dict[Literal["first", "last"], int | str] = "all"
    attention: Literal["partial", "full"] = Field(
        "partial",
        description="input of attention; partial: the stream without the routed output in flight",
    )
    mlp: str | list[int] | dict[Literal["first", "last"], int | str] = Field(
        "outdated",
        description=(
            "input of MoE and MLP blocks; outdated: the stream before this layer's"
            " attention; full: the regular input; a selection of layers, such as last:50%:"
            " outdated only in these layers"
        ),
    )

    @model_validator(mode="after")
    def _check_selection(self) -> "ConnectivityConfig":
        try:
            parse_selection(self.layers)
            parse_mlp(self.mlp)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    @cached_property
    def spec(self) -> Connectivity:
        """The connectivity that this section describes."""
        layers: Any = self.layers
        mlp: Any = self.mlp
        return Connectivity(layers, self.attention, mlp)


def connectivity_of(
    layers: Selection | Connectivity | None, attention: Any, mlp: Any
) -> Connectivity | None:
    """Return the connectivity that a selection and two sides, or a `Connectivity`, say;
    of None none.

    Raises:
        UserError: sides without layers, or together with a `Connectivity`; an error of
            `Connectivity`.
    """
    if layers is not None and not isinstance(layers, Connectivity):
        return Connectivity(layers, attention, mlp)
    # Without layers, or together with a `Connectivity`, they would change nothing.
    if (attention, mlp) != (Connectivity.attention, Connectivity.mlp):
        advice = "set them in the Connectivity instead"
        if layers is None:
            advice = "apply to the layers to rewire; give layers, too"
        raise UserError(f"attention, mlp: {advice}")
    return layers


def chosen_connectivity(
    layers: Selection | Connectivity | None, attention: Any, mlp: Any
) -> Connectivity | None:
    """Return the connectivity that a selection and two sides choose; None where all are
    left out, and a checkpoint keeps its own.
    """
    chosen = (attention, mlp) != (Connectivity.attention, Connectivity.mlp)
    if layers is None and chosen:
        layers = "all"
    return connectivity_of(layers, attention, mlp)


VERSION = 1
"""Version of the `farskip` field in a checkpoint's config."""


def _version(field: Any) -> Any:
    return field.get("version") if isinstance(field, Mapping) else None


_FIELD: tuple[Rule, ...] = (
    (
        lambda field, where: _version(field) != VERSION,
        lambda field, where: (
            f"{where}: farskip.version: this fcsd reads version {VERSION}, got"
            f" {_version(field)!r}"
        ),
    ),
    # An unknown key may change the meaning of the others, so none is ignored.
    (
        lambda field, where: (
            set(field) != {"version", "layers", "attention", "mlp"}
            or not isinstance(field["layers"], list)
        ),
        lambda field, where: (
            f"{where}: farskip: needs exactly the keys version, layers (a list),"
            f" attention, mlp; got {dict(field)!r}"
        ),
    ),
    (
        lambda field, where: (
            field["mlp"] not in ("outdated", "full")
            and not isinstance(field["mlp"], list)
        ),
        "mlp: must be 'outdated', 'full' or a list of layers, got {0[mlp]!r}",
    ),
)
"""Of a `farskip` field, and the file that has it."""


def outdated_layers(field: Mapping[str, Any]) -> list[int]:
    """Return the layers of a `farskip` field whose MLP side reads the outdated stream."""
    if field["mlp"] == "outdated":
        return list(field["layers"])
    return [] if field["mlp"] == "full" else list(field["mlp"])


def field_text(field: Mapping[str, Any]) -> str:
    """Format the `farskip` field of a config for an error."""
    return (
        f"layers {field['layers']}, attention {field['attention']}, mlp {field['mlp']}"
    )


CALIBRATED, TRAINED = "farskip_calibration", "farskip_trained"
"""Keys of a config that say what has changed its weights since they were the
original's. They stay when it is unconverted.
"""


def changed_by(config: Any) -> str | None:
    """Return "trained" or "calibrated" where a config, or its dictionary, says that the
    weights are not the original's.

    None: nothing is recorded; a training outside fcsd records nothing.
    """
    values = config if isinstance(config, Mapping) else vars(config)
    # A calibrated model may have been trained since, and then has both keys.
    if TRAINED in values:
        return "trained"
    return "calibrated" if CALIBRATED in values else None


def is_converted(config: Any) -> bool:
    """Tell whether a config, or its dictionary, says that layers are rewired."""
    values = config if isinstance(config, Mapping) else vars(config)
    return bool((values.get("farskip") or {}).get("layers"))


def is_original(config: Any) -> bool:
    """Tell whether a config, or its dictionary, says nothing of a conversion, or of a
    training or calibration by fcsd.
    """
    return not is_converted(config) and changed_by(config) is None
