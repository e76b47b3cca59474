"""Take the publisher's places out of what is published: of an absolute path the last name is left.

Not covered: relative paths, which say nothing of a machine.
"""

import json
import re
from pathlib import PurePath
from typing import Any

PLACE = re.compile(r"(?<![\w/.:~\\-])~?(?:/[\w.@+-]+){2,}")
"""An absolute path of two names or more in a text; `/` alone, `and/or` and what stands in an address are none."""


def without_places(text: str) -> str:
    """Replace the absolute paths in a text by their last names."""
    return PLACE.sub(lambda found: PurePath(found[0]).name, text)


def public_text(name: str, text: str) -> str:
    """Return what a file of that name publishes: JSON value by value, other text as it stands."""
    if not name.endswith(".json"):
        return without_places(text)
    return json.dumps(_public(json.loads(text)), indent=2) + "\n"


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {without_places(key): _public(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_public(each) for each in value]
    if not isinstance(value, str):
        return value
    return PurePath(value).name if re.match(r"~?/[^\n]*$", value) else without_places(value)
