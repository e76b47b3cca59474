"""The fields that the tiny configuration of each family adds to the common sizes of `fcsd.pipeline.tiny.models`."""

from typing import Any

from fcsd.pipeline.tiny.configs import adapted, multimodal, standard

TINY: dict[str, dict[str, Any]] = {**standard.TINY, **adapted.TINY, **multimodal.TINY}
"""Model type -> config fields."""
