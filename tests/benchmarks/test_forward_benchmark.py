"""The benchmark of the forward pass runs, compares like with like, and fails on its limit."""

import json
from pathlib import Path

import pytest
import torch

from tests.support import command_words, load_script

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "forward.py"
SMALL = command_words("--layers 2 --dim 32 --tokens 8 --rounds 2 --decode-steps 2")


@pytest.fixture
def benchmark(monkeypatch):
    module = load_script(FILE)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_it_prints_and_writes_a_row_for_every_family_phase_and_variant(
    benchmark, tmp_path, capsys
):
    families = ["qwen3_moe", "granitemoeshared"]
    assert (
        benchmark.main(
            [*SMALL, "--family", *families, "--json", str(tmp_path / "rows.json")]
        )
        == 0
    )
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {(row["family"], row["phase"], row["variant"]) for row in rows} == {
        (family, phase, variant)
        for family in families
        for phase in ("prefill", "decode")
        for variant in ("control", "farskip")
    }
    assert all(row["original_ms"] > 0 and row["median_ratio"] > 0 for row in rows)
    assert all(
        row["interval"][0] <= row["median_ratio"] <= row["interval"][1] for row in rows
    )
    assert capsys.readouterr().out.count("farskip") == 4


def test_a_slower_rewired_model_exceeds_the_limit(benchmark, monkeypatch, capsys):
    def slower(runs, rounds, device):
        return {name: [1.05 if name == "farskip" else 1.0] * rounds for name in runs}

    monkeypatch.setattr(benchmark, "interleaved", slower)
    assert benchmark.main([*SMALL, "--limit", "1.02", "--family", "mixtral"]) == 1
    assert "above the limit of 1.02: mixtral" in capsys.readouterr().err
    assert benchmark.main([*SMALL, "--limit", "1.06", "--family", "mixtral"]) == 0


def test_every_model_takes_its_turn_in_every_round(benchmark):
    order = []
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = benchmark.interleaved(runs, 40, "cpu")
    rounds = ["".join(order[k : k + 3]) for k in range(0, len(order), 3)]
    assert rounds[0] == "abc" and all(
        sorted(names) == ["a", "b", "c"] for names in rounds
    )  # a warm-up comes first
    # every order occurs, so that no model always runs after the same other one
    assert len(set(rounds[1:])) == 6
    assert all(len(values) == 40 for values in times.values())


def test_the_interval_of_a_median_is_that_of_the_tables(benchmark):
    """Conover, Practical Nonparametric Statistics: for 10 values the 2nd and 9th, for
    25 the 8th and 18th.
    """
    for n, ranks in ((5, (1, 5)), (10, (2, 9)), (25, (8, 18))):
        assert benchmark.median_interval([float(k) for k in range(n, 0, -1)]) == ranks


def test_the_models_share_their_weights_and_nothing_else(benchmark):
    original = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    twin = benchmark.twin(original)
    assert twin[0] is not original[0] and twin[0].weight is original[0].weight
    assert twin[1].running_mean is not original[1].running_mean


def test_a_published_configuration_is_cut_to_the_layers_that_are_asked_for(
    benchmark, tmp_path, capsys
):
    fields = json.loads(
        (
            FILE.parents[1] / "fcsd/model/inspect/configs/DeepSeek-V2-Lite.json"
        ).read_text()
    )
    fields |= {
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = benchmark.published(tmp_path / "config.json", 2, "cpu", "bfloat16")
    assert (len(model.model.layers), model.config.vocab_size, model.dtype) == (
        2,
        1024,
        torch.bfloat16,
    )
    assert benchmark.main([*SMALL, "--config", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out.count("deepseek_v2") == 4
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(SystemExit):
        benchmark.main([*SMALL, "--config", str(tmp_path / "config.json")])
    assert "no text family has model_type 'llama'" in capsys.readouterr().err


def test_help_explains_what_is_measured(benchmark, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "--limit" in text
    assert "The benchmark times forward passes" in text
