"""Data-parallel attention, experts over all ranks: right and in order, however uneven
the ranks; mutants are not.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import exchange_orders
import orders
import pytest
from cases import BREADTH, FEW, WRAPPERS
from engine import BOUND
from launch import ENVIRONMENT
from test_parallel import HERE, PATIENCE_S, run_ranks

FAMILIES = ("qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss")
OTHERS = (
    "instella_moe", "deepseek_v2", "llama4_text", "qwen3_next",
)  # fmt: skip
CONNECTIVITIES = ("all", "half", "gap", "attention_full", "mlp_full")

RIGHT = [
    *(f"{family}-{layers}:async" for family in FAMILIES for layers in CONNECTIVITIES),
    "qwen2_moe-mixed:async",
    *(f"{family}-all:blocking" for family in FAMILIES),
    *(
        f"qwen2_moe-all:{layout}"
        for layout in (
            "timed", "no_ep", "small_at_once", "chunks", "idle", "few", "abort", "hooks",
        )
    ),
    *(f"{family}-all:async" for family in OTHERS),
    "glm4_moe-all:chunks",
    "deepseek_v3-all:idle",
    "qwen3_moe-all:compiled",
    "qwen2_moe-all:compiled",
]  # fmt: skip
WRONG = [
    "qwen2_moe-all:async:wait_at_start", "qwen2_moe-all:async:dispatch_after_attention",
    "qwen2_moe-all:async:read_before_combine", "qwen2_moe-all:async:attend_to_routed",
    "qwen2_moe-all:async:add_shared_twice", "deepseek_v3-all:async:forget_scale",
    "deepseek_v3-all:async:leave_dense_stock",
]  # fmt: skip
FOUR = [
    *(f"{family}-all:async" for family in FAMILIES),
    "gpt_oss-gap:async",
    "deepseek_v3-half:blocking",
    "qwen2_moe-all:idle",
]
# every family, connectivity and way, on two ranks and on four
if BREADTH:
    every = [
        f"{f}-{c}:{way}"
        for f in FAMILIES
        for c in CONNECTIVITIES
        for way in ("async", "blocking")
    ]
    RIGHT += [case for case in every if case not in RIGHT]
    RIGHT += [
        f"{family}-all:async"
        for family in FEW
        if family not in (*WRAPPERS, "gemma4_text")  # which is refused
    ]
    FOUR += [
        case
        for case in [*every, *(f"{f}-all:idle" for f in FAMILIES)]
        if case not in FOUR
    ]


@pytest.fixture(scope="module")
def results(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    place = tmp_path_factory.mktemp("ranks") / "results"
    return run_ranks(models, place, RIGHT + WRONG, script=HERE / "data_ranks.py")


@pytest.fixture(scope="module")
def results_of_four(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("four") / "results"
    return run_ranks(models, place, FOUR, script=HERE / "data_ranks.py", ranks=4)


def check(ranks: list[dict[str, Any]], prompts: int) -> None:
    """Each rank computes what `load_model` computes, of all prompts together, and not
    the original.
    """
    for result in ranks:
        assert "error" not in result, result["error"]
        print(
            f"{result['case']}: {result['equal']} of {result['prompts']} prompts,"
            f" {result['worst']:.1e}"
        )
        assert (result["equal"], result["original"]) == (result["prompts"], 0)
        assert result["worst"] < BOUND
    assert sum(result["prompts"] for result in ranks) == prompts


def steps_of(case: str) -> list[str]:
    """Return the events of one step of a case."""
    checkpoint, layout, *_ = case.split(":")
    # there is no sum of embeddings
    events = orders.events(exchange_orders.OF_CASE[checkpoint], ranks=2)[1:]
    # attention, which is outside the plugin's operators, runs no hooks
    if layout == "compiled":
        return [event for event in events if not event.startswith("attention")]
    return events


@pytest.mark.parametrize("case", RIGHT)
def test_data_parallel_ranks_compute_what_load_model_computes(
    case: str, results: dict[str, Any]
) -> None:
    layout = case.split(":")[1]
    check(results[case], {"chunks": 16, "few": 1, "abort": 6}.get(layout, 8))
    if layout == "chunks":
        assert all(result["cached"] >= 32 for result in results[case])


@pytest.mark.parametrize("case", FOUR)
def test_so_do_four_of_which_one_may_be_idle(
    case: str, results_of_four: dict[str, Any]
) -> None:
    check(results_of_four[case], 8)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in RIGHT
        if case.split(":")[0] in exchange_orders.OF_CASE
        and not case.endswith((":blocking", ":no_ep", ":small_at_once"))
    ],
)
def test_every_rank_begins_and_ends_its_exchanges_in_the_order_that_is_written_down(
    case: str, results: dict[str, Any]
) -> None:
    step = steps_of(case)
    for result in results[case]:
        steps = len(result["events"]) // len(step)
        assert steps >= 15
        assert result["events"] == step * steps


@pytest.mark.parametrize("case", WRONG)
def test_a_mutant_is_seen(case: str, results: dict[str, Any]) -> None:
    *_, mutant = case.split(":")
    step = steps_of(case)
    for result in results[case]:
        assert "error" not in result, result["error"]
        wrong_order = result["events"] != step * (len(result["events"]) // len(step))
        wrong_numbers = result["worst"] > 1e-2
        print(
            f"{case}: order {'wrong' if wrong_order else 'right'}, off by"
            f" {result['worst']:.1e}"
        )
        # they compute the same
        if mutant in ("wait_at_start", "dispatch_after_attention"):
            assert wrong_order
            assert result["equal"] == result["prompts"]
        else:
            assert wrong_numbers


@pytest.mark.parametrize("layout", ["async", "timed"])
def test_the_other_rank_ends_with_an_error_when_one_is_killed_in_the_middle_of_a_layer(
    layout: str, models: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(models), str(tmp_path / "results"), f"qwen2_moe-all:{layout}:die"]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "data_ranks.py"), *words],
            env={
                **ENVIRONMENT, **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            },
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [rank.wait(timeout=PATIENCE_S) for rank in ranks] == [1, -signal.SIGKILL]
    finally:
        for rank in ranks:
            rank.kill()
    (result,) = [
        json.loads(line) for line in (tmp_path / "results.0").read_text().splitlines()
    ]
    assert "onnection" in result["error"]
