"""Schema of a calibration: how the maps are solved, and what becomes of the calibrated model."""

from pydantic import Field

from fcsd.config.strict import Strict


class CalibrationConfig(Strict):
    """Fold closed-form maps into the converted weights, before any training (docs/calibration.md)."""

    tokens: int = Field(262_144, gt=0)  # of data.train
    ridge: float = Field(1e-3, ge=0, lt=1)  # pull towards the identity, relative to the mean diagonal
    # Whether trainings start from the calibrated weights; false: it is one more model that is evaluated.
    starts_training: bool = True
