"""Analyse the choices of one model, or of two models on the same tokens, as JSON-able
values.

Batch j is at endpoint j mod N, and N consecutive batches are one step, in which every
endpoint sends the rows of its batch to the other endpoints. Times are those of one MoE
layer's exchanges in one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from fcsd.planning.network.links import LinkModel
from fcsd.planning.network.simulate import Payload
from fcsd_steering.config import PlacedBy
from fcsd_steering.routing.exchanges import (
    endpoint_counts,
    exchange_counts,
    exchange_times,
)
from fcsd_steering.routing.metrics import (
    avg_layer_cv,
    avg_layer_kl,
    cv,
    kl,
    layer_cv,
    layer_kl,
    routes_moved,
    switch_balance_loss,
)
from fcsd_steering.routing.placement import Placement, contiguous, placed
from fcsd_steering.routing.routes import FACTORS, Counts, Kept, Routes


@dataclass(frozen=True)
class Network:
    """The endpoints and, if known, the links between them and the bytes of a token."""

    num_endpoints: int
    links: LinkModel | None = None
    payload: Payload | None = None

    def time(self, steps: Counts, placement: Placement) -> dict[str, float]:
        """Return mean and 95th percentile of T_A2A over steps and layers, in ms; empty
        without links.
        """
        if self.links is None or self.payload is None:
            return {}
        times = 1e3 * exchange_times(self.links, steps, placement, self.payload)
        return {
            "mean_ms": float(times.mean()),
            "p95_ms": float(np.percentile(times, 95)),
        }


def model_facts(
    routes: Routes, after_dropping: Sequence[Kept], network: Network
) -> dict[str, Any]:
    """Return loads, balance, the effect of capacity factors, traffic and time of one
    model. after_dropping: for each of FACTORS.
    """
    batch_loads = routes.batch_loads()
    loads = batch_loads.sum(0)
    sources = np.stack(
        [
            batch_loads[u :: network.num_endpoints].sum(0)
            for u in range(network.num_endpoints)
        ],
        1,
    )
    placement = contiguous(routes.num_experts, network.num_endpoints)
    steps = exchange_counts(batch_loads, network.num_endpoints)
    num_tokens = int(routes.num_tokens.sum())
    return {
        "layers": routes.layers,
        "num_experts": routes.num_experts,
        "top_k": routes.top_k,
        "num_tokens": num_tokens,
        "counts": sources.tolist(),
        "traffic": endpoint_counts(steps, placement).sum((0, 1)).astype(int).tolist(),
        **_spread(loads),
        "layer_cv": layer_cv(loads).tolist(),
        "switch_balance_loss": switch_balance_loss(
            loads, routes.probabilities
        ).tolist(),
        **network.time(steps, placement),
        "capacity": [
            {
                "factor": factor,
                "dropped": dropped.dropped,
                "without_expert": dropped.without_expert,
                "padding": dropped.padding,
                **_spread(dropped.loads.sum(0)),
                **network.time(
                    exchange_counts(dropped.loads, network.num_endpoints), placement
                ),
            }
            for factor, dropped in zip(FACTORS, after_dropping, strict=True)
        ],
        "placements": _placements(steps, network),
    }


def _spread(loads: Counts) -> dict[str, float]:
    return {"cv": cv(loads), "avg_layer_cv": avg_layer_cv(loads)}


def _placements(steps: Counts, network: Network) -> dict[str, Any]:
    """Compare placements: decided on the first half of the steps, timed on the second;
    a single step is both.
    """
    if network.links is None or network.payload is None:
        return {}
    # A placement decided and timed on the same steps would be flattered.
    half = len(steps) // 2
    decided, timed = (
        (steps[:half].sum(0), steps[half:]) if half else (steps.sum(0), steps)
    )
    placements = {
        by: placed(by, decided, network.links, network.payload)
        for by in get_args(PlacedBy)
    }
    return {
        by: {**network.time(timed, placement), "endpoints": placement.tolist()}
        for by, placement in placements.items()
    }


def comparison(
    base: Routes,
    compared: Routes,
    base_kept: Sequence[Kept],
    compared_kept: Sequence[Kept],
) -> dict[str, Any]:
    """Return the distance of the routing of `compared` from that of `base` on the same
    tokens.
    """
    base_loads = base.batch_loads().sum(0)
    compared_loads = compared.batch_loads().sum(0)
    # Moved routes are counted before drops; KLs before and after.
    moved = routes_moved(base.experts, compared.experts)
    return {
        "routes_moved": float(moved.mean()),
        "layer_moved": moved.tolist(),
        **_shift(base_loads, compared_loads),
        "layer_kl": layer_kl(base_loads, compared_loads).tolist(),
        "capacity": [
            {
                "factor": factor,
                **_shift(base_dropped.loads.sum(0), compared_dropped.loads.sum(0)),
            }
            for factor, base_dropped, compared_dropped in zip(
                FACTORS, base_kept, compared_kept, strict=True
            )
        ],
    }


def _shift(base: Counts, compared: Counts) -> dict[str, float]:
    return {"kl": kl(base, compared), "avg_layer_kl": avg_layer_kl(base, compared)}
