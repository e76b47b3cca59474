"""Schema of a calibration: how the maps are solved, and what becomes of the calibrated model."""

from fcsd.base.strict import Strict, option


class CalibrationConfig(Strict):
    """Fold closed-form maps into the converted weights, before any training (docs/calibration.md)."""

    tokens: int = option(262_144, "tokens of the text to solve on", gt=0)  # of data.train
    ridge: float = option(
        1e-3, "pull of the maps towards the identity, relative to the mean diagonal", ge=0, lt=1
    )
    # Whether trainings start from the calibrated weights; false: it is one more model that is evaluated.
    starts_training: bool = True
