"""What a capacity factor drops: an expert takes so many tokens of a batch, the rest of its tokens go without it.

    capacity = ceil(factor * K * tokens / experts)         of each batch, for each expert

K belongs in it: the article of `docs/steer.md` (blog.vikrampawar.com, part 2 of "How do Mixture of Experts Layers
Work?") leaves it out of its text ("batch_tokens / num_experts"), which at top-8 would drop seven pairs of eight of a
perfectly even routing. Tokens come in order, as they do in the article's loop; a dropped pair
contributes zero to its token's sum. The article's own gather clamps the index instead and adds another token's output.

Not covered: experts that choose tokens; a capacity that is counted over several ranks together.
"""

import math

import numpy as np
from numpy.typing import NDArray

FACTORS = (1.0, 1.25, 2.0, 4.0)


def capacity(factor: float, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return how many tokens of a batch one expert takes."""
    return math.ceil(round(factor * top_k * num_tokens / num_experts, 9))


def kept_pairs(experts: NDArray[np.integer], limit: int) -> NDArray[np.bool_]:
    """Return which pairs of a batch, experts [T, K], are among the first `limit` of their expert: [T, K]."""
    flat = experts.reshape(-1)
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    place = np.arange(len(flat)) - np.searchsorted(ordered, ordered)
    kept = np.empty(len(flat), dtype=bool)
    kept[order] = place < limit
    return kept.reshape(experts.shape)
