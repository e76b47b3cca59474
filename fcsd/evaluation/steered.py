"""The original of a run with its routers steered: its scores, its KL to itself, and what its exchanges cost.

KL, routes and times are measured on held-out text, row by row: row j is at endpoint j mod N, and an exchange carries
`evaluation.batch_size` rows of every endpoint.
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
from fcsd.evaluation.backend import Batches
from fcsd.model.families.choices import recording
from fcsd.parallel.launch import Launch
from fcsd.steering.network.links import LinkModel
from fcsd.steering.network.simulate import Payload, exchange_counts, exchange_times, time_summary
from fcsd.steering.routing.metrics import avg_layer_cv, avg_layer_kl, cv, kl, routes_moved
from fcsd.training.losses.kl import Original, mean_kl, read_original

Routes = dict[int, NDArray[np.int16]]
"""The experts [L, T, K] that the tokens of this rank's rows chose, by the number of the row."""


@dataclass(frozen=True)
class Sweep:
    """The original of a run, to be asked under one bias after another; read once for all of them.

    loaded: the original, as this rank holds it. rows: held-out text. placement: [L, E]. batch_size: rows of an endpoint
    in one exchange, and sequences in a batch of the suite.
    """

    loaded: PreTrainedModel
    rows: Sequence[Any]
    links: LinkModel
    placement: NDArray[np.integer]
    payload: Payload
    top_k: int
    batch_size: int
    launch: Launch

    @functools.cached_property
    def _unbiased(self) -> tuple[Original, Routes]:
        with self._routes() as (routes, around):
            return read_original(self.loaded, self.rows, ranks=self.launch.ranks, around_row=around), routes

    def measure(self, loaded: PreTrainedModel, batches: Batches | None) -> dict[str, Any]:
        """Return `kl_to_original`, `exchange` and `routing` of the original, whose routers are biased now."""
        assert batches is not None and batches.begin is not None
        known, _ = self._unbiased
        with self._routes(batches.begin) as (routes, around):
            ranks = self.launch.ranks
            kl = mean_kl(known, loaded, self.rows, ranks=ranks, around_row=around)
        return {"kl_to_original": kl, **self._measured(routes)}

    def unbiased(self) -> dict[str, Any]:
        """Return `exchange` and `routing` of the original itself."""
        return self._measured(None)

    @contextlib.contextmanager
    def _routes(self, begin: Any = None) -> Iterator[tuple[Routes, Any]]:
        """Record what routers choose row by row; give the routes, and what goes around each row."""
        with recording(self.loaded) as recorded:
            routes: Routes = {}

            @contextlib.contextmanager
            def around(row: int) -> Iterator[None]:
                if begin is not None:
                    begin(row)
                yield
                kept = real_tokens(Collator()([self.rows[row]])).flatten()
                found = [routed.experts.cpu()[kept] for routed in recorded.take()]
                routes[row] = torch.stack(found).to(torch.int16).numpy()

            yield routes, around

    def _measured(self, routes: Routes | None) -> dict[str, Any]:
        """Return what exchanges take, and how the routing differs from the original's. All ranks call this."""
        _, before = self._unbiased
        links, size = self.links, self.batch_size
        counts = self._counts(before)
        now = counts if routes is None else self._counts(routes)
        exchanges = exchange_counts(now, len(links.endpoints), size)
        times = exchange_times(links, exchanges, self.placement, self.payload)
        base, loads = counts.sum(0), now.sum(0)
        routing = {"cv": cv(loads), "avg_layer_cv": avg_layer_cv(loads)}
        if routes is not None:
            pairs = self._by_row(
                lambda: {
                    row: (float(routes_moved(before[row], now).mean()), now.shape[1])
                    for row, now in routes.items()
                }
            )
            total = sum(count for _, count in pairs)
            routing |= {
                "kl": kl(base, loads),
                "avg_layer_kl": avg_layer_kl(base, loads),
                "routes_moved": math.fsum(share * count for share, count in pairs) / total,
            }
        tokens = exchanges.sum((2, 3)).mean() / self.top_k / len(links.endpoints)
        return {"exchange": time_summary(times) | {"tokens": float(tokens)}, "routing": routing}

    def _counts(self, routes: Mapping[int, NDArray[np.int16]]) -> NDArray[np.int64]:
        """Return the pairs [rows, L, E] of all ranks' rows."""
        num_experts = self.placement.shape[1]

        def own() -> dict[int, NDArray[np.int64]]:
            return {
                row: np.stack([np.bincount(layer.ravel(), minlength=num_experts) for layer in experts])
                for row, experts in routes.items()
            }

        return np.stack(self._by_row(own))

    def _by_row(self, own: Callable[[], dict[int, Any]]) -> list[Any]:
        """Return what all ranks have of their rows, in the order of the rows."""
        found = {row: value for of_rank in self.launch.ranks.share(own) for row, value in of_rank.items()}
        return [found[row] for row in sorted(found)]
