"""Measure a model on held-out text under one bias after another: its KL to the
original, its exchanges, its routes.

Row j is at endpoint j mod N, and an exchange carries `batch_size` rows of every
endpoint.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from fcsd.data.batches import Collator, real_tokens
from fcsd.model.families.choices import recording
from fcsd.parallel.launch import Launch
from fcsd.planning.network.links import Array, LinkModel
from fcsd.planning.network.simulate import Payload
from fcsd.training.losses.heldout_kl import OriginalOutputs, mean_kl, read_original
from fcsd_steering.evaluate import biased_routers
from fcsd_steering.routing.bias import BiasTables
from fcsd_steering.routing.exchanges import exchange_counts, exchange_times
from fcsd_steering.routing.metrics import (
    avg_layer_cv,
    avg_layer_kl,
    cv,
    kl,
    routes_moved,
)

Routes = dict[int, NDArray[np.int16]]
"""The experts [L, T, K] chosen for the tokens of this rank's rows, by row number."""


@dataclass(frozen=True)
class Sweep:
    """A model of a run, loaded once and then measured under one bias after another.

    loaded: this rank's model. original: the original's outputs on the rows; None: the
    model is the original. rows: held-out text. placement: [L, E]. batch_size: rows of
    an endpoint in one exchange, and sequences in a batch of the suite.
    """

    loaded: PreTrainedModel
    original: OriginalOutputs | None
    rows: Sequence[Any]
    links: LinkModel
    placement: NDArray[np.integer]
    payload: Payload
    top_k: int
    batch_size: int
    launch: Launch

    @functools.cached_property
    def _unbiased(self) -> tuple[OriginalOutputs, Routes]:
        """The original's outputs on the rows, and the routes of the model without a
        bias.
        """
        ranks = self.launch.ranks
        with self._routes() as (routes, around):
            if self.original is None:
                return (
                    read_original(
                        self.loaded, self.rows, ranks=ranks, around_row=around
                    ),
                    routes,
                )
            mean_kl(
                self.original, self.loaded, self.rows, ranks=ranks, around_row=around
            )
            return self.original, routes

    def measure(self, tables: BiasTables) -> dict[str, Any]:
        """Return `kl_to_original`, `exchange` and `routing` of the model under a bias."""
        # First: it may have to run the model without a bias.
        original_outputs, _ = self._unbiased
        with (
            biased_routers(self.loaded, tables) as batches,
            self._routes(batches.begin) as (routes, around),
        ):
            kl = mean_kl(
                original_outputs,
                self.loaded,
                self.rows,
                ranks=self.launch.ranks,
                around_row=around,
            )
        return {"kl_to_original": kl, **self._measured(routes)}

    def unbiased(self) -> dict[str, Any]:
        """Return `exchange` and `routing` of the model without a bias."""
        return self._measured(None)

    @contextlib.contextmanager
    def _routes(self, begin: Any = None) -> Iterator[tuple[Routes, Any]]:
        """Record the experts that routers choose; yield the routes, and a context to
        enter around each row.
        """
        with recording(self.loaded) as recorded:
            routes: Routes = {}

            @contextlib.contextmanager
            def around(row: int) -> Iterator[None]:
                if begin is not None:
                    begin(row)
                yield
                # Padding is also routed, but is not text.
                mask = real_tokens(Collator()([self.rows[row]])).flatten()
                experts = [routed.experts.cpu()[mask] for routed in recorded.take()]
                routes[row] = torch.stack(experts).to(torch.int16).numpy()

            yield routes, around

    def _measured(self, routes: Routes | None) -> dict[str, Any]:
        """Return the time of exchanges, and the difference of the routing from that
        without a bias. All ranks call this.
        """
        _, unbiased_routes = self._unbiased
        links, size = self.links, self.batch_size
        counts = self._counts(unbiased_routes)
        biased = counts if routes is None else self._counts(routes)
        exchanges = exchange_counts(biased, len(links.endpoints), size)
        times = exchange_times(links, exchanges, self.placement, self.payload)
        base, loads = counts.sum(0), biased.sum(0)
        routing = {"cv": cv(loads), "avg_layer_cv": avg_layer_cv(loads)}
        if routes is not None:
            # Rows differ in length, so shares are weighted by their numbers of tokens.
            pairs = self._by_row(
                lambda: {
                    row: (
                        float(routes_moved(unbiased_routes[row], biased).mean()),
                        biased.shape[1],
                    )
                    for row, biased in routes.items()
                }
            )
            total = sum(count for _, count in pairs)
            routing |= {
                "kl": kl(base, loads),
                "avg_layer_kl": avg_layer_kl(base, loads),
                "routes_moved": (
                    math.fsum(share * count for share, count in pairs) / total
                ),
            }
        tokens = exchanges.sum((2, 3)).mean() / self.top_k / len(links.endpoints)
        return {
            "exchange": _time_summary(times) | {"tokens": float(tokens)},
            "routing": routing,
        }

    def _counts(self, routes: Mapping[int, NDArray[np.int16]]) -> NDArray[np.int64]:
        """Return the pairs [rows, L, E] of all ranks' rows."""
        num_experts = self.placement.shape[1]

        def rank_counts() -> dict[int, NDArray[np.int64]]:
            return {
                row: np.stack(
                    [
                        np.bincount(layer.ravel(), minlength=num_experts)
                        for layer in experts
                    ]
                )
                for row, experts in routes.items()
            }

        return np.stack(self._by_row(rank_counts))

    def _by_row(self, rank_values: Callable[[], dict[int, Any]]) -> list[Any]:
        """Return the values of all ranks' rows, in the order of the rows."""
        values = {
            row: value
            for of_rank in self.launch.ranks.share(rank_values)
            for row, value in of_rank.items()
        }
        return [values[row] for row in sorted(values)]


def _time_summary(times: Array) -> dict[str, Any]:
    """Return mean and 95th percentile over exchanges and layers, in seconds, and the
    number of values.
    """
    return {
        "mean_s": float(times.mean()),
        "p95_s": float(np.percentile(times, 95)),
        "num_exchanges": int(times.size),
    }
