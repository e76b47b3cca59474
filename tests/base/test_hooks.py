"""Hooks see the inputs and outputs of modules, and none stays registered."""

import contextlib

import torch
from torch import nn

from fcsd.base.hooks import Stopped, first_tensor, hidden_states, hooked


def test_calls_are_seen_in_the_block_and_hooks_are_gone_behind_it_also_after_a_stop():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    seen: list[tuple[int, ...]] = []
    with hooked(
        before=[(model[0], lambda args, kwargs: seen.append(args[0].shape))],
        after=[(model[1], lambda args, kwargs, out: seen.append(out.shape))],
    ):
        model(torch.zeros(5, 2))
    assert seen == [(5, 2), (5, 4)]

    def stop(args: object, kwargs: object) -> None:
        raise Stopped

    with contextlib.suppress(Stopped), hooked(before=[(model[1], stop)]):
        model(torch.zeros(1, 2))
    assert model(torch.zeros(1, 2)).shape == (1, 4)
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model
    )


def test_the_hidden_states_of_a_call_are_those_of_that_name_or_the_first_tensor():
    one, two = torch.zeros(1), torch.ones(1)
    assert first_tensor({"a": None, "b": ([one], two)}) is one
    assert first_tensor((None, 3)) is None
    assert hidden_states((one,), {"mask": two}) is one
    assert hidden_states((one,), {"hidden_states": two}) is two
