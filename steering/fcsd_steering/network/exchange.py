"""Time exchanges over a process group, as one all-to-all or with a message for each
pair of ranks.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fcsd.parallel.overlap.transport import AllToAll, Transport
from fcsd.planning.network.links import Array, Collective


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
    ) -> Any:
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


class GroupExchange:
    """Time the exchange of bytes between a group's ranks; all ranks call it. device:
    where the bytes are.

    The clock starts after a barrier and stops when this rank has sent and received
    everything; the slowest rank counts.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        collective: Collective,
        device: torch.device,
    ):
        self.group, self.collective, self.device = group, collective, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.transport: Transport = (SendReceive if collective == "p2p" else AllToAll)(
            group
        )
        self._buffers = [
            torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)
        ]

    def __call__(self, num_bytes: Array) -> float:
        """Return the seconds of the slowest rank. num_bytes: [N, N] from rank to rank;
        the diagonal is not sent.
        """
        to_others = np.where(np.eye(self.size, dtype=bool), 0, num_bytes)
        to_others = to_others.astype(np.int64)
        # Every rank has the whole matrix, so both ends of a transfer know its size.
        send = to_others[self.rank].tolist()
        receive = to_others[:, self.rank].tolist()
        sent, received = self._buffer(0, sum(send)), self._buffer(1, sum(receive))
        self._together()
        start = time.perf_counter()
        self._exchange(received, sent, receive, send)
        elapsed = torch.tensor(
            time.perf_counter() - start, dtype=torch.float64, device=self.device
        )
        dist.all_reduce(elapsed, dist.ReduceOp.MAX, group=self.group)
        return float(elapsed)

    def _buffer(self, which: int, num_bytes: int) -> torch.Tensor:
        # Written once: the first use of a page is not the link's time.
        if len(self._buffers[which]) < num_bytes:
            self._buffers[which] = torch.ones(
                num_bytes, dtype=torch.uint8, device=self.device
            )
        return self._buffers[which][:num_bytes]

    def _together(self) -> None:
        # Exchange a byte between all ranks, twice: the last rank to reach the first
        # exchange leaves the second with the others. The backends' barriers release
        # ranks a link's latency apart, which would be counted as the link's.
        single_bytes = [int(peer != self.rank) for peer in range(self.size)]
        for _ in range(2):
            self._exchange(
                self._buffer(1, sum(single_bytes)),
                self._buffer(0, sum(single_bytes)),
                single_bytes,
                single_bytes,
            )

    def _exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        receive: list[int],
        send: list[int],
    ) -> None:
        self.transport.start(received, sent, receive, send).wait()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
