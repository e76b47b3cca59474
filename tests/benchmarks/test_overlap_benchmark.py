"""The benchmark of overlap: what its table says, who computes when batons are handed on, what its link is told."""

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "overlap.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("overlap_benchmark", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_a_ratio_is_the_median_over_rounds_and_hidden_the_share_of_what_was_sent(benchmark: Any) -> None:
    def rounds(*steps: float, exposed: float) -> list[dict[str, float]]:
        return [{"step": step, "total of all": 1.0, "exposed of all": exposed} for step in steps]

    table = benchmark.summary({"regular": rounds(4, 6, 5, exposed=1), "full": rounds(2, 2, 5, exposed=0.25)})
    assert table["regular"]["ratio"] == 1 and table["full"]["ratio"] == 2  # of 2, 3 and 1
    assert table["full"]["hidden of all"] == pytest.approx(0.75) and table["full"]["step"] == 2
    assert "| full | 2000 | 2.00 | 50% | 75.0% | - | - | - | - |" in benchmark.printed(table)


def test_two_halves_compute_one_at_a_time_and_in_the_same_order_on_every_rank(benchmark: Any) -> None:
    batons, log = benchmark.Batons(), []

    def half(number: int, waits: int) -> Any:
        def run() -> None:
            for wait in range(waits):
                log.append((number, wait))
                time.sleep(0.001 * (2 - number))
                batons.hand_on()
            log.append((number, "end"))

        return run

    batons.run([half(0, 2), half(1, 3)])
    assert log == [(0, 0), (1, 0), (0, 1), (1, 1), (0, "end"), (1, 2), (1, "end")]


def test_the_modes_and_sizes_follow_from_model_and_device(benchmark: Any) -> None:
    def options(*words: str) -> Any:
        return benchmark.complete(benchmark.parser().parse_args(words))

    assert "beside" not in options("--model", "none").modes  # it has no shared expert
    assert options("--checkpointing").modes == ["blocking", "full"]
    cuda = options("--device", "cuda", "--layers", "2")
    assert (cuda.ranks, cuda.compute, cuda.dim, cuda.layers) == (1, "real", 2048, 2)
    plain = options()
    assert benchmark.exchanged_bytes(plain) == 2 * 64 * 4 * (64 + 1) * 4 / 2
