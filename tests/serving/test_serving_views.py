"""A view of padded memory is summed as its values are: collectives read memory, not strides."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.reference.ranks import run_ranks
from tests.support import ROOT

VIEWS = {
    "padded": lambda x: x[:, :3],  # kernels of MXFP4 experts pad the hidden size
    "transposed": lambda x: x.t(),
    "whole": lambda x: x,
}


def communication() -> Any:
    sys.path.insert(0, str(ROOT / "serving"))
    try:
        return importlib.import_module("fcsd_vllm.communication")
    finally:
        sys.path.remove(str(ROOT / "serving"))


def raw_double(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sum over two equal ranks as NCCL does: so many numbers from where the tensors begin."""
    out.as_strided((out.numel(),), (1,)).copy_(2 * x.as_strided((x.numel(),), (1,)))
    return out


@pytest.mark.parametrize("view", VIEWS)
def test_nccl_on_a_stream_and_the_engines_own_sum_get_whole_memory(view: str) -> None:
    module = communication()
    x = VIEWS[view](torch.arange(20.0).reshape(5, 4))
    event = SimpleNamespace(record=lambda *_: None)
    stream = module.Stream.__new__(module.Stream)
    stream.communicator = SimpleNamespace(all_reduce=lambda x, out, stream: raw_double(x, out))
    stream.stream = SimpleNamespace(wait_event=lambda event: None)
    stream.events, stream.inputs = {"routed.0": (event, event)}, {}
    torch.testing.assert_close(stream.start(x, "routed.0"), 2 * x, rtol=0, atol=0)
    group = SimpleNamespace(all_reduce=lambda x: raw_double(x, x))
    torch.testing.assert_close(module.Blocking(group).start(x, "routed.0"), 2 * x, rtol=0, atol=0)
    assert torch.equal(x, VIEWS[view](torch.arange(20.0).reshape(5, 4)))


def summed(rank: int) -> list[bool]:
    module = communication()
    settings = importlib.import_module("fcsd_vllm.settings").Settings(comm="timed")
    group = SimpleNamespace(world_size=2, device_group=dist.group.WORLD)
    right = []
    for back_end in (module.Timed(group, settings), module.Functional(group)):
        for name, view in VIEWS.items():
            x = view((rank + 1) * torch.arange(20.0).reshape(5, 4))
            total = back_end.wait(back_end.start(x, name), name)
            right.append(torch.equal(total, view(3 * torch.arange(20.0).reshape(5, 4))))
    return right


def test_views_are_summed_between_two_ranks() -> None:
    assert run_ranks(summed, 2) == [[True] * 6] * 2
