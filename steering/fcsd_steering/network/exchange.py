"""Time exchanges over a process group, with the transports of
`fcsd.parallel.overlap`.
"""

import time

import numpy as np
import torch
import torch.distributed as dist

from fcsd.parallel.overlap.transport import AllToAll, SendReceive, Transport
from fcsd.planning.network.links import Array, Collective


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
