"""Links that carry the rows in the benchmark: a thread or a stream that is busy for
bytes / rate, or network namespaces.
"""

import contextlib
import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class Link:
    """A link between CPU ranks, which carries one exchange after another, each for as
    long as the bytes that leave this rank take.
    """

    def __init__(self, seconds_per_byte: float):
        self.seconds_per_byte = seconds_per_byte
        self.jobs: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self, group: Any) -> "_OnLink":
        return _OnLink(self, group)

    def _run(self) -> None:
        while True:
            work = self.jobs.get()
            began = time.perf_counter()
            work.exchange()
            time.sleep(
                max(
                    0.0,
                    work.num_bytes * self.seconds_per_byte
                    - (time.perf_counter() - began),
                )
            )
            work.finish()


class _OnLink:
    """`fcsd.parallel.overlap.transport.Transport` over a `Link`."""

    def __init__(self, link: Link, group: Any):
        self.link, self.group = link, group

    def start(self, received: Any, sent: Any, receive: Any, send: Any) -> "_Work":
        own = send[dist.get_rank(self.group)]
        row_bytes = sent[:1].numel() * sent.element_size() if len(sent) else 0
        work = _Work(
            lambda: dist.all_to_all_single(
                received, sent, receive, send, group=self.group
            ),
            (sum(send) - own) * row_bytes,
        )
        self.link.jobs.put(work)
        return work


class _Work:
    """One exchange, which is also its own future."""

    def __init__(self, exchange: Any, num_bytes: int):
        self.exchange, self.num_bytes = exchange, num_bytes
        self.done, self.callbacks = threading.Event(), []

    def finish(self) -> None:
        for callback in self.callbacks:
            callback(self)
        self.done.set()

    def wait(self) -> None:
        self.done.wait()

    def get_future(self) -> "_Work":
        return self

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)


class CudaLink:
    """A link from one GPU to `ranks` - 1 virtual ones: rows are copied while the stream
    of the link is busy.
    """

    def __init__(self, bytes_per_second: float, ranks: int):
        self.stream = torch.cuda.Stream(priority=-1)
        # number of rows that one row of this rank stands for
        self.share, self.stands_for = (ranks - 1) / ranks, 1.0
        self.cycles_per_byte = _cycles_per_second() / bytes_per_second

    def __call__(self, group: Any) -> "CudaLink":
        return self

    def start(self, received: Any, sent: Any, receive: Any, send: Any) -> Any:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            received.copy_(sent)
            num_bytes = (
                sent.numel() * sent.element_size() * self.share * self.stands_for
            )
            torch.cuda._sleep(int(num_bytes * self.cycles_per_byte))
            arrived = torch.cuda.Event()
            arrived.record()
        return _Arrival(arrived)


class _Arrival:
    def __init__(self, event: Any):
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def _cycles_per_second() -> float:
    torch.cuda._sleep(10_000_000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(200_000_000)
    end.record()
    end.synchronize()
    return 200_000_000 / (begin.elapsed_time(end) / 1e3)


@contextlib.contextmanager
def namespaces(rate_bits: float) -> Iterator[list[str]]:
    """Create two network namespaces, whose interfaces to each other have the same names
    as they.
    """
    names = [f"fcsd{os.getpid() % 10000}-{end}" for end in (0, 1)]

    def run(*words: str) -> None:
        subprocess.run(words, check=True)

    try:
        for name in names:
            run("ip", "netns", "add", name)
        ends = ("type", "veth", "peer", "name", names[1], "netns", names[1])
        run("ip", "link", "add", names[0], "netns", names[0], *ends)
        for end, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            run(*inside, "ip", "addr", "add", f"10.44.0.{end + 1}/24", "dev", name)
            run(*inside, "ip", "link", "set", name, "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            limit = (
                "rate",
                f"{int(rate_bits)}bit",
                "burst",
                "32kb",
                "latency",
                "400ms",
            )
            run(*inside, "tc", "qdisc", "replace", "dev", name, "root", "tbf", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
