"""`generate` with rewired models: caches, beams, drafts, padding. Greedy and beam
scores are compared with the equations, not with another run of the model."""

import copy

import pytest
import torch

from tests.float64 import BOUND
from tests.model.connectivity.test_ways_parallel import FEW
from tests.reference.reference import reference_forward
from tests.reference.tiny import converted, tiny_model
from tests.support import COMMON, cache_of, few

# Rows on which beams find texts at least as likely as greedy decoding.
X = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(3))

pytestmark = pytest.mark.usefixtures("float64")

# Longer than gpt_oss' window of 8 and llama4's chunk of 16 tokens.
SETTINGS = {
    "max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
    "attention_mask": torch.ones_like(X),
}  # fmt: skip


@torch.no_grad()
def reference_logits(family, sequences):
    return reference_forward(tiny_model(family), sequences, range(4))[0]


@pytest.mark.parametrize("family", few(COMMON, kinds=FEW))
def test_greedy_generation_with_a_dynamic_and_a_static_cache_follows_the_equations(
    family,
):
    model = converted(family)
    dynamic = model.generate(X, **SETTINGS)
    expected = reference_logits(family, dynamic).argmax(-1)[:, X.shape[1] - 1 : -1]
    assert torch.equal(dynamic[:, X.shape[1] :], expected)
    assert len(set(dynamic[0, X.shape[1] :].tolist())) > 3
    static = model.generate(
        X, cache_implementation="static", return_dict_in_generate=True, **SETTINGS
    )
    assert [type(cache).__name__ for cache in cache_of(static).values()] == [
        "StaticCache"
    ]
    assert torch.equal(static.sequences, dynamic)


@pytest.mark.parametrize("family", few(COMMON, kinds=FEW))
def test_beam_search_gives_sequences_with_the_scores_of_the_equations(family):
    model = converted(family)
    beams = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "length_penalty": 1.0,
    } | SETTINGS
    cached, plain = (
        model.generate(
            X,
            use_cache=cache,
            output_scores=True,
            return_dict_in_generate=True,
            **beams,
        )
        for cache in (True, False)
    )
    assert torch.equal(cached.sequences, plain.sequences)
    start = X.shape[1]
    log_probs = reference_logits(family, cached.sequences).log_softmax(-1)[
        :, start - 1 : -1
    ]
    chosen = log_probs.gather(2, cached.sequences[:, start:, None])[..., 0]
    assert (cached.sequences_scores - chosen.mean(1)).abs().max() < BOUND
    greedy = model.generate(X, **SETTINGS)
    greedy_scores = reference_logits(family, greedy).log_softmax(-1)[:, start - 1 : -1]
    greedy_scores = greedy_scores.gather(2, greedy[:, start:, None])[..., 0].mean(1)
    assert (cached.sequences_scores[::2] >= greedy_scores - BOUND).all()


@pytest.mark.parametrize("family", few(COMMON, kinds=FEW))
def test_right_padding_changes_nothing(family):
    model = converted(family)
    mask = torch.ones_like(X)
    mask[0, -4:] = 0
    with torch.no_grad():
        padded = model(X, attention_mask=mask, use_cache=False).logits
        alone = model(X[:1, :-4], use_cache=False).logits
        whole = model(X[1:], use_cache=False).logits
    assert (padded[:1, :-4] - alone).abs().max() < BOUND
    assert (padded[1:] - whole).abs().max() < BOUND


@pytest.mark.parametrize("family", few(COMMON, kinds=FEW))
@pytest.mark.parametrize("draft", few(["small", "same"], 1))
def test_assisted_generation_gives_the_greedy_tokens(family, draft):
    model = converted(family)
    x, settings = X[:1], SETTINGS | {"attention_mask": torch.ones_like(X[:1])}
    greedy = model.generate(x, **settings)
    # A random draft is rejected token by token, which cuts the cache back; the model as
    # its own draft never is.
    assistant = (
        tiny_model("qwen3_moe", seed=1, num_hidden_layers=1)
        if draft == "small"
        else copy.deepcopy(model)
    )
    passes = []
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    assisted = model.generate(x, assistant_model=assistant, **settings)
    hook.remove()
    assert torch.equal(assisted, greedy)
    assert len(passes) < 9 if draft == "same" else len(passes) > 5


@pytest.mark.parametrize("family", few(COMMON, kinds=FEW))
def test_hidden_states_recorded_while_generating_are_the_full_streams(family):
    model = converted(family)
    out = model.generate(
        X, output_hidden_states=True, return_dict_in_generate=True, **SETTINGS
    )
    assert torch.equal(out.sequences, model.generate(X, **SETTINGS))
    with torch.no_grad():
        streams = reference_forward(
            tiny_model(family), out.sequences[:, :-1], range(4)
        )[1]
    assert len(out.hidden_states) == 9
    # the last recorded state is after the final norm, in the regular model too
    for k in range(4):
        recorded = torch.cat([step[k] for step in out.hidden_states], dim=1)
        scale = max(1.0, float(streams[k].abs().max()) / 5)
        assert (recorded - streams[k]).abs().max() < BOUND * scale, k
