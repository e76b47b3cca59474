"""All-reduces as published: between two sizes, beyond the largest, by ranks and GPU; and
those that a cluster file gives.
"""

import math
import re
from typing import Any

import pytest

from benchmarks.plan import planned
from fcsd.cli.main import main
from fcsd.model.connectivity import Connectivity
from fcsd.planning.cost.collectives import TABLES, published
from fcsd.planning.cost.hardware import GPUS
from fcsd.planning.cost.plan import plan
from fcsd.planning.cost.planned import Planned
from fcsd.planning.cost.table import plan_table
from fcsd.planning.cost.times import plan_times
from tests.support import few, user_error

QWEN: dict[str, Any] = {"gpu": "h200", "phase": "decode", "batch": 64, "length": 4096}


def of(planned: Planned) -> dict[str, float]:
    return {
        name: 1e6 * value for name, value in plan_times(planned)["exchange_s"].items()
    }


def test_every_row_is_in_order_and_every_table_has_a_source() -> None:
    for by_gpu in TABLES.values():
        for by_ranks in by_gpu.values():
            for table in by_ranks.values():
                assert table.source
                sizes = [row[0] for row in table.rows]
                assert sizes == sorted(set(sizes))
                for _, low, typical, high in table.rows:
                    assert 0 < low <= typical <= high


def test_a_size_between_two_rows_is_on_a_line_over_its_logarithm() -> None:
    table = published("engine", GPUS["h200"], 8)
    assert table is not None
    # 256 KiB 12.5 us, 512 KiB 11 us
    share = math.log(300 / 256) / math.log(2)
    assert table.at(300 * 1024, lambda _: 0.0)[1] == pytest.approx(12.5 - 1.5 * share)
    assert table.at(1024, lambda _: 0.0) == table.rows[0][1:]
    # 64 MiB takes 320 us; the bytes beyond it, as long as their rate says
    more = table.at(2 * 65536 * 1024, lambda num_bytes: num_bytes / 65536)
    assert more[1] == 320 + 1024


def test_64_requests_of_qwen_are_256_kib_and_a_prefill_is_as_fast_as_its_links():
    assert of(planned("Qwen3-30B-A3B", {}, QWEN)) == pytest.approx(
        {"all_reduce": 12.5, "side": 24.6}
    )
    prefill = {"gpu": "h200", "phase": "prefill", "batch": 16, "length": 2048}
    # 128 MiB: 320 us for 64, and the rest over seven eighths of the links, there and
    # back
    rest = 2 * 7 / 8 * 64 * 2**20 / (450e9 * 0.85) * 1e6
    assert of(planned("Qwen3-30B-A3B", {}, prefill))["all_reduce"] == pytest.approx(
        320 + rest
    )


def test_smaller_groups_have_their_own_times_and_other_gpus_latency_and_rates() -> None:
    four = planned("Qwen3-30B-A3B", {}, QWEN | {"gpus_per_node": 4})
    assert of(four) == pytest.approx({"all_reduce": 10, "side": 15.8})
    # nobody published 3 ranks: those of 4
    assert published("engine", GPUS["h100"], 3) is published("engine", GPUS["h100"], 4)
    num_bytes = 64 * 2048 * 2
    a100 = 2 * (20 + 1e6 * 7 / 8 * num_bytes / (300e9 * 0.85))
    assert of(planned("Qwen3-30B-A3B", {}, QWEN | {"gpu": "a100"})) == pytest.approx(
        {"all_reduce": a100, "side": a100}
    )
    # over two nodes, 50 us and the bytes
    two = planned("Qwen3-30B-A3B", {}, QWEN | {"nodes": 2})
    sent = 2e6 * 15 / 16 * num_bytes / min(450e9 * 0.85, 8 * 50e9 * 0.8)
    assert of(two)["all_reduce"] == pytest.approx(50 + sent)


@pytest.mark.parametrize(
    ("settings", "fused"),
    few(
        [
            ({"batch": 63}, True),
            # 256 KiB and more go by a faster kernel, which is not fused.
            ({"batch": 64}, False),
            ({"batch": 64, "gpu": "b200"}, True),
            ({"batch": 128, "gpus_per_node": 2}, False),
            ({"batch": 127, "gpus_per_node": 2}, True),
            ({"batch": 8, "gpu": "mi300x"}, False),
            ({"batch": 8, "nodes": 2}, False),
            ({"batch": 8, "tensor_parallel": 1}, False),
        ],
        4,
    ),
)
def test_a_norm_is_fused_with_an_all_reduce_where_an_engine_is_faster_so(
    settings: dict[str, Any], fused: bool
) -> None:
    plans = [
        planned("Qwen3-30B-A3B", {}, QWEN | settings).assuming(fused_norm_us=us)
        for us in (0.0, 3.0)
    ]
    before, after = map(plan_times, plans)
    # 96 norms of 48 layers, of which the rewired model keeps the one behind the last
    # all-reduce, which is in line.
    saved, lost = (96 * 3e-6, 95 * 3e-6) if fused else (0.0, 0.0)
    assert after["fused_norms_s"] == pytest.approx({"regular": saved, "lost": lost})
    assert before["regular_s"] - after["regular_s"] == pytest.approx(saved)
    assert before["overlapped_s"] - after["overlapped_s"] == pytest.approx(saved - lost)
    text = plan_table(plan(plans[1], advise=False))
    said = "which saves 0.288 ms; FarSkip loses 0.285 ms of that"
    assert (said in text) == fused == ("FUSED NORMS" in text)


