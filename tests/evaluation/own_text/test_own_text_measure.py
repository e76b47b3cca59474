"""Own-text KL, compared with equations by hand: every continuation of a vocabulary of
five, in float64.
"""

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fcsd.evaluation.config import SuiteConfig
from fcsd.evaluation.own_text.measure import Original
from fcsd.evaluation.suites import load_suite
from fcsd.parallel.launch import Ranks
from tests.float64 import BOUND, in_float64
from tests.reference.ranks import run_ranks
from tests.reference.tiny import tiny_model
from tests.support import evaluate, few, user_error

WORDS = ["<eos>", "a", "b", "c", "d"]
LENGTH = 3


def five_words() -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<eos>"
    )


def model_of_five(seed: int) -> Any:
    model = tiny_model("qwen3_moe", vocab_size=5, seed=seed)
    # Distributions that prefer some words, as those of a trained model do.
    model.get_output_embeddings().weight.data.mul_(3)
    model.generation_config.eos_token_id = 0
    return model.double()


def original_of(model: Any, **settings: Any) -> Original:
    @contextlib.contextmanager
    def loaded() -> Iterator[Any]:
        yield model

    return Original(loaded, **settings)


def own_suite(place: Path, texts: list[str], **keys: Any) -> SuiteConfig:
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (place / "texts.jsonl").write_text("".join(lines))
    row = {
        "task": "own", "kind": "own_text", "dataset": str(place / "texts.jsonl"),
        "num_prompts": 1000, "prompt_tokens": 2, "max_new_tokens": LENGTH, **keys,
    }  # fmt: skip
    (place / "suite.yaml").write_text(yaml.safe_dump({"name": "own", "tasks": [row]}))
    return load_suite(place / "suite.yaml")


@functools.cache
def log_probabilities(model: Any, *ids: int) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0, -1]
    return [float(value) for value in logits.log_softmax(-1)]


def divergence(first: list[float], second: list[float]) -> float:
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(first, second, strict=True))


def figures(model: Any, original: Any, prompt: list[int], text: list[int]) -> Any:
    """Return KL(model || original), KL(original || model) and -log p_original, a token
    of the text each, and log p_model of the whole text.
    """
    rows, likelihood = [], 0.0
    for position, token in enumerate(text):
        own, other = (
            log_probabilities(each, *prompt, *text[:position])
            for each in (model, original)
        )
        rows.append((divergence(own, other), divergence(other, own), -other[token]))
        likelihood += own[token]
    means = [math.fsum(column) / len(text) for column in zip(*rows, strict=True)]
    return (*means, likelihood)


def continuations() -> Iterator[list[int]]:
    """Yield every text: it ends with its first end token, or at the limit."""
    for length in range(1, LENGTH + 1):
        for words in itertools.product(range(1, 5), repeat=length - 1):
            yield [*words, 0]
    for words in itertools.product(range(1, 5), repeat=LENGTH):
        yield list(words)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    with in_float64():
        return model_of_five(1), model_of_five(2)


