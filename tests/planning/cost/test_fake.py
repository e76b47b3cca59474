"""Repeated operations against torch's own FakeTensorMode, which computes every
shape.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fcsd.planning.cost.fake import FakeTensors


def form(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )


def operations(x: Tensor, y: Tensor) -> list[Tensor]:
    """Cover views, in-place operations, several outputs, promotion by the type of a
    number, and given outputs.
    """
    parts = x.split(2, dim=-1)
    normed = nn.functional.layer_norm(x, (x.shape[-1],))
    out = torch.empty_like(x)
    torch.add(x, y, out=out)
    torch.add(x, x, out=x)
    return [
        *parts, normed, out, x, x[1:, ::2].T, x.expand(3, *x.shape), x.to(torch.bfloat16) * 2, (x > 0) * 1,
        x.mul_(2), x.mul_(x), y.copy_(x), torch.cat([x, y]), torch.topk(x, 2).indices, x.new_zeros(3), x.sum(), x @ y.T,
        torch.empty_strided((2, 2), (4, 1)), x.view(-1)[3:5], (x > 0) * 1.0,
    ]  # fmt: skip


@pytest.mark.parametrize("same", [False, True])
def test_what_comes_again_has_the_form_and_the_storage_that_torchs_own_mode_gives(
    same: bool,
) -> None:
    def made(mode: Any) -> list[list[Tensor]]:
        with mode:
            runs = []
            for size in (6, 8, 6, 6, 8):
                x = torch.empty(4, size)
                runs.append([x, *operations(x, x if same else torch.empty(4, size))])
            return runs

    calls: list[Any] = []
    for own, torchs in zip(
        made(FakeTensors(lambda *call: calls.append(call[0]))),
        made(FakeTensorMode()),
        strict=True,
    ):
        assert [form(tensor) for tensor in own] == [form(tensor) for tensor in torchs]
        for several in (own, torchs):
            assert several[0].untyped_storage().nbytes() == 4 * several[0].numel()
        shared = [
            [a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in run]
            for run in (own, torchs)
            for a in run
        ]
        assert shared[: len(own)] == shared[len(own) :]
    # each is passed on, either run or remembered
    assert calls.count(torch.ops.aten.mm.default) == 5


def test_a_gradient_comes_back_and_what_needs_data_is_refused_each_time() -> None:
    for _ in range(2):
        with FakeTensors(lambda *_: None):
            weight = nn.Parameter(torch.empty(3, 3))
            (torch.empty(2, 3) @ weight).relu().sum().backward()
            assert weight.grad is not None and weight.grad.shape == (3, 3)
            assert torch.tensor(3).item() == 3
            with pytest.raises(Exception, match="_local_scalar_dense"):
                weight.sum().item()
