"""The benchmark of the forward pass runs, compares like with like, and fails on its limit."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "forward.py"
SMALL = ["--layers", "2", "--dim", "32", "--tokens", "8", "--rounds", "2", "--decode-steps", "2"]


@pytest.fixture
def benchmark(monkeypatch):
    spec = importlib.util.spec_from_file_location("forward_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_it_prints_and_writes_a_row_for_every_family_phase_and_variant(benchmark, tmp_path, capsys):
    families = ["qwen3_moe", "granitemoeshared"]
    assert benchmark.main([*SMALL, "--family", *families, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {(row["family"], row["phase"], row["variant"]) for row in rows} == {
        (family, phase, variant)
        for family in families
        for phase in ("prefill", "decode")
        for variant in ("control", "farskip")
    }
    assert all(row["original_ms"] > 0 and row["median_ratio"] > 0 for row in rows)
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
    times = benchmark.interleaved(runs, 3, "cpu")
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # one warm-up each, then the rounds
    assert all(len(values) == 3 for values in times.values())


def test_help_explains_what_is_measured(benchmark, capsys):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "What is measured" in text and "--limit" in text
