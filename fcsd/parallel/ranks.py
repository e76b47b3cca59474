"""Ranks that evaluate one model together: each takes a share of the batches, and all of
them get all answers.

    launch = join_launch()                               # all ranks of the launch; one process: that one
    with prepare_evaluation(tokenizer, suite, config, ranks=launch.ranks) as evaluate:
        result, samples = evaluate(model, "model")

All ranks make these calls, with the same arguments, and get the same results; only the
first one prints, writes and runs programs. This also works on a model in training,
under every engine (`fcsd.parallel.engine`):

copies      every rank has the whole model (of DDP the model inside). A rank asks its own share, at its own pace.
lockstep    the weights are sharded over the ranks (FSDP2, ZeRO-3, expert parallelism), so a forward pass needs all of
            them at the same time. Ranks that finish early run dummy forwards, and
            generation lasts as long as the longest of the ranks.

The batches are those that a single process would make, in the same order, dealt one by
one: the number of ranks changes neither the padding of a sequence nor the seed that it
is sampled with.

Where ranks have copies, an error of one rank in its share is raised on all of them. In
lockstep, and for everything that is not an `Exception`, the others wait in a
collective, and `fcsd.parallel.failure` ends them.

FSDP2 gathers sharded weights for every pass; while a model is scored, they stay gathered
if all ranks have room for them (`gathered_once`).

Not covered: ranks that must see the same batch (tensor parallelism, and expert
parallelism of the `all_reduce` kind).
"""

from __future__ import annotations

