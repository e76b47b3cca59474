"""The fields that the tiny configuration of each family adds to the common sizes of `fcsd.tiny.models`."""

from typing import Any

from fcsd.tiny.configs import adapted, multimodal, standard

TINY: dict[str, dict[str, Any]] = {**standard.TINY, **adapted.TINY, **multimodal.TINY}
"""Model type -> config fields."""
