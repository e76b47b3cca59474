"""Collectives read memory, not strides: a view of padded memory is still summed and
exchanged by its values.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.reference.ranks import run_ranks
from tests.support import load_modules

VIEWS = {
    "padded": lambda x: x[:, :3],  # kernels of MXFP4 experts pad the hidden size
    "transposed": lambda x: x.t(),
    "whole": lambda x: x,
}


def plugin(name: str) -> Any:
    """Return a module of the plugin."""
    return getattr(load_modules("serving", "fcsd_vllm", [name]), name)


def raw_double(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sum over two equal ranks as NCCL does: this many numbers from the start of the
    tensors.
    """
    out.as_strided((out.numel(),), (1,)).copy_(2 * x.as_strided((x.numel(),), (1,)))
    return out


@pytest.mark.parametrize("view", VIEWS)
def test_nccl_on_a_stream_and_the_engines_own_sum_get_whole_memory(view: str) -> None:
    module = plugin("communication")
    x = VIEWS[view](torch.arange(20.0).reshape(5, 4))
    event = SimpleNamespace(record=lambda *_: None)
    stream = module.Stream.__new__(module.Stream)
    stream.kernels = ()
    stream.communicator = SimpleNamespace(
        all_reduce=lambda x, out, stream: raw_double(x, out)
    )
    stream.stream = SimpleNamespace(wait_event=lambda event: None)
    stream.events, stream.inputs = {"routed.0": (event, event)}, {}
    torch.testing.assert_close(stream.start(x, "routed.0"), 2 * x, rtol=0, atol=0)
    group = SimpleNamespace(all_reduce=lambda x: raw_double(x, x))
    torch.testing.assert_close(
        module.Blocking(group).start(x, "routed.0"), 2 * x, rtol=0, atol=0
    )
    assert torch.equal(x, VIEWS[view](torch.arange(20.0).reshape(5, 4)))


def summed(rank: int) -> list[bool]:
    module = plugin("communication")
    settings = plugin("settings").Settings(comm="timed")
    group = SimpleNamespace(world_size=2, device_group=dist.group.WORLD)
    right = []
    for back_end in (module.Timed(group, settings), module.C10d(group)):
        for name, view in VIEWS.items():
            x = view((rank + 1) * torch.arange(20.0).reshape(5, 4))
            total = back_end.wait(back_end.start(x, name), name)
            right.append(torch.equal(total, view(3 * torch.arange(20.0).reshape(5, 4))))
    return right


def test_views_are_summed_between_two_ranks() -> None:
    assert run_ranks(summed, 2) == [[True] * 6] * 2


SIZES = ([3, 2], [5, 0])
"""Rows of the two ranks: uneven, and none of the second."""
LAID_OUT = {
    "padded": lambda x: torch.cat([x, x + 9], 1)[:, : x.shape[1]],
    "transposed": lambda x: x.t().contiguous().t(),
    "whole": lambda x: x,
}


def exchanged(rank: int) -> list[bool]:
    settings = plugin("settings").Settings
    group = SimpleNamespace(device_group=dist.group.WORLD)
    right = []
    for comm in ("c10d", "timed"):
        transport = plugin("transports").make_transport(settings(comm=comm), group)
        for name, lay_out in LAID_OUT.items():
            for sizes in SIZES:
                rows, ids = torch.arange(15.0).reshape(5, 3), torch.arange(5)[:, None]
                own = [lay_out(x.split(sizes)[rank]) for x in (rows, ids)]
                gathered = transport.gather(own, sizes, f"dispatch.{name}{sizes}")()
                right.append(
                    torch.equal(gathered[0], rows) and torch.equal(gathered[1], ids)
                )
                output = torch.full((sizes[rank], 3), 7.0)
                transport.scatter(
                    lay_out(rows + 100 * rank), output, sizes, f"combine.{name}{sizes}"
                )()
                right.append(torch.equal(output, 2 * rows.split(sizes)[rank] + 100))
    return right


def test_views_of_uneven_numbers_of_rows_are_exchanged_between_two_ranks() -> None:
    assert run_ranks(exchanged, 2) == [[True] * 24] * 2


@pytest.mark.parametrize("view", VIEWS)
def test_nccl_on_a_stream_gathers_and_scatters_whole_memory(view: str) -> None:
    module = plugin("transports")
    x = VIEWS[view](torch.arange(20.0).reshape(5, 4))
    seen = []
    transport = module.StreamTransport.__new__(module.StreamTransport)
    calls = SimpleNamespace(
        group_start=lambda: None,
        group_end=lambda: None,
        all_gatherv=lambda rows, x, sizes, stream: seen.append(x),
        reduce_scatterv=lambda output, x, sizes, stream: seen.append(x),
    )
    transport.stream = SimpleNamespace(begin=lambda run, inputs, tag: run(calls, None))
    transport.gather([x], [len(x)], "dispatch.0")
    transport.scatter(x, torch.empty_like(x), [len(x)], "combine.0")
    assert len(seen) == 2
    assert all(each.is_contiguous() and torch.equal(each, x) for each in seen)