@pytest.mark.parametrize(
    ("connectivity", "lost"),
    [
        ({"layers": "none"}, 0),
        # The last all-reduce is in line, as are those of regular layers,
        ({"layers": "last:50%"}, 2 * 24 - 1),
        # and those of attention whose sum the MLP needs.
        ({"mlp": "full"}, 48 - 1),
    ],
)
def test_norms_behind_all_reduces_in_line_stay_fused(
    connectivity: dict[str, Any], lost: int
) -> None:
    settings = QWEN | {"batch": 8, "connectivity": Connectivity(**connectivity)}
    one = planned("Qwen3-30B-A3B", {}, settings).assuming(fused_norm_us=3.0)
    times = plan_times(one)
    assert times["fused_norms_s"]["lost"] == pytest.approx(lost * 3e-6)
    if not lost:
        assert times["speed_up"] == pytest.approx(1)


def test_own_times_replace_the_published_and_their_range() -> None:
    own = planned(
        "Qwen3-30B-A3B", {}, QWEN | {"assumptions": {"all_reduce_us": 30, "side_us": 9}}
    )
    assert of(own) == pytest.approx({"all_reduce": 30, "side": 9})
    facts = plan(own, advise=False)
    rows = {row["name"]: row for row in facts["sensitivity"]}
    assert rows["all_reduce_us"]["range"] == [30, 30]
    assert rows["side_us"]["range"] == [9, 9]
    assert "mostly by imbalance" in plan_table(facts)
    assert re.search(r"\| all_reduce_us +\| +30 +\| +given ", plan_table(facts))
    # One of them leaves the other as published.
    one = planned("Qwen3-30B-A3B", {}, QWEN | {"assumptions": {"all_reduce_us": 30}})
    rows = {row["name"]: row for row in plan(one, advise=False)["sensitivity"]}
    assert rows["side_us"]["range"] == [24.4, 34]
    with user_error(r"all_reduce_us: only tensor-parallel ranks"):
        planned("Qwen3-30B-A3B", {}, {"assumptions": {"all_reduce_us": 30}})


def test_the_expected_gain_covers_every_assumption_and_names_the_first() -> None:
    for phase in ("decode", "prefill"):
        length = 512 if phase == "prefill" else 4096
        facts = plan(
            planned("Qwen3-30B-A3B", {}, QWEN | {"phase": phase, "length": length}),
            advise=False,
        )
        least, most = facts["expected_gain"]
        for row in facts["sensitivity"]:
            assert least - 1e-12 <= row["speed_up"][0] - 1, row["name"]
            assert row["speed_up"][1] - 1 <= most + 1e-12, row["name"]
        spans = {
            row["name"]: row["speed_up"][1] - row["speed_up"][0]
            for row in facts["sensitivity"]
        }
        assert spans[facts["hangs_on"]] == max(spans.values())


def test_a_captured_step_takes_its_kernels_and_its_gap() -> None:
    """One request on eight GPUs: nothing is as long as the kernels of its steps."""
    one = planned("Qwen3-30B-A3B", {}, QWEN | {"batch": 1, "length": 64})
    times, layer = plan_times(one), plan_times(one)["layer_s"]
    # A matmul takes 5 us, attention 12 and any other kernel 2.5.
    assert {name: 1e6 * value for name, value in layer.items() if value} == pytest.approx({
        "attention a": 5 + 3 * 2.5, "attention b": 5 + 12, "router": 5 + 5 * 2.5,
        "experts": 2 * 5 + 3 * 2.5, "arrive": 2.5,
    })  # fmt: skip
    head = one.roofline.head(one.work)
    # Two norms of a layer are fused with the all-reduces before them.
    assert times["compute_s"] == pytest.approx(
        48 * (64.5e-6 - 2 * 3.2e-6) + head + 400e-6, rel=1e-3
    )
    # In FP8 each input is quantised; latent attention has three matmuls and a norm more.
    latent = planned(
        "DeepSeek-V3", {}, QWEN | {"batch": 1, "length": 64, "dtype": "fp8"}
    )
    layer = plan_times(latent)["layer_s"]
    assert 1e6 * layer["attention a"] == pytest.approx(3 * 5 + 5 * 2.5)
    assert 1e6 * layer["attention b"] == pytest.approx(2 * 5 + 2.5 + 12)
    assert 1e6 * layer["shared expert"] == pytest.approx(2 * 5 + 2 * 2.5)


