"""Copies, pickles and other precisions of rewired models."""

import copy
import io
import pickle

import pytest
import torch

from fcsd.model.connectivity import (
    Connectivity,
    convert_model,
    farskip_layers,
    load_model,
    unconvert_model,
)
from fcsd.model.families import FAMILIES
from tests.reference.images import inputs_of
from tests.reference.tiny import converted, tiny_model
from tests.support import COMMON, KINDS, few

X = torch.randint(3, 99, (8, 32), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model, input_ids=X, **inputs):
    return model(input_ids, use_cache=False, **inputs).logits.float()


def saved_and_loaded(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = (
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    saved_and_loaded,
)


@pytest.mark.parametrize("family", few(sorted(FAMILIES), kinds={*KINDS, *COMMON}))
def test_copies_are_rewired_and_independent(family):
    model, inputs = converted(family), inputs_of(family)
    copies = [copied(model) for copied in WAYS]
    expected = logits(model, **inputs)
    # The hooks that transformers installs in the first call of these cannot be pickled.
    if family not in ("aria", "mistral_large4"):
        copies += [copied(model) for copied in WAYS]
    unconvert_model(model)
    regular = logits(model, **inputs)
    assert (regular - expected).abs().max() > 1
    for other in copies:
        assert type(other).__name__ == f"FarSkip{FAMILIES[family].causal_lm}"
        assert farskip_layers(other) == [0, 1, 2, 3]
        assert torch.equal(logits(other, **inputs), expected)
        unconvert_model(other)
        assert type(other) is type(model)
        assert torch.equal(logits(other, **inputs), regular)


@pytest.mark.parametrize("family", COMMON)
def test_bfloat16_is_no_less_exact_than_in_the_original(family):
    """Compares mean errors against float32 with the same, already rounded, weights;
    with few tokens, those whose experts change would decide.
    """
    half = tiny_model(family).to(torch.bfloat16)
    full = copy.deepcopy(half).float()
    original = float((logits(half) - logits(full)).abs().mean())
    for model in (half, full):
        convert_model(model, Connectivity("all"))
    assert 0 < float((logits(half) - logits(full)).abs().mean()) < 1.5 * original


@pytest.mark.parametrize("family", COMMON)
def test_the_dtype_can_change_before_and_after_the_conversion(family):
    before = tiny_model(family).to(torch.bfloat16)
    convert_model(before, Connectivity("all"))
    after = converted(family).to(torch.bfloat16)
    assert next(after.parameters()).dtype == torch.bfloat16
    assert torch.equal(logits(before), logits(after))
    with torch.no_grad():
        assert torch.isfinite(after(X, labels=X).loss)


@pytest.mark.parametrize("family", COMMON)
def test_loading_in_bfloat16_is_loading_and_then_converting(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, connectivity=Connectivity("all"), dtype="bfloat16")
    model = load_model(tmp_path, dtype="bfloat16")
    convert_model(model, Connectivity("all"))
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))
