"""What is converted, and how: the model, a selection of its layers and the two sides of
the connectivity, as values and as the sections `model` and `connectivity` of a recipe.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from fcsd.base.errors import UserError
from fcsd.base.strict import Rule, Strict, refuse

Selection = str | dict[str, int | str] | list[int]
"""`all | moe | none | {"first": N | "P%"} | {"last": N | "P%"} | [indices]`."""

MlpInput = Literal["outdated", "full"] | Selection
"""Which rewired layers have an MLP side that reads the outdated stream: all of them, none,
or a selection."""

VERSION = 1
"""Version of the `farskip` field in a checkpoint's config."""

_ALLOWED = (
    "all, moe, none, first:N, last:N, first:P%, last:P%, or layer indices such as 0,2,5"
    " or 1-5"
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
        if layers and self.mlp not in ("outdated", "full"):
            chosen = resolve_layers(self.mlp, moe_mask, "mlp")
            outdated = [layer for layer in chosen if layer in layers]
            # A list names its layers one by one; a rule such as last:50% may also name
            # others.
            if isinstance(self.mlp, list) and outdated != chosen:
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
        behind = self.attention == "partial" and any(
            moe_mask[k] and k + 1 in layers and not (blocks and moe_mask[k + 1])
            for k in layers
        )
        # attention: full of a parallel family is refused by name where the layers are
        # looked at.
        regular_mlp = field["mlp"] == "full" or (
            layout == "parallel" and self.attention == "partial"
        )
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
    if layers is None:
        if (attention, mlp) == (Connectivity.attention, Connectivity.mlp):
            return None
        layers = "all"
    return connectivity_of(layers, attention, mlp)


def ranges(indices: Sequence[int]) -> str:
    """Format indices as ranges: `1-5,7` for [1, 2, 3, 4, 5, 7]; `-` for none."""
    spans: list[list[int]] = []
    for index in sorted(indices):
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return (
        ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
        or "-"
    )


def selection_text(layers: Sequence[int], num_layers: int | None = None) -> str:
    """Format sorted indices as `--layers` reads them: `3,5-27`; `none` for no layer.

    num_layers: of the model, whose last layers are then `last:N`; None: not known.
    """
    if num_layers is not None and layers == list(
        range(num_layers - len(layers), num_layers)
    ):
        return f"last:{len(layers)}"
    return ranges(layers) if layers else "none"


def parse_mlp(value: Any) -> MlpInput:
    """Return the MLP side's input in normal form: "outdated", "full" or a selection.

    Raises:
        UserError: neither of the two words nor a selection.
    """
    if value in ("outdated", "full"):
        return value
    try:
        return parse_selection(value, "mlp")
    except UserError as error:
        if not isinstance(value, str):
            raise
        raise UserError(
            f"{error}; also allowed: outdated (all rewired layers) or full (none)"
        ) from None


def parse_selection(value: Any, name: str = "layers") -> Selection:
    """Return a selection in its normal form, from a value (recipe, Python) or from text
    (command line).

    name: begins the messages.

    Text: `all`, `moe`, `none`, `first:8`, `last:75%`, `0,2,5`, `1-5`, `0,2-4`. Values:
    the same words, a mapping with one key `first` or `last`, or a list of indices.
    Indices are returned sorted.

    Raises:
        UserError: nothing of the above, a repeated or negative index, a percentage
            outside (0, 100], a count below 1.
    """
    if isinstance(value, str):
        return _parse_text(value, name)
    if isinstance(value, Mapping):
        if len(value) != 1 or (end := next(iter(value))) not in ("first", "last"):
            raise UserError(
                f"{name}: a mapping needs exactly one key, first or last; got"
                f" {dict(value)!r}"
            )
        return {end: _count(value[end], f"{name}.{end}")}
    # True is an int in Python, but is never meant as a number of layers.
    if isinstance(value, int) and not isinstance(value, bool):
        raise UserError(
            f"{name}: {value} is ambiguous; write first:{value}, last:{value} or the"
            f" list [{value}]"
        )
    if isinstance(value, Sequence):
        return _indices(list(value), repr(value), name)
    raise UserError(f"{name}: {value!r} is not a selection; allowed: {_ALLOWED}")


def _parse_text(text: str, name: str) -> Selection:
    word = text.strip()
    if word in ("all", "moe", "none"):
        return word
    if match := re.fullmatch(r"(first|last)\s*:\s*(.+)", word):
        number = match[2].strip()
        count: int | str = int(number) if re.fullmatch(r"-?\d+", number) else number
        return {match[1]: _count(count, f"{name} {match[1]}")}
    indices: list[int] = []
    for part in word.split(","):
        if not (match := re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)):
            raise UserError(f"{name}: '{text}' is not a selection; allowed: {_ALLOWED}")
        low, high = int(match[1]), int(match[2] or match[1])
        span = part.strip()
        refuse(
            (high < low, f"{name}: '{span}' runs backwards; write {high}-{low}"),
            # A slip in the number of digits must not fill the memory with indices.
            (high - low > 10_000, f"{name}: '{span}' has more than 10000 layers"),
        )
        indices.extend(range(low, high + 1))
    return _indices(indices, f"'{text}'", name)


