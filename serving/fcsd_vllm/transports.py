"""Exchanges of rows between data-parallel ranks that start in one place and end in
another, with several backends.

    gather    every rank's rows, in the order of ranks: the dispatch of `allgather_reducescatter`
    scatter the sum over ranks of this rank's rows: the combine of
    `allgather_reducescatter`

Ranks may have different numbers of rows (`sizes`), also none. Both return a function
that waits; until it returns, the input of `scatter` is being read. A tag names an
exchange of the model, such as `dispatch.3`, and is the same on every rank and in every
step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fcsd_vllm.communication import Stream, Timed
from fcsd_vllm.settings import Settings


def gather_rows(
    x: torch.Tensor, sizes: list[int], group: Any, wait: bool = True
) -> tuple[torch.Tensor, Any]:
    """Return all ranks' rows, and the work to wait for. gloo gathers only equal
    numbers, so every rank sends to all.
    """
    rows = x.new_empty((sum(sizes), *x.shape[1:]))
    sent = x.repeat(len(sizes), *[1] * (x.dim() - 1))
    work = dist.all_to_all_single(
        rows, sent, sizes, [len(x)] * len(sizes), group, async_op=not wait
    )
    return rows, work


def scatter_rows(
    x: torch.Tensor, sizes: list[int], group: Any, wait: bool = True
) -> tuple[torch.Tensor, Any]:
    """Return every rank's version of this rank's rows, (ranks, rows, …), and the work
    to wait for.
    """
    own = sizes[dist.get_rank(group)]
    parts = x.new_empty((len(sizes) * own, *x.shape[1:]))
    work = dist.all_to_all_single(
        parts, x.contiguous(), [own] * len(sizes), sizes, group, async_op=not wait
    )
    return parts.view(len(sizes), own, *x.shape[1:]), work


class Transport:
    """A backend: torch.distributed on the device's group, gloo on CPUs, NCCL or RCCL
    elsewhere.
    """

    def __init__(self, group: Any, settings: Settings) -> None:
        self.group = group.device_group
        self.settings = settings
        self.at_once = settings.comm == "blocking"  # then nothing arrives here

    def gather(
        self, tensors: list[torch.Tensor], sizes: list[int], tag: str
    ) -> Callable[[], list[torch.Tensor]]:
        """Start to gather the rows of several tensors with equal numbers of rows."""
        begun = [gather_rows(x, sizes, self.group, wait=False) for x in tensors]

        def wait() -> list[torch.Tensor]:
            for _, work in begun:
                work.wait()
            return [rows for rows, _ in begun]

        return wait

    def scatter(
        self, x: torch.Tensor, output: torch.Tensor, sizes: list[int], tag: str
    ) -> Callable[[], object]:
        """Start to sum into `output`."""
        parts, work = scatter_rows(x, sizes, self.group, wait=False)

        def wait() -> None:
            work.wait()
            torch.sum(parts, 0, out=output)

        return wait


def _giving(
    rows: list[torch.Tensor], end: Callable[[], object]
) -> Callable[[], list[torch.Tensor]]:
    """Return a function that waits for the end and returns the rows."""

    def wait() -> list[torch.Tensor]:
        end()
        return rows

    return wait


class TimedTransport(Transport):
    """The thread of `Timed`, with its emulated network; a dispatch is one message, and
    so is a combine.
    """

    def __init__(self, group: Any, settings: Settings) -> None:
        super().__init__(group, settings)
        self.timed = Timed(group, settings)

    def gather(
        self, tensors: list[torch.Tensor], sizes: list[int], tag: str
    ) -> Callable[[], list[torch.Tensor]]:
        """Queue one message; its bytes count all ranks' rows."""
        gathered: list[torch.Tensor] = []

        def run() -> None:
            gathered.extend(gather_rows(x, sizes, self.group)[0] for x in tensors)

        end = self.timed.begin(
            run, sum(x[:1].nbytes for x in tensors) * sum(sizes), tag
        )

        return _giving(gathered, end)

    def scatter(
        self, x: torch.Tensor, output: torch.Tensor, sizes: list[int], tag: str
    ) -> Callable[[], object]:
        """Queue one message."""

        def run() -> None:
            torch.sum(scatter_rows(x, sizes, self.group)[0], 0, out=output)

        return self.timed.begin(run, x.nbytes, tag)


class StreamTransport(Transport):
    """NCCL or RCCL with a separate communicator and stream."""

    def __init__(self, group: Any, settings: Settings) -> None:
        super().__init__(group, settings)
        self.stream = Stream(group)

    def gather(
        self, tensors: list[torch.Tensor], sizes: list[int], tag: str
    ) -> Callable[[], list[torch.Tensor]]:
        """Start when the computing stream has written the tensors."""
        tensors = [x.contiguous() for x in tensors]
        gathered = [x.new_empty((sum(sizes), *x.shape[1:])) for x in tensors]

        def run(communicator: Any, stream: Any) -> None:
            communicator.group_start()
            for x, rows in zip(tensors, gathered, strict=True):
                communicator.all_gatherv(rows, x, sizes, stream=stream)
            communicator.group_end()

        end = self.stream.begin(run, tensors, tag)

        return _giving(gathered, end)

    def scatter(
        self, x: torch.Tensor, output: torch.Tensor, sizes: list[int], tag: str
    ) -> Callable[[], object]:
        """Start when the computing stream has written `x`."""
        x = x.contiguous()

        def run(communicator: Any, stream: Any) -> None:
            communicator.reduce_scatterv(output, x, sizes, stream=stream)

        return self.stream.begin(run, x, tag)


def make_transport(settings: Settings, group: Any) -> Transport:
    """Return the backend that the settings name, over the data-parallel ranks;
    `blocking` is vLLM's own exchange.
    """
    if settings.comm == "timed":
        return TimedTransport(group, settings)
    if settings.comm in ("stream", "nccl"):
        return StreamTransport(group, settings)
    return Transport(group, settings)
