"""Replace values by their dotted keys (`--set`), and print a recipe as YAML."""

import copy
from typing import Any

import yaml

from fcsd.base.errors import UserError


def set_dotted(raw: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `raw[a][b][c] = value` for key `a.b.c`, in place; a number selects an item of a list."""
    parts = key.split(".")
    place: Any = raw
    for index, part in enumerate(parts[:-1]):
        if isinstance(place, list):
            place = _item(place, part, where)
        else:
            if place.get(part) is None:
                place[part] = {}
            place = place[part]
        if not isinstance(place, dict | list):
            raise UserError(
                f"{where}: {'.'.join(parts[: index + 1])} is a single value and has no key {parts[index + 1]!r}"
            )
    if isinstance(place, list):
        _item(place, parts[-1], where)
        place[int(parts[-1])] = copy.deepcopy(value)
    else:
        place[parts[-1]] = copy.deepcopy(value)


def _item(place: list[Any], part: str, where: str) -> Any:
    if not part.isdigit() or int(part) >= len(place):
        raise UserError(f"{where}: {part!r} is not an item of this list; allowed: 0 to {len(place) - 1}")
    return place[int(part)]


def to_yaml(value: Any) -> str:
    """YAML text in the order of the schema, as `fcsd recipe` prints it."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)
