"""Select the decoder layers to rewire: read a selection as recipes, Python and the
command line write it, find its layers in a model, and write it again.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fcsd.base.errors import UserError
from fcsd.base.strict import Rule, refuse

Selection = str | dict[str, int | str] | list[int]
"""`all | moe | none | {"first": N | "P%"} | {"last": N | "P%"} | [indices]`."""


MlpInput = Literal["outdated", "full"] | Selection
"""Which rewired layers have an MLP side that reads the outdated stream: all of them, none,
or a selection."""


_ALLOWED = (
    "all, moe, none, first:N, last:N, first:P%, last:P%, or layer indices such as 0,2,5"
    " or 1-5"
)


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
