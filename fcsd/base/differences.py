"""Compare settings and inputs of two records key by key."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

# The ends of differences that do not count: folders of a former fcsd may have the keys.
_SAY_NOTHING = (
    ".streaming: false -> null",
    '.l2_points: "blocks" -> null',
    "heldout.weight: 1.0 -> null",
)


# A hash that fcsd makes; a commit of the Hub has 40 digits, and tells something.
_HASH = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")


def changed_settings(old: Any, new: Any, may_change: Collection[str] = ()) -> list[str]:
    """List the settings that have changed though they may not, as `differences`."""
    return [
        change
        for change in differences(old, new)
        if change.split(":")[0] not in may_change and not change.endswith(_SAY_NOTHING)
    ]


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """List the dotted keys that differ between two values, as `train.learning_rate:
    2e-05 -> 4e-05`, or `original: other content` for two hashes. Absent keys count as
    null.
    """
    # Lists of records (sources, tasks) are compared item by item, so that the message
    # names the one key that differs and not two long lists.
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        items = [*old, *new]
        if items and all(isinstance(item, dict) for item in items):
            old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        changes = []
        for key in sorted(set(old) | set(new)):
            dotted = f"{prefix}.{key}" if prefix else str(key)
            changes += differences(old.get(key), new.get(key), dotted)
        return changes
    if old == new:
        return []
    if all(isinstance(value, str) and _HASH.fullmatch(value) for value in (old, new)):
        return [f"{prefix}: other content"]
    return [f"{prefix}: {_short(old)} -> {_short(new)}"]


def without_none(value: Any) -> Any:
    """Remove the keys whose value is None, at every depth."""
    if isinstance(value, Mapping):
        return {
            key: without_none(item) for key, item in value.items() if item is not None
        }
    return [without_none(item) for item in value] if isinstance(value, list) else value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
