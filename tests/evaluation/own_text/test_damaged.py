"""What each figure of own text sees of a model that is damaged by hand (the table of
docs/evaluate.md), in float64 on a vocabulary of five.
"""

import copy
from typing import Any

import pytest
import torch

from tests.evaluation.own_text.test_own_text_measure import (
    five_words,
    model_of_five,
    original_of,
    own_suite,
)
from tests.float64 import in_float64
from tests.support import evaluate

pytestmark = pytest.mark.breadth

PROMPTS = ["a b a", "b b a", "a a b", "b a b"] * 60
RARE = 6.0  # nats by which the words `c` and `d`, the facts, are rarer than the others


def repeats(model: Any) -> None:
    """Tell the model to be three times as sure."""
    model.model.norm.weight.data.mul_(3)


def never_ends(model: Any) -> None:
    model.lm_head.bias.data[0] -= 20


def wrong_facts(model: Any) -> None:
    """Exchange two rare words."""
    for values in (model.lm_head.weight.data, model.lm_head.bias.data):
        values[[3, 4]] = values[[4, 3]]


@pytest.fixture(scope="module")
def original() -> Any:
    with in_float64():
        model = model_of_five(2)
        head = torch.nn.Linear(model.config.hidden_size, 5, bias=True)
        head.weight.data.copy_(model.lm_head.weight.data)
        head.bias.data.copy_(torch.tensor([0.0, 0.0, 0.0, -RARE, -RARE]))
        model.lm_head = head
        return model


DAMAGE = {
    "none": None, "repeats": repeats, "never ends": never_ends, "wrong": wrong_facts,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured(original: Any, tmp_path_factory: Any) -> dict[str, dict[str, Any]]:
    """Return the figures of the original and of each damaged model."""
    suite = own_suite(tmp_path_factory.mktemp("own"), PROMPTS, max_new_tokens=16)
    found = {}
    for name, damage in DAMAGE.items():
        with in_float64():
            model = copy.deepcopy(original)
            if damage is not None:
                damage(model)
            compared = original_of(original, itself=damage is None)
            result, _ = evaluate(
                model, five_words(), suite, original=compared, progress=False, batch_size=240
            )  # fmt: skip
        row = result["tasks"]["own"]
        found[name] = row["metrics"] | {"own_text_kl": row}
    return found


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the difference of two figures in standard errors."""
    error = (one["stderr"] ** 2 + other["stderr"] ** 2) ** 0.5
    return float((one["value"] - other["value"]) / error)


def test_a_model_that_repeats_itself_is_seen_though_the_original_finds_its_text_likely(
    measured: dict[str, dict[str, Any]],
) -> None:
    own, whole = measured["repeats"], measured["none"]
    assert own["own_text_kl"]["value"] > 5 * own["own_text_kl"]["stderr"]
    assert far(own["repeated_4grams"], whole["repeated_4grams"]) > 2
    # These nats alone would praise it.
    assert own["nats_above"]["value"] < -2 * own["nats_above"]["stderr"]


def test_a_model_that_never_ends_is_seen_by_what_it_never_says(
    measured: dict[str, dict[str, Any]],
) -> None:
    own, whole = measured["never ends"], measured["none"]
    assert own["ended"]["value"] == 0 and whole["ended"]["value"] > 0.3
    assert own["forward_kl"]["value"] > 5 * own["own_text_kl"]["value"]


def test_wrong_facts_are_hardly_seen_at_own_tokens_and_clearly_in_a_text_with_facts(
    original: Any, measured: dict[str, dict[str, Any]]
) -> None:
    own, whole, narrow = (measured[name] for name in ("wrong", "none", "repeats"))
    assert own["own_text_kl"]["value"] < 0.5 * narrow["own_text_kl"]["value"]
    for name in ("ended", "repeated_4grams", "nats"):
        assert abs(far(own[name], whole[name])) < 3, name
    # Given the facts, the damage is plain: half a nat and more at each of them.
    with in_float64(), torch.no_grad():
        damaged = copy.deepcopy(original)
        wrong_facts(damaged)
        ids = torch.tensor([[1, 2, 1, 2, 1]])
        change = (
            original(ids).logits.log_softmax(-1) - damaged(ids).logits.log_softmax(-1)
        )[0, :, 3:]
    assert change.abs().mean() > 0.5
