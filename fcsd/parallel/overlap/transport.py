"""What carries the rows of an exchange: `start` returns at once, `wait` when the rows
are there.

On a GPU `wait` makes the current stream wait, not the host; nothing here names a
stream. Both tensors are the exchange's until it has been waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """Something that is under way."""

    def wait(self) -> Any:
        """Return when it is done, or make the current stream wait for it."""


class Transport(Protocol):
    """Sends rows from each rank of a group to each."""

    def start(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: Sequence[int],
        send: Sequence[int],
    ) -> Work:
        """Begin to send `send[r]` rows of `sent` to rank r, and to fill `received` with
        `receive[r]` rows of rank r.
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
    """Every irecv, then every isend: both directions of a pair run at once.

    gloo's all-to-all serves them one after the other: its receiver's readiness queues
    behind its own rows.
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
        ops += [
            self._op(dist.isend, going[target], target)
            for _, target in peers
            if send[target]
        ]
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
    """Return the groups for rows and for counts of this rank's expert-parallel group;
    all ranks of the world call this.

    Counts have a group of their own: on the rows' they would queue behind an exchange
    that is under way. The rows have one, too: on a GPU its stream has a high priority,
    so that a waiting kernel of it starts before compute's; and both have the backend's
    timeout, where the launch's may be hours (a score is waited for on it).
    """
    own = tuple(dist.get_process_group_ranks(group))
    if own in _groups and _groups[own][1] in dist.distributed_c10d._world.pg_map:
        return _groups[own]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for ranks in sorted(set(everyone)):  # every rank makes all groups, in one order
        counts = dist.new_group(list(ranks))
        nccl = "nccl" in dist.get_backend_config(group)
        rows = _urgent_group(list(ranks)) if nccl else dist.new_group(list(ranks))
        if ranks == own:
            _groups[own] = rows, counts
    return _groups[own]


def _urgent_group(ranks: list[int]) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(ranks, pg_options=options)
