"""Record every choice of a model's routers on a text, batch by batch, so that two runs
can be compared.

Not covered: text whose choices (2 bytes for each token, layer and chosen expert) do not
fit in main memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fcsd.model.families.capacity import capacity, kept_pairs
from fcsd.model.families.routers import find_routers
from fcsd.parallel.launch import ALONE, Ranks
from fcsd_steering.routing.counts import read_batches
from fcsd_steering.routing.metrics import Array

Counts = NDArray[np.int64]


FACTORS = (1.0, 1.25, 2.0, 4.0)


@dataclass(frozen=True)
class Routes:
    """The choices of L layers, T tokens in J batches, K of E experts each.

    layers: indices of the MoE layers. experts: int16 [L, T, K]. num_tokens: tokens of
    each batch, [J]. probabilities: mean of softmax(logits) over the tokens, [L, E].
    """

    layers: list[int]
    num_experts: int
    experts: NDArray[np.int16]
    num_tokens: Counts
    probabilities: Array

    @property
    def top_k(self) -> int:
        """The number of experts of one token in one layer."""
        return self.experts.shape[-1]

    def batches(self) -> list[NDArray[np.int16]]:
        """Return the experts [L, t, K] of each batch."""
        return np.split(self.experts, np.cumsum(self.num_tokens)[:-1], axis=1)

    def batch_loads(self) -> Counts:
        """Return the pairs of each expert, [J, L, E]."""
        return np.stack(
            [
                self._loads(batch, np.ones(batch.shape, dtype=bool))
                for batch in self.batches()
            ]
        )

    def keep(self, factor: float) -> "Kept":
        """Drop the pairs of each batch that exceed the capacity of a factor."""
        loads, num_without, num_slots = [], 0, 0
        for batch in self.batches():
            # Capacity is per batch, as it would be in an exchange.
            limit = capacity(factor, batch.shape[1], self.top_k, self.num_experts)
            # Layer by layer: an expert's buffer belongs to one layer.
            pairs = np.stack(
                [
                    kept_pairs(torch.from_numpy(experts), limit).numpy()
                    for experts in batch
                ]
            )
            loads.append(self._loads(batch, pairs))
            # A token whose experts are all full gets no routed output in this layer.
            num_without += int((~pairs.any(-1)).sum())
            num_slots += limit * self.num_experts * len(batch)
        num_kept, choices = int(np.sum(loads)), self.experts.size // self.top_k
        return Kept(
            np.stack(loads),
            1 - num_kept / self.experts.size,
            num_without / choices,
            1 - num_kept / num_slots,
        )

    def _loads(self, batch: NDArray[np.int16], is_kept: NDArray[np.bool_]) -> Counts:
        counts = [
            np.bincount(experts[pairs], minlength=self.num_experts)
            for experts, pairs in zip(batch, is_kept, strict=True)
        ]
        return np.stack(counts)


@dataclass(frozen=True)
class Kept:
    """The effect of a capacity factor: the remaining pairs of each expert [J, L, E],
    and three shares: of dropped pairs, of tokens without an expert in a layer, of
    padding in the buffers of all experts.
    """

    loads: Counts
    dropped: float
    without_expert: float
    padding: float


def read_routes(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    *,
    ranks: Ranks = ALONE,
    bar: str | None = None,
) -> Routes:
    """Run a model on batches and record its routers' choices for all tokens but
    padding; all ranks get the routes of one process.
    """
    routers = find_routers(model)
    choices = read_batches(
        model, batches, lambda routed, _: _summed(routed), ranks=ranks, bar=bar
    )
    experts, probabilities = zip(*choices, strict=True)
    num_tokens = np.array([batch.shape[1] for batch in experts])
    return Routes(
        [router.layer for router in routers],
        routers[0].num_experts,
        np.concatenate(experts, 1),
        num_tokens,
        np.sum(probabilities, 0) / num_tokens.sum(),
    )


def _summed(routed: Sequence[tuple[Tensor, Tensor]]) -> tuple[NDArray[np.int16], Array]:
    """Return the experts of one batch [L, t, K], and the probabilities summed over its tokens."""
    experts = (
        torch.stack([chosen.cpu() for chosen, _ in routed]).numpy().astype(np.int16)
    )
    # One layer at a time, since float64 probabilities of all layers would need much
    # memory.
    probabilities = [logits.double().softmax(-1).sum(0).cpu() for _, logits in routed]
    return experts, torch.stack(probabilities).numpy()
