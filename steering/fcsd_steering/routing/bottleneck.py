"""Make a bias that pushes tokens off the slowest paths only, as far as a goal requires.

An exchange takes as long as its slowest path, so pushing tokens off other paths gains
nothing. The search repeats these steps until the goal is reached: get the model's
routes, simulate the exchanges, weigh each path by softmax(time / slowest time) for
dispatch and combine, and lower the logits of those (source, endpoint) pairs.

X exchanges, L MoE layers, N endpoints, E experts.

Not covered: goals for a phase of serving; routes or links that change from day to day.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fcsd.base.errors import UserError
from fcsd.planning.network.links import Array, LinkModel
from fcsd.planning.network.simulate import Payload, path_times
from fcsd_steering.routing.camoe import for_experts
from fcsd_steering.routing.exchanges import endpoint_counts, exchange_times

Respond = Callable[[NDArray[np.float32]], NDArray[Any]]
"""Given tables [L, N, E], returns the pairs [X, L, N, E] of the model on the
calibration tokens.
"""

TEMPERATURE = 0.03
"""A path 3 % below the slowest is pushed 1/e as much."""
STEP = 0.025
"""The size of a push, in standard deviations of a layer's logits."""
LANDING = 4
"""Halvings of the last step, so that the goal is met and not passed."""
MAX_STEPS = 300


@dataclass(frozen=True)
class Push:
    """The result of a search. tables: float32 [L, N, E]. steps: number of steps taken.
    left: positions of layers that no push brings into their windows, and that therefore
    get no bias.
    """

    tables: NDArray[np.float32]
    steps: int
    left: tuple[int, ...] = ()


@dataclass(frozen=True)
class Deployment:
    """The placement [L, E] of the experts, and the links between their endpoints."""

    links: LinkModel
    payload: Payload
    placement: NDArray[np.integer]

    def paths(self, counts: NDArray[Any]) -> Array:
        """Return the seconds [X, L, 2, N, N] of each (source, endpoint) in dispatch and combine."""
        pairs = endpoint_counts(counts, self.placement)
        out = path_times(self.links, "dispatch", pairs * self.payload.dispatch_bytes)
        back = path_times(
            self.links,
            "combine",
            np.swapaxes(pairs, -1, -2) * self.payload.combine_bytes,
        )
        return np.stack([out, np.swapaxes(back, -1, -2)], axis=-3)

    def mean_time(self, counts: NDArray[Any]) -> float:
        """Return T_A2A, mean over exchanges and layers."""
        return float(
            exchange_times(self.links, counts, self.placement, self.payload).mean()
        )


def bottleneck(
    respond: Respond,
    deployment: Deployment,
    goal_s: float,
    *,
    logit_std: Array | None = None,
) -> Push:
    """Push until exchanges take goal_s, mean over exchanges and layers.

    logit_std: [L], standard deviation of the layers' logits, the unit of steps. None:
    2.4.

    Raises:
        UserError: the goal is out of reach.
    """
    pushes = _zeros(deployment)
    best = deployment.mean_time(
        counts := respond(for_experts(pushes, deployment.placement))
    )
    previous, steps = pushes, 0
    while (mean_s := deployment.mean_time(counts)) > goal_s:
        best = min(best, mean_s)
        if steps == MAX_STEPS:
            raise UserError(
                f"bottleneck: exchanges of {goal_s * 1e3:.3g} ms are out of reach;"
                f" {MAX_STEPS} steps brought them to {best * 1e3:.3g} ms; ask for less"
            )
        # The last step passes the goal, so the answer lies between it and the one
        # before.
        previous = pushes
        pushes = previous - _step(deployment.paths(counts), None, logit_std)
        counts = respond(for_experts(pushes, deployment.placement))
        steps += 1
    # Bisection: the weaker push that still meets the goal changes fewer routes.
    for _ in range(LANDING if steps else 0):
        middle = (previous + pushes) / 2
        halfway = respond(for_experts(middle, deployment.placement))
        if deployment.mean_time(halfway) > goal_s:
            previous = middle
        else:
            pushes = middle
    return Push(for_experts(pushes, deployment.placement), steps)


def fit_windows(
    respond: Respond,
    deployment: Deployment,
    windows: Array,
    *,
    logit_std: Array | None = None,
) -> Push:
    """Push each layer until its dispatch and its combine take no longer than their
    windows [L, 2] of seconds.

    A collective that is already hidden gets no push. Neither does a layer that no push
    can hide, such as one with a window shorter than the latency; it is in `left`.

    Raises:
        UserError: windows for another number of layers, or a negative one.
    """
    num_layers = len(deployment.placement)
    if windows.shape != (num_layers, 2):
        raise UserError(
            f"windows: {len(windows)} layers, but the model has {num_layers} MoE layers"
        )
    if not (windows >= 0).all():
        raise UserError(
            "windows: a time is negative or missing; seconds of 0 or more are needed"
        )
    # Layers are independent: each is pushed by its own late collectives.
    pushes, left, steps = _zeros(deployment), np.zeros(num_layers, dtype=bool), 0
    while True:
        counts = respond(for_experts(pushes, deployment.placement))
        paths = deployment.paths(counts)
        late = (paths.max((-2, -1)).mean(0) > windows) & ~left[:, None]  # [L, 2]
        if not late.any():
            without = np.flatnonzero(left).tolist()
            return Push(
                for_experts(pushes, deployment.placement), steps, tuple(without)
            )
        # At the start give up layers whose window is below the latency; after each
        # MAX_STEPS, all that are still late.
        if steps % MAX_STEPS == 0:
            floor = deployment.paths(np.zeros_like(counts[:1])).max((-2, -1))[0]
            hopeless = late & ((floor > windows) | (steps > 0))
            left |= hopeless.any(1)
            pushes[left] = 0
        pushes = pushes - _step(paths, late & ~left[:, None], logit_std)
        steps += 1


def _zeros(deployment: Deployment) -> Array:
    size = len(deployment.links.endpoints)
    return np.zeros((len(deployment.placement), size, size))


def _step(
    paths: Array, late: NDArray[np.bool_] | None, logit_std: Array | None
) -> Array:
    """Return the amount to subtract from the logits, [L, N, N], for paths [X, L, 2, N,
    N]; late: the phases [L, 2] that count.
    """
    slowest = paths.max((-2, -1), keepdims=True)
    # Where the slowest time is 0 the division fails; those weights become 0 below.
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.exp((paths / slowest - 1) / TEMPERATURE)
    weights = np.where((paths > 0) & np.isfinite(weights), weights, 0.0).mean(0)
    if late is not None:
        weights = weights * late[..., None, None]
    weights = weights.sum(1)
    # The path with the largest weight gets a full step, all others a share of it.
    largest = weights.max((-2, -1), keepdims=True)
    # Without a calibration the unit is 2.4 logits.
    unit = np.full(len(weights), 2.4) if logit_std is None else logit_std
    scaled = np.divide(weights, largest, out=np.zeros(weights.shape), where=largest > 0)
    return np.asarray(STEP * unit[:, None, None] * scaled)
