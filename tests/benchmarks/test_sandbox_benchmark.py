"""The benchmark of the sandbox measures programs that pass, beside the floor of the same run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.rows import write_root
from tests.support import command_words, load_script

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "sandbox.py"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return load_script(FILE)


def test_overhead_stands_beside_two_forks_and_canonical_programs_are_counted(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command_words(
        "--jobs 3 --rounds 2 --workers 2 --data-root", write_root(tmp_path / "root")
    )
    assert benchmark.main([*words, "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["overhead_ms"]) == [
        "two forks", "interpreter", "one worker", "2 workers",
    ]  # fmt: skip
    assert all(
        len(times) == 2 and min(times) > 0 for times in report["overhead_ms"].values()
    )
    assert {name: row["programs"] for name, row in report["canonical"].items()} == {
        "MBPP+": 3,
        "HumanEval+": 3,
    }
    out = capsys.readouterr().out
    assert out.count("target at most 10 ms") == 2
    assert out.count("target at most 75 s on 2 cores") == 1


def test_a_target_that_is_missed_is_said_to_be(benchmark: Any) -> None:
    assert benchmark.verdict(9.9, 10, "ms").endswith("met")
    assert benchmark.verdict(10.1, 10, "ms").endswith("MISSED")