import contextlib
import math
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from fcsd.base.errors import UserError
from fcsd.base.memory import available_memory, free_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Share:
    """The items that a rank is dealt, each with its number among all, and their
    results: of this rank within the block of `Ranks.sharing`, of all items, in order,
    behind it.
    """

    items: list[tuple[int, Any]]
    results: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Ranks:
    """This rank's place. lockstep: a forward pass needs all ranks at the same time."""

    rank: int = 0
    size: int = 1
    lockstep: bool = False

    @cached_property
    def first(self) -> bool:
        """Whether this rank prints, writes and runs programs."""
        return self.rank == 0

    def deal(self, batches: Sequence[Item]) -> list[Item]:
        """Return this rank's share, in order."""
        return list(batches[self.rank :: self.size])

    def idle_passes(self, num_batches: int) -> int:
        """Return how many batches fewer than the first rank this one has; in lockstep
        it runs as many dummy forwards.
        """
        num_own = len(range(self.rank, num_batches, self.size))
        return math.ceil(num_batches / self.size) - num_own if self.lockstep else 0

    @contextlib.contextmanager
    def sharing(self, items: Sequence[Any], idle: Callable[[], Any]) -> Iterator[Share]:
        """Give the block the items that this rank is dealt; the block appends a result
        for each, and behind it all ranks have the results of all items.

        idle: runs a dummy forward, on ranks in lockstep that have fewer items. Raises
        as `share`.
        """
        share, error = Share(self.deal(list(enumerate(items)))), None
        try:
            yield share
            # In lockstep, every rank makes as many passes as the busiest one.
            for _ in range(self.idle_passes(len(items))):
                idle()
        except Exception as own_error:
            if self.size == 1 or self.lockstep:
                raise
            error = own_error
        by_rank = self._from_all(share.results, error)
        # Items were dealt in turn, so item i is the (i // size)-th result of rank i %
        # size.
        share.results = [
            by_rank[number % self.size][number // self.size]
            for number in range(len(items))
        ]

    def share(self, call: Callable[[], Result]) -> list[Result]:
        """Return call() of every rank, by rank, on all ranks. Plain data only.

        Raises:
            The error of `call` on this rank; for that of another rank, a UserError or
            RuntimeError with the same text.
        """
        if self.size == 1:
            return [call()]
        own_result, error = _attempt(call)
        # The other ranks are in a forward pass, and would not join the collective.
        if error is not None and self.lockstep:
            raise error
        return self._from_all(own_result, error)

    def _from_all(self, own_result: Any, error: Exception | None) -> list[Any]:
        """Return the results of all ranks, by rank, or raise the first error of one."""
        if self.size == 1:
            return [own_result]
        # The error is also sent to the others, since they wait in the collective.
        outcomes: list[Any] = [None] * self.size
        import torch.distributed as dist

        dist.all_gather_object(outcomes, (own_result, _report(error)))
        _raise_first(error, [report for _, report in outcomes])
        return [result for result, _ in outcomes]

    def from_first(self, call: Callable[[], Result]) -> Result:
        """Call on the first rank alone, and return its result, or raise its error, on
        all ranks. Plain data only.
        """
        if self.size == 1:
            return call()
        # An error is sent like a result, because the others wait for either.
        own_result, error = _attempt(call) if self.first else (None, None)
        outcome: list[Any] = [(own_result, _report(error))]
        import torch.distributed as dist

        dist.broadcast_object_list(outcome, src=0)
        result, report = outcome[0]
        _raise_first(error, [report])
        return result


ALONE = Ranks()


def _attempt(call: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, error


def _report(error: Exception | None) -> tuple[bool, str] | None:
    """Return an error in the form for other ranks: whether it is a user's mistake, and
    its text (for a bug, the traceback).
    """
    # A user's mistake needs no traceback; that of a bug would otherwise be lost here.
    if error is None or isinstance(error, UserError):
        return None if error is None else (True, str(error))
    return False, "".join(traceback.format_exception(error))


def _raise_first(
    own_error: Exception | None, reports: Sequence[tuple[bool, str] | None]
) -> None:
    errors = [
        UserError(report[1]) if report[0] else RuntimeError(report[1])
        for report in reports
        if report
    ]
    if errors:
        # A rank raises its own error if it has one, since that has the real traceback.
        error = own_error or errors[0]
        error.of_all_ranks = True  # type: ignore[attr-defined]
        raise error


def known_to_all(error: BaseException) -> bool:
    """Return whether all ranks have raised this error, or one with the same text, and
    can continue together.
    """
    return getattr(error, "of_all_ranks", False)


def is_sharded(model: nn.Module) -> bool:
    """Return whether this rank holds a shard of the weights: FSDP2 and expert
    parallelism have DTensors, ZeRO-3 ids.
    """
    return any(
        hasattr(weight, "device_mesh") or hasattr(weight, "ds_id")
        for weight in model.parameters()
    )


def input_device(model: Any) -> torch.device:
    """Return the device for token ids; it is not that of the embedding's weights, if
    these are moved to another one for a pass.
    """
    import torch

    # The embedding is the first module, and the only one that gets token ids.
    embedding = model.get_input_embeddings()
    if is_sharded(embedding):
        from accelerate import PartialState

        return PartialState().device  # offloaded weights are in main memory
    # accelerate's hook moves offloaded weights to this device for the pass.
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if device is not None:
        return torch.device(device)
    return next(embedding.parameters()).device


@dataclass(frozen=True)
class Shards:
    """The weights that FSDP2 gathers on a rank: its units, each with whether a forward
    pass frees it, and the bytes of all of them.
    """

    units: list[tuple[Any, bool]]
    num_bytes: int
    device: torch.device


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered (generation leaves the head whole)."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


_WHOLE_AND_REST = 1.1
"""Free memory, as a multiple of all gathered weights, from which on they stay gathered:
a tenth is for caches and activations.
"""


def fits_whole(num_bytes: int, free_bytes: int) -> bool:
    """Tell whether weights of this many bytes stay whole while a model is scored."""
    return _WHOLE_AND_REST * num_bytes <= free_bytes


@contextlib.contextmanager
def gathered_once(model: nn.Module, ranks: Ranks) -> Iterator[None]:
    """Keep the weights that FSDP2 gathers in the block's first forward pass until the
    block ends, if all ranks have room for them.

    Generation makes a pass for every token, and each would gather all weights. All
    ranks enter the block, and change no weights in it. Expert parallelism gathers as it
    does outside.
    """
    # Only models under FSDP2 have such a record.
    shards: list[Shards] = [
        shard_set.__dict__["_shards"]
        for shard_set in model.modules()
        if "_shards" in shard_set.__dict__
    ]
    num_bytes = sum(shard_set.num_bytes for shard_set in shards)
    # All ranks must decide alike, or their gathers would not match.
    keeps_gathered = False
    if shards:
        keeps_gathered = all(
            ranks.share(lambda: fits_whole(num_bytes, _free_bytes(shards[0].device)))
        )
    if keeps_gathered:
        units = [unit for shard_set in shards for unit in shard_set.units]
    else:
        units = []
    for unit, _ in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for unit, frees in units:
            unit.set_reshard_after_forward(frees, recurse=False)
        if units:
            reshard(model)


def _free_bytes(device: torch.device) -> int:
    """Return the bytes that this rank may take of its device's memory."""
    if device.type == "cpu":
        return available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    import torch

    # Unused blocks of the caching allocator are returned to the device first.
    free_memory()
    return int(torch.cuda.mem_get_info(device)[0])
