"""Own text in launches of two processes, with copies and with sharded weights."""

from pathlib import Path

import pytest

from fcsd.evaluation.results import read_result
from tests.evaluation.own_text.test_compared import place
from tests.parallel.test_engines import launch
from tests.support import few

__all__ = ["place"]  # a fixture


@pytest.mark.breadth
@pytest.mark.parametrize("config", few(["cpu_2_fsdp2", "cpu_2", "cpu_2_ep"], 1))
def test_two_processes_find_what_one_finds(
    place: Path, tmp_path: Path, config: str
) -> None:
    words = [
        "evaluate", place / "last", "--suite", place / "suite.yaml", "--output", tmp_path / "out", "--data-root",
        place / "data", "--original", place / "original", "--batch-size", "2",
    ]  # fmt: skip
    if config == "cpu_2_ep":
        words += ["--expert-parallel", "2"]
    assert launch(config, [str(word) for word in words]) == [0]
    (result, samples), (expected, alone) = (
        read_result(folder) for folder in (tmp_path / "out", place / "results/last")
    )
    for task, row in expected["tasks"].items():
        pairs = list(zip(samples[task], alone[task], strict=True))
        # Experts that are spread round otherwise, which may turn a draw.
        least = len(pairs) - (1 if config == "cpu_2_ep" else 0)
        same = [(a, b) for a, b in pairs if a["tokens"] == b["tokens"]]
        assert len(same) >= least
        for found, own in same:
            assert found["score"] == pytest.approx(own["score"], rel=1e-3)
            assert found["nats"] == pytest.approx(own["nats"], rel=1e-3)
        if config != "cpu_2_ep":
            for name, figure in row["metrics"].items():
                value = result["tasks"][task]["metrics"][name]["value"]
                assert value == pytest.approx(figure["value"], rel=1e-3, abs=1e-5)
