"""Schema of a calibration: which text the maps are solved on, and what becomes of the calibrated model."""

from pydantic import Field

from fcsd.config.data import SourceConfig
from fcsd.config.strict import Strict


class CalibrationConfig(Strict):
    """Fold closed-form maps into the converted weights, before any training (docs/calibration.md)."""

    text: list[SourceConfig] | None = Field(None, min_length=1)  # null: data.train
    tokens: int = Field(262_144, gt=0)
    ridge: float = Field(1e-3, ge=0, lt=1)  # pull towards the identity, relative to the mean diagonal
    # Whether trainings start from the calibrated weights; false: it is one more model that is evaluated.
    starts_training: bool = True