@pytest.mark.parametrize("ranks", [8, 16, 64])
def test_a_servers_exchange_has_its_own_fixed_time_wherever_it_goes(ranks: int) -> None:
    """128 rows of 7,168 to eight experts each: DeepEP's table, bytes and 27 or 36 us."""
    one = planned(
        "DeepSeek-V3",
        {},
        {
            "phase": "decode", "gpu": "h100", "nodes": ranks // 8, "data_parallel": ranks, "batch": 128 * ranks,
            "all2all": "deepep_low_latency",
        },
    )  # fmt: skip
    rows = 128 * 8
    exchange = plan_times(one)["exchange_s"]
    published = {16: (118, 195), 64: (173, 314)}
    for index, (name, fixed, width) in enumerate(
        (("dispatch", 27, 7168 * (1 + 4 / 128)), ("combine", 36, 7168 * 2))
    ):
        if ranks == 8:
            sent = rows * width * 7 / 8 / (450e9 * 0.85)
        else:
            sent = rows * width * (1 - 8 / ranks) / (50e9 * 0.8)
        assert exchange[name] == pytest.approx(1e-6 * fixed + sent)
        if ranks in published:
            assert 1e6 * exchange[name] == pytest.approx(
                published[ranks][index], rel=0.22
            )


def test_a_small_batch_reads_the_experts_that_its_requests_share() -> None:
    few = planned("Qwen3-30B-A3B", {}, QWEN | {"batch": 32})
    seconds = [
        plan_times(few.assuming(distinct=share))["layer_s"]["experts"]
        for share in (1.0, 0.5)
    ]
    beside = 3 * 2.5e-6
    assert seconds[1] - beside == pytest.approx((seconds[0] - beside) / 2)


def test_a_large_all_reduce_hangs_on_its_links_and_is_printed_in_whole_microseconds():
    """268 MB of prompts, of which 201 MB go at the rate of the links."""
    facts = plan(
        planned(
            "Qwen3-235B-A22B",
            {},
            {"gpu": "h200", "phase": "prefill", "batch": 16, "length": 2048},
        ),
        advise=False,
    )
    rows = {row["name"]: row for row in facts["sensitivity"]}
    least, most = rows["link"]["speed_up"]
    assert most - least > 0.02
    assert "the engine's own in line 1241 µs" in plan_table(facts)


@pytest.mark.parametrize("settings", [{"tensor_parallel": 1}, {"layers": "none"}])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_server_that_hides_nothing_has_a_plan_without_an_expected_gain(
    phase: str, settings: dict[str, Any]
) -> None:
    settings = dict(settings)
    if "layers" in settings:
        settings = {"connectivity": Connectivity(layers=settings["layers"])}
    facts = plan(
        planned("OLMoE-1B-7B-0924", {}, {"gpu": "h200", "phase": phase} | settings),
        advise=False,
    )
    assert facts["hangs_on"] is None
    assert facts["expected_gain"] == pytest.approx([0, 0])
    assert "EXPECTED GAIN" not in plan_table(facts)


def test_ranks_without_published_times_say_so_and_expect_an_engines_faster_kernel():
    a100 = planned("Qwen3-30B-A3B", {}, QWEN | {"gpu": "a100"})
    facts = plan(a100, advise=False)
    assert "ALL-REDUCES: 41.8 µs, from latency and rates" in plan_table(facts)
    rows = {row["name"]: row for row in facts["sensitivity"]}
    sent = 2e6 * 7 / 8 * 64 * 2048 * 2 / (300e9 * 0.85)
    assert rows["all_reduce_us"]["range"] == pytest.approx([8.3 + sent, 40 + sent])
    # As its own kernel and NCCL may, so may both be faster or slower.
    assert rows["latency_us"]["speed_up"][1] > facts["times"]["speed_up"] + 0.05
    least, _ = facts["expected_gain"]
    given = QWEN | {"gpu": "a100", "assumptions": {"all_reduce_us": 12}}
    assert least < plan_times(planned("Qwen3-30B-A3B", {}, given))["speed_up"] - 1


def test_a_gain_over_no_exact_schedule_is_the_expected_one_over_regular_blocks():
    facts = plan(
        planned("Qwen3-30B-A3B", {}, QWEN | {"assumptions": {"all_reduce_us": 30}}),
        advise=False,
    )
    assert facts["times"]["best_exact"] == "regular"
    assert facts["expected_over_exact"] == facts["expected_gain"]


def test_the_help_names_the_assumptions_to_replace_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "first replace the assumptions on which a server's gain hangs" in words
    assert "{all_reduce_us: X, side_us: X}" in words
