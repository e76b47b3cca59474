"""Choose how many sequences go into one forward pass: a number, or "auto".

"auto" starts at 128 and halves when the accelerator is out of memory. lm-eval and
`InMemoryBackend.complete` both begin a task with its longest sequences, so a failure comes early and costs little.
Scores do not depend on the size beyond float noise.

Every task starts at 128 again. Of several ranks that hold whole copies each may halve its own.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from fcsd.base.errors import UserError
from fcsd.parallel.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BatchSize = int | Literal["auto"]
Result = TypeVar("Result")
_FIRST, _ON_CPU = 128, 16  # without an accelerator memory runs out without an error that could be caught


def check_batch_size(size: BatchSize, ranks: Ranks = ALONE) -> None:
    """Raise UserError for a number below 1, and for "auto" where the weights are sharded over the ranks."""
    if size == "auto" and ranks.lockstep:
        raise UserError(
            "batch_size: 'auto' needs a rank that can try again alone, and this launch shards the weights over"
            f" {ranks.size}; give a number"
        )
    if isinstance(size, int) and size < 1:
        raise UserError(f"batch_size: must be at least 1, got {size}")


class BatchSizer:
    """The batch size of an evaluation, which shrinks where it may."""

    def __init__(self, size: BatchSize, model: "PreTrainedModel"):
        self.automatic = size == "auto"
        self._first = _ON_CPU if model.device.type == "cpu" else _FIRST
        self.size: int = size if isinstance(size, int) else self._first

    def begin(self, count: int, ranks: Ranks) -> None:
        """Start a task of `count` sequences at the full size again, with some sequences for every rank."""
        if self.automatic:
            self.size = max(1, min(self._first, math.ceil(count / ranks.size)))

    def run(self, work: Callable[[int], Result]) -> Result:
        """Return work(size), with half the size again when out of memory.

        Raises:
            UserError: memory does not suffice, and the size is given or is 1.
        """
        import torch

        from fcsd.model.load import free_memory

        while True:
            try:
                return work(self.size)
            except torch.OutOfMemoryError as error:
                if not self.automatic or self.size == 1:
                    hint = (
                        "lower it, or use 'auto'"
                        if self.size > 1
                        else "the model leaves no room for one sequence"
                    )
                    raise UserError(f"out of memory with batch_size {self.size}: {hint}") from error
            self.size //= 2
            free_memory()
