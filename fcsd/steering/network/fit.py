"""The line alpha + beta * B through measured times of an exchange."""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import lsq_linear

from fcsd.steering.network.links import Array


@dataclass(frozen=True)
class Line:
    """Seconds alpha, seconds a byte beta, and the share r2 of the times' variance that the line explains."""

    alpha_s: float
    beta_s_per_byte: float
    r2: float


def fit_line(num_bytes: Array, seconds: Array) -> Line:
    """Fit alpha, beta >= 0 by least squares of the relative errors.

    Relative: the largest transfer would else decide alone, and alpha is seen in the smallest. Without the bounds a
    burst that a shaper lets through at once makes alpha negative.
    """
    # alpha and beta differ by five orders of magnitude: solved for in units of what the data are about
    units = np.array([seconds.max(), seconds.max() / num_bytes.max()])
    rows = np.stack([np.ones_like(num_bytes), num_bytes], 1) * units / seconds[:, None]
    alpha, beta = lsq_linear(rows, np.ones_like(seconds), bounds=(0, np.inf)).x * units
    residual = float(((alpha + beta * num_bytes - seconds) ** 2).sum())
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    return Line(float(alpha), float(beta), 1 - residual / spread if spread > 0 else 0.0)
