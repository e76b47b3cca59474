"""Profile the links between the ranks of a launch for `fcsd-steer profile-network`, and check
the profile by exchanges of fixed patterns.
"""

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from fcsd.base.artifact import versions
from fcsd.base.errors import UserError
from fcsd.base.text import progress_bar
from fcsd.base.writing import check_file_place
from fcsd.parallel.launch import Launch
from fcsd.planning.network.links import (
    Array,
    Collective,
    LinkModel,
    read_links,
    write_links,
)
from fcsd.planning.network.simulate import exchange_time
from fcsd_steering.network.exchange import GroupExchange
from fcsd_steering.network.profile import REPEATS, num_exchanges, profile

LARGEST_BYTES = {"cpu": 1 << 20}
"""The largest size with which an edge is measured, by device type; 16 MiB on any other.
"""


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
            f"simulated against measured, {len(errors)} patterns: mean error"
            f" {errors.mean():.1%}, maximum {errors[worst]:.1%} ({self.names[worst]})"
        )


def patterns(size: int, largest_bytes: int, seed: int = 0) -> list[tuple[str, Array]]:
    """Return 18 patterns of bytes [N, N]: 4 balanced, 6 skewed, 4 with a hot
    destination, 4 random.
    """
    rng = np.random.default_rng(seed)
    named = [
        (f"balanced {part}/4", np.full((size, size), largest_bytes * part / 4))
        for part in range(1, 5)
    ]
    usual = largest_bytes * 0.6
    # Destinations of very different popularity, which sources share up to 20 %.
    for number in range(6):
        shares = rng.gamma(0.7, size=size) + 1e-3
        skewed = (
            usual * size * shares / shares.sum() * rng.uniform(0.8, 1.2, (size, size))
        )
        named.append((f"skewed {number}", skewed))
    for number in range(4):
        # 60 % of all bytes go to one endpoint, the rest to the others in equal shares.
        hot = number % size
        total, cold_share = usual * size, 0.4 / (size - 1)
        named.append(
            (
                f"hot {hot}",
                np.tile(
                    np.where(np.arange(size) == hot, 0.6, cold_share) * total, (size, 1)
                ),
            )
        )
    for number in range(4):
        named.append(
            (f"random {number}", rng.integers(0, 9, (size, size)) * largest_bytes / 8)
        )
    return [(name, np.ceil(pattern)) for name, pattern in named]


def measure_and_simulate(
    links: LinkModel,
    exchange: Callable[[Array], float],
    named_patterns: Sequence[tuple[str, Array]],
) -> Comparison:
    """Exchange each pattern and simulate it with the dispatch's links; every rank calls
    this.
    """
    # The minimum of the repeats, as in the profile: disturbances only make an exchange
    # longer.
    measured = [
        min(exchange(pattern) for _ in range(REPEATS)) for _, pattern in named_patterns
    ]
    simulated = exchange_time(
        links, "dispatch", np.stack([pattern for _, pattern in named_patterns])
    )
    return Comparison(
        [name for name, _ in named_patterns], np.array(measured), simulated
    )


def profile_launch(
    launch: Launch,
    path: Path,
    *,
    collective: Collective,
    largest_bytes: int | None = None,
    check: bool = False,
) -> tuple[LinkModel, Comparison | None]:
    """Measure the links between all ranks and write them to `path`; every rank calls
    this.

    check: exchange 18 patterns afterwards, and simulate them.
    """
    ranks, device = launch.ranks, launch.device
    if ranks.size < 2:
        raise UserError(
            "profile-network measures links between ranks, but was started as a single"
            " rank; start it with `accelerate launch --num_processes N -m fcsd_steering"
            " profile-network"
            " LINKS` (configs/cpu_2.yaml without GPUs), or give --nccl-tests"
        )
    largest = largest_bytes
    if largest is None:
        largest = LARGEST_BYTES.get(device.type, 1 << 24)
    # Smaller transfers take no longer than their latency.
    if largest < 1024:
        raise UserError(
            f"--max-bytes {largest}: must be at least 1024; smaller messages show only"
            " the latency"
        )
    # A path that cannot be written is refused before the measurement, not after it.
    ranks.from_first(lambda: check_file_place(path, read_links))
    libraries = versions()
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        libraries = {**libraries, "nccl": nccl}
    facts = {
        "endpoints": ranks.share(lambda: f"{socket.gethostname()}:{ranks.rank}"),
        "collective": collective,
        "backend": dist.get_backend(),
        "libraries": libraries,
    }
    exchange = GroupExchange(None, collective, device)
    named_patterns = patterns(ranks.size, largest) if check else []
    total = num_exchanges(ranks.size) + REPEATS * len(named_patterns)
    with progress_bar(
        total=total, desc="links", unit="exchange", shown=ranks.first
    ) as bar:

        def timed(num_bytes: Array) -> float:
            seconds = exchange(num_bytes)
            bar.update()
            return seconds

        links = profile(timed, facts, largest_bytes=largest)
        comparison = None
        if check:
            comparison = measure_and_simulate(links, timed, named_patterns)
    ranks.from_first(lambda: write_links(path, links))
    return links, comparison


def _rate(seconds_per_byte: float) -> str:
    """Return a rate in Gb/s; no number if noise hides the time of the bytes."""
    if seconds_per_byte <= 1e-13:
        return "too fast to measure"
    return f"{8e-9 / seconds_per_byte:.3g} Gb/s"


def describe(links: LinkModel) -> str:
    """Summarise a links file in a few lines."""
    size = len(links.endpoints)
    edges = [(u, v) for u in range(size) for v in range(size) if u != v]
    alpha, beta = links.alpha("dispatch"), links.beta("dispatch")
    # The range over all edges shows slow links; the fit shows whether to trust it.
    ms = sorted(alpha[edge] * 1e3 for edge in edges)
    rates = sorted((beta[edge] for edge in edges), reverse=True)
    fits = [r2 for u, v in edges if (r2 := links.dispatch.r2[u][v]) is not None]
    lines = [
        f"{size} endpoints, {links.collective} of {links.backend}: latency {ms[0]:.3g}"
        f" to {ms[-1]:.3g} ms, rate {_rate(rates[0])} to {_rate(rates[-1])}, R² at"
        f" least {min(fits):.4f}"
    ]
    refined = sum(map(sum, links.dispatch.refined))
    lines.append(
        f"{refined} of {len(edges)} edges were also measured under contention; the"
        " others only alone"
    )
    for direction in ("egress", "ingress"):
        port_rates = getattr(links.ports, f"{direction}_s_per_byte")
        for name, rate in zip(links.endpoints, port_rates, strict=True):
            if rate is not None:
                lines.append(
                    f"{name}: its edges share its {direction}, {_rate(rate)} in all"
                )
    # A bad fit of a latency and a rate means that the times were disturbed.
    poor = [
        f"{links.endpoints[u]} -> {links.endpoints[v]}"
        for u, v in edges
        if (links.dispatch.r2[u][v] or 0) < 0.9
    ]
    if poor:
        named = ", ".join([*poor[:3], *["…"] * (len(poor) > 3)])
        lines.append(
            f"R² below 0.9 on {len(poor)} edges ({named}): the machine or the network"
            " was busy; measure again, or with larger --max-bytes"
        )
    return "\n".join(lines)
