"""Simulated times beside measured ones: the exchanges of fixed patterns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fcsd.steering.network.links import Array, LinkModel
from fcsd.steering.network.simulate import exchange_time

REPEATS = 3


@dataclass(frozen=True)
class Comparison:
    """Seconds of each pattern, measured (minimum of three) and simulated."""

    names: list[str]
    measured: Array
    simulated: Array

    @property
    def errors(self) -> Array:
        """Simulated over measured, less one."""
        return self.simulated / self.measured - 1

    def __str__(self) -> str:
        errors = np.abs(self.errors)
        worst = int(errors.argmax())
        return (
            f"simulated against measured, {len(errors)} patterns: mean error {errors.mean():.1%}, maximum"
            f" {errors[worst]:.1%} ({self.names[worst]})"
        )


def patterns(size: int, largest_bytes: int, seed: int = 0) -> list[tuple[str, Array]]:
    """Return 18 patterns of bytes [N, N]: 4 balanced, 6 skewed, 4 with a hot destination, 4 random."""
    rng = np.random.default_rng(seed)
    found = [(f"balanced {part}/4", np.full((size, size), largest_bytes * part / 4)) for part in range(1, 5)]
    usual = largest_bytes * 0.6
    for number in range(6):
        shares = rng.gamma(0.7, size=size) + 1e-3
        skewed = usual * size * shares / shares.sum() * rng.uniform(0.8, 1.2, (size, size))
        found.append((f"skewed {number}", skewed))
    for number in range(4):
        hot = number % size
        total, rest = usual * size, 0.4 / (size - 1)
        found.append((f"hot {hot}", np.tile(np.where(np.arange(size) == hot, 0.6, rest) * total, (size, 1))))
    for number in range(4):
        found.append((f"random {number}", rng.integers(0, 9, (size, size)) * largest_bytes / 8))
    return [(name, np.ceil(pattern)) for name, pattern in found]


def measure_and_simulate(
    links: LinkModel,
    exchange: Callable[[Array], float],
    given: Sequence[tuple[str, Array]],
) -> Comparison:
    """Exchange each pattern, and simulate it with the dispatch's links; every rank calls this."""
    measured = [min(exchange(pattern) for _ in range(REPEATS)) for _, pattern in given]
    simulated = exchange_time(links, "dispatch", np.stack([pattern for _, pattern in given]))
    return Comparison([name for name, _ in given], np.array(measured), simulated)