def _count(value: Any, where: str) -> int | str:
    """Return a number of layers, or a percentage in the normal form "75%"."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 1:
            raise UserError(
                f"{where}: must be at least 1, got {value}; for no layers use none"
            )
        return value
    if isinstance(value, str) and (
        match := re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*%\s*", value)
    ):
        percent = float(match[1])
        if not 0 < percent <= 100:
            raise UserError(
                f"{where}: a percentage must be above 0% and at most 100%, got"
                f" {value.strip()}"
            )
        return f"{percent:g}%"
    raise UserError(
        f'{where}: must be a number of layers or a percentage such as "75%", got'
        f" {value!r}"
    )


_INDICES: tuple[Rule, ...] = (
    (
        lambda values, _: not values,
        "the list of indices is empty; for no layers use none",
    ),
    (
        lambda values, _: any(
            not isinstance(index, int) or isinstance(index, bool) for index in values
        ),
        "indices must be whole numbers, got {1}",
    ),
    (
        lambda values, _: min(values) < 0,
        lambda values, _: (
            f"index {next(index for index in values if index < 0)} is negative; for the"
            " last layers use last:N"
        ),
    ),
    (
        lambda values, _: len({*values}) < len(values),
        lambda values, shown_values: (
            f"index {next(index for index in values if values.count(index) > 1)} is given"
            f" twice in {shown_values}"
        ),
    ),
)
"""Of a list of indices, and the text in which it was given."""


def _indices(values: list[Any], shown_values: str, name: str) -> list[int]:
    refuse(*_INDICES, of=(values, shown_values), where=f"{name}: ")
    return sorted(values)


def resolve_layers(
    selection: Selection, moe_mask: Sequence[bool], name: str = "layers"
) -> list[int]:
    """Return the sorted indices that a selection names in one model.

    Args:
        selection: see `Selection`; text forms are accepted too.
        moe_mask: one entry a decoder layer, True for an MoE layer.
        name: begins the messages.

    Rules: `all` is every decoder layer, dense ones too; `moe` the MoE layers; `first`
    and `last` count decoder layers; P% of L layers is P·L/100 rounded to the nearest
    whole number, halves up.

    Raises:
        UserError: an index or a count beyond the model's layers, or a percentage that
            comes to no layer.
    """
    total = len(moe_mask)
    selection = parse_selection(selection, name)
    if selection == "none":
        return []
    if selection == "all":
        return list(range(total))
    if selection == "moe":
        return [index for index, is_moe in enumerate(moe_mask) if is_moe]
    if isinstance(selection, dict):
        ((end, count),) = selection.items()
        if isinstance(count, str):
            # Not `round`, which takes halves to the even number.
            number = int(float(count.rstrip("%")) * total / 100 + 0.5)
        else:
            number = count
        refuse(
            (
                number < 1,
                f"{name}: {end}:{count} of {total} layers selects no layer; for no layers"
                " use none",
            ),
            (
                number > total,
                f"{name}: {end}:{number}: the model has only {total} decoder layers",
            ),
        )
        first = 0 if end == "first" else total - number
        return list(range(first, first + number))
    assert isinstance(selection, list)
    if beyond := [index for index in selection if index >= total]:
        raise UserError(
            f"{name}: index {beyond[0]} is out of range: the model has {total} decoder"
            f" layers, 0 to {total - 1}"
        )
    return selection


def field_text(field: Mapping[str, Any]) -> str:
    """Format the `farskip` field of a config for an error."""
    return (
        f"layers {field['layers']}, attention {field['attention']}, mlp {field['mlp']}"
    )


Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class ModelConfig(Strict):
    """The original checkpoint: the teacher, and the weights the student starts from."""

    # hub id or local folder; may be left out when `pretrain` makes the model
    path: str = ""
    revision: str | None = Field(None, description="revision of a hub id")
    trust_remote_code: bool = Field(
        False, description="run code that comes with the checkpoint"
    )
    # Also the dtype of the teacher, and of every model during evaluation.
    dtype: Dtype = Field(
        "auto", description="dtype of the model; auto: the checkpoint's dtype"
    )
    attn_implementation: str | None = None
    experts_implementation: str | None = None


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

    def spec(self) -> Connectivity:
        """Return the connectivity that this section describes."""
        layers: Any = self.layers
        mlp: Any = self.mlp
        return Connectivity(layers, self.attention, mlp)


DROP_NEEDS_A_CAPACITY: Rule = (
    lambda record: record.capacity_drop is not None and record.capacity_factor is None,
    "capacity_drop: {0.capacity_drop!r} has no meaning without capacity_factor; set it,"
    " or leave both out",
)
"""Of a record with `capacity_factor` and `capacity_drop`."""
