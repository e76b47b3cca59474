"""The benchmark of whole steps compares trainers that do the same work, and reports
correct ratios.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from tests.support import command_words, few, load_script

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "step.py"
SMALL = command_words("--dim 64 --layers 2 --vocab 512 --length 64 --rows 2")


@pytest.fixture(scope="module")
def benchmark():
    return load_script(FILE)


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **others):
        self.values += [logs["loss"]] if "loss" in logs else []


def losses(benchmark, variant, lengths, folder):
    options = benchmark.parser().parse_args(SMALL)
    torch.manual_seed(0)
    watcher = Losses()
    benchmark.train_variant(variant, options, lengths, str(folder), 3, watcher)
    return watcher.values


# TRL's warnings about names that transformers will drop
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("lengths", few(["equal", "mixed"], 1))
def test_all_distillations_have_the_same_losses_after_the_same_updates(
    benchmark, lengths, tmp_path
):
    expected = losses(benchmark, "kl", lengths, tmp_path / "kl")
    assert len(expected) == 3 and expected[0] > expected[2] > 0
    others = ["kl cached"]
    if importlib.util.find_spec("trl") is not None:
        others += ["gkd"] + ["gkd sorted"] * (lengths == "mixed")
    for variant in others:
        # Divergences are 2e-4 nats: float32 is exact to 1e-7 for each token, and TRL
        # takes them from two log-softmaxes.
        assert losses(benchmark, variant, lengths, tmp_path / variant) == pytest.approx(
            expected, rel=1e-3
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
def test_with_own_text_both_trainers_learn_from_as_many_own_tokens(
    benchmark, tmp_path, monkeypatch
):
    options = benchmark.parser().parse_args(
        [*SMALL, "--rows", "4", "--micro-batches", "2", "--own-text"]
    )
    own = 4 * (64 - benchmark.prompt_tokens(64))
    watcher, found = Losses(), []
    watcher.on_log = lambda *_, logs=None, **__: found.append(logs)
    benchmark.train_variant("kl", options, "equal", str(tmp_path), 1, watcher)
    (entry,) = [entry for entry in found if "own_rows" in entry]
    assert entry["own_rows"] == entry["own_cut"] == 4
    assert entry["own_rows"] * entry["own_mean_tokens"] == own
    if importlib.util.find_spec("trl") is None:
        return
    from trl.experimental.gkd import GKDTrainer

    kept, compute = [], GKDTrainer.compute_loss

    def noted(self, model, inputs, *args, **others):
        kept.append(int((inputs["labels"] != benchmark.NO_LOSS).sum()))
        return compute(self, model, inputs, *args, **others)

    monkeypatch.setattr(GKDTrainer, "compute_loss", noted)
    benchmark.train_variant("gkd", options, "equal", str(tmp_path), 1, Losses())
    assert kept == [own // 2, own // 2]


def test_the_mixed_batch_fills_its_rows_and_the_equal_one_needs_no_padding(benchmark):
    options = benchmark.parser().parse_args([])
    for lengths, fewest in (("equal", 1.0), ("mixed", 0.9)):
        batch = benchmark.examples(options, lengths)
        num_tokens = sum(len(example["input_ids"]) for example in batch)
        places = len(benchmark.packed_rows(options, batch)) * options.length
        assert fewest <= num_tokens / places <= 1
        kept = sum(sum(example["loss_mask"]) for example in batch)
        assert kept == pytest.approx(0.75 * num_tokens, rel=0.02)
    assert len({len(example["input_ids"]) for example in batch}) > 10


def test_the_heads_share_is_that_of_a_real_model(benchmark):
    options = benchmark.parser().parse_args([])
    with torch.device("meta"):
        share = benchmark.head_share(benchmark.make_model(options, rewired=False))
    assert share == pytest.approx(0.10, abs=0.01)


def test_ratios_are_against_the_best_of_the_peer_and_differences_against_every_other(
    benchmark,
):
    def result(seconds, ratio, *losses):
        return {"seconds": seconds, "time_ratio": ratio, "losses": list(losses)}

    results = {
        "sft": result([1.0, 2.0], 1.0, 5.0, 4.0),
        "kl": result([1.5, 2.5], 1.4, 0.50, 0.40),
        "kl cached": result([1.1, 2.2], 1.1, 0.50, 0.44),
        "gkd": result([3.0, 6.0], 3.0, 0.50, 0.40),
        "gkd sorted": result([2.4, 4.0], 2.2, 0.55, 0.40),
    }
    ratios = benchmark.ratios(results)
    assert ratios["kl / sft"] == 1.4 and ratios["kl cached / sft"] == 1.1
    assert ratios["tokens/s, kl / gkd"] == pytest.approx((2.0 + 2.4) / 2)
    assert ratios["tokens/s, kl / gkd sorted"] == pytest.approx((1.6 + 1.6) / 2)
    assert benchmark.largest_difference(results) == pytest.approx(
        {"kl cached": 0.1, "gkd": 0.0, "gkd sorted": 0.1}
    )


def test_help_explains_what_is_measured(benchmark):
    text = benchmark.parser().format_help()
    assert "The benchmark times the optimiser steps" in text and "--lengths" in text
