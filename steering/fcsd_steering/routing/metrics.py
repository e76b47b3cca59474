"""Measure how unevenly experts are used, and the distance between the routings of two
runs.

Equations of CAMoE's appendix A.4 (numbered 14 to 20 in our copy), on loads [L, E]:
(token, expert) pairs of each expert in each MoE layer, before or after tokens were
dropped. KLs are in nats; 0 where the loads agree.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Loads = NDArray[Any]

EPSILON = 1e-6
"""Pairs added to every expert before a KL, so that an unused expert has a logarithm.
CAMoE does not give its value. If one run leaves experts unused, the KL depends on it,
so it is written beside every result.
"""


def cv(loads: Loads) -> float:
    """Return the standard deviation over experts / mean, of loads summed over layers
    (equation 14).
    """
    return float(layer_cv(loads.sum(0)))


def layer_cv(loads: Loads) -> Array:
    """Return the coefficient of variation of loads [..., E]: shape [...] (equation 15);
    0 without pairs.
    """
    mean = loads.mean(-1)
    return np.asarray(
        np.divide(loads.std(-1), mean, out=np.zeros(mean.shape), where=mean > 0)
    )


def avg_layer_cv(loads: Loads) -> float:
    """Return the mean over layers of the coefficient of variation (equation 16)."""
    return float(layer_cv(loads).mean())


def layer_kl(base: Loads, compared: Loads, epsilon: float = EPSILON) -> Array:
    """Return KL(base || compared) of loads [..., E], each made a distribution: shape [...] (equations 17 to 19)."""
    # Epsilon keeps unused experts finite in both runs.
    p, q = (_distribution(loads, epsilon) for loads in (base, compared))
    return np.asarray((p * np.log(p / q)).sum(-1))


def kl(base: Loads, compared: Loads, epsilon: float = EPSILON) -> float:
    """Return the KL of the loads summed over layers (equation 18)."""
    return float(layer_kl(base.sum(0), compared.sum(0), epsilon))


def avg_layer_kl(base: Loads, compared: Loads, epsilon: float = EPSILON) -> float:
    """Return the mean over layers of the KL of each (equation 20)."""
    return float(layer_kl(base, compared, epsilon).mean())


def _distribution(loads: Loads, epsilon: float) -> Array:
    smooth = loads.astype(np.float64) + epsilon
    return np.asarray(smooth / smooth.sum(-1, keepdims=True))


def routes_moved(base: NDArray[np.integer], compared: NDArray[np.integer]) -> Array:
    """Return the share of (token, expert) pairs of one run that the other run does not
    have: shape [...].

    base, compared: experts [..., T, K] of the same tokens; their order among a token's
    K does not matter.
    """
    # Compare every choice of one run with every choice of the other: their order is
    # irrelevant.
    in_both = (base[..., :, None] == compared[..., None, :]).any(-1)
    return np.asarray(1 - in_both.mean((-2, -1)))


def switch_balance_loss(loads: Loads, probabilities: Array) -> Array:
    """Return E * sum_e f_e P_e of loads [..., E] and of the router's mean probabilities
    [..., E]: shape [...].

    f_e is the share of pairs of expert e, P_e the mean over tokens of softmax(logits)
    (Switch Transformers, equation 4). The loss is 1 where either is even, and more
    where probable experts are also the loaded ones.
    """
    total = loads.sum(-1, keepdims=True)
    shares = np.divide(loads, total, out=np.zeros(loads.shape), where=total > 0)
    return np.asarray(loads.shape[-1] * (shares * probabilities).sum(-1))
