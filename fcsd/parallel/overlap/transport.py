"""Transports carry the rows of an exchange: `start` returns at once, `wait` when the
rows have arrived.

On a GPU `wait` makes the current stream wait, not the host; nothing here names a
stream. Both tensors belong to the exchange until it has been waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Transport(Protocol):
    """Sends rows from each rank of a group to every rank of it."""

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Any:
        """Begin to send `send[r]` rows of `sent` to rank r, and to receive `receive[r]`
        rows from rank r into `received`.

        Returns an object whose `wait()` blocks until it is done, or makes the current
        stream wait for it.
        """


@dataclass
class AllToAll:
    """The all-to-all of a process group."""

    group: dist.ProcessGroup | None

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Any:
        """See `Transport`."""
        return dist.all_to_all_single(
            received, sent, list(receive), list(send), group=self.group, async_op=True
        )


_groups: dict[tuple[int, ...], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def groups_beside(
    group: dist.ProcessGroup,
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return two groups of the ranks of this rank's expert-parallel group, for rows
    and for counts; all ranks of the world call this.

    Counts have a separate group, because in the rows' group they would queue behind a
    running exchange. Rows have one, too: on a GPU its stream has a high priority, so
    that a waiting kernel of it starts before those of compute; and both have the
    backend's timeout, while the launch's may be hours (ranks wait on it for a score).
    """
    own_ranks = tuple(dist.get_process_group_ranks(group))
    # A group of a launch that was torn down since is created again.
    if (
        own_ranks in _groups
        and _groups[own_ranks][1] in dist.distributed_c10d._world.pg_map
    ):
        return _groups[own_ranks]
    ranks_of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks_of_all, own_ranks)
    # new_group is a collective of the world: every rank makes all groups, in one order.
    for ranks in sorted(set(ranks_of_all)):
        counts = dist.new_group(list(ranks))
        options: Any = None
        if "nccl" in dist.get_backend_config(group):
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        rows = dist.new_group(list(ranks), pg_options=options)
        if ranks == own_ranks:
            _groups[own_ranks] = rows, counts
    return _groups[own_ranks]
