"""Tiny configurations of `fcsd.families.multimodal`."""

from typing import Any

TINY: dict[str, dict[str, Any]] = {}
