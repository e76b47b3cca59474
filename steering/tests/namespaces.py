"""Ranks in network namespaces of their own, joined by a switch in user space with a
delay and a rate for each edge.

Needs root and /dev/net/tun; no netem. A namespace has no name: it is gone when its rank
is, and ranks and switch are killed with the process that started them, however that
ends.

A packet leaves when its edge, and its endpoint's egress port where there is one, have
sent what came before it. Nothing is dropped: what waits is in the switch.
"""

import contextlib
import ctypes
import fcntl
import heapq
import multiprocessing
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from fcsd.planning.network.links import Array
from tests.reference.ranks import run_ranks

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NETWORK = 0x40000000
_DIE_WITH_PARENT, _TIMER_SLACK = 1, 29
_MAKE_TUN, _TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
_MTU = 60000
# CAMoE, A.3
RATES = (
    np.array(
        [
            [0, 1500, 1500, 1500],
            [1500, 0, 1e4, 1e4],
            [1500, 1e4, 0, 1e4],
            [1500, 1e4, 1e4, 0],
        ]
    )
    * 1e6
)
DELAYS = (
    np.array(
        [
            [0, 0.65, 0.56, 0.55],
            [0.645, 0, 0.63, 0.65],
            [0.56, 0.63, 0, 0.07],
            [0.565, 0.65, 0.065, 0],
        ]
    )
    * 1e-3
)


@dataclass(frozen=True)
class Wires:
    """rates: bits a second [N, N]; delays: seconds one way [N, N]; egress: bits a
    second [N], or infinite.
    """

    rates: Array
    delays: Array
    egress: Array

    @property
    def round_trips(self) -> Array:
        return self.delays + self.delays.T


def appendix_a3(slower: float = 10, delay: float = 5, egress: float = np.inf) -> Wires:
    """A.3 with rates divided, and delays multiplied: what two cores can serve."""
    return Wires(RATES / slower, DELAYS * delay, np.full(4, egress))


def in_namespaces(
    fn: Callable[..., Any], wires: Wires, *args: Any, timeout_s: float = 240.0
) -> list[Any]:
    """`run_ranks`, with every rank behind its own end of the wires, where its gloo group is."""
    size = len(wires.rates)
    pairs = [socket.socketpair() for _ in range(size)]
    context = multiprocessing.get_context("fork")
    switch = context.Process(
        target=_switch,
        args=(wires, [end for end, _ in pairs], os.getpid()),
        daemon=True,
    )
    switch.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            ends = [end for _, end in pairs]
            return run_ranks(
                _inside, size, fn, ends, folder, os.getpid(), args, timeout_s=timeout_s
            )
    finally:
        switch.kill()
        switch.join()
        for pair in pairs:
            for end in pair:
                end.close()


def _inside(
    rank: int, fn: Any, ends: list[socket.socket], folder: str, parent: int, args: Any
) -> Any:
    import torch.distributed as dist

    _die_with(parent)
    _called(_LIBC.unshare(_NEW_NETWORK))
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _MAKE_TUN, struct.pack("16sH22x", b"wire", _TUN_WITHOUT_HEADER))
    for words in (
        "link set lo up",
        f"addr add 10.79.0.{rank + 1}/24 dev wire",
        f"link set wire mtu {_MTU} txqueuelen 2000 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    # of this namespace
    with open("/proc/sys/net/ipv4/tcp_slow_start_after_idle", "w") as file:
        file.write("0")
    socket.send_fds(ends[rank], [b"x"], [tun])
    size = dist.get_world_size()
    store = dist.FileStore(os.path.join(folder, "wires"), size)
    store.set(f"here {rank}", "")
    # the group of the host's network may have half met
    store.wait([f"here {each}" for each in range(size)])
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "wire"
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, store=store, timeout=timedelta(seconds=60)
    )
    return fn(rank, *args)


def _called(status: int) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _die_with(parent: int) -> None:
    _called(_LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:  # it has died already
        os._exit(1)


def _switch(wires: Wires, ends: list[socket.socket], parent: int) -> None:
    _die_with(parent)
    _LIBC.prctl(_TIMER_SLACK, 1000, 0, 0, 0)
    # before the ranks: a switch that comes late is a slower wire
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    tuns = [socket.recv_fds(end, 1, 1)[1][0] for end in ends]
    number = {tun: rank for rank, tun in enumerate(tuns)}
    seconds_a_byte = (8 / np.where(wires.rates > 0, wires.rates, 1)).tolist()
    port, delays = (8 / wires.egress).tolist(), wires.delays.tolist()
    edge_free, port_free = [[0.0] * len(tuns) for _ in tuns], [0.0] * len(tuns)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            os.write(tuns[target], packet)
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for tun in select.select(tuns, [], [], left)[0]:
            source = number[tun]
            for _ in range(8):
                try:
                    packet = os.read(tun, 65535)
                except BlockingIOError:
                    break
                target = packet[19] - 1  # the last byte of an IPv4 packet's destination
                if (
                    packet[0] >> 4 != 4
                    or not 0 <= target < len(tuns)
                    or target == source
                ):
                    continue
                now, size = time.monotonic(), len(packet)
                edge_free[source][target] = (
                    max(now, edge_free[source][target])
                    + size * seconds_a_byte[source][target]
                )
                port_free[source] = max(now, port_free[source]) + size * port[source]
                due = (
                    max(edge_free[source][target], port_free[source])
                    + delays[source][target]
                )
                count += 1
                heapq.heappush(waiting, (due, count, target, packet))
