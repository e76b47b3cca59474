"""Times that a benchmark leaves for `fcsd plan --measured`: of which row, and where
nothing is known none.
"""

from typing import Any

import pytest

from fcsd.planning.cost.times import gain
from fcsd_bench.gains import find_limits, served_gains
from fcsd_bench.rows import make_rows

SETTINGS: dict[str, Any] = {
    "comm": {}, "tensor_parallel": 2, "requests": [4], "output_tokens": 9, "prompt_tokens": [100, 200],
}  # fmt: skip
FIELD = {"version": 1, "layers": [46, 47], "attention": "partial", "mlp": "full"}
CONFIG = {
    "model_type": "farskip_llama4",
    "text_config": {"num_hidden_layers": 48},
    "farskip": FIELD,
}


def rounds(
    ttft: list[float],
    prefill: tuple[float, float, float] | None,
    decode: tuple[float, float, float] | None,
) -> list[dict[str, Any]]:
    """Return runs with these times to the first token (ms); seconds, and total and
    exposed seconds of two ranks, warm-up included, of both measurements."""

    def measured(
        figures: dict[str, float], spent: tuple[float, float, float] | None
    ) -> dict[str, Any]:
        if spent is None:
            return figures | {"duration": 0.5, "communication": None}
        communication = {"ranks": 2, "total_s": spent[1], "exposed_s": spent[2]}
        return figures | {"duration": spent[0], "communication": communication}

    return [
        {
            "points": [
                {
                    "prefill": measured({"median_ttft_ms": each}, prefill),
                    "decode": measured({"median_tpot_ms": each / 10}, decode),
                }
                for _ in SETTINGS["prompt_tokens"]
            ]
        }
        for each in ttft
    ]


def test_by_a_trace_the_regular_server_is_stock_and_only_the_prompts_that_were_traced_are_known() -> (
    None
):
    runs = {
        "stock": rounds([400, 500, 440], None, None),
        "farskip_blocking": rounds([450, 450, 450], None, None),
        "farskip_overlapped": rounds([320, 500, 400], None, None),
    }
    # Rank 0 only communicates in 0.1 s of a run of 0.5 s; overlapped, three quarters of
    # 0.12 s are hidden.
    traces = {
        "stock": {"total_s": 0.1, "exposed_s": 0.1},
        "farskip_blocking": {"total_s": 0.2, "exposed_s": 0.2},
        "farskip_overlapped": {"total_s": 0.12, "exposed_s": 0.03},
    }
    (row,) = served_gains(SETTINGS, CONFIG, runs, traces)
    assert row["regular"] == "stock" and row["file"] == "times-prefill-100.json"
    known = {
        "phase": "prefill", "model_type": "llama4", "num_layers": 48,
        "connectivity": {"layers": [46, 47], "attention": "partial", "mlp": "full"},
        "ranks": 2, "batch": 4, "length": 100,
    }  # fmt: skip
    assert known.items() <= row["times"].items() and row["times"]["step_s"] == 0.44
    assert row["times"]["communication_s"] == pytest.approx(0.44 * 0.2)
    assert row["times"]["overlap"] == pytest.approx(0.75)
    assert row["planned"] == pytest.approx(1 / (1 - 0.2 * 0.75))
    assert row["measured"]["rounds"] == pytest.approx([1.25, 1.0, 1.1])
    assert row["measured"]["median"] == pytest.approx(1.1)


