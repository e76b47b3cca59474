"""Two and four ranks: tensor and expert parallel, blocking and overlapped, are right and
in order; mutants are not.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import orders
import pytest
from cases import BREADTH, FEW, WRAPPERS
from engine import BOUND
from launch import start_ranks

HERE = Path(__file__).parent
PATIENCE_S = 1200

STAGES = [
    f"{case}:pp"
    for case in ("qwen3_moe-all", "qwen2_moe-gap", "deepseek_v2-all", "gpt_oss-all")
]

RIGHT = [
    *(
        f"{family}-all:{layout}"
        for family in (
            "qwen3_moe", "qwen2_moe", "deepseek_v2", "gpt_oss", "instella_moe",
        )
        for layout in ("tp", "ep", "async", "async_ep")
    ),
    "qwen3_moe-gap:async",
    "qwen2_moe-attention_full:async",
    "qwen2_moe-mlp_full:async",
    "deepseek_v2-gap:async",
    "qwen3_moe-all:timed",
    "qwen2_moe-all:compiled",
    # sums in attention; shared experts beside the block; norms behind the sums; branches
    *(
        f"{family}-all:async_ep"
        for family in ("minimax_m2", "granitemoeshared", "gemma4_text", "nemotron_h")
    ),
]  # fmt: skip
if BREADTH:
    every = [
        f"{family}-all:{layout}"
        for family in FEW
        if family not in WRAPPERS
        for layout in ("tp", "ep", "async", "async_ep")
    ]
    RIGHT += [case for case in every if case not in RIGHT]
OF_FOUR = ["qwen2_moe-all:async_ep", "nemotron_h-all:async_ep"]
if BREADTH:
    OF_FOUR += [
        f"{family}-all:async_ep"
        for family in (
            "qwen3_moe", "deepseek_v2", "minimax_m2", "granitemoeshared", "gemma4_text",
        )
    ]  # fmt: skip
WRONG = [
    "qwen3_moe-all:timed:wait_early", "qwen3_moe-all:timed:wait_late", "qwen3_moe-all:async:forget_all_reduce",
    "qwen2_moe-all:async:reduce_shared_twice", "deepseek_v2-all:async:leave_dense_stock",
    "nemotron_h-all:timed:wait_early", "nemotron_h-all:timed:wait_late", "nemotron_h-all:async:forget_all_reduce",
]  # fmt: skip


def run_ranks(
    models: Path,
    place: Path,
    cases: list[str],
    script: Path = HERE / "tensor_ranks.py",
    ranks: int = 2,
) -> dict[str, list[dict[str, Any]]]:
    """Return every case's result on each rank, of one launch of as many processes."""
    run = start_ranks(
        script,
        str(models),
        str(place),
        *cases,
        ranks=ranks,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _, said = run.communicate(timeout=PATIENCE_S + 60 * len(cases))
    finally:
        # and torchrun its ranks, one of which may wait forever for the other
        run.terminate()
        run.wait()
    assert run.returncode == 0, said[-4000:]
    results = [
        [json.loads(line) for line in Path(f"{place}.{rank}").read_text().splitlines()]
        for rank in range(ranks)
    ]
    return {each[0]["case"]: list(each) for each in zip(*results, strict=True)}


@pytest.fixture(scope="module")
def results(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    return run_ranks(
        models, tmp_path_factory.mktemp("ranks") / "results", RIGHT + WRONG
    )


@pytest.fixture(scope="module")
def stages(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    return run_ranks(models, tmp_path_factory.mktemp("stages") / "results", STAGES)


@pytest.mark.parametrize("case", STAGES)
def test_two_stages_of_a_pipeline_compute_what_load_model_computes(
    case: str, stages: dict[str, Any]
) -> None:
    for result in stages[case]:
        assert "error" not in result, result["error"]
        assert (result["equal"], result["original"]) == (4, 0)
        assert result["worst"] < BOUND


@pytest.fixture(scope="module")
def of_four(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    return run_ranks(
        models, tmp_path_factory.mktemp("four") / "results", OF_FOUR, ranks=4
    )


@pytest.mark.parametrize("case", OF_FOUR)
def test_four_ranks_compute_what_load_model_computes_in_the_order_of_two(
    case: str, of_four: dict[str, Any]
) -> None:
    step = orders.events(orders.OF_CASE[case.partition(":")[0]], ranks=2)
    assert len(of_four[case]) == 4
    for result in of_four[case]:
        assert "error" not in result, result["error"]
        assert (result["equal"], result["original"]) == (4, 0)
        assert result["worst"] < BOUND and result["events"] == step * 16


@pytest.mark.parametrize("case", RIGHT)
def test_two_ranks_compute_what_load_model_computes_and_not_the_original(
    case: str, results: dict[str, Any]
) -> None:
    for result in results[case]:
        assert "error" not in result, result["error"]
        assert (result["equal"], result["original"]) == (4, 0)
        assert result["worst"] < BOUND


@pytest.mark.parametrize(
    "case", [case for case in RIGHT if case.partition(":")[0] in orders.OF_CASE]
)
def test_both_ranks_begin_and_end_their_sums_in_the_order_that_is_written_down(
    case: str, results: dict[str, Any]
) -> None:
    compiled = case.endswith(
        "compiled"
    )  # in its graph is the engine's own sum, of embeddings, where none sees it
    step = orders.events(
        orders.OF_CASE[case.partition(":")[0]], ranks=1 if compiled else 2
    )
    for result in results[case]:
        assert result["events"] == step * 16


@pytest.mark.parametrize(
    "case",
    [case for case in RIGHT if "-all:" in case and not case.endswith("compiled")],
)
def test_a_layer_takes_as_many_sums_as_in_the_regular_model(
    case: str, results: dict[str, Any]
) -> None:
    events = results[case][0]["events"]
    sums = [event for event in events if event.startswith(("start", "all_reduce"))]
    dense = sum(event == "start mlp.0" for event in sums)  # one less
    # in attention; of shared experts alone, whose routed ones end later
    more = {"minimax_m2": 4, "nemotron_h": 1}.get(case.partition("-")[0], 0)
    assert len(sums) == 16 * (1 + 2 * 4 + more) - dense


@pytest.mark.parametrize("case", WRONG)
def test_a_mutant_is_seen(case: str, results: dict[str, Any]) -> None:
    checkpoint, _, mutant = case.split(":")
    step = orders.events(orders.OF_CASE[checkpoint], ranks=2)
    for result in results[case]:
        assert "error" not in result, result["error"]
        wrong_order = result["events"] != step * 16
        wrong_numbers = result["worst"] > 1e-2
        print(
            f"{case}: order {'wrong' if wrong_order else 'right'}, off by {result['worst']:.1e}"
        )
        assert wrong_order or wrong_numbers
        # the one computes the same, the other may by chance
        if mutant not in ("wait_early", "wait_late"):
            assert wrong_numbers
