"""Inside a context a rewired model is the original, with every kind of layer; after it,
it is rewired as before.
"""

import pytest
import torch

from fcsd.model.connectivity import Connectivity, convert_model, farskip_layers
from fcsd.model.connectivity.rewire import regular
from fcsd.model.families import FAMILIES
from tests.reference.tiny import TINY, logits, tiny_model

# One family for each kind of layer: the others differ only in names.
KINDS = {
    (
        family.layout, bool(family.norms), bool(family.moe_argument), bool(family.block_shared),
        bool(family.block_gate), family.shared_in_place, family.additive, bool(family.layer_shared), family.residual,
        bool(family.side_output), bool(family.stream_edit), family.multimodal,
    ): name
    for name, family in reversed(FAMILIES.items()) if name in TINY
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(KINDS.values()))
def test_inside_the_context_the_logits_are_the_originals_to_the_last_bit(family):
    model = tiny_model(family)
    original = logits(model)
    convert_model(model, Connectivity("all"))
    rewired, layers = logits(model), farskip_layers(model)
    with regular(model):
        inside = logits(model)
        assert farskip_layers(model) == []
    assert torch.equal(inside, original) and not torch.equal(rewired, original)
    assert farskip_layers(model) == layers and torch.equal(logits(model), rewired)


def test_an_error_inside_the_context_leaves_the_model_rewired():
    model = tiny_model("qwen2_moe")
    convert_model(model, Connectivity("all"))
    rewired = logits(model)
    with pytest.raises(ZeroDivisionError), regular(model):
        raise ZeroDivisionError
    assert torch.equal(logits(model), rewired)
