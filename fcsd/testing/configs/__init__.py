"""What the tiny configuration of each family adds to the common sizes of `fcsd.testing.tiny`."""

from typing import Any

from fcsd.testing.configs import adapted, multimodal, standard

TINY: dict[str, dict[str, Any]] = {**standard.TINY, **adapted.TINY, **multimodal.TINY}
"""Model type -> config fields."""
