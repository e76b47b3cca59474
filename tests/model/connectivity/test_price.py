"""The extra computation of a rewired model: the sums that the connectivity needs, and
little Python.
"""

import copy
import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fcsd.model.connectivity import Connectivity, convert_model
from tests.reference.tiny import tiny_model

NORM = {"mean": 2, "sub": 2, "pow": 1, "add": 1, "rsqrt": 1, "mul": 2}
EXTRA: dict[str, dict[str, int]] = {
    "qwen3_moe": {},  # the partial stream is h, which the family makes anyway
    "deepseek_v2": {"add": 1},  # h + shared
    "qwen2_moe": {"add": 1},
    "llama4_text": {"add": 1},
    "granitemoeshared": {"mul": 1, "add": 1},  # h + c·shared
    # o + attn, + shared/2, and the norm of the partial stream
    "cohere2_moe": {**NORM, "add": 3, "mul": 3},
}
"""Family -> operators that write memory, for a layer whose routed output stays in flight."""


class Operators(TorchDispatchMode):
    """Counts the operators that write memory, in place or not."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view:
            self.counts[function.overloadpacket.__name__.removesuffix("_")] += 1
        return function(*args, **(kwargs or {}))


def pair(family):
    """Return the original and the rewired model, which route tokens alike, because no
    branch adds anything.
    """
    original = tiny_model(family)
    for name, parameter in original.named_parameters():
        if any(part in name for part in ("o_proj", "down_proj", "output_linear")):
            parameter.data.zero_()
    rewired = copy.deepcopy(original)
    convert_model(rewired, Connectivity("all"))
    return original, rewired


IDS = torch.randint(3, 99, (2, 11), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("family", EXTRA)
@torch.no_grad()
def test_a_rewired_layer_computes_only_the_sums_that_the_connectivity_needs(family):
    counts = []
    models = pair(family)
    for model in models:
        with Operators() as operators:
            model(IDS, use_cache=False)
        counts.append(operators.counts)
    in_flight = sum(layer.farskip_plan.carry for layer in models[1].model.layers)
    assert in_flight >= 2
    assert counts[1] - counts[0] == Counter(
        {name: count * in_flight for name, count in EXTRA[family].items()}
    )
    assert not counts[0] - counts[1]


@torch.no_grad()
def test_a_rewired_layer_costs_at_most_nine_calls_of_python():
    calls = []
    for model in pair("qwen3_moe"):
        model(IDS, use_cache=False)
        events = Counter()
        before = sys.getprofile()
        sys.setprofile(
            lambda frame, event, argument, events=events: events.update([event])
        )
        try:
            model(IDS, use_cache=False)
        finally:
            sys.setprofile(before)
        calls.append(events["call"])
    assert 0 < calls[1] - calls[0] <= 9 * 4


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "llama4_text", "cohere2_moe", "minimax"]
)
def test_what_is_shared_without_gradients_changes_no_bit(family):
    """With gradients every reader computes its own sum, as in the equations."""
    model = tiny_model(family)
    convert_model(model, Connectivity("all"))
    with torch.no_grad():
        shared = model(IDS, use_cache=False).logits
    assert torch.equal(shared, model(IDS, use_cache=False).logits)