def test_wide_rows_have_times_of_their_own_where_their_ranks_are_alike() -> None:
    # A rank exchanges for 0.2 of 0.5 s; overlapped, three quarters of it are hidden.
    runs = {
        "farskip_blocking": rounds([100], (0.5, 0.4, 0.4), (1.5, 2.4, 2.4)),
        "wide_blocking": rounds([300], (0.5, 0.8, 0.8), None),
        "wide_overlapped": rounds([250], (0.5, 0.8, 0.2), None),
    }
    gains = served_gains(SETTINGS, CONFIG, runs, {})
    wide = [each for each in gains if each["times"]["data_parallel"]]
    assert len(gains) == 4 + len(wide)
    assert [each["file"] for each in wide] == [
        "times-wide-prefill-100.json",
        "times-wide-prefill-200.json",
    ]
    assert wide[0]["regular"] == "wide_blocking" and wide[0]["times"]["ranks"] == 2
    assert wide[0]["times"]["communication_s"] == pytest.approx(0.3 * 0.4)
    assert wide[0]["times"]["overlap"] == pytest.approx(0.75)
    assert wide[0]["planned"] == pytest.approx(1 / (1 - 0.4 * 0.75))
    assert wide[0]["measured"]["median"] == pytest.approx(1.2)
    uneven = served_gains(SETTINGS | {"requests": [5]}, CONFIG, runs, {})
    assert len(uneven) == 4 and not any(
        each["times"]["data_parallel"] for each in uneven
    )


def test_with_several_numbers_of_requests_the_trace_is_of_the_first_and_files_name_theirs() -> (
    None
):
    settings = SETTINGS | {"prompt_tokens": [100], "requests": [4, 5]}
    stock = rounds([400], (0.5, 0.4, 0.4), (1.5, 2.4, 2.4))
    traces = {"stock": {"total_s": 0.1, "exposed_s": 0.1}}
    gains = served_gains(settings, CONFIG, {"stock": stock}, traces)
    assert [(each["phase"], each["requests"], each["file"]) for each in gains] == [
        ("prefill", 4, "times-prefill-100-4.json"),
        ("decode", 4, "times-decode-104-4.json"),
        ("prefill", 5, "times-prefill-100-5.json"),
        ("decode", 5, "times-decode-104-5.json"),
    ]
    assert [each["times"]["batch"] for each in gains] == [4, 4, 5, 5]
    # By the trace 0.1 of 0.5 s; by the ranks' own figures 0.4 s of two ranks, twice.
    assert gains[0]["times"]["communication_s"] == pytest.approx(0.4 * 0.2)
    wide = served_gains(settings, CONFIG, {"wide_blocking": stock}, {})
    # Two ranks cannot share five requests evenly.
    assert [each["file"] for each in wide] == [
        "times-wide-prefill-100-4.json",
        "times-wide-decode-104-4.json",
    ]


def test_without_an_overlapped_server_the_plan_says_what_is_hidden() -> None:
    runs = {"farskip_blocking": rounds([100, 300], (0.5, 0.4, 0.4), (1.5, 2.4, 2.4))}
    gains = served_gains(SETTINGS, CONFIG, runs, {})
    assert [(each["phase"], each["prompt_tokens"]) for each in gains] == [
        *(("prefill", 100), ("decode", 100), ("prefill", 200), ("decode", 200))
    ]
    # Half an answer of 9 tokens is 4.
    assert [each["times"]["length"] for each in gains] == [100, 104, 200, 204]
    assert all(
        each["planned"] is each["measured"] is each["times"]["overlap"] is None
        for each in gains
    )
    # 0.1 of 0.5 s in prefill; 0.6 - 0.1 of 1.5 - 0.5 s in decoding, whose steps take 20
    # ms in the middle.
    assert gains[0]["times"]["communication_s"] == pytest.approx(0.2 * 0.2)
    assert gains[1]["times"]["communication_s"] == pytest.approx(0.5 * 0.020)


