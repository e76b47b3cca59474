"""Keys of a config that say what has changed its weights since they were the original's.
They stay when it is unconverted.
"""

from collections.abc import Mapping
from typing import Any

CALIBRATED, TRAINED = "farskip_calibration", "farskip_trained"


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
