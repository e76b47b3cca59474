"""Transports carry the rows of an exchange: `start` returns at once, `wait` when the
rows have arrived.

On a GPU `wait` makes the current stream wait, not the host; nothing here names a
stream. Both tensors belong to the exchange until it has been waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """An exchange that is under way."""

    def wait(self) -> Any:
        """Block until it is done, or make the current stream wait for it."""


class Transport(Protocol):
    """Sends rows from each rank of a group to every rank of it."""

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Work:
        """Begin to send `send[r]` rows of `sent` to rank r, and to receive `receive[r]`
        rows from rank r into `received`.
        """


class AllToAll:
    """The all-to-all of a process group."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Work:
        """See `Transport`."""
        work: Work = dist.all_to_all_single(
            received, sent, list(receive), list(send), group=self.group, async_op=True
        )
        return work


class SendReceive:
    """Every irecv, then every isend: both directions of a pair run concurrently.

    gloo's all-to-all serves the two one after another: the message that a receiver is
    ready queues behind the rows that it sends itself.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Work:
        """See `Transport`."""
        rank, size = dist.get_rank(self.group), len(send)
        coming, going = received.split(list(receive)), sent.split(list(send))
        # in the order of the distance, so that not all ranks begin with the same peer
        peers = [
            ((rank - step) % size, (rank + step) % size) for step in range(1, size)
        ]
        ops = [
            self._op(dist.irecv, coming[source], source)
            for source, _ in peers
            if receive[source]
        ]
        # Receives come first, so that each message finds its buffer.
        ops += [
            self._op(dist.isend, going[target], target)
            for _, target in peers
            if send[target]
        ]
        # A rank's own rows need no message.
        coming[rank].copy_(going[rank])
        return _Together(dist.batch_isend_irecv(ops) if ops else [])

    def _op(self, kind: Any, rows: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, rows, group=self.group, group_peer=peer)


class _Together:
    def __init__(self, works: list[Any]):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


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
        nccl = "nccl" in dist.get_backend_config(group)
        rows = _urgent_group(list(ranks)) if nccl else dist.new_group(list(ranks))
        if ranks == own_ranks:
            _groups[own_ranks] = rows, counts
    return _groups[own_ranks]


def _urgent_group(ranks: list[int]) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(ranks, pg_options=options)
