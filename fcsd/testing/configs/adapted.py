"""Tiny configurations of `fcsd.families.adapted`."""

from typing import Any

TINY: dict[str, dict[str, Any]] = {}