def test_each_sample_has_the_figures_of_equations_by_hand(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    model, original = pair
    texts = ["a b c", "d d d", "c a b", "b b a", "a d c"]
    with in_float64():
        _, samples = evaluate(
            model, five_words(), own_suite(tmp_path, texts, temperature=1.3),
            original=original_of(original), progress=False, batch_size=2,
        )  # fmt: skip
        for text, sample in zip(texts, samples["own"], strict=True):
            prompt = [WORDS.index(word) for word in text.split()[:2]]
            kl, forward, nats, _ = figures(model, original, prompt, sample["tokens"])
            assert sample["score"] == pytest.approx(kl, abs=BOUND)
            assert sample["forward_kl"] == pytest.approx(forward, abs=BOUND)
            assert sample["nats"] == pytest.approx(nats, abs=BOUND)
            assert sample["ended"] == (sample["tokens"][-1] == 0)
    assert len({len(sample["tokens"]) for sample in samples["own"]}) > 1
    assert len({sample["score"] for sample in samples["own"]}) == len(texts)


@pytest.mark.breadth
def test_the_mean_of_samples_is_that_of_all_continuations_within_its_error(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    """400 samples after one prompt, against the sum over all 85 + 64 continuations."""
    model, original = pair
    with in_float64():
        exact = {"kl": 0.0, "forward": 0.0, "nats": 0.0, "mass": 0.0}
        for text in continuations():
            kl, forward, nats, likelihood = figures(model, original, [1, 2], text)
            weight = math.exp(likelihood)
            exact["kl"] += weight * kl
            exact["forward"] += weight * forward
            exact["nats"] += weight * nats
            exact["mass"] += weight
        result, samples = evaluate(
            model, five_words(), own_suite(tmp_path, ["a b c"] * 400),
            original=original_of(original), progress=False, batch_size=100,
        )  # fmt: skip
    assert exact["mass"] == pytest.approx(1, abs=BOUND)
    row = result["tasks"]["own"]
    own = row["metrics"]
    assert len({tuple(sample["tokens"]) for sample in samples["own"]}) > 20
    for found, expected in (
        (row, exact["kl"]),
        (own["forward_kl"], exact["forward"]),
        (own["nats"], exact["nats"]),
    ):
        assert 0 < found["stderr"] < 0.1 * expected
        assert abs(found["value"] - expected) < 3 * found["stderr"]
    # A mean at the original's samples, or the other direction, would be far away.
    assert abs(exact["kl"] - exact["forward"]) > 6 * row["stderr"]


def test_the_original_diverges_from_itself_by_exactly_nothing(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    model, _ = pair
    suite = own_suite(tmp_path, ["a b c", "c d a", "b a b"])
    with in_float64():
        result, samples = evaluate(
            model, five_words(), suite,
            original=original_of(model, itself=True), progress=False, batch_size=2,
        )  # fmt: skip
        for sample in samples["own"]:
            prompt = [WORDS.index(word) for word in sample["prompt"].split()]
            nats = figures(model, model, prompt, sample["tokens"])[2]
            assert sample["nats"] == pytest.approx(nats, abs=BOUND)
    own = result["tasks"]["own"]["metrics"]
    assert result["tasks"]["own"]["value"] == own["forward_kl"]["value"] == 0
    assert own["nats_above"]["value"] == 0
    assert own["greedy_equal"]["value"] == 1
    assert result["mean"] is None


def test_an_original_of_another_vocabulary_is_refused(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    other = tiny_model("qwen3_moe", vocab_size=4)
    refused = user_error("has 5 tokens, its original's 4; name")
    with in_float64(), refused:
        _figures((pair[0], other), own_suite(tmp_path, ["a b c"]), 1)


@pytest.mark.parametrize("batch_size", few([2, "auto", 5], 2))
def test_no_batch_size_changes_a_figure(
    pair: tuple[Any, Any], tmp_path: Path, batch_size: Any
) -> None:
    texts = ["a b c", "a b d", "c c d", "d a b", "b c a"]
    suite = own_suite(tmp_path, texts)
    with in_float64():
        alone, other = (_figures(pair, suite, size) for size in (1, batch_size))
    assert _same(alone, other)


def _figures(pair: tuple[Any, Any], suite: Any, size: Any, ranks: Any = None) -> Any:
    _, samples = evaluate(
        pair[0], five_words(), suite, original=original_of(pair[1]),
        progress=False, batch_size=size, **({"ranks": ranks} if ranks else {}),
    )  # fmt: skip
    return samples["own"]


def _same(samples: Any, others: Any) -> bool:
    """Compare texts exactly and figures within the rounding of float64."""
    for sample, other in zip(samples, others, strict=True):
        for key, value in sample.items():
            if isinstance(value, float):
                assert other[key] == pytest.approx(value, abs=BOUND), key
            elif key != "by_length":
                assert other[key] == value, key
    return True


def _of_rank(rank: int, pair: tuple[Any, Any], suite: Any) -> Any:
    with in_float64():
        return _figures(pair, suite, 2, Ranks(rank, 2))


def test_no_number_of_ranks_changes_a_figure(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    suite = own_suite(tmp_path, ["a b c", "a b d", "c c d", "d a b", "b c a"])
    with in_float64():
        alone = _figures(pair, suite, 2)
    first, second = run_ranks(_of_rank, 2, pair, suite)
    assert first == second
    assert _same(alone, first)


def test_another_seed_draws_other_samples_and_the_same_greedy_text(
    pair: tuple[Any, Any], tmp_path: Path
) -> None:
    texts = ["a b c", "a b d", "c c d", "d a b", "b c a"]
    with in_float64():
        first, again, other = (
            _figures(pair, own_suite(tmp_path, texts, seed=seed), 5)
            for seed in (0, 0, 1000)
        )
    assert first == again
    assert [s["tokens"] for s in first] != [s["tokens"] for s in other]
    assert [s["greedy_tokens"] for s in first] == [s["greedy_tokens"] for s in other]
