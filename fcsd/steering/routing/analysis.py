"""What the choices of one model, or of two on the same tokens, come to: JSON-able
values.

Batch j is at endpoint j mod N, and N batches in a row are one step, in which every
endpoint sends what its own batch has for the others. Times are those of one MoE layer's
exchanges in one step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from fcsd.steering.config import PlacedBy
from fcsd.steering.network.links import LinkModel
from fcsd.steering.network.simulate import (
    Payload,
    endpoint_counts,
    exchange_counts,
    exchange_times,
)
from fcsd.steering.routing.metrics import (
    avg_layer_cv,
    avg_layer_kl,
    cv,
    kl,
    layer_cv,
    layer_kl,
    routes_moved,
    switch_balance_loss,
)
from fcsd.steering.routing.placement import Placement, contiguous, placed
from fcsd.steering.routing.routes import FACTORS, Counts, Kept, Routes


@dataclass(frozen=True)
class Network:
    """Endpoints, and if they are known the links between them and the bytes of a token."""

    num_endpoints: int
    links: LinkModel | None = None
    payload: Payload | None = None

    def time(self, steps: Counts, placement: Placement) -> dict[str, float]:
        """Return mean and 95th percentile over steps and layers of T_A2A, in ms;
        nothing without links.
        """
        if self.links is None or self.payload is None:
            return {}
        times = 1e3 * exchange_times(self.links, steps, placement, self.payload)
        return {
            "mean_ms": float(times.mean()),
            "p95_ms": float(np.percentile(times, 95)),
        }


def model_facts(
    routes: Routes, kept: Sequence[Kept], network: Network
) -> dict[str, Any]:
    """Return loads, balance, what capacity factors do, traffic and time of one model.
    kept: for each of FACTORS.
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
    place = contiguous(routes.num_experts, network.num_endpoints)
    steps = exchange_counts(batch_loads, network.num_endpoints)
    num_tokens = int(routes.num_tokens.sum())
    return {
        "layers": routes.layers,
        "num_experts": routes.num_experts,
        "top_k": routes.top_k,
        "num_tokens": num_tokens,
        "counts": sources.tolist(),
        "traffic": endpoint_counts(steps, place).sum((0, 1)).astype(int).tolist(),
        **_spread(loads),
        "layer_cv": layer_cv(loads).tolist(),
        "switch_balance_loss": switch_balance_loss(
            loads, routes.probabilities
        ).tolist(),
        **network.time(steps, place),
        "capacity": [
            {
                "factor": factor,
                "dropped": each.dropped,
                "without_expert": each.without_expert,
                "padding": each.padding,
                **_spread(each.loads.sum(0)),
                **network.time(
                    exchange_counts(each.loads, network.num_endpoints), place
                ),
            }
            for factor, each in zip(FACTORS, kept, strict=True)
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
    base: Routes, compared: Routes, base_kept: Sequence[Kept], kept: Sequence[Kept]
) -> dict[str, Any]:
    """Return how far the routing of `compared` is from that of `base` on the same tokens."""
    before, after = base.batch_loads().sum(0), compared.batch_loads().sum(0)
    moved = routes_moved(base.experts, compared.experts)
    return {
        "routes_moved": float(moved.mean()),
        "layer_moved": moved.tolist(),
        **_shift(before, after),
        "layer_kl": layer_kl(before, after).tolist(),
        "capacity": [
            {"factor": factor, **_shift(one.loads.sum(0), other.loads.sum(0))}
            for factor, one, other in zip(FACTORS, base_kept, kept, strict=True)
        ],
    }


def _shift(base: Counts, compared: Counts) -> dict[str, float]:
    return {"kl": kl(base, compared), "avg_layer_kl": avg_layer_kl(base, compared)}