def test_what_hiding_everything_could_give_is_known_by_the_row_that_is_set_against() -> (
    None
):
    # 0.1 of 0.5 s in prefill; 0.6 - 0.1 of 1.5 - 0.5 s in decoding; of the wide ones
    # half of it and a tenth.
    runs = {
        "farskip_blocking": rounds([100, 300], (0.5, 0.4, 0.4), (1.5, 2.4, 2.4)),
        "farskip_overlapped": rounds([100, 300], None, None),
        "wide_blocking": rounds([100, 300], (0.5, 1.0, 1.0), (1.5, 1.4, 1.4)),
        "wide_overlapped": rounds([100, 300], None, None),
    }
    rows = make_rows("vllm", list(runs), CONFIG, (), 2, {}, "allgather_reducescatter")
    limits = find_limits(SETTINGS, rows, runs, {})
    assert set(limits) == set(runs)
    for place in range(2):
        assert limits["farskip_overlapped"][place] == pytest.approx(
            {"ttft_ms": 1.25, "tbt_ms": 2.0, "output_tokens_per_s": 2.0}
        )
        assert limits["wide_overlapped"][place] == pytest.approx(
            {"ttft_ms": 2.0, "tbt_ms": 1 / 0.9, "output_tokens_per_s": 2.0}
        )
    traces = {"stock": {"total_s": 0.1, "exposed_s": 0.1}}
    runs = {
        "stock": rounds([400], None, None),
        "farskip_overlapped": rounds([320], None, None),
    }
    first, second = find_limits(
        SETTINGS, make_rows("vllm", list(runs), CONFIG, (), 2, {}, ""), runs, traces
    )["farskip_overlapped"]
    assert first == pytest.approx({"ttft_ms": 1.25}) and second == {}


@pytest.mark.parametrize(
    ("settings", "runs", "left"),
    [
        ({}, {"farskip_blocking": rounds([100], None, None)}, []),
        (
            {},
            {"farskip_overlapped": rounds([100], (0.5, 0.4, 0.1), (1.5, 2.4, 0.1))},
            [],
        ),
        # Pipeline stages beside them: four ranks, of which each has a part of the
        # layers.
        (
            {"tensor_parallel": 4},
            {"farskip_blocking": rounds([100], (0.5, 0.4, 0.4), (1.5, 2.4, 2.4))},
            [],
        ),
        # The longer measurement communicated less.
        (
            {},
            {"farskip_blocking": rounds([100], (0.5, 0.4, 0.4), (1.5, 0.3, 0.3))},
            ["prefill"],
        ),
        # More communication than there was time.
        (
            {},
            {"farskip_blocking": rounds([100], (0.5, 2.4, 2.4), (1.5, 4.4, 4.4))},
            ["decode"],
        ),
        # Four fifths of it communication, all of which is said to be hidden.
        (
            {},
            {
                "farskip_blocking": rounds([100], (0.5, 1.6, 1.6), (1.5, 1.8, 1.8)),
                "farskip_overlapped": rounds([100], (0.5, 1.6, 0.0), (1.5, 1.8, 0.0)),
            },
            ["decode"],
        ),
    ],
)
def test_what_is_not_known_leaves_no_file(
    settings: dict[str, Any], runs: dict[str, Any], left: list[str]
) -> None:
    gains = served_gains(
        SETTINGS | {"prompt_tokens": [100]} | settings, CONFIG, runs, {}
    )
    assert [each["phase"] for each in gains] == left


@pytest.mark.parametrize(
    ("blocking_ms", "overlapped_ms", "collectives", "each_ms", "hidden"),
    [
        (274, 244, 16, 2.6, 0.894),
        (1221, 814, 256, 2.1, 0.720),
        (248, 211, 16, 2.6, 0.923),
        (1256, 883, 256, 2.1, 0.712),
    ],
)
def test_the_gain_of_recorded_servers_follows_from_their_shares(
    blocking_ms: float,
    overlapped_ms: float,
    collectives: int,
    each_ms: float,
    hidden: float,
) -> None:
    """What `make bench-serving` measured with vLLM (docs/serve.md)."""
    planned = 1 + gain(collectives * each_ms / blocking_ms, hidden)
    assert planned == pytest.approx(blocking_ms / overlapped_ms, rel=0.035)
